"""Live ranks in an order that changes with every request: a sorted list of ints.

Each int has what a rank is ordered by, its recency and its number side by side. A change costs a
bisection, and whoever comes first is at hand.
"""

from bisect import bisect_left, insort

_RECENCY_BITS, _NUMBER_BITS = 48, 16
_VALUE_SHIFT = _RECENCY_BITS + _NUMBER_BITS

Key = int
"""What stands for a rank: of two, the lower one comes first."""


class RankOrder:
    """Ranks by some value, then by recency (assigned longest ago first), then by number.

    Args:
        deterministic: Leave recency out: it depends on the order in which requests happen to come.

    Attributes:
        keys: Of each rank, by number.
        sorted: The same, the first one first.
    """

    def __init__(self, deterministic: bool = False):
        self._deterministic = deterministic
        self.keys: dict[int, Key] = {}
        self.sorted: list[Key] = []

    def put(self, rank: int, value: int, last_assigned: int) -> None:
        """A rank is new, or its value has changed.

        Args:
            rank: Its number, below 65,536.
            value: What it is ordered by, at least 0.
            last_assigned: Sequence number of its latest assignment, -1 for never.
        """
        self.remove(rank)
        recency = 0 if self._deterministic else last_assigned + 1
        key = (value << _RECENCY_BITS | recency) << _NUMBER_BITS | rank
        self.keys[rank] = key
        insort(self.sorted, key)

    def remove(self, rank: int) -> None:
        """A rank is gone, if it was there."""
        key = self.keys.pop(rank, None)
        if key is not None:
            del self.sorted[bisect_left(self.sorted, key)]

    def index_from(self, value: int, start: int = 0) -> int:
        """Where those begin, in `sorted`, whose value is so high or higher; at `start` or later."""
        return bisect_left(self.sorted, value << _VALUE_SHIFT, start)


def value_of(key: Key) -> int:
    """What a rank is ordered by."""
    return key >> _VALUE_SHIFT


def number_of(key: Key) -> int:
    """A rank's number."""
    return key & ((1 << _NUMBER_BITS) - 1)
