#!/usr/bin/env python3
r"""Attack a coordinator process with damaged messages, beside valid traffic that must be unharmed.

    python tools/fuzz_coordinator.py                      1,000,000 messages: several minutes
    python tools/fuzz_coordinator.py --messages 20000     a few seconds

Half of the messages go to a coordinator that takes messages from everybody, from peers of both
dialects; half to one with keys, from peers that have them. Each is tools/run_coordinator.py. Beside
come connections that send garbage, and, where there are keys, peers without the right ones. Fuzzing
peers register, connect, go and come; a client and two honest engines are beside them. Then the same
stream goes through codec and core in this process, which tells how long one message takes at most.

The last line of the output is JSON:
  messages, garbage        damaged (and some valid) messages; connections without the protocol
  valid.before, .during    the valid traffic, undisturbed and under attack: asked, answered, lost,
                           wrong, twice, errors; round trips in ms of those that an honest engine
                           answered. Lost, wrong, twice and errors must be 0
  rss_mib                  of the coordinator, at 10 % of the messages and at the end
  descriptors              before the attack, and when all peers of it have gone
  log_kib                  what it logged meanwhile
  offline                  processor time of a message in codec and core: mean, 99.9 %, longest
  failures                 what is not as it should be; the exit status is 1 if there are any
"""

import argparse
import json
import sys
import time
from typing import Any

from light_import import import_lightly

import_lightly()

from coordinator_fuzz import offline  # noqa: E402
from coordinator_fuzz.beside import BesideProcess  # noqa: E402
from coordinator_fuzz.garbage import Garbage  # noqa: E402
from coordinator_fuzz.live import Attack, Stuck  # noqa: E402
from coordinator_fuzz.target import Target, TargetFailed, running  # noqa: E402
from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: E402

GROWTH_MIB = 32.0
"""Memory may grow by so much from 10 % of the messages to their end."""
LOG_KIB = 1024.0
STALL_MS = 100.0
"""Of processor time that one message may take."""
_SETTLE_SECONDS = 5.0


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=1_000_000, help="How many to send.")
    parser.add_argument(
        "--seconds",
        type=float,
        default=3600.0,
        help="Stop sooner: each of the three parts takes at most a third. Default: 3600.",
    )
    parser.add_argument("--peers", type=int, default=24, help="Fuzzing peers at a time.")
    parser.add_argument(
        "--control", type=float, default=5.0, help="Seconds of valid traffic alone, before."
    )
    parser.add_argument("--seed", type=int, default=0, help="Of all chance.")
    return parser


def attack(target: Target, beside: BesideProcess, args: Any, deadline: float) -> dict[str, Any]:
    """One coordinator's share of the messages."""
    messages = args.messages // 2
    time.sleep(args.control)
    report: dict[str, Any] = {"valid": {"before": beside.phase()}}
    before, logged = target.descriptors, target.log_bytes
    garbage, peers = Garbage(target, args.seed), Attack(target, args.peers, args.seed)
    bar = _bar("plain" if target.ring is None else "with keys", messages)
    memory: list[float] = []
    for share in (messages // 10, messages - messages // 10):

        def each(sent: int) -> None:
            bar.update(sent - bar.n)
            garbage.throw()

        peers.run(share, deadline, each)
        memory.append(round(target.rss_mib, 1))
    peers.close()  # before the phase ends: fuzzing engines have some of its requests
    garbage.close()
    report["valid"]["during"] = beside.phase()
    report |= {"messages": peers.sent, "garbage": garbage.thrown, "rss_mib": memory}
    report["descriptors"] = [before, _settled(target, before)]
    report["log_kib"] = round((target.log_bytes - logged) / 1024, 1)
    report["valid"]["after"] = beside.phase("stop")
    report["events"] = target.stop()
    bar.close()
    return report


def _bar(about: str, messages: int) -> Any:
    return tqdm(total=messages, desc=about, unit=" messages", disable=None)


def _settled(target: Target, before: int) -> int:
    deadline = time.monotonic() + _SETTLE_SECONDS
    while target.descriptors > before and time.monotonic() < deadline:
        time.sleep(0.1)
    return target.descriptors


def failures_of(name: str, report: dict[str, Any]) -> list[str]:
    """What is not as it should be with one coordinator."""
    failures = [
        f"{name}: {valid[what]} of the valid requests {when} were {what}"
        for when, valid in report["valid"].items()
        for what in ("lost", "wrong", "twice", "errors")
        if valid[what]
    ]
    early, late = report["rss_mib"]
    if late - early > GROWTH_MIB:
        failures.append(f"{name}: memory grew from {early} to {late} MiB")
    before, after = report["descriptors"]
    if after > before:
        failures.append(f"{name}: {after} descriptors are open, {before} were")
    if report["log_kib"] > LOG_KIB:
        failures.append(f"{name}: {report['log_kib']} KiB of log")
    return failures


def campaign(args: Any) -> dict[str, Any]:
    """Everything; what the JSON line holds."""
    share = args.seconds / 3
    result: dict[str, Any] = {"seed": args.seed}
    failures: list[str] = []
    for name in ("plain", "keys"):
        with running(plain=name == "plain") as target:
            beside = BesideProcess(target.address, target.ring)
            try:
                result[name] = attack(target, beside, args, time.monotonic() + share)
                failures += failures_of(name, result[name])
            except (TargetFailed, Stuck) as error:
                failures.append(f"{name}: {error}")
            finally:
                beside.close()
    deadline = time.monotonic() + share
    with _bar("offline", args.messages) as bar:
        result["offline"] = offline.measure(
            args.seed, args.messages, deadline, lambda done: bar.update(done - bar.n)
        )
    if result["offline"]["max_ms"] > STALL_MS:
        failures.append(f"offline: one message took {result['offline']['max_ms']} ms")
    return result | {"failures": failures}


def main(argv: list[str]) -> int:
    """Attack, and say what came of it."""
    result = campaign(make_parser().parse_args(argv))
    print(json.dumps(result), flush=True)
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
