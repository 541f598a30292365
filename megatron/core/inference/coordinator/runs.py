"""Runs of blocks: one record for blocks that were always seen together.

A *run* is a stretch of consecutive blocks that the same slots hold; it is found by the hash of its
first block, or, by an engine that removes blocks from the end, of its last (`run_tables.py`). It is
split where somebody comes to hold a part of it, and joined again with its neighbour when both are
in the same state. So the work for a prompt grows with the number of its runs, which is small, and
not with its blocks.
"""

from megatron.core.inference.coordinator.hashing import HASH_BYTES
from megatron.core.inference.coordinator.prefixes import Match, Run, SlotLike, common_bytes
from megatron.core.inference.coordinator.run_tables import RunTables

_SHORT = 4 * HASH_BYTES
"""Runs shorter than this, and not pinned, are kept block by block: a record costs more."""


class Runs(RunTables):
    """All runs, and how they change."""

    # --- leases ------------------------------------------------------------------------------

    def pin(self, slot: SlotLike, match: Match) -> Run:
        """Let a slot hold a prompt, of at least one block, until `unpin`.

        Returns:
            The run that the prompt ends with, which stands for the lease.
        """
        leaf: Run | None = None
        for run in self._whole(match):
            if run.pins is None:
                run.pins = {slot: 1}
            else:
                run.pins[slot] = run.pins.get(slot, 0) + 1
            if not run.held & slot.bit:
                run.held |= slot.bit
                slot.blocks += len(run.hashes) // HASH_BYTES
            run.parent = leaf
            leaf = run
        assert leaf is not None
        return leaf

    def unpin(self, slot: SlotLike, leaf: Run) -> int:
        """End a lease.

        Returns:
            How many runs it passed through.
        """
        run: Run | None = leaf
        child: Run | None = None
        passed = 0
        while run is not None:
            parent = run.parent
            self._unpin_one(slot, run)
            child = self._joined(run, child)
            run = parent
            passed += 1
        if child is not None:
            self._settle(child)
        return passed

    def unpin_last(self, slot: SlotLike, leaf: Run, blocks: int) -> Run | None:
        """Shorten a lease from its end: by `blocks`, or by its last run if that is less.

        Returns:
            The run that it ends with now; None when nothing is left of it.
        """
        size = len(leaf.hashes) - blocks * HASH_BYTES
        shorter = self._split(leaf, size) if size > 0 else leaf.parent
        self._unpin_one(slot, leaf)
        self._settle(leaf)
        return shorter

    def join_path(self, leaf: Run) -> None:
        """Join what can be joined on the way from a lease's last run to its first."""
        child, run = leaf, leaf.parent
        while run is not None:
            parent = run.parent
            if run.is_like(child):
                self._absorb(child, run)
            else:
                child = run
            run = parent

    # --- what engines say --------------------------------------------------------------------

    def store(self, slot: SlotLike, hashes: bytes) -> None:
        """A slot's engine stored these blocks, each following the one before it."""
        bit = slot.bit
        at, end = 0, len(hashes)
        while at < end:
            key = hashes[at : at + HASH_BYTES]
            shard = self.starts[key[0]]
            entry = shard.get(key)
            if isinstance(entry, Run):
                size = common_bytes(entry.hashes, hashes, at)
                run = entry if size == len(entry.hashes) else self._split(entry, size)
                self._store_run(slot, run)
            elif entry is None and end - at >= _SHORT:
                size = end - at
                shard[key] = run = Run(hashes[at:])
                self._store_run(slot, run)
            else:
                size = HASH_BYTES
                if not (entry or 0) & bit:
                    shard[key] = self.shared((entry or 0) | bit)
                    slot.blocks += 1
            at += size

    def remove(self, slot: SlotLike, hashes: bytes) -> bool:
        """A slot's engine removed these blocks, which follow each other, from a chain's end.

        Returns:
            Whether all of them were found. If not, what is believed of the slot is wrong.
        """
        end = len(hashes)
        while end:
            key = hashes[end - HASH_BYTES : end]
            run = self.ends[key[0]].get(key)
            if run is not None and run.stored & slot.bit:
                end -= self._remove_from(slot, run, hashes[:end])
                continue
            shard = self.starts[key[0]]
            entry = shard.get(key)
            if not isinstance(entry, int) or not entry & slot.bit:
                return False
            slot.blocks -= 1
            self.put(shard, key, entry ^ slot.bit)
            end -= HASH_BYTES
        return True

    def sweep(self, budget: int) -> int:
        """Take the slots in `sweeping` out of the next entries.

        Returns:
            How many entries were looked at; fewer than `budget` when all shards are done.
        """
        looked_at = 0
        while looked_at < budget:
            if not self._to_sweep:
                if self._swept == self.shards:
                    break
                # What comes into a shard later is clean, or noticed in `list_start`.
                self._to_sweep = list(self.starts[self._swept])
                self._swept += 1
                continue
            self._sweep_entry(self._to_sweep.pop())
            looked_at += 1
        if looked_at < budget:
            self._end_of_sweep()
        return looked_at

    def _sweep_entry(self, key: bytes) -> None:
        starts = self.starts[key[0]]
        entry = starts.get(key)
        if isinstance(entry, Run):
            self._forget_in(entry)
        elif entry is not None and entry & self.sweeping:
            self.put(starts, key, entry & ~self.sweeping)

    def _end_of_sweep(self) -> None:
        for run in list(self.hidden):
            self._forget_in(run)
        if not self.left_over:
            self.sweeping = 0
        self.left_over = False
        self._swept = 0

    # --- one run -----------------------------------------------------------------------------

    def _whole(self, match: Match) -> list[Run]:
        """The prompt as runs that begin and end with it; what is new becomes one."""
        hashes = match.hashes
        runs: list[Run] = []
        gathered: Run | None = None  # of single blocks in the same state
        at = 0
        for entry, size in match.segments:
            if isinstance(entry, Run):
                runs.append(entry if size == len(entry.hashes) else self._split(entry, size))
                gathered = None
            else:
                key = hashes[at : at + size]
                if gathered is not None and gathered.stored == entry:
                    gathered.hashes += key
                    del self.starts[key[0]][key]
                else:
                    gathered = self.starts[key[0]][key] = Run(key, entry)
                    runs.append(gathered)
            at += size
        for run in runs:
            if run.stored:
                self.list_end(run)
        if at < len(hashes):
            run = Run(hashes[at:])
            self.list_start(run)
            runs.append(run)
        return runs

    def _split(self, run: Run, size: int) -> Run:
        """Cut a run in two: a new one of the first `size` bytes, returned, and the rest.

        The rest stays the same object, since leases that end with the run go on ending with it.
        """
        head = Run(run.hashes[:size])
        head.held, head.stored, head.parent = run.held, run.stored, run.parent
        self.list_start(head, instead_of=run)
        if head.stored:
            self.list_end(head)
        run.hashes = run.hashes[size:]
        if run.pins is not None:
            head.pins = run.pins.copy()
            run.parent = head
        self.list_start(run)
        return head

    def _joined(self, run: Run, child: Run | None) -> Run | None:
        """Going up a lease that ends: join a run with the one after it, or settle that one."""
        if child is not None:
            if run.is_like(child):
                self._absorb(child, run)
                return child
            self._settle(child)
        return run

    def _absorb(self, run: Run, before: Run) -> None:
        """Join a run with the one before it. No lease ends between them."""
        self.unlist(run)
        self.unlist(before)
        run.hashes = before.hashes + run.hashes
        run.parent = before.parent
        before.parent = None
        self.list_start(run)
        if run.stored:
            self.list_end(run)

    def _settle(self, run: Run) -> None:
        """Drop a run that nobody holds, and keep a short one that nobody pins block by block."""
        if run.pins is not None:
            return
        if self.sweeping:
            self._unstore(run, self.sweeping)
        if not run.held:
            self.unlist(run)
        elif len(run.hashes) < _SHORT:
            self.break_up(run)

    def _unpin_one(self, slot: SlotLike, run: Run) -> None:
        pins = run.pins
        assert pins is not None
        if pins[slot] > 1:
            pins[slot] -= 1
            return
        del pins[slot]
        if run.held & slot.bit and not run.stored & slot.bit:
            run.held ^= slot.bit
            slot.blocks -= len(run.hashes) // HASH_BYTES
        if not pins:
            run.pins = run.parent = None

    def _store_run(self, slot: SlotLike, run: Run) -> None:
        if not run.held & slot.bit:
            run.held |= slot.bit
            slot.blocks += len(run.hashes) // HASH_BYTES
        run.stored |= slot.bit
        self.list_end(run)

    def _remove_from(self, slot: SlotLike, run: Run, hashes: bytes) -> int:
        """Remove the end of a run, as far as it is the end of `hashes`; returns how far that is."""
        size = min(len(run.hashes), len(hashes))
        if run.hashes[-size:] != hashes[-size:]:
            size = HASH_BYTES  # not the chain that was stored; one block at a time is always right
        if size < len(run.hashes):
            self._split(run, len(run.hashes) - size)
        self._unstore(run, slot.bit)
        slot.blocks -= size // HASH_BYTES
        self._settle(run)
        return size

    def _unstore(self, run: Run, bits: int) -> None:
        run.stored &= ~bits
        run.held &= ~bits  # pins or not: an engine may give up a request that it will run again
        if not run.stored:
            self.unlist_end(run)

    def _forget_in(self, run: Run) -> None:
        if not self.is_swept(run):
            self._unstore(run, self.sweeping)
            pins = run.pins or {}
            run.pins = {slot: n for slot, n in pins.items() if not slot.bit & self.sweeping} or None
            if run.pins is None:
                run.parent = None
            self._settle(run)
