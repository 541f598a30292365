#!/usr/bin/env python3
r"""Measure the coordinator beside the released one, in one run, the two taking turns.

    python tools/bench_coordinator.py                        everything: half an hour or so
    python tools/bench_coordinator.py --quick                what CI runs: less than a minute
    python tools/bench_coordinator.py --parts decision,bursts --plot bench.png --json bench.json

Each side runs in a process of its own. Times are processor time of the thread that does the work
(of the data plane: of real processes over loopback TCP), and what is shown is the median over the
rounds. Rows have a target where there is one: a bound on a ratio of the same run, or on
milliseconds. A quick run fails (exit code 1) when a ratio does not reach half of its target; it
never fails on milliseconds, which depend on the machine.

parts:
  decision    one request from its frames to the engine's: decode, decide, update the index, encode.
              Conversations grow turn by turn and all are in flight at once; the last turn counts.
  plane       clients -> process -> engines -> process -> clients, 16 engines that tell of their
              caches, 256 requests in flight. "limit" is a bare pyzmq ROUTER with the same frames.
              Also the processor time a request of the process's main thread and of all its threads.
  memory      growth of a fresh process for each (block, rank) pair, everything answered.
              "history": engines that tell nothing of their caches.
  stalls      the longest call, or pause of the garbage collector, while much changes at once.
  hashing     131,072 tokens, from a list and from an array, beside megatron-core's own function.
  replies     a batch of 50 replies of 2,000 tokens each, and of 32,000.
  bursts      400 requests at once in 8 groups with 7/8 of every prompt in common, on 8 ranks.
  growth      a request's cost against ranks, blocks, what the index holds, requests in flight.

columns:
  ours, released, limit    medians; "-" where there is none
  ratios                   "released / ours 8" of times: 8 times as fast
  target, met              what issue 4 asks for, and whether this run reached it
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from coordinator_bench.options import Options, quick
from coordinator_bench.rows import Row, details_table, table, write_json
from coordinator_bench.workers import say

PARTS = {
    "decision": "decision",
    "plane": "data_plane",
    "memory": "memory",
    "stalls": "stalls",
    "hashing": "hashes",
    "replies": "replies",
    "bursts": "bursts",
    "growth": "growth",
}
NOT_QUICK = ("stalls", "growth")
"""Parts that `--quick` leaves out: they take long, and have no ratio that it could fail on."""
QUICK_SHARE = 0.5
"""Share of a target that a quick run must reach: it is short, and the machine may be busy."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and show.

    Returns:
        The exit code: 1 where a quick run misses half a target.
    """
    arguments = _parser().parse_args(argv)
    # Importing megatron-core without a GPU's packages warns a dozen times, in every process.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    options = (
        quick(arguments.block_size, arguments.rounds or 3)
        if arguments.quick
        else Options(block=arguments.block_size, rounds=arguments.rounds or 5)
    )
    chosen = arguments.parts or [p for p in PARTS if not (arguments.quick and p in NOT_QUICK)]
    rows: list[Row] = []
    for part in chosen:
        found = measure(part, options)
        rows += found
        print(f"{table(found)}\n", flush=True)
        if detailed := [row for row in found if row.details]:
            print(f"{details_table(detailed)}\n", flush=True)
        if arguments.json:  # after each part: a full run is long
            write_json(arguments.json, rows, command=list(sys.argv[1:] if argv is None else argv))
    if arguments.plot:
        from coordinator_bench.plots import write_plot

        write_plot(arguments.plot, rows)
    say("done")
    return verdict(rows) if arguments.quick else 0


def measure(part: str, options: Options) -> list[Row]:
    """The rows of a part."""
    rows: list[Row] = importlib.import_module(f"coordinator_bench.{PARTS[part]}").measure(options)
    return rows


def verdict(rows: Sequence[Row]) -> int:
    """Say which rows miss half of their target; the exit code of a quick run."""
    failed = [row for row in rows if row.fails(QUICK_SHARE)]
    for row in failed:
        missed = ", ".join(map(str, row.targets))
        print(f"misses half of its target: {row.part}, {row.variant} ({missed})", file=sys.stderr)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", type=_parts, metavar="A,B", help=f"only these; of {', '.join(PARTS)}"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, exit code 1 on failure")
    parser.add_argument(
        "--rounds", type=_positive, metavar="N", help="turns of each side; default 5, quick 3"
    )
    parser.add_argument(
        "--block-size", type=_positive, default=64, metavar="N", help="tokens; default 64"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures, e.g. a PNG")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser


def _parts(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"no part {name!r}; there are {', '.join(PARTS)}")
    return names


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
