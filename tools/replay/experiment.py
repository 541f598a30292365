"""Many runs: every policy on the same arrivals, for every seed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped]

from replay.arrivals import Arrivals, Load
from replay.figures import Measured, bound, measure
from replay.policies import Policy
from replay.simulation import SAMPLE_SECONDS, Fleet, Outcome, Simulation, check_fits
from replay.workload import Workload

WorkloadMaker = Callable[[int], Workload]
"""The sessions of a seed, in the order in which they start."""

_PICTURE_SAMPLES = 240
"""Stretches of time that a picture of loads shows."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is replayed, and against what.

    Attributes:
        make: Makes the sessions of a seed.
        load: How they are sent.
        fleet: The replicas.
        seeds: Of sessions, their order and gaps.
        jobs: Processes to run in.
    """

    make: WorkloadMaker
    load: Load
    fleet: Fleet
    seeds: Sequence[int] = (0,)
    jobs: int = 1


@dataclass(slots=True)
class Run:
    """One policy with one seed.

    Attributes:
        policy: Its name.
        seed: The seed.
        figures: What was measured.
        ttft: Percentiles 0 to 100 of the time to the first token, seconds.
        times: Of `loads`, seconds.
        loads: Requests in flight on each replica, mean over some stretches of time.
    """

    policy: str
    seed: int
    figures: Measured
    ttft: list[float]
    times: list[float]
    loads: list[list[float]]


@dataclass(slots=True)
class Comparison:
    """All runs of a comparison.

    Attributes:
        workload: Its name.
        requests: Requests of a run, of the first seed.
        bound: The most that can be skipped: by one infinite cache, mean over seeds.
        runs: The runs, by policy, in the order of the seeds.
    """

    workload: str
    requests: int
    bound: float
    runs: dict[str, list[Run]] = field(default_factory=dict)


def compare(setting: Setting, policies: Sequence[Policy], quiet: bool = False) -> Comparison:
    """Run everything.

    Raises:
        InputError: The workload cannot be replayed on these replicas.
    """
    workloads = {seed: setting.make(seed) for seed in setting.seeds}
    for workload in workloads.values():
        check_fits(workload, setting.fleet.profile)
    first = workloads[setting.seeds[0]]
    generated = setting.fleet.generated
    limits = [bound(workload, generated) for workload in workloads.values()]
    result = Comparison(first.name, first.requests, sum(limits) / len(limits))
    tasks = [(policy, seed) for policy in policies for seed in setting.seeds]
    total = sum(workloads[seed].requests for _, seed in tasks)
    with tqdm(total=total, unit=" requests", disable=quiet or None, smoothing=0.1) as bar:
        found = {(r.policy, r.seed): r for r in _runs(setting, workloads, tasks, bar)}
    for policy, seed in tasks:
        result.runs.setdefault(policy.name, []).append(found[policy.name, seed])
    return result


Task = tuple[Policy, int]
_shared: tuple[Setting, dict[int, Workload]]


def _runs(
    setting: Setting, workloads: dict[int, Workload], tasks: Iterable[Task], bar: Any
) -> Iterator[Run]:
    global _shared
    _shared = (setting, workloads)  # workers are forked, and find it there
    if setting.jobs == 1:
        for policy, seed in tasks:
            bar.set_description(f"{policy.name}, seed {seed}")
            yield _run(policy, seed, bar.update)
        return
    with ProcessPoolExecutor(setting.jobs, mp_context=get_context("fork")) as pool:
        for future in as_completed([pool.submit(_run, policy, seed) for policy, seed in tasks]):
            run: Run = future.result()
            bar.set_description(f"{run.policy}, seed {run.seed}")
            bar.update(workloads[run.seed].requests)
            yield run


def _run(policy: Policy, seed: int, progress: Callable[[int], object] = lambda count: None) -> Run:
    setting, workloads = _shared
    arrivals = Arrivals(workloads[seed], setting.load, seed)
    outcome = Simulation(
        arrivals, setting.fleet, policy.maker, seed,
        true_caches=policy.true_caches, progress=progress,
    ).run()  # fmt: skip
    ttft = np.percentile([r.first_token - r.arrival for r in outcome.requests], range(101))
    times, loads = _picture(outcome)
    return Run(policy.name, seed, measure(outcome), ttft.tolist(), times, loads)


def _picture(outcome: Outcome) -> tuple[list[float], list[list[float]]]:
    """Mean loads of evenly spread stretches of time, and when each begins."""
    count = len(outcome.loads)
    bins = min(count, _PICTURE_SAMPLES)
    starts = np.unique(np.linspace(0, count, bins, endpoint=False).astype(int))
    sums = np.add.reduceat(outcome.loads, starts, axis=0)
    means = sums / np.diff([*starts, count])[:, None]
    return (starts * SAMPLE_SECONDS).tolist(), means.tolist()
