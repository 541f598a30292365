"""The command line of the tool, and what it means."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from replay import shared_traces
from replay.arrivals import Load
from replay.decision_log import read_decisions
from replay.experiment import Setting, WorkloadMaker
from replay.generator import Shape, chats, rollouts
from replay.jsonl import read_sessions
from replay.profiles import PROFILES, find_profile
from replay.simulation import Fleet
from replay.workload import InputError, Workload

SHARED = Path(__file__).resolve().parents[3] / "shared" / "workloads"
"""Where the recorded workloads are, unless `--path` says otherwise."""

_Reader = Callable[[Path], Workload]
_FOLDERS: dict[str, tuple[str, _Reader]] = {
    "swebench": ("swebench_gemini3", shared_traces.read_swebench),
    "claude_code": ("claude_code_weka", shared_traces.read_claude_code),
    "tau": ("tau_airline_gpt4o", shared_traces.read_tau),
    "mooncake": ("mooncake", shared_traces.read_mooncake),
    "mooncake_synthetic": ("mooncake", partial(shared_traces.read_mooncake, trace="synthetic")),
}
_FILES: dict[str, _Reader] = {"sessions": read_sessions, "decisions": read_decisions}
WORKLOADS = ("rollouts", "chats", *_FILES, *_FOLDERS, "reference")

_DEFAULT = " (default: %(default)s)"


def parser(description: str | None) -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="replay",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_traffic(made.add_argument_group("traffic"))
    _add_fleet(made.add_argument_group("fleet"))
    run = made.add_argument_group("run")
    run.add_argument("--policies", default="quick", help="what to compare (default: quick)")
    run.add_argument("--seeds", type=_whole_numbers, default=(0,), metavar="N,N,…")
    run.add_argument("--jobs", type=_positive, default=1, help="processes to run in")
    run.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    run.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures")
    run.add_argument(
        "--pictures", type=Path, metavar="FOLDER", help="write each picture as an SVG file"
    )
    run.add_argument(
        "--claims", type=Path, metavar="FILE", help="check the reported claims instead"
    )
    run.add_argument("--quiet", action="store_true", help="no progress bar")
    return made


def _add_traffic(group: Any) -> None:
    shape, load = Shape(), Load()
    gap = (load.gap_mu, load.gap_sigma)
    add = group.add_argument
    add("--workload", choices=WORKLOADS, default="rollouts")
    add("--path", type=Path, help="file or folder of the workload")
    add("--groups", type=_positive, default=shape.groups, help=f"of rollouts{_DEFAULT}")
    add("--group-size", type=_positive, help="members of a group (8; recorded: as they are)")
    tokens = f"tokens, of rollouts{_DEFAULT}"
    add("--first-prompt", type=_positive, default=shape.first_prompt, help=tokens)
    add("--turns", type=_positive, default=shape.turns, help=f"of a rollout, median{_DEFAULT}")
    live = f"sessions live at once{_DEFAULT}"
    add("--concurrency", type=_positive, default=load.concurrency, help=live)
    add("--gap", type=float, nargs=2, default=gap, metavar=("MU", "SIGMA"), help="of turns")
    add("--trace-gaps", action="store_true", help="gaps as recorded, where they are")
    add("--speedup", type=float, default=0.0, help="open loop, so much faster than recorded")


def _add_fleet(group: Any) -> None:
    fleet = Fleet(PROFILES["reference"])
    add = group.add_argument
    add("--profile", default=fleet.profile.name, help="reference, strict, or a file of one's own")
    how_many = f"how many (default: as many as recorded, or {fleet.replicas})"
    add("--replicas", type=_positive, help=how_many)
    size, places = fleet.profile.cache_tokens, fleet.profile.max_requests
    own = "(default: the profile's, {:,} of reference)"
    add("--cache", type=_positive, metavar="TOKENS", help=f"of each replica {own.format(size)}")
    places_text = f"that a replica runs at once {own.format(places)}"
    add("--max-requests", type=_positive, help=places_text)
    add("--eviction", choices=("lru", "ref_zero"), default="lru")
    add("--generated", action="store_true", help="replicas keep generated blocks")
    add("--max-rank-requests", type=int, default=0, help="more than this wait in the coordinator")


def setting_of(args: argparse.Namespace) -> Setting:
    """What the arguments ask for.

    Raises:
        InputError: They do not go together.
    """
    make = workload_maker(args)
    profile = find_profile(args.profile)
    first = make(args.seeds[0])
    changes = {"cache_tokens": args.cache, "max_requests": args.max_requests}
    given = {name: value for name, value in changes.items() if value is not None}
    profile = replace(profile, block_size=first.block_size, **given)
    replicas = args.replicas or first.replicas or Fleet(profile).replicas
    fleet = Fleet(profile, replicas, args.eviction == "lru", args.generated)
    mu, sigma = args.gap
    load = Load(args.concurrency, Load().ramp, mu, sigma, args.trace_gaps, args.speedup)
    if args.speedup < 0:
        raise InputError("--speedup must be 0 (closed loop) or more")
    if args.speedup and not first.timed:
        raise InputError(f"{args.workload} has no timestamps: it cannot be sent in open loop")
    return Setting(make, load, fleet, args.seeds, args.jobs)


def workload_maker(args: argparse.Namespace) -> WorkloadMaker:
    """What makes the sessions of a seed."""
    if args.workload in ("rollouts", "chats") and args.path is not None:
        raise InputError("--path says where a workload is; say which with --workload")
    if args.workload == "chats":
        return chats
    if args.workload == "rollouts":
        size = args.group_size or Shape().group_size
        shape = Shape(args.groups, size, args.turns, first_prompt=args.first_prompt)
        return partial(rollouts, shape)
    if args.workload == "reference":
        return partial(shared_traces.read_reference, args.path or SHARED)
    read = _read(args)
    if args.group_size:
        return partial(shared_traces.grouped, read, args.group_size)
    return lambda seed: read


def _read(args: argparse.Namespace) -> Workload:
    if args.workload in _FILES:
        if args.path is None:
            raise InputError(f"--workload {args.workload} needs --path")
        return _FILES[args.workload](args.path)
    folder, reader = _FOLDERS[args.workload]
    return reader(args.path or SHARED / folder)


def described(setting: Setting) -> dict[str, Any]:
    """A setting as JSON shows it."""
    profile = setting.fleet.profile
    return {
        "profile": {f.name: getattr(profile, f.name) for f in fields(profile)},
        "replicas": setting.fleet.replicas,
        "eviction": "lru" if setting.fleet.keeps else "ref_zero",
        "generated": setting.fleet.generated,
        "load": {f.name: getattr(setting.load, f.name) for f in fields(setting.load)},
        "seeds": list(setting.seeds),
    }


def in_a_line(setting: Setting) -> str:
    """What the figures hang on most, for the terminal."""
    profile, load = setting.fleet.profile, setting.load
    sent = (
        f"sent {load.speedup:g} times as fast as recorded"
        if load.speedup
        else f"up to {load.concurrency:,} sessions at once"
    )
    doubt = "" if profile.agrees else " (its check did NOT agree with the engine)"
    return (
        f"{setting.fleet.replicas:,} replicas of {profile.cache_tokens:,} tokens and "
        f"{profile.max_requests:,} places, profile {profile.name}{doubt}, {sent}"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _whole_numbers(text: str) -> Sequence[int]:
    numbers = tuple(int(item) for item in text.split(","))
    if len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError("a seed stands there twice")
    return numbers
