"""What each rank is believed to cache: what its engine says, or the history of its requests.

A request in flight *pins* its blocks: they count as held from its routing on, before the engine
confirms anything, unless the engine says that it removed them. What else a rank holds is known from
its engine's events (`kv_events.py`): the blocks *stored*. Where these cannot be believed, or there
are none, history has to do: after the answer a prompt is *retained*, under `lru` eviction for the
engine's retention time, under `ref_zero` not at all, and never more of it than the engine has room
for: the prompt unused for longest gives way first, from its end.

Block hashes are chained, so whoever holds a block held the whole prefix before it. A prompt goes
from its end, so that stays true of what is believed, and presence along a prompt is monotone.

Everything believed of a rank hangs on a *slot* (`slots.py`). A rank that is lost, or whose engine
tells its table anew, gets another one, and the old one is swept out of the runs (`runs.py`) piece
by piece.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megatron.core.inference.coordinator.hashing import HASH_BYTES
from megatron.core.inference.coordinator.kv_events import Change
from megatron.core.inference.coordinator.prefixes import Match, Run
from megatron.core.inference.coordinator.runs import Runs
from megatron.core.inference.coordinator.slots import Lease, Slot


class PrefixIndex:
    """Which rank is believed to hold which blocks. Times are seconds of the caller's clock.

    Args:
        retention_seconds: How long the blocks of an answered request count as held on a rank
            that retains them.
    """

    def __init__(self, retention_seconds: float):
        self._retention = retention_seconds
        self._runs = Runs()
        self._slots: dict[int, Slot] = {}  # by rank
        self._by_bit: dict[int, Slot] = {}
        self._live = 0  # bits
        self._ended = 0  # bits to sweep out of the runs next
        # Emptied a bounded piece at a time, so that forgetting a lot at once costs nothing.
        self._discarded: deque[dict[Any, Any]] = deque()

    def __len__(self) -> int:
        """Blocks believed held, over all ranks."""
        return sum(slot.blocks for slot in self._slots.values())

    # --- ranks -------------------------------------------------------------------------------

    def add_rank(self, rank: int, *, capacity: int | None, retains: bool) -> None:
        """Begin to track a rank, with nothing held; what was known of it before is dropped.

        Args:
            rank: Its number.
            capacity: Blocks in its engine's cache, or None when unknown.
            retains: Whether its engine keeps blocks that no request uses (`lru`).
        """
        self.drop_rank(rank)
        self._open(rank, capacity, self._retention if retains else 0.0, trusted=False)

    def drop_rank(self, rank: int) -> None:
        """Forget a rank, in O(1)."""
        slot = self._slots.pop(rank, None)
        if slot is not None:
            self._end(slot)
            del self._by_bit[slot.bit]
            self._live ^= slot.bit
            self._ended |= slot.bit

    def clear(self) -> None:
        """Forget every block, in O(ranks): nothing computed so far may be reused."""
        self._discarded += [*self._runs.starts, *self._runs.ends]
        self._runs = Runs()
        slots = list(self._slots.values())
        self._slots, self._by_bit = {}, {}
        self._live = self._ended = 0
        for slot in slots:
            self._end(slot)
            self._open(slot.rank, slot.capacity, slot.retention, slot.trusted)

    def distrust(self, rank: int) -> None:
        """Go by the history of requests, from now on, until the engine's next clear."""
        if self._slots[rank].trusted:
            self._reopen(rank, trusted=False)

    # --- prompts -----------------------------------------------------------------------------

    def match(self, hashes: bytes) -> Match:
        """Find what is known of a prompt, for the calls below; of use until the next change."""
        return self._runs.match(hashes)

    def holders(self, match: Match) -> list[tuple[int, int]]:
        """Ranks that hold the same number of a prompt's blocks.

        Returns:
            Pairs of (slots of ranks, blocks), from few blocks to many; a rank that does not hold
            the first block is in none.
        """
        return match.groups(self._live)

    def ranks(self, slots: int) -> Iterator[int]:
        """The ranks in a set of slots."""
        while slots:
            bit = slots & -slots
            yield self._by_bit[bit].rank
            slots ^= bit

    def slot(self, rank: int) -> int:
        """A rank's slot, as the set of slots that holds it alone."""
        return self._slots[rank].bit

    def depth(self, rank: int, match: Match) -> int:
        """Blocks of the prompt that a rank holds, counted from the first."""
        return match.depth(self._slots[rank].bit)

    def pin(self, rank: int, match: Match) -> Lease:
        """Count a prompt, of at least one block, as held by the rank it is routed to."""
        slot = self._slots[rank]
        lease = Lease(slot, self._runs.pin(slot, match), match.hashes)
        slot.leases[lease] = None
        self._trim(slot)
        return lease

    def release(self, lease: Lease, now: float) -> None:
        """The request was answered, or will never be. A lease on what was forgotten is void."""
        slot = lease.slot
        if slot.ended:
            return
        del slot.leases[lease]
        if slot.retention and not slot.trusted:
            self._retain(slot, lease.leaf, now)
            self._trim(slot)
            self._expire_slot(slot, now, budget=2)  # forgetting keeps pace with learning
        else:
            self._runs.unpin(slot, lease.leaf)

    # --- what engines say --------------------------------------------------------------------

    def apply(self, rank: int, segments: Sequence[tuple[Change, bytes]]) -> bool:
        """Take an engine's events; after a clear its word alone counts, beside the pins.

        Returns:
            False when it removed what it is not believed to have stored: it should tell its whole
            table.
        """
        slot = self._slots[rank]
        consistent = True
        for change, hashes in segments:
            if change is Change.CLEARED:
                slot = self._reopen(rank, trusted=True)
            elif not slot.trusted:
                return True
            elif change is Change.STORED:
                self._runs.store(slot, hashes)
            else:
                consistent &= self._runs.remove(slot, hashes)
        return consistent

    # --- time --------------------------------------------------------------------------------

    @property
    def backlog(self) -> bool:
        """Whether there is something to sweep out."""
        return bool(self._ended or self._runs.sweeping or self._discarded)

    def expire(self, now: float, budget: int = 500) -> None:
        """Forget what is past its time, and sweep out what was forgotten at once.

        Args:
            now: The time.
            budget: How many records may be touched, about.
        """
        for slot in self._slots.values():
            budget -= self._expire_slot(slot, now, budget)
        while budget > 0 and (self._ended or self._runs.sweeping):
            budget -= self._sweep(budget)
        while budget > 0 and self._discarded:
            table = self._discarded[0]
            count = min(budget, len(table))
            for _ in range(count):
                table.popitem()
            budget -= count
            if not table:
                self._discarded.popleft()

    def check_integrity(self, leases: Iterable[Lease]) -> None:
        """Compare everything that is counted with what it is counted from.

        Raises:
            AssertionError: They differ, or something is kept for nothing.
        """
        out = [lease for lease in leases if not lease.void]
        pins: dict[int, dict[Slot, int]] = {}
        for slot, leaf in self._pinned_leaves(out):
            for run in _way_up(leaf):
                counts = pins.setdefault(id(run), {})
                counts[slot] = counts.get(slot, 0) + 1
        blocks = dict.fromkeys(self._slots.values(), 0)
        for run in self._runs:
            self._check_run(run, pins.pop(id(run), {}))
            for rank in self.ranks(run.held & self._live):
                blocks[self._slots[rank]] += len(run.hashes) // HASH_BYTES
        assert not pins, "leases pin runs that were dropped"
        for stored in self._runs.single_blocks():
            assert stored, "a block is kept that nobody stores"
            for rank in self.ranks(stored & self._live):
                blocks[self._slots[rank]] += 1
        for slot, held in blocks.items():
            assert slot.blocks == held, "blocks were miscounted"
            assert slot.leases.keys() == {x for x in out if x.slot is slot}, "leases were lost"
            fits = slot.capacity is None or held <= slot.capacity
            assert fits or not slot.retained, "a rank holds more than its engine has room for"
            times = list(slot.retained.values())
            assert times == sorted(times), "retained prompts are out of order"
            assert not slot.ended, "a live rank's slot has ended"

    def _pinned_leaves(self, leases: Iterable[Lease]) -> Iterator[tuple[Slot, Run]]:
        yield from ((lease.slot, lease.leaf) for lease in leases)
        for slot in self._slots.values():
            yield from ((slot, leaf) for leaf in slot.retained)

    def _check_run(self, run: Run, pins: dict[Slot, int]) -> None:
        live = {slot: n for slot, n in (run.pins or {}).items() if not slot.ended}
        assert live == pins, "pins differ from the leases that are out"
        assert run.pins or run.held, "a run is kept for nothing"
        assert run.pins or run.parent is None, "a run that is not pinned has a parent"
        assert not run.stored & ~run.held, "a run is stored and not held"
        unpinned = self._live & ~sum(slot.bit for slot in live)
        assert not run.held & ~run.stored & unpinned, "a run outlived its last lease"

    # --- slots -------------------------------------------------------------------------------

    def _open(self, rank: int, capacity: int | None, retention: float, trusted: bool) -> Slot:
        taken = self._live | self._ended | self._runs.sweeping
        bit = ~taken & (taken + 1)  # the lowest that is free
        slot = Slot(rank, bit, capacity, retention, trusted)
        self._slots[rank] = self._by_bit[bit] = slot
        self._live |= bit
        return slot

    def _end(self, slot: Slot) -> None:
        slot.ended = True
        self._discarded.append(slot.retained)

    def _reopen(self, rank: int, trusted: bool) -> Slot:
        """Believe nothing of a rank any more but that it has the requests in flight."""
        old = self._slots[rank]
        self.drop_rank(rank)
        slot = self._open(rank, old.capacity, old.retention, trusted)
        for lease in old.leases:
            lease.slot = slot
            lease.leaf = self._runs.pin(slot, self._runs.match(lease.hashes))
        slot.leases = old.leases
        return slot

    def _sweep(self, budget: int) -> int:
        """Go on sweeping ended slots out; returns how many records that touched."""
        if not self._runs.sweeping:
            self._runs.sweeping, self._ended = self._ended, 0
        return self._runs.sweep(budget) + 1

    # --- history -----------------------------------------------------------------------------

    def _retain(self, slot: Slot, leaf: Run, now: float) -> None:
        """Keep an answered prompt; those retained that it begins with are part of it."""
        for run in [run for run in _way_up(leaf) if run in slot.retained]:
            del slot.retained[run]
            self._runs.unpin(slot, run)
        self._runs.join_path(leaf)
        slot.retained[leaf] = now

    def _expire_slot(self, slot: Slot, now: float, budget: int) -> int:
        touched = 0
        while slot.retained and touched < budget:
            leaf = next(iter(slot.retained))
            if slot.retained[leaf] > now - slot.retention:
                break
            del slot.retained[leaf]
            touched += self._runs.unpin(slot, leaf)
        return touched

    def _trim(self, slot: Slot) -> None:
        if slot.capacity is None:
            return
        while slot.blocks > slot.capacity and slot.retained:
            leaf = next(iter(slot.retained))
            used = slot.retained.pop(leaf)
            excess = slot.blocks - slot.capacity
            assert leaf.pins is not None
            # What another prompt needs too is not freed by shortening this one.
            blocks = excess if leaf.pins[slot] == 1 else len(leaf.hashes)
            shorter = self._runs.unpin_last(slot, leaf, blocks)
            if shorter is None:
                continue
            if shorter in slot.retained:  # used later by itself
                self._runs.unpin(slot, shorter)
            else:
                slot.retained[shorter] = used
                slot.retained.move_to_end(shorter, last=False)


def _way_up(leaf: Run) -> Iterator[Run]:
    """The runs of a lease, from its last to its first."""
    run: Run | None = leaf
    while run is not None:
        yield run
        run = run.parent
