"""One run in virtual time: a workload, modelled replicas, and who routes between them."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from megatron.core.inference.coordinator.kv_events import BREAK, pack_events
from replay.arrivals import Arrivals
from replay.profiles import Profile
from replay.replica import Replica
from replay.routes import Placed, Route, RouteMaker
from replay.workload import InputError, Request, Workload

SAMPLE_SECONDS = 0.25
"""How often the load of every replica is looked at."""

_BREAK = pack_events([BREAK])
_COMPARED_EVERY = 4
"""Of so many decisions one is compared with what all caches really hold: that takes long."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The modelled replicas of a run.

    Attributes:
        profile: Their times and limits.
        replicas: How many there are.
        keeps: Whether they keep blocks that nobody uses (`lru`), or not (`ref_zero`).
        generated: Whether they keep the blocks that they generated.
    """

    profile: Profile
    replicas: int = 16
    keeps: bool = True
    generated: bool = False

    def make(self) -> list[Replica]:
        """The replicas, with nothing cached."""
        return [Replica(self.profile, self.keeps, self.generated) for _ in range(self.replicas)]


@dataclass(slots=True)
class Outcome:
    """What happened in a run.

    Attributes:
        requests: Every request, in the order in which they ended.
        loads: Requests in flight, shape [samples, replicas].
        live: Sessions live at each sample, shape [samples].
        target: Sessions that were to be live at once.
        ends: When the last request ended, seconds.
        replicas: The replicas, as they are in the end.
        index_blocks: The most blocks that the index held.
    """

    requests: list[Request]
    loads: np.ndarray
    live: np.ndarray
    target: int
    ends: float
    replicas: list[Replica]
    index_blocks: int


class Simulation:
    """Virtual time.

    Args:
        arrivals: What is sent, and when.
        fleet: The replicas.
        maker: Makes the route between the two.
        seed: For routes that draw.
        true_caches: Whether replicas tell the route of their caches.
        progress: Called with the number of requests that ended.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        fleet: Fleet,
        maker: RouteMaker,
        seed: int = 0,
        *,
        true_caches: bool = True,
        progress: Callable[[int], object] = lambda count: None,
    ):
        self._arrivals = arrivals
        self._replicas = fleet.make()
        self._route: Route = maker(self._replicas, seed)
        self._true_caches = true_caches
        self._progress = progress
        self._placed = 0
        self._loads = [0] * fleet.replicas
        self._samples: list[list[int]] = []
        self._live: list[int] = []
        self._done: list[Request] = []
        self._queue: list[tuple[float, int, int, int, Request | None]] = []
        self._pushed = 0
        self._index_blocks = 0

    def run(self) -> Outcome:
        """Go on until every request has ended."""
        for request in self._arrivals.first():
            self._push(request.arrival, -1, 0, request)
        collected = gc.isenabled()
        gc.disable()  # little here is cyclic, and much is alive
        try:
            return self._go()
        finally:
            if collected:
                gc.enable()

    def _go(self) -> Outcome:
        next_tick = 1.0
        now = 0.0
        while self._queue:
            now, _, number, version, request = heappop(self._queue)
            while now >= len(self._live) * SAMPLE_SECONDS:
                self._sample()
            while now >= next_tick:
                self._route.tick(next_tick)
                next_tick += 1.0
            if request is not None:
                self._place(self._route.submit(request, now), now)
            elif self._replicas[number].version == version:
                self._steps_end(number, now)
        return Outcome(
            self._done, np.array(self._samples, np.int32), np.array(self._live, np.int32),
            self._arrivals.target, now, self._replicas, self._index_blocks,
        )  # fmt: skip

    def _push(self, time: float, number: int, version: int, request: Request | None) -> None:
        self._pushed += 1
        heappush(self._queue, (time, self._pushed, number, version, request))

    def _sample(self) -> None:
        self._samples.append(self._loads.copy())
        self._live.append(self._arrivals.live)

    def _place(self, placed: Sequence[Placed], now: float) -> None:
        for number, request in placed:
            request.replica = number
            self._placed += 1
            if self._placed % _COMPARED_EVERY == 0:
                self._compare(request)
            self._loads[number] += 1
            replica = self._replicas[number]
            version = replica.version
            replica.add(request, now)
            self._plan(number, version)

    def _steps_end(self, number: int, now: float) -> None:
        replica = self._replicas[number]
        finished = replica.finish_steps(now)
        if self._true_caches and (replica.stored or replica.cache.removed):
            self._route.stored(number, events_of(replica), now)
        replica.stored.clear()
        replica.cache.removed.clear()
        version = replica.version
        replica.begin(now)
        self._plan(number, version)
        if finished:
            self._loads[number] -= len(finished)
            self._place(self._route.answered(number, finished, now), now)
            self._go_on(finished, now)

    def _go_on(self, finished: list[Request], now: float) -> None:
        for request in finished:
            request.chain = request.hashes = b""
            self._done.append(request)
            following = self._arrivals.after(request, now)
            if following is not None:
                self._push(following.arrival, -1, 0, following)
        self._progress(len(finished))
        self._index_blocks = max(self._index_blocks, self._route.index_blocks)

    def _plan(self, number: int, version: int) -> None:
        """Note when a replica's steps end, if that has changed."""
        replica = self._replicas[number]
        if replica.ends is not None and replica.version != version:
            self._push(replica.ends, number, replica.version, None)

    def _compare(self, request: Request) -> None:
        """Note whether another replica holds more of the prompt than the one chosen."""
        chosen, request.compared = request.replica, True
        own = self._replicas[chosen].cache.depth(request.hashes)
        best, holder = own, chosen
        for number, replica in enumerate(self._replicas):
            depth = replica.cache.depth(request.hashes)
            if depth > best:
                best, holder = depth, number
        if best > own:
            request.passed_over = (best - own) * self._replicas[chosen].profile.block_size
            request.load_saved = self._loads[holder] - self._loads[chosen]


def events_of(replica: Replica) -> bytes:
    """What changed in a replica's cache since the last time, as packed events."""
    parts: list[bytes] = []
    for tail in replica.cache.removed:
        if parts:
            parts.append(_BREAK)
        parts.append((-np.frombuffer(tail, "<i8")).tobytes())
    last = b""
    for before, chain in replica.stored:
        if last and before != last:
            parts.append(_BREAK)
        parts.append(chain)
        last = chain[-8:]
    return b"".join(parts)


def check_fits(workload: Workload, profile: Profile) -> None:
    """Refuse requests that no replica could ever run.

    Raises:
        InputError: One is too large.
    """
    largest = -(-workload.largest() // profile.block_size)
    if profile.strict and largest > profile.total_blocks:
        raise InputError(
            f"{workload.name}: a request needs {largest:,} blocks of {profile.block_size} tokens; "
            f"the cache of a replica has {profile.total_blocks:,}"
        )
