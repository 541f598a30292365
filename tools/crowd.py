#!/usr/bin/env python3
r"""Connect 10,000 clients to a coordinator, and let clients ask that never read the answers.

    python tools/crowd.py                                  several minutes
    python tools/crowd.py --connections 500 --deaf 2       small

Each of three coordinators (tools/run_coordinator.py) has a client and two engines whose requests
must all be answered, once and rightly. One JSON line for each, on standard output:
  crowd, plain; crowd, with keys
    seconds            until all had been welcomed
    kib_a_connection   memory of the coordinator
    rss_mib, descriptors   before, while all are there, and 13 s after all have vanished
    missed             of those that vanished without a word, how many the coordinator noticed
  clients that never read
    lost               how many counted as lost when their answers had piled up
    rss_mib            before, most, and after they had gone
  valid                the traffic beside, phase by phase; round trips in ms
  failures             what is not as it should be; the exit status is 1 if there are any

10,000 connections take more than 10,000 descriptors: see `ulimit -Hn`.
"""

import argparse
import json
import sys
from functools import partial

from light_import import import_lightly

import_lightly()

from coordinator_fuzz.crowd import crowd, deaf  # noqa: E402


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connections", type=int, default=10_000, help="Clients that connect.")
    parser.add_argument("--deaf", type=int, default=4, help="Clients that never read.")
    parser.add_argument(
        "--requests", type=int, default=40_000, help="Of each of them; 20,000 answers may wait."
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="Of each phase.")
    return parser


def main(argv: list[str]) -> int:
    """Do all three."""
    args = make_parser().parse_args(argv)
    failed = False
    for scenario in (
        partial(crowd, True, args.connections, args.seconds),
        partial(crowd, False, args.connections, args.seconds),
        partial(deaf, args.deaf, args.requests, args.seconds),
    ):
        report = scenario()
        print(json.dumps(report), flush=True)
        failed |= bool(report["failures"])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
