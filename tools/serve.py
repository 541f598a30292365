#!/usr/bin/env python3
"""Start the server's processes on this machine, and end them cleanly on Ctrl-C.

    tools/serve.py [--replicas N] [flags of tools/run_dynamic_text_generation_server.py]

Nothing but the server itself opens a port: its processes meet at a file (launch.py). On several
machines, or under a launcher of your own, start the server with torchrun.
"""

import argparse
import signal
import sys
from pathlib import Path

from launch import INTERRUPTED, STOP_SECONDS, run_processes

TOOL = Path(__file__).with_name("run_dynamic_text_generation_server.py")
_JOINS = "--inference-coordinator-address"


def launch(argv: list[str]) -> int:
    """Run the server until it ends; returns the exit code for the shell."""
    parser = argparse.ArgumentParser(
        description="Serve a model on this machine: one process a replica.",
        epilog=f"All other flags go to {TOOL.name}, whose help follows.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument(
        "--replicas", type=int, default=2, metavar="N", help="Processes to start. Default: 2."
    )
    own, rest = parser.parse_known_args(argv)
    asks_for_help = not {"--help", "-h", "--help-all"}.isdisjoint(rest)
    if asks_for_help:
        parser.print_help()
        print(flush=True)
    if own.replicas < 1:
        print(f"error: --replicas is {own.replicas}; give 1 or more", file=sys.stderr)
        return 2
    replicas = 1 if asks_for_help else own.replicas
    print(f"[serve] starting {replicas} process(es); the first imports take a while", flush=True)
    joins = any(flag.partition("=")[0] == _JOINS for flag in rest)
    return run_processes(
        replicas,
        [str(TOOL), *rest],
        # A job that joins a coordinator first answers what it has, for as long as it was told to.
        stop_seconds=float("inf") if joins else STOP_SECONDS,
        # The server takes both alike, but while it still imports, SIGINT would print a traceback.
        ctrl_c=signal.SIGTERM,
        name="serve",
    )


if __name__ == "__main__":
    try:
        sys.exit(launch(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
