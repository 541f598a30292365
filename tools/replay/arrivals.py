"""When turns are sent: sessions in a closed loop, or by their timestamps in an open one."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from replay.workload import Request, Workload, request_of


@dataclass(frozen=True, slots=True)
class Load:
    """How a workload is sent.

    Attributes:
        concurrency: Sessions live at once in the closed loop; the next starts when one ends.
        ramp: Seconds over which the first of them start, uniformly.
        gap_mu: Of the lognormal distribution of the gaps that the workload leaves open: the mean
            of their logarithms, in seconds.
        gap_sigma: The standard deviation of the same.
        trace_gaps: Whether gaps are those of the workload, where it has any.
        speedup: 0 for the closed loop; otherwise timestamps are divided by this.
    """

    concurrency: int = 512
    ramp: float = 10.0
    gap_mu: float = 1.61
    gap_sigma: float = 0.70
    trace_gaps: bool = False
    speedup: float = 0.0


class Arrivals:
    """The source of requests of one run. Nothing in it depends on how they are routed.

    Args:
        workload: The sessions.
        load: How to send them.
        seed: Of starts and gaps.

    Attributes:
        target: Sessions that are to be live at once.
        live: Sessions that have started and not ended.
    """

    def __init__(self, workload: Workload, load: Load, seed: int):
        self._workload = workload
        self._load = load
        self._seed = seed
        count = len(workload.sessions)
        self._open = load.speedup > 0
        self.target = count if self._open else min(load.concurrency, count)
        self._next = count if self._open else self.target
        self.live = self.target
        self._gaps = self._draw_gaps()

    def first(self) -> Iterator[Request]:
        """The requests that do not wait for an answer."""
        workload, load = self._workload, self._load
        if self._open:
            for number, session in enumerate(workload.sessions):
                at = session.turns[0].at
                yield request_of(workload, number, 0, (at or 0.0) / load.speedup)
            return
        rng = np.random.default_rng([self._seed, 1])
        for number, start in enumerate(rng.uniform(0.0, load.ramp, self.target).tolist()):
            yield request_of(workload, number, 0, start)

    def after(self, request: Request, now: float) -> Request | None:
        """The request that follows an answer: the session's next turn, or the next session."""
        workload = self._workload
        turns = workload.sessions[request.session].turns
        turn = request.turn + 1
        if turn < len(turns):
            return request_of(workload, request.session, turn, self._time_of(request, turn, now))
        self.live -= 1
        if self._next == len(workload.sessions):
            return None
        self._next += 1
        self.live += 1
        return request_of(workload, self._next - 1, 0, now)

    def _time_of(self, request: Request, turn: int, now: float) -> float:
        at = self._workload.sessions[request.session].turns[turn].at
        if self._open and at is not None:
            return max(now, at / self._load.speedup)
        return now + self._gaps[request.session][turn]

    def _draw_gaps(self) -> list[list[float]]:
        """Gaps before each turn, drawn per session, so that they do not depend on the order."""
        load, gaps = self._load, []
        for number, session in enumerate(self._workload.sessions):
            rng = np.random.default_rng([self._seed, 2, number])
            drawn = rng.lognormal(load.gap_mu, load.gap_sigma, len(session.turns)).tolist()
            if load.trace_gaps:
                own = (turn.gap for turn in session.turns)
                drawn = [d if gap is None else gap for d, gap in zip(drawn, own, strict=True)]
            gaps.append(drawn)
        return gaps
