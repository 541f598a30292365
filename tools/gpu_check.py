#!/usr/bin/env python3
r"""Check this plugin on one GPU, beside the released coordinator, in under 5 minutes.

Replicas of megatron-core's real engine share the GPU (over gloo) and serve a GPT with random
weights. The same multi-turn sessions go through our coordinator, then, in fresh processes that are
not patched, through the released one. Compared are the answers, the share of prefill that was
skipped, times to the first token, and step times.

    python tools/gpu_check.py                   one GPU: 4 replicas, 8 sessions of 4k to 6k tokens
    python tools/gpu_check.py --device cpu      no GPU: the same logic at a small size, in float32

docs/gpu.md explains the figures. Exit codes: 0 passed, 1 failed, 2 wrong flags or no GPU,
3 not all was measured within the budget.
"""

import argparse
import importlib.util
import json
import logging
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# A spawned replica runs this file again: nothing heavy may be imported up here.
from gpu_check_fleet import Budget, Fleet, FleetFailed, OutOfTime, Sessions
from gpu_check_parts import CPU_SIZES, Outcome, Sizes, make_prompts, skip_bound
from gpu_check_replica import OURS
from gpu_check_report import (
    UNUSABLE,
    comparison,
    distinct_answers,
    exit_code,
    failures,
    summary,
    table,
)

_RELEASED_POLICIES = ("load_balanced", "longest_prefix", "first_prefix_block")
_PACKAGES = ("megatron-core", "torch", "flash-attn", "pyzmq")


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The flags; `sizes` of the result holds those that make up a `Sizes`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cpu tests the logic where no GPU is at hand: sizes and model are small, float32, "
        "blocks of 64. Default: cuda, and an error where torch finds none.",
    )
    _add_size_flags(parser)
    parser.add_argument(
        "--released-policies",
        nargs="+",
        choices=_RELEASED_POLICIES,
        default=["longest_prefix", "load_balanced"],
        metavar="POLICY",
        help="Run the released coordinator once with each: longest_prefix (the signal that ours "
        "uses), load_balanced (its default), first_prefix_block. Default: the first two.",
    )
    parser.add_argument(
        "--budget-seconds",
        type=_positive,
        default=280,
        help="The whole check ends by then, and says what was not measured. Default: 280.",
    )
    parser.add_argument(
        "--request-seconds",
        type=_positive,
        default=60,
        help="A request without an answer for so long is lost. Default: 60.",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="Also write the last line, the JSON, to FILE."
    )
    args = parser.parse_args(argv)
    try:
        args.sizes = _sizes(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def _add_size_flags(parser: argparse.ArgumentParser) -> None:
    gpu, cpu = Sizes(), CPU_SIZES
    for flag, name, what in [
        ("--replicas", "replicas", "Engines on the one device"),
        ("--sessions", "sessions", "Conversations held at the same time"),
        ("--turns", "turns", "Requests in each"),
        ("--new-tokens", "new_tokens", "Tokens generated per request"),
        ("--block-size", "block_size", "Tokens in a cache block; flash-attn wants 256"),
    ]:
        default = f"{getattr(gpu, name)}, on a CPU {getattr(cpu, name)}"
        parser.add_argument(flag, type=int, dest=name, metavar="N", help=f"{what}. ({default})")
    parser.add_argument(
        "--tokens",
        metavar="FIRST:LAST",
        help="Prompt lengths of a session's first and last turn. "
        f"({gpu.first_tokens}:{gpu.last_tokens}, on a CPU {cpu.first_tokens}:{cpu.last_tokens})",
    )
    parser.add_argument(
        "--dtype",
        choices=["bf16", "float32"],
        help="Of weights and cache. Only float32 on a CPU must give equal outputs. "
        f"({gpu.dtype}, on a CPU {cpu.dtype})",
    )


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("give a number above 0")
    return value


def _sizes(args: argparse.Namespace) -> Sizes:
    names = ("replicas", "sessions", "turns", "new_tokens", "block_size", "dtype")
    given = {n: getattr(args, n) for n in names if getattr(args, n) is not None}
    if args.tokens is not None:
        first, _, last = args.tokens.partition(":")
        if not (first.isdecimal() and last.isdecimal()):
            raise ValueError(f"--tokens is {args.tokens!r}; give FIRST:LAST, e.g. 4000:6000")
        given |= {"first_tokens": int(first), "last_tokens": int(last)}
    sizes = replace(CPU_SIZES if args.device == "cpu" else Sizes(), **given)
    for name in ("replicas", "sessions", "turns", "new_tokens", "block_size"):
        if getattr(sizes, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more")
    if not 8 <= sizes.first_tokens <= sizes.last_tokens:
        raise ValueError("--tokens must be FIRST:LAST with 8 <= FIRST <= LAST")
    return sizes


@dataclass
class Check:
    """The whole check: what it may take, and what it has found.

    Attributes:
        args: The flags.
        budget: What is left of the time.
        outcomes: Finished runs by name, ours first.
        about: What the replicas of the first run said they are.
        failed: Runs that broke off, and why.
        not_measured: What the budget cut.
    """

    args: argparse.Namespace
    budget: Budget
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    not_measured: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Print a line of progress."""
        print(f"[gpu_check {self.budget.spent:5.1f} s] {text}", flush=True)

    def run_all(self) -> None:
        """Ours, then the released coordinator with each policy."""
        released = [(f"released {policy}", policy) for policy in self.args.released_policies]
        with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
            for name, coordinator in [(OURS, OURS), *dict(released).items()]:
                try:
                    self._run(name, coordinator, Path(folder))
                except OutOfTime as error:
                    self.say(f"{name}: {error}")
                    self.not_measured.append(name)
                except FleetFailed as error:
                    self.say(f"{name}: {error}")
                    self.failed.append(f"{name}: {str(error).splitlines()[0]}")

    def _run(self, name: str, coordinator: str, folder: Path) -> None:
        if not self.budget.left:
            raise OutOfTime("no time left to begin")
        sizes, began = self.args.sizes, time.monotonic()
        self.say(f"{name}: starting {sizes.replicas} replicas on one {sizes.device} device")
        with Fleet(sizes, coordinator, folder) as fleet:
            sessions = Sessions(
                coordinator, sizes, self.budget, self.args.request_seconds, self._teller(name)
            )  # its imports take seconds too
            about = fleet.ready(self.budget)
            self.about = self.about or {k: v for k, v in about[0].items() if k != "address"}
            started = time.monotonic() - began
            self.say(f"{name}: ready after {started:.1f} s; {sizes.requests} requests to go")
            outcome = sessions.hold(about[0]["address"])
            outcome.start_seconds = started
            self.outcomes[name] = outcome
            for lost in outcome.lost:
                self.say(f"{name}: lost {lost}")
            if outcome.unsent:
                self.not_measured.append(f"{name}: {outcome.unsent} of {sizes.requests} requests")
            outcome.replicas = fleet.stop(self.budget)

    def _teller(self, name: str) -> Callable[[str], None]:
        return lambda text: self.say(f"{name}: {text}")

    def report(self) -> dict[str, Any]:
        """Everything found, for the JSON line."""
        sizes = self.args.sizes
        runs = {name: summary(outcome) for name, outcome in self.outcomes.items()}
        ours = self.outcomes.get(OURS)
        others = {n: o for n, o in self.outcomes.items() if n != OURS and ours is not None}
        comparisons = {name: comparison(ours, other) for name, other in others.items() if ours}
        found = self.failed + failures(sizes, runs, comparisons)
        return {
            "check": "gpu_check",
            "passed": not found and not self.not_measured,
            "failures": found,
            "not_measured": self.not_measured,
            "seconds": round(self.budget.spent, 1),
            "device": self.about.get("device"),
            "attention": self.about.get("attention"),
            "parameters": self.about.get("parameters"),
            "versions": _versions(),
            "sizes": {name: getattr(sizes, name) for name in Sizes.__slots__}
            | {"cache_blocks": sizes.cache_blocks, "max_requests": sizes.max_requests},
            "skip_bound": round(skip_bound(make_prompts(sizes), sizes.block_size), 4),
            "distinct_answers": distinct_answers(ours) if ours else 0,
            "runs": runs,
            "against": comparisons,
        }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def main(argv: list[str]) -> int:
    """Run the check; returns the exit code."""
    args = parse_args(argv)
    if importlib.util.find_spec("megatron") is None:
        print(
            "error: this Python has no megatron-core; run `make setup` and use "
            ".venv/bin/python, or see docs/gpu.md",
            file=sys.stderr,
        )
        return UNUSABLE
    check = Check(args, Budget(args.budget_seconds))
    warnings.simplefilter("ignore")  # megatron-core warns of each package it can do without
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        import torch

        if not torch.cuda.is_available():
            print("error: torch finds no GPU; --device cpu tests the logic", file=sys.stderr)
            return UNUSABLE
    check.run_all()
    report = check.report()
    if report["runs"]:
        print(table(report))
    for text in report["failures"] + [f"not measured: {each}" for each in report["not_measured"]]:
        print(text)
    line = json.dumps(report)
    if args.json is not None:
        args.json.write_text(line + "\n")
    print(line, flush=True)
    return exit_code(report)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # in order, so that no replica stays
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
