"""The campaign's flags and its last line."""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from campaign.faults import KINDS
from campaign.run import Campaign
from campaign.verdict import Options, broken_promises


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="python tools/campaign",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=2.0, help="How long things break. Default: 2.")
    add(
        "--every",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="From one fault to the next. Default: 10.",
    )
    add("--seed", type=int, default=5, help="Of prompts, times and faults. Default: 5.")
    add(
        "--engines",
        choices=["real", "stub"],
        default="real",
        help="megatron-core's engine with the built-in model on the CPU, or stand-ins that speak "
        "the same wire and answer a checksum. Default: real.",
    )
    add("--replicas", type=int, default=3, metavar="N", help="Processes with one. Default: 3.")
    add(
        "--released",
        action="store_true",
        help="The control: megatron-core's own coordinator, with stand-ins for its engines; it is "
        "started anew each time that it ends.",
    )
    add(
        "--faults",
        default=",".join(KINDS),
        metavar="KIND,…",
        help="What breaks. Default: everything.",
    )
    add(
        "--hung-timeout",
        type=float,
        default=6.0,
        metavar="SECONDS",
        help="The coordinator's. Default: 6; its own is 120.",
    )
    add(
        "--retries",
        type=int,
        default=1,
        metavar="N",
        help="The coordinator's --inference-coordinator-max-retries. Default: 1.",
    )
    add(
        "--deadline",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="A request that has got nothing by then is lost. Default: 60.",
    )
    add(
        "--growth-mib",
        type=float,
        default=32.0,
        metavar="MIB",
        help="What the coordinator's memory may grow by. Default: 32.",
    )
    add(
        "--rate",
        type=float,
        default=None,
        metavar="REQUESTS",
        help="Sent a second. Default: 80 %% of what is measured at first.",
    )
    add("--keep-logs", type=Path, default=None, metavar="FOLDER", help="Where to put all logs.")
    return parser


def options_of(args: argparse.Namespace) -> Options:
    """What the parsed flags ask for.

    Raises:
        ValueError: A value makes no sense; says which.
    """
    faults = tuple(args.faults.split(","))
    unknown = set(faults) - set(KINDS)
    if unknown:
        raise ValueError(f"--faults: no kind is called {', '.join(sorted(unknown))}")
    for name in ("minutes", "every", "hung_timeout", "deadline", "replicas"):
        if getattr(args, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')}: give more than 0")
    given = {name: getattr(args, name) for name in Options.__slots__ if name != "faults"}
    return Options(**given, faults=faults)


def main(description: str | None) -> int:
    """Run a campaign; returns the exit status."""
    parser = make_parser(description)
    args = parser.parse_args()
    try:
        options = options_of(args)
    except ValueError as error:
        parser.error(str(error))
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[campaign {time.monotonic() - began:5.1f} s] {text}", file=sys.stderr, flush=True)

    folder = Path(tempfile.mkdtemp(prefix="campaign-"))
    try:
        figures = asyncio.run(Campaign(options, folder, say).run())
    except TimeoutError as error:
        say(f"error: {error}")
        args.keep_logs = args.keep_logs or folder
        return 2
    finally:
        if args.keep_logs is not None and args.keep_logs != folder:
            shutil.copytree(folder, args.keep_logs, dirs_exist_ok=True)
        if args.keep_logs != folder:
            shutil.rmtree(folder, ignore_errors=True)
    broken = [] if options.released else broken_promises(figures, options)
    for text in broken:
        say(f"broken promise: {text}")
    print(json.dumps(figures))
    return 1 if broken else 0
