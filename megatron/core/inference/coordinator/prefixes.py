"""A stretch of blocks, and what is known of a prompt.

A prompt's block hashes come packed (little-endian int64, 8 bytes each) and stay so: equal hash
means equal whole prefix, so a stretch of blocks is compared with one `startswith`, and where two
prompts part is found by bisection. Sets of slots (`slots.py`) are ints, one bit a slot.
"""

from typing import Protocol

from megatron.core.inference.coordinator.hashing import HASH_BYTES


class SlotLike(Protocol):
    """What is needed here of a slot: its bit, how many blocks it holds, and whether it ended."""

    bit: int
    blocks: int
    ended: bool


class Run:
    """Consecutive blocks of a prompt that the same slots hold.

    Attributes:
        hashes: Its packed block hashes, at least one.
        held: Slots that are believed to hold it.
        stored: Those of them whose engine said so (or is known not to forget).
        pins: Leases that pass through it, by slot; None when there are none.
        parent: While pinned: the run before it on the way of its leases, None at the root.
    """

    __slots__ = ("hashes", "held", "parent", "pins", "stored")

    def __init__(self, hashes: bytes, stored: int = 0):
        self.hashes = hashes
        self.held = self.stored = stored
        self.pins: dict[SlotLike, int] | None = None
        self.parent: Run | None = None

    def is_like(self, other: "Run") -> bool:
        """Whether both are in the same state; then no lease ends between the two."""
        return self.held == other.held and self.stored == other.stored and self.pins == other.pins


Entry = Run | int
"""A run; or, for a single block that no lease pins, only the set of slots that store it."""


class Match:
    """What is known of a prompt.

    Attributes:
        hashes: Its packed block hashes.
        segments: Entries along it, from its first block on, and how many bytes of it each covers;
            the last ones of an entry may belong to other prompts.
        known: Bytes of it that they cover together.
    """

    __slots__ = ("hashes", "known", "segments")

    def __init__(self, hashes: bytes, segments: list[tuple[Entry, int]], known: int):
        self.hashes = hashes
        self.segments = segments
        self.known = known

    @property
    def blocks(self) -> int:
        """Full blocks of the prompt."""
        return len(self.hashes) // HASH_BYTES

    def groups(self, among: int) -> list[tuple[int, int]]:
        """Slots that hold the same number of the prompt's blocks, counted from the first.

        Args:
            among: The slots that count.

        Returns:
            Pairs of (slots, blocks), from few blocks to many; slots that hold none are left out.
        """
        groups = []
        at = 0
        for entry, size in self.segments:
            holders = among & (entry if type(entry) is int else entry.held)  # type: ignore[union-attr]
            if holders != among:
                if at:
                    groups.append((among ^ holders, at // HASH_BYTES))
                among = holders
                if not among:
                    return groups
            at += size
        if at and among:
            groups.append((among, at // HASH_BYTES))
        return groups

    def depth(self, bit: int) -> int:
        """Blocks of the prompt that one slot holds, counted from the first."""
        groups = self.groups(bit)
        return groups[0][1] if groups else 0


def common_bytes(run: bytes, hashes: bytes, at: int) -> int:
    """Bytes of a run that a prompt shares from `at` on; their first block is the same."""
    if hashes.startswith(run, at):
        return len(run)
    low, high = 1, min(len(run), len(hashes) - at) // HASH_BYTES
    middle = high  # most often the prompt ends here, and what the run holds of it is the same
    while low < high:
        end = middle * HASH_BYTES
        if run[end - HASH_BYTES : end] == hashes[at + end - HASH_BYTES : at + end]:
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low * HASH_BYTES
