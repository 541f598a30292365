"""The order of the ranks: which one to prefer where nothing else tells them apart."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable

_RECENCY_BITS, _NUMBER_BITS = 48, 16


class Standing:
    """Live ranks by load, then by recency (assigned longest ago first), then by number.

    The order is kept as a sorted list of ints, each of them load, recency and number side by side,
    so that a change costs a bisection and the best of all is at hand.

    Args:
        deterministic: Leave recency out: it depends on the order in which requests happen to come.
    """

    def __init__(self, deterministic: bool = False):
        self._deterministic = deterministic
        self._keys: dict[int, int] = {}
        self._order: list[int] = []
        self._total = 0

    def __len__(self) -> int:
        return len(self._order)

    def update(self, rank: int, load: int, last_assigned: int) -> None:
        """A rank is new, or its load has changed.

        Args:
            rank: Its number, below 65,536.
            load: Requests that it has and has not answered.
            last_assigned: Sequence number of its latest assignment, -1 for never.
        """
        self.remove(rank)
        recency = 0 if self._deterministic else last_assigned + 1
        key = ((load << _RECENCY_BITS) | recency) << _NUMBER_BITS | rank
        self._keys[rank] = key
        self._total += load
        insort(self._order, key)

    def remove(self, rank: int) -> None:
        """A rank is gone, if it was there."""
        key = self._keys.pop(rank, None)
        if key is not None:
            self._total -= _load(key)
            del self._order[bisect_left(self._order, key)]

    def first(self) -> int:
        """The least loaded rank.

        Raises:
            IndexError: There is none.
        """
        return _number(self._order[0])

    def first_of(self, ranks: Iterable[int]) -> int:
        """The least loaded of some ranks, which must be live; takes a step for each of them."""
        return min(ranks, key=self._keys.__getitem__)

    def first_where(self, accept: Callable[[int], object]) -> int:
        """The least loaded rank that is accepted; takes a step for each one before it."""
        return next(number for key in self._order if accept(number := _number(key)))

    def load(self, rank: int) -> int:
        """A rank's load."""
        return _load(self._keys[rank])

    @property
    def mean_load(self) -> float:
        """The mean over all ranks, of which there must be one."""
        return self._total / len(self._order)


def _number(key: int) -> int:
    return key & ((1 << _NUMBER_BITS) - 1)


def _load(key: int) -> int:
    return key >> (_RECENCY_BITS + _NUMBER_BITS)
