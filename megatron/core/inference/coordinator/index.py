"""What each rank is believed to cache: what its engine says, or the history of its requests.

A request in flight *pins* its blocks: they count as held from its routing on, before the engine
confirms anything, unless the engine says that it removed them. What else a rank holds is known from
its engine's events (`kv_events.py`): the blocks *stored*. Where these cannot be believed, or there
are none, history has to do: after the answer blocks stay, *idle*, for the engine's retention time
(`lru` eviction) or go at once (`ref_zero`), and never more of them than the engine has room for.

Block hashes are chained, so whoever holds a block held the whole prefix before it. That stays true
of what is believed: a prompt's blocks become idle last to first, and go in that order, so no block
goes before one that extends it. Presence along a prompt is therefore monotone, and is searched by
bisection.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence

from megatron.core.inference.coordinator.kv_events import CLEARED


class _Table:
    """The blocks of one rank."""

    __slots__ = ("capacity", "dropped", "idle", "lost", "pinned", "retention", "stored")

    def __init__(self, capacity: int | None, retention: float):
        self.pinned: dict[int, int] = {}  # block -> requests in flight that use it
        self.idle: OrderedDict[int, float] = OrderedDict()  # block -> last use, oldest first
        self.stored: set[int] | None = None  # as the engine's events say; None: not believed
        # Pinned, but the engine says it removed them: of a request that it evicted, say.
        self.lost: set[int] = set()
        self.capacity = capacity
        self.retention = retention
        self.dropped = False

    def __len__(self) -> int:
        return len(self.pinned) + len(self.idle) + len(self.stored or ())

    def successor(self) -> "_Table":
        """An empty table of the same engine."""
        table = _Table(self.capacity, self.retention)
        table.stored = None if self.stored is None else set()
        return table

    def apply(self, events: Iterable[int]) -> None:
        """Take what the engine says, which a table that goes by history becomes with a clear."""
        for event in events:
            if event == CLEARED:
                self.stored = set()
                self.idle.clear()
            elif self.stored is None:
                return
            elif event > 0:
                self.stored.add(event)
                self.lost.discard(event)
            else:
                self.stored.discard(-event)
                if -event in self.pinned:
                    self.lost.add(-event)

    def depth(self, hashes: Sequence[int]) -> int:
        pinned = self.pinned
        lost = self.lost
        kept: Collection[int] = self.idle if self.stored is None else self.stored
        low, high = 0, len(hashes)  # hashes[:low] are held; of hashes[low:high] nothing is known
        middle = 1 if high else 0  # most ranks hold nothing of most prompts: ask for the first
        while low < high:
            block = hashes[middle - 1]
            if (block in pinned and block not in lost) or block in kept:
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return low

    def pin(self, hashes: Sequence[int]) -> None:
        pinned, idle = self.pinned, self.idle
        for block in hashes:
            count = pinned.get(block, 0)
            pinned[block] = count + 1
            if not count:
                idle.pop(block, None)
        if self.lost:  # whoever is routed here now will have them computed
            self.lost.difference_update(hashes)
        self._trim()

    def unpin(self, hashes: Sequence[int], now: float) -> None:
        pinned, idle = self.pinned, self.idle
        retained = self.retention and self.stored is None
        for block in reversed(hashes):
            count = pinned[block] - 1
            if count:
                pinned[block] = count
            else:
                del pinned[block]
                self.lost.discard(block)
                if retained:
                    idle[block] = now
        self._trim()

    def expire(self, now: float, budget: int) -> int:
        """Forget idle blocks past their time, `budget` at most; returns how many."""
        idle, limit = self.idle, now - self.retention
        for forgotten in range(budget):
            if not idle or idle[next(iter(idle))] > limit:
                return forgotten
            idle.popitem(last=False)
        return budget

    def discard(self, budget: int) -> int:
        """Empty a dropped table by `budget` blocks at most; returns how many."""
        for discarded in range(budget):
            if self.idle:
                self.idle.popitem()
            elif self.stored:
                self.stored.pop()
            elif self.pinned:
                self.pinned.popitem()
            else:
                return discarded
        return budget

    def _trim(self) -> None:
        if self.capacity is not None:
            while self.idle and len(self.pinned) + len(self.idle) > self.capacity:
                self.idle.popitem(last=False)


class Lease:
    """A request's hold on its blocks in one rank's table; given back once, on its answer."""

    __slots__ = ("hashes", "table")

    def __init__(self, table: _Table, hashes: Sequence[int]):
        self.table = table
        self.hashes = hashes


class PrefixIndex:
    """Which rank is believed to hold which blocks. Times are seconds of the caller's clock.

    Args:
        retention_seconds: How long the blocks of an answered request count as held on a rank
            that retains them.
    """

    def __init__(self, retention_seconds: float):
        self._retention = retention_seconds
        self._tables: dict[int, _Table] = {}
        # Emptied a bounded piece at a time by `expire`, so that dropping a rank costs nothing.
        self._dropped: deque[_Table] = deque()

    def __len__(self) -> int:
        """Blocks believed held, over all ranks."""
        return sum(len(table) for table in self._tables.values())

    def add_rank(self, rank: int, *, capacity: int | None, retains: bool) -> None:
        """Begin to track a rank, with nothing held; what was known of it before is dropped.

        Args:
            rank: Its number.
            capacity: Blocks in its engine's cache, or None when unknown.
            retains: Whether its engine keeps blocks that no request uses (`lru`).
        """
        self.drop_rank(rank)
        self._tables[rank] = _Table(capacity, self._retention if retains else 0.0)

    def drop_rank(self, rank: int) -> None:
        """Forget a rank, in O(1)."""
        table = self._tables.pop(rank, None)
        if table is not None:
            self._drop(table)

    def clear(self) -> None:
        """Forget every block, in O(ranks): nothing computed so far may be reused."""
        for rank, table in self._tables.items():
            self._drop(table)
            self._tables[rank] = table.successor()

    def apply(self, rank: int, events: Sequence[int]) -> None:
        """Take an engine's events; after a clear its word alone counts, beside the pins."""
        self._tables[rank].apply(events)

    def distrust(self, rank: int) -> None:
        """Go by the history of requests, from now on, until the engine's next clear."""
        table = self._tables[rank]
        table.stored = None
        table.lost.clear()

    def depth(self, rank: int, hashes: Sequence[int]) -> int:
        """Blocks of the prompt that a rank holds, counted from the first."""
        return self._tables[rank].depth(hashes)

    def holders(self, hashes: Sequence[int]) -> dict[int, int]:
        """The depth of every rank that holds at least the first block."""
        depths = ((rank, table.depth(hashes)) for rank, table in self._tables.items())
        return {rank: depth for rank, depth in depths if depth}

    def pin(self, rank: int, hashes: Sequence[int]) -> Lease:
        """Count a prompt as held by the rank it has just been routed to."""
        table = self._tables[rank]
        table.pin(hashes)
        return Lease(table, hashes)

    def release(self, lease: Lease, now: float) -> None:
        """The request was answered, or will never be. A lease on a dropped table is void."""
        if not lease.table.dropped:
            lease.table.unpin(lease.hashes, now)

    def expire(self, now: float, budget: int = 20_000) -> None:
        """Forget what is past its time, `budget` blocks at most in one call."""
        while self._dropped and budget > 0:
            budget -= self._dropped[0].discard(budget)
            if not len(self._dropped[0]):
                self._dropped.popleft()
        for table in self._tables.values():
            if budget <= 0:
                return
            budget -= table.expire(now, budget)

    def check_integrity(self, leases: Iterable[Lease]) -> None:
        """Compare the pins with the leases that are out.

        Raises:
            AssertionError: They differ, a block is kept for nothing, or a rank holds too much.
        """
        counts: dict[int, dict[int, int]] = {id(t): {} for t in self._tables.values()}
        for lease in leases:
            if not lease.table.dropped:
                pins = counts[id(lease.table)]
                for block in lease.hashes:
                    pins[block] = pins.get(block, 0) + 1
        for table in self._tables.values():
            assert table.pinned == counts[id(table)], "pins differ from the leases that are out"
            assert not table.pinned.keys() & table.idle.keys(), "a block is pinned and idle"
            assert table.lost <= table.pinned.keys(), "a block is lost that nobody uses"
            assert table.retention or not table.idle, "a block outlived its last request"
            assert table.stored is None or not table.idle, "history beside the engine's word"
            held = len(table.pinned) + len(table.idle)
            fits = table.capacity is None or held <= table.capacity
            assert fits or not table.idle, "a rank holds more than its engine has room for"
            times = list(table.idle.values())
            assert times == sorted(times), "idle blocks are out of order"

    def _drop(self, table: _Table) -> None:
        table.dropped = True
        self._dropped.append(table)
