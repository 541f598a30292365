"""Conversations: tokens, and the chained hashes of their blocks."""

import numpy as np

from coordinator_bench.frames import array_header, packed_tokens

_SYSTEM = 0xC0FFEE
"""Seed of the system prompt, which all conversations of a variant share."""


class Conversation:
    """One conversation; a turn's prompt is its first blocks.

    Args:
        name: Tells conversations apart; equal names have equal tokens.
        blocks: Blocks of its longest prompt.
        block: Tokens in a block.
        system_blocks: Blocks at its beginning that all conversations share.

    Attributes:
        hashes: Of its blocks, shape [blocks], int64.
        held: How many of them each rank holds, as far as the driver knows.
    """

    def __init__(self, name: int, blocks: int, block: int, system_blocks: int = 0):
        self._block = block
        tokens = tokens_of(name, blocks * block, system_blocks * block)
        self._packed = packed_tokens(tokens)
        self._system = system_blocks
        self.name = name
        self.held: dict[int, int] = {}
        self.hashes = hashes_of(tokens, block)

    def body(self, blocks: int) -> bytes:
        """The packed list of the first blocks' tokens."""
        count = self.tokens(blocks)
        return array_header(count) + self._packed[: 3 * count]

    def tokens(self, blocks: int) -> int:
        """Tokens in so many blocks."""
        return blocks * self._block

    def held_by(self, rank: int) -> int:
        """Blocks that a rank holds; the system prompt is everywhere."""
        return self.held.get(rank, self._system)


def tokens_of(name: int, count: int, system: int = 0) -> np.ndarray:
    """Tokens in [256, 65535], shape [count]; the first `system` are the same for every name."""
    own = np.random.default_rng(name).integers(256, 1 << 16, count)
    if system:
        own[:system] = np.random.default_rng(_SYSTEM).integers(256, 1 << 16, system)
    return own


def hashes_of(tokens: np.ndarray, block: int) -> np.ndarray:
    """Block hashes, shape [len(tokens) // block], int64."""
    # Imported here, since it takes seconds and the bench's main process hashes nothing.
    from megatron.core.inference.coordinator.hashing import block_hashes

    return np.asarray(block_hashes(tokens, block), dtype=np.int64)


def system_hashes(blocks: int, block: int) -> np.ndarray:
    """Hashes of the system prompt, shape [blocks]."""
    return hashes_of(tokens_of(0, blocks * block, blocks * block), block)


def random_chain(rng: np.random.Generator, blocks: int) -> np.ndarray:
    """Hashes of a prompt that nobody will ever ask for, so its tokens need not exist."""
    return rng.integers(1, 2**63 - 1, blocks, dtype=np.int64)
