"""Where runs of blocks are found: by their first block and, where stored, by their last."""

from collections.abc import Iterator

from megatron.core.inference.coordinator.hashing import HASH_BYTES
from megatron.core.inference.coordinator.prefixes import Entry, Match, Run, common_bytes

_SHARDS = 256
"""Tables are split by a hash's first byte, which is uniform: none grows, or is freed, for long."""


class RunTables:
    """All runs. Keys are packed hashes of single blocks.

    Attributes:
        starts: Runs and single blocks by their first block, in shards.
        ends: Stored runs by their last block, in shards.
        hidden: Runs that their first block does not lead to.
        sweeping: Ended slots that are being taken out, shard after shard.
        left_over: Whether some of them came into a shard that was done already.
    """

    def __init__(self):
        self.starts: list[dict[bytes, Entry]] = [{} for _ in range(_SHARDS)]
        self.ends: list[dict[bytes, Run]] = [{} for _ in range(_SHARDS)]
        self.hidden: dict[Run, None] = {}
        self.sweeping = 0
        self.left_over = False
        self._swept = 0  # shards begun
        self._to_sweep: list[bytes] = []  # keys of the latest of them
        self._sets: dict[int, int] = {}

    def match(self, hashes: bytes) -> Match:
        """Find what is known of a prompt."""
        starts = self.starts
        segments: list[tuple[Entry, int]] = []
        before: Entry | None = None
        at, end = 0, len(hashes)
        while at < end:
            entry = starts[hashes[at]].get(hashes[at : at + HASH_BYTES])
            if entry is None:
                break
            size, whole = HASH_BYTES, True
            if isinstance(entry, Run):
                if entry.pins is not None and entry.parent is not before:
                    break  # a list that no chain of hashes makes, this one or an earlier one
                size = common_bytes(entry.hashes, hashes, at)
                whole = size == len(entry.hashes)
            segments.append((entry, size))
            at += size
            before = entry if whole else 0
        return Match(hashes, segments, at)

    @property
    def shards(self) -> int:
        """How many shards there are."""
        return _SHARDS

    def __iter__(self) -> Iterator[Run]:
        """Every run, single blocks left out."""
        for starts in filter(None, self.starts):
            yield from (entry for entry in starts.values() if isinstance(entry, Run))
        yield from self.hidden

    def single_blocks(self) -> Iterator[int]:
        """For every block that is no part of a run, the slots that store it."""
        for starts in filter(None, self.starts):
            yield from (entry for entry in starts.values() if isinstance(entry, int))

    # --- changes -----------------------------------------------------------------------------

    def list_start(self, run: Run, instead_of: Run | None = None) -> None:
        """Let a run be found by its first block.

        Another run with the same first block comes of a list that no chain of hashes makes. What
        an engine stored goes before what a client claims; the loser is known to its leases alone.
        """
        shard, key = self.starts[run.hashes[0]], run.hashes[:HASH_BYTES]
        other = shard.get(key)
        if self.hidden:
            self.hidden.pop(run, None)
        if self.sweeping and not self.is_swept(run):
            self.left_over = True
        if other is None or other is instead_of:
            shard[key] = run
        elif isinstance(other, Run) and run.stored and not other.stored:
            shard[key] = run
            self.hidden[other] = None
        else:
            self.hidden[run] = None

    def list_end(self, run: Run) -> None:
        """Let a stored run be found by its last block."""
        key = run.hashes[-HASH_BYTES:]
        self.ends[key[0]][key] = run

    def unlist_end(self, run: Run) -> None:
        """Let a run not be found by its last block any more."""
        key = run.hashes[-HASH_BYTES:]
        if self.ends[key[0]].get(key) is run:
            del self.ends[key[0]][key]

    def unlist(self, run: Run) -> None:
        """Take a run out of the tables."""
        if self.hidden:
            self.hidden.pop(run, None)
        key = run.hashes[:HASH_BYTES]
        if self.starts[key[0]].get(key) is run:
            del self.starts[key[0]][key]
        self.unlist_end(run)

    def break_up(self, run: Run) -> None:
        """Keep a run, which no lease pins, as single blocks, unless others have one of its keys."""
        hashes, starts = run.hashes, self.starts
        keys = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
        if all(starts[key[0]].get(key, run) is run for key in keys):
            self.unlist_end(run)
            if self.hidden:
                self.hidden.pop(run, None)
            stored = self.shared(run.stored)
            # In the run's place: deleting its key first leaves a hole, and holes double the tables.
            for key in keys:
                starts[key[0]][key] = stored

    def put(self, shard: dict[bytes, Entry], key: bytes, slots: int) -> None:
        """A single block is stored by these slots."""
        if slots:
            shard[key] = self.shared(slots)
        else:
            del shard[key]

    def shared(self, slots: int) -> int:
        """The same set as an object that equal sets share: millions of blocks have one each."""
        if len(self._sets) > 100_000:
            self._sets.clear()
        return self._sets.setdefault(slots, slots)

    def is_swept(self, run: Run) -> bool:
        """Whether nothing of the slots in `sweeping` is in a run."""
        bits = self.sweeping
        return not (run.held & bits or any(slot.bit & bits for slot in run.pins or ()))
