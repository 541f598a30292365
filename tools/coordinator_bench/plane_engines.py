"""The data plane's engines: what they hold, and what they tell of it."""

from collections import OrderedDict

import numpy as np

from coordinator_bench.frames import chains


class PlaneConversation:
    """A conversation of the data plane, whose hashes nobody checks.

    Attributes:
        hashes: Of its longest prompt's blocks.
        mark: Packed tokens of its first block, which tell it from all others.
        turn: Index of its next turn.
    """

    __slots__ = ("hashes", "mark", "turn")

    def __init__(self, rng: np.random.Generator, blocks: int, block: int, turn: int = 0):
        self.hashes = rng.integers(1, 2**63 - 1, blocks, dtype=np.int64)
        tokens = rng.integers(0, 256, (block, 3), dtype=np.uint8)
        tokens[:, 0], tokens[:, 1] = 0xCD, 1 + tokens[:, 1] // 2
        self.mark = tokens.tobytes()
        self.turn = turn


class Cache:
    """One engine's cache: whole conversations, the least recently used goes first.

    Args:
        capacity: Blocks that it has room for.

    Attributes:
        next: Number of the next event.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._held: OrderedDict[PlaneConversation, int] = OrderedDict()
        self._used = 0
        self.next = 0
        self._pending: list[np.ndarray] = [np.zeros(1, dtype=np.int64)]

    def serve(self, conversation: PlaneConversation, blocks: int) -> int:
        """Compute a prompt and keep it; returns how many of its blocks were held."""
        held = self._held.get(conversation, 0)
        if blocks > held:
            self._pending.append(conversation.hashes[held:blocks])
            self._held[conversation] = blocks
            self._used += blocks - held
        self._held.move_to_end(conversation)
        while self._used > self._capacity and len(self._held) > 1:
            oldest, gone = self._held.popitem(last=False)
            self._pending.append(-oldest.hashes[:gone])
            self._used -= gone
        return min(held, blocks)

    def news(self) -> tuple[int, np.ndarray]:
        """The number of the first event not told yet, and those events."""
        first = self.next
        cleared, told = self._pending[:1], self._pending
        if len(cleared) and cleared[0][0] == 0:
            packed = np.concatenate([cleared[0], chains(*told[1:])])
        else:
            packed = chains(*told)
        self._pending = []
        self.next += len(packed)
        return first, packed
