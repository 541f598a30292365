"""The order of the ranks: which one to prefer where nothing else tells them apart."""

from collections.abc import Callable, Iterable

from megatron.core.inference.coordinator.rank_order import RankOrder, number_of, value_of


class Standing:
    """Live ranks by load, then as `RankOrder` does.

    Args:
        deterministic: Leave recency out.
    """

    def __init__(self, deterministic: bool = False):
        self._ranks = RankOrder(deterministic)
        self._total = 0

    def __len__(self) -> int:
        return len(self._ranks.sorted)

    def update(self, rank: int, load: int, last_assigned: int) -> None:
        """A rank is new, or its load has changed.

        Args:
            rank: Its number, below 65,536.
            load: Requests that it has and has not answered.
            last_assigned: Sequence number of its latest assignment, -1 for never.
        """
        key = self._ranks.keys.get(rank)
        self._total += load - (0 if key is None else value_of(key))
        self._ranks.put(rank, load, last_assigned)

    def remove(self, rank: int) -> None:
        """A rank is gone, if it was there."""
        key = self._ranks.keys.get(rank)
        if key is not None:
            self._total -= value_of(key)
            self._ranks.remove(rank)

    def first(self) -> int:
        """The least loaded rank.

        Raises:
            IndexError: There is none.
        """
        return number_of(self._ranks.sorted[0])

    def first_of(self, ranks: Iterable[int]) -> int:
        """The least loaded of some ranks, which must be live; takes a step for each of them."""
        return min(ranks, key=self._ranks.keys.__getitem__)

    def first_where(self, accept: Callable[[int], object]) -> int:
        """The least loaded rank that is accepted; takes a step for each one before it."""
        return next(number for key in self._ranks.sorted if accept(number := number_of(key)))

    def load(self, rank: int) -> int:
        """A rank's load."""
        return value_of(self._ranks.keys[rank])

    @property
    def mean_load(self) -> float:
        """The mean over all ranks, of which there must be one."""
        return self._total / len(self._ranks.sorted)
