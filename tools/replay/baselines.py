"""Policies outside the core, with the same interface, to compare it with."""

import random
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from megatron.core.inference.coordinator.hashing import expected_skip
from megatron.core.inference.coordinator.index import PrefixIndex
from megatron.core.inference.coordinator.kv_events import CLEARED, pack_events, segments
from megatron.core.inference.coordinator.slots import Lease
from replay.replica import Replica
from replay.routes import Placed
from replay.workload import Request

RETENTION_SECONDS = 300.0
"""How long the history of requests is believed, as by the core's default."""

_POINTS = 64
"""Points of each replica on the ring of the consistent hash."""


class Baseline:
    """Places every request at once; what is chosen, and why, is the subclass's.

    Args:
        replicas: The replicas.
        seed: For those that draw.
        true_caches: Whether replicas tell of their caches.
        sized: Whether they tell how large these are.

    Attributes:
        replicas: The replicas.
        loads: Requests in flight on each.
        random: To draw from.
    """

    def __init__(
        self, replicas: Sequence[Replica], seed: int, true_caches: bool, sized: bool = True
    ):
        self.replicas = replicas
        self.sized = sized
        self.loads = [0] * len(replicas)
        self.random = random.Random(seed)
        self.true_caches = true_caches

    def choose(self, request: Request) -> int:
        """The number of the replica that gets a request."""
        raise NotImplementedError

    def submit(self, request: Request, now: float) -> Sequence[Placed]:
        """Place it."""
        number = self.choose(request)
        self.loads[number] += 1
        self.note_placed(request, number)
        return [(number, request)]

    def answered(self, replica: int, requests: list[Request], now: float) -> Sequence[Placed]:
        """Note that they ended; nothing ever waits."""
        self.loads[replica] -= len(requests)
        for request in requests:
            self.note_ended(request, now)
        return ()

    def note_placed(self, request: Request, number: int) -> None:
        """A request was placed."""

    def note_ended(self, request: Request, now: float) -> None:
        """A request ended."""

    def stored(self, replica: int, events: bytes, now: float) -> None:
        """A replica's cache changed."""

    def tick(self, now: float) -> None:
        """A second has passed."""

    @property
    def index_blocks(self) -> int:
        """Blocks that it believes to be held."""
        return 0


class RoundRobin(Baseline):
    """One after the other."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._next = -1

    def choose(self, request: Request) -> int:
        """The next."""
        self._next = (self._next + 1) % len(self.replicas)
        return self._next


class Random(Baseline):
    """Any."""

    def choose(self, request: Request) -> int:
        """Draw one."""
        return self.random.randrange(len(self.replicas))


class ConsistentHash(Baseline):
    """The replica that follows the session's name on a ring."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        points = [
            (_place(f"replica {number} {point}"), number)
            for number in range(len(self.replicas))
            for point in range(_POINTS)
        ]
        self._ring = sorted(points)

    def choose(self, request: Request) -> int:
        """The next point on the ring."""
        return self._ring[bisect(self._ring, (_place(request.name), -1)) % len(self._ring)][1]


def _place(name: str) -> int:
    return int.from_bytes(sha256(name.encode()).digest()[:8])


class Pinned(Baseline):
    """A session stays where it began: on the replica with the fewest live sessions then."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._homes: dict[int, int] = {}
        self._sessions = Counter(dict.fromkeys(range(len(self.replicas)), 0))

    def choose(self, request: Request) -> int:
        """Its home; of equal replicas the less loaded becomes one."""
        home = self._homes.get(request.session)
        if home is None:
            home = min(self._sessions, key=lambda n: (self._sessions[n], self.loads[n]))
            self._homes[request.session] = home
            self._sessions[home] += 1
        return home

    def note_ended(self, request: Request, now: float) -> None:
        """A session that is over lives nowhere."""
        if request.last:
            self._sessions[self._homes.pop(request.session)] -= 1


class WithCaches(Baseline):
    """A baseline that knows of caches what the core would know: events, or the routing history."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._index = PrefixIndex(RETENTION_SECONDS)
        self._leases: dict[Request, Lease] = {}
        clear = pack_events([CLEARED])
        for number, replica in enumerate(self.replicas):
            capacity = replica.profile.total_blocks if self.sized else None
            self._index.add_rank(number, capacity=capacity, retains=True)
            if self.true_caches:
                self.stored(number, clear, 0.0)

    def depths(self, request: Request) -> dict[int, int]:
        """Blocks of a prompt that each replica holds, where it holds any."""
        groups = self._index.holders(self._index.match(request.hashes))
        return {number: depth for slots, depth in groups for number in self._index.ranks(slots)}

    def note_placed(self, request: Request, number: int) -> None:
        """A prompt counts as held from its routing on."""
        if request.hashes:
            match = self._index.match(request.hashes)
            self._leases[request] = self._index.pin(number, match)

    def note_ended(self, request: Request, now: float) -> None:
        """Its prompt is not pinned any more."""
        lease = self._leases.pop(request, None)
        if lease is not None:
            self._index.release(lease, now)

    def stored(self, replica: int, events: bytes, now: float) -> None:
        """Believe what a replica says."""
        changes = segments(events, len(events) // 8)
        assert changes is not None
        assert self._index.apply(replica, changes), "events and index differ"

    def tick(self, now: float) -> None:
        """Forget what is past its time."""
        self._index.expire(now)

    @property
    def index_blocks(self) -> int:
        """Blocks in the index."""
        return len(self._index)


class WorkTimesBatch(WithCaches):
    """The least (tokens to prefill, new and queued) x (requests there + 1).

    Queued tokens and batches are read from the replicas themselves, also where caches are not.
    """

    def choose(self, request: Request) -> int:
        """The least product; of equal ones the least loaded."""
        depths = self.depths(request)
        tokens, size = request.prompt_tokens, self.replicas[0].profile.block_size
        nothing = tokens - expected_skip(tokens, 0, size)

        def cost(number: int) -> tuple[float, int]:
            replica, depth = self.replicas[number], depths.get(number)
            new = nothing if depth is None else tokens - expected_skip(tokens, depth, size)
            return (new + replica.queued) * (replica.batch + 1), self.loads[number]

        return min(range(len(self.replicas)), key=cost)


@dataclass(frozen=True, slots=True)
class BaselineMaker:
    """Makes routes of a baseline.

    Attributes:
        kind: Its class.
        true_caches: Whether replicas tell of their caches.
        options: What else its class takes.
    """

    kind: Callable[..., Baseline]
    true_caches: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, replicas: Sequence[Replica], seed: int) -> Baseline:
        """A fresh one."""
        return self.kind(replicas, seed, self.true_caches, **self.options)
