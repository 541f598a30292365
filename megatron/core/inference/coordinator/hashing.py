"""Block hashes of a prompt: what clients compute and the coordinator routes on.

A block is `block_size` consecutive prompt tokens; only full blocks are hashed. Hashes are chained
(digest_i = SHA256(digest_{i-1} || tokens_i as little-endian int64), digest_{-1} = 32 zero bytes;
value = little-endian uint64 of digest[:8] mod (2^63 - 1), plus 1), so an equal hash means an equal
whole prefix. The values equal those of megatron-core's `compute_block_hashes_batched`, which the
engine keys its cache with.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

HASH_BYTES = 8
"""Bytes of one packed hash: a little-endian int64."""

_LARGEST_HASH = 2**63 - 1


def block_hashes(tokens: Sequence[int] | np.ndarray, block_size: int) -> list[int]:
    """Hash every full block of a prompt.

    Args:
        tokens: Token ids, shape [n].
        block_size: Tokens in a block, 1 or more.

    Returns:
        n // block_size hashes in [1, 2^63 - 1], the first block's first.
    """
    blocks = len(tokens) // block_size
    data = memoryview(np.asarray(tokens, dtype="<i8").tobytes())
    stride = block_size * 8
    digest = bytes(32)
    hashes = []
    for start in range(0, blocks * stride, stride):
        chain = hashlib.sha256(digest)
        chain.update(data[start : start + stride])
        digest = chain.digest()
        hashes.append(int.from_bytes(digest[:8], "little") % _LARGEST_HASH + 1)
    return hashes


def epoch_mask(epoch: int) -> int:
    """What the keys of a weight epoch are masked with; 0 at epoch 0.

    The little-endian uint64 of SHA256(epoch as little-endian int64)[:8], its top bit cleared.
    """
    if epoch == 0:
        return 0
    digest = hashlib.sha256(epoch.to_bytes(8, "little", signed=True)).digest()
    return int.from_bytes(digest[:8], "little") & _LARGEST_HASH


def rekeyed(hashes: Sequence[int], epoch: int) -> list[int]:
    """Block hashes as keys of a weight epoch, or such keys as block hashes: its own inverse.

    Two epochs share no key of the same block, so KV of one can never be found under the other. On
    [1, 2^63 - 1] this is a bijection: the hash that equals the mask stays itself, where the xor
    would give 0. The engine's 0 (no parent) and -1 (no hash) are never masked.

    Args:
        hashes: Block hashes, or keys of this epoch.
        epoch: The weight epoch.
    """
    mask = epoch_mask(epoch)
    return [h if h <= 0 or h == mask else h ^ mask for h in hashes]


def pack_hashes(hashes: Sequence[int]) -> bytes:
    """Pack hashes for the wire: little-endian int64, 8 bytes each."""
    return np.asarray(hashes, dtype="<i8").tobytes()


def unpack_hashes(packed: bytes, full_blocks: int | None) -> list[int] | None:
    """Unpack a hash frame, which is untrusted input.

    Args:
        packed: Little-endian int64 hashes.
        full_blocks: How many the prompt has, or None when its length is unknown.

    Returns:
        The hashes, or None when the list cannot be right: a wrong length, a value outside
        [1, 2^63 - 1], or duplicates (chained hashes never repeat within one prompt).
    """
    if len(packed) % HASH_BYTES:
        return None
    hashes: list[int] = np.frombuffer(packed, dtype="<i8").tolist()
    wrong_length = full_blocks is not None and len(hashes) != full_blocks
    if wrong_length or len(set(hashes)) != len(hashes) or (hashes and min(hashes) < 1):
        return None
    return hashes


def expected_skip(prompt_tokens: int, cached_blocks: int, block_size: int) -> int:
    """How many tokens of prefill the engine skips when it holds a prompt's first blocks.

    The engine always computes at least 2 tokens of a prompt that has 2, rounded down to a block
    (a 1-token prefill would look like a decode step to its attention kernels).

    Args:
        prompt_tokens: Length of the prompt.
        cached_blocks: Blocks held, counted from the first.
        block_size: Tokens in a block.

    Returns:
        Tokens skipped.
    """
    skip = min(cached_blocks * block_size, max(0, prompt_tokens - 1))
    if prompt_tokens >= 2 and prompt_tokens - skip < 2:
        skip = (prompt_tokens - 2) // block_size * block_size
    return skip
