#!/usr/bin/env python3
r"""Fit a profile of tools/replay to a real engine, and check the replica model against it.

The built-in model answers multi-turn sessions on this CPU, in this process, under a real
coordinator, at several loads. Every step of the engine is timed, from its begin to the begin of the
next, and a profile fitted to the times: so long for any step, for each token of prefill, for each
request that decodes, for each token of their context. Printed: what was measured beside what the
profile says, and the profile as a line of JSON.

    python tools/calibrate_replay.py              fit alone: about 25 seconds
    python tools/calibrate_replay.py --check      compare runs with their replays as well

--check then holds other sessions on fresh engines, with the coordinator recording them, and replays
the record: the same sessions through the same coordinator core, in virtual time, with the fitted
profile. Pauses between turns are the recorded ones; when requests are scheduled, where they go, how
long they take and what is skipped is the model's own doing. One run is on one engine; the other is
on two, which share a thread, so that only what they skip is judged. Exit code 1: skip rates differ,
or the time by more than --within.

All in one run, so that the speed of the machine cancels out. Other work on the machine does not:
where the check fails beside a busy neighbour, run it again, or give it more --attempts.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from measure_engines import engine_factory
from measure_steps import ROUTING, Run, hold_recorded, measure_steps
from replay.arrivals import Arrivals, Load
from replay.calibrate import TERMS, CalibrationError, Group, fit, grouped
from replay.core_route import CoreMaker
from replay.profiles import Profile
from replay.simulation import Fleet, Simulation, check_fits


@dataclass(frozen=True, slots=True)
class Checked:
    """A run and its replay.

    Attributes:
        replicas: How many there were.
        requests: How many were answered.
        prompt_tokens: Tokens of their prompts.
        measured_skip: Tokens of prefill that the engines skipped.
        predicted_skip: Tokens that the model skipped.
        measured_seconds: From the first request to the last answer.
        predicted_seconds: The same in the replay.
    """

    replicas: int
    requests: int
    prompt_tokens: int
    measured_skip: int
    predicted_skip: int
    measured_seconds: float
    predicted_seconds: float

    @property
    def ratio(self) -> float:
        """Predicted time by measured time."""
        return self.predicted_seconds / self.measured_seconds

    @property
    def timed(self) -> bool:
        """Whether the times may be compared: engines of one process take turns."""
        return self.replicas == 1

    def agrees(self, within: float) -> bool:
        """Whether the same was skipped, in times that differ by no more than this share."""
        in_time = abs(self.ratio - 1) <= within or not self.timed
        return self.measured_skip == self.predicted_skip and in_time


def replayed(run: Run, profile: Profile) -> Checked:
    """Replay a run on replicas of these step times, routed as it was."""
    # One engine's step lasts as long as a step of each where several take turns.
    times = {name: run.replicas * getattr(profile, name) for name in TERMS}
    profile = replace(profile, **times, **run.limits)
    check_fits(run.workload, profile)
    load = Load(len(run.workload.sessions), ramp=0.0, trace_gaps=True)
    fleet, route = Fleet(profile, run.replicas), CoreMaker(dict(ROUTING))
    outcome = Simulation(Arrivals(run.workload, load, 0), fleet, route).run()
    return Checked(
        replicas=run.replicas,
        requests=len(outcome.requests),
        prompt_tokens=run.prompt_tokens,
        measured_skip=run.skipped,
        predicted_skip=sum(request.cached_tokens for request in outcome.requests),
        measured_seconds=run.seconds,
        predicted_seconds=outcome.ends,
    )


def table(groups: Sequence[Group]) -> str:
    """Steps for a terminal."""
    head = "prefill tokens  decoding  steps  measured, ms  fitted, ms  fitted/measured"
    lines = [
        f"{_range(g.prefill):>14} {_range(g.decoding):>9} {g.steps:>6} {g.measured * 1e3:>13.2f} "
        f"{g.fitted * 1e3:>11.2f} {g.fitted / g.measured:>16.2f}"
        for g in groups
    ]
    return "\n".join([head, *lines])


def _range(ends: tuple[int, int]) -> str:
    least, most = ends
    return str(least) if least == most else f"{least}-{most}"


def verdict(checks: Sequence[Checked], within: float) -> str:
    """Checks for a terminal."""
    lines = ["replicas  requests  figure         measured  predicted  predicted/measured"]
    for c in checks:
        skips = [tokens / c.prompt_tokens for tokens in (c.measured_skip, c.predicted_skip)]
        equal = "equal" if c.measured_skip == c.predicted_skip else "NOT EQUAL"
        late = f", OFF BY OVER {within:.0%}" if abs(c.ratio - 1) > within else ""
        lines += [
            f"{c.replicas:>8} {c.requests:>9}  skip rate     {skips[0]:>9.4f} {skips[1]:>10.4f}  "
            f"{equal}",
            f"{'':>8} {'':>9}  completion, s {c.measured_seconds:>9.2f} "
            f"{c.predicted_seconds:>10.2f}  {c.ratio:.2f}{late if c.timed else ' (not judged)'}",
        ]
    return "\n".join(lines)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    add = parser.add_argument
    add("--check", action="store_true", help="hold other sessions, and replay them")
    add("--sessions", default=8, help="at once, in the check; default %(default)s", **number)
    add("--turns", default=4, help="of each session; default %(default)s", **number)
    add("--answer", default=24, help="mean tokens of an answer; default %(default)s", **number)
    add("--think", type=float, default=0.05, metavar="S", help="mean pause; default %(default)s s")
    add("--within", type=float, default=0.15, metavar="SHARE", help="default %(default)s")
    add("--attempts", default=1, help="until a check agrees; default %(default)s", **number)
    add("--seed", default=1, help="of the sessions; default %(default)s", **number)
    add("--json", type=Path, metavar="FILE", help="write the profile and the check there too")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, check, and show; returns the exit code."""
    options = parse_args(argv)
    make = engine_factory()
    for _ in range(options.attempts if options.check else 1):
        try:
            written = attempt(make, options)
        except CalibrationError as error:
            print(f"calibrate_replay: {error}; try more --turns", file=sys.stderr)
            return 2
        agrees = written["profile"]["agrees"]
        if agrees:
            break
    if options.json:
        options.json.write_text(json.dumps(written, indent=2) + "\n")
    if options.check:
        how = "agrees" if agrees else "does NOT agree"
        print(f"\nThe model {how} with the engine (times within {options.within:.0%}).")
        if not agrees:
            print("Other work on the machine spoils it: run it alone, or give it --attempts.")
    return 0 if agrees else 1


def attempt(make: Callable[..., Any], options: argparse.Namespace) -> dict[str, Any]:
    """Fit and check once, and show; returns what `--json` writes.

    The run whose time is checked lies between those that are fitted to, so that it has the mean
    speed of a machine that becomes slower or faster meanwhile.

    Raises:
        CalibrationError: The steps do not determine a profile.
    """
    steps = list(measure_steps(make, options, 1000 + options.seed))
    runs = [hold_recorded(make, options, 1)] if options.check else []
    steps += measure_steps(make, options, 2000 + options.seed)
    runs += [hold_recorded(make, options, 2)] if options.check else []
    profile = fit(steps, "cpu")
    checks = [replayed(run, profile) for run in runs]
    agrees = all(checked.agrees(options.within) for checked in checks)
    written = asdict(replace(profile, agrees=agrees))
    print(table(grouped(steps, profile)))
    print(json.dumps(written))
    if checks:
        print(verdict(checks, options.within), flush=True)
    return {
        "profile": written,
        "checks": [asdict(checked) | {"ratio": checked.ratio} for checked in checks],
    }


if __name__ == "__main__":
    sys.exit(main())
