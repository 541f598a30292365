"""What is measured of a run. Every figure is defined here and nowhere else.

Load is the number of requests in flight on a replica, sampled every 0.25 s. *Busy* is the time
while at least 90 % of the target sessions are live, *tail* while fewer than half are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.core.inference.coordinator.hashing import HASH_BYTES, expected_skip
from replay.cache import BlockCache
from replay.simulation import SAMPLE_SECONDS, Outcome
from replay.workload import Workload, request_of

BUSY, TAIL = 0.9, 0.5
"""Shares of the target sessions that the phases are told by."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure.

    Attributes:
        key: Its name in JSON.
        title: Over its column.
        unit: Of its values; empty for a plain number.
        digits: Shown after the point.
        meaning: Its definition.
        better: -1 if less is better, 1 if more is, 0 if neither.
    """

    key: str
    title: str
    unit: str
    digits: int
    meaning: str
    better: int = -1

    @property
    def heading(self) -> str:
        """The title and the unit."""
        return f"{self.title}, {self.unit}" if self.unit else self.title


_TTFT = "from sending a request to its first token"
_REQUEST = "from sending a request to its last token"
_CV = "standard deviation / mean of the replicas' loads, averaged over"
_T90 = "from the start until fewer than 90 % of the target sessions are live, for good"
_IDLE = "share of all samples of replicas that have no load while another has 2 or more"
_PASSED = (
    "share of prompt tokens that another replica had cached and the chosen one had not, "
    "of every 4th request"
)
_PASSED_FOR = "how many requests more that other replica had, mean over the requests so passed"
_MAX_MEDIAN = "highest load / max(1, median load) of the replicas, averaged over busy samples"
_MISSED = "prefill max/mean: tokens that the replica with most prefilled / mean over the replicas"

FIGURES = (
    Figure("skip", "skip", "", 3, "share of prompt tokens whose prefill was skipped", 1),
    Figure("makespan", "makespan", "s", 0, "from the start until the last answer has ended"),
    Figure("t90", "t90", "s", 0, _T90),
    Figure("ttft_p50", "TTFT p50", "s", 2, f"{_TTFT}, median"),
    Figure("ttft_p90", "TTFT p90", "s", 2, f"{_TTFT}, 90th percentile"),
    Figure("ttft_p99", "TTFT p99", "s", 2, f"{_TTFT}, 99th percentile"),
    Figure("request_p50", "request p50", "s", 2, f"{_REQUEST}, median"),
    Figure("request_p99", "request p99", "s", 2, f"{_REQUEST}, 99th percentile"),
    Figure("busy_cv", "busy CV", "", 2, f"{_CV} busy samples"),
    Figure("tail_cv", "tail CV", "", 2, f"{_CV} tail samples"),
    Figure("idle", "idle", "", 3, _IDLE),
    Figure("max_median", "max/median", "", 2, _MAX_MEDIAN),
    Figure("missed", "missed", "", 2, _MISSED),
    Figure("prefill_share", "prefill", "", 3, "share of all step time that went into prefill"),
    Figure("passed_over", "passed", "", 3, _PASSED),
    Figure("load_saved", "passed for", "", 1, _PASSED_FOR, 0),
    Figure("index_blocks", "index", "", 0, "most blocks that the coordinator's index held", 0),
)  # fmt: skip

TERMS = {
    "load": f"requests in flight on a replica, sampled every {SAMPLE_SECONDS:g} s",
    "live": "a session from its start to its last answer, the gaps between its turns included",
    "target sessions": "how many are to be live at once: --concurrency, or all with --speedup",
    "busy samples": f"those while at least {BUSY:.0%} of the target sessions are live",
    "tail samples": f"those while fewer than {TAIL:.0%} of the target sessions are live",
    "p50, p90, p99": "percentiles over all requests of a run",
}
"""What the meanings of figures take for granted."""

BY_KEY = {figure.key: figure for figure in FIGURES}

Measured = dict[str, float]
"""Figures of one run, by key."""


def measure(outcome: Outcome) -> Measured:
    """All figures of a run."""
    requests = outcome.requests
    prompt = sum(r.prompt_tokens for r in requests)
    ttft = np.array([r.first_token - r.arrival for r in requests])
    whole = np.array([r.finished - r.arrival for r in requests])
    prefilled = np.array([r.prefilled for r in outcome.replicas], float)
    passed = [r for r in requests if r.passed_over]
    compared = sum(r.prompt_tokens for r in requests if r.compared)
    values = {
        "skip": sum(r.cached_tokens for r in requests) / prompt,
        "makespan": outcome.ends,
        "missed": float(prefilled.max() / max(1.0, prefilled.mean())),
        "prefill_share": _prefill_share(outcome),
        "passed_over": sum(r.passed_over for r in passed) / max(1, compared),
        "load_saved": sum(r.load_saved for r in passed) / max(1, len(passed)),
        "index_blocks": float(outcome.index_blocks),
        **_load_figures(outcome),
    }
    for name, times, shares in (("ttft", ttft, (50, 90, 99)), ("request", whole, (50, 99))):
        for share in shares:
            values[f"{name}_p{share}"] = float(np.percentile(times, share))
    return values


def _prefill_share(outcome: Outcome) -> float:
    busy = sum(replica.busy_time for replica in outcome.replicas)
    return sum(replica.prefill_time for replica in outcome.replicas) / busy if busy else 0.0


def _load_figures(outcome: Outcome) -> Measured:
    loads, live = outcome.loads, outcome.live
    busy = live >= BUSY * outcome.target
    tail = live < TAIL * outcome.target
    mean = loads.mean(axis=1)
    cv = loads.std(axis=1) / np.maximum(mean, 1e-9)
    spread = loads.max(axis=1) / np.maximum(1.0, np.median(loads, axis=1))
    idle = (loads == 0) & (loads.max(axis=1) >= 2)[:, None]
    return {
        "t90": float((np.flatnonzero(busy)[-1] + 1) * SAMPLE_SECONDS),
        "busy_cv": _mean(cv[busy & (mean > 0)]),
        "tail_cv": _mean(cv[tail & (mean > 0)]),
        "max_median": _mean(spread[busy & (mean > 0)]),
        "idle": _mean(idle),
    }


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else 0.0


def bound(workload: Workload, generated: bool = False) -> float:
    """The most that can be skipped: one request at a time, and one cache that is never full."""
    size = workload.block_size
    cache = BlockCache(2**62)
    skipped = prompt = clock = 0
    for number, session in enumerate(workload.sessions):
        for turn in range(len(session.turns)):
            clock += 1
            request = request_of(workload, number, turn, 0.0)
            node, there = cache.acquire(request.hashes, clock)
            skipped += expected_skip(request.prompt_tokens, there // HASH_BYTES, size)
            prompt += request.prompt_tokens
            tokens = request.prompt_tokens + (request.output_tokens if generated else 0)
            end = min(tokens // size * HASH_BYTES, len(request.chain))
            if end > there:
                node, _ = cache.extend(node, request.chain, there, end, clock)
            cache.release(node)
    return skipped / prompt


def mean_and_spread(runs: Sequence[Measured], key: str) -> tuple[float, float]:
    """Mean over seeds, and half the distance between the smallest and the largest."""
    values = [run[key] for run in runs]
    return sum(values) / len(values), (max(values) - min(values)) / 2


def markdown_definitions() -> str:
    """The figures as the docs define them."""
    lines = ["| figure | what it is |", "| --- | --- |"]
    for figure in FIGURES:
        lines.append(f"| {figure.heading} | {figure.meaning} |")
    return "\n".join(lines) + "\n"
