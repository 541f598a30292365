#!/usr/bin/env python3
"""Start the server under torchrun on this machine, and end it cleanly on Ctrl-C.

    tools/serve.py [--replicas N] [flags of tools/run_dynamic_text_generation_server.py]

Plain torchrun prints a traceback of its own on Ctrl-C; this launcher runs the same code and
catches it.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

TOOL = Path(__file__).with_name("run_dynamic_text_generation_server.py")
_INTERRUPTED = 130
_JOINS = "--inference-coordinator-address"


def launch(argv: list[str]) -> int:
    """Run the server until it ends; returns the exit code for the shell."""
    parser = argparse.ArgumentParser(
        description="Serve a model on this machine: torchrun with one process a replica.",
        epilog=f"All other flags go to {TOOL.name}, whose help follows; its own are at the end.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument(
        "--replicas", type=int, default=2, metavar="N", help="Processes to start. Default: 2."
    )
    own, rest = parser.parse_known_args(argv)
    if "--help" in rest or "-h" in rest:
        parser.print_help()
        print()
    if own.replicas < 1:
        print(f"error: --replicas is {own.replicas}; give 1 or more", file=sys.stderr)
        return 2
    replicas = 1 if "--help" in rest or "-h" in rest else own.replicas
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would warn, and set the same
    os.environ.setdefault("LOGLEVEL", "ERROR")  # torchrun's own: it tells of every signal
    print(f"[serve] starting {replicas} process(es); the first imports take a while", flush=True)
    import logging

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    torchrun = ["--standalone", f"--nproc-per-node={replicas}", "--max-restarts=0"]
    if any(flag.partition("=")[0] == _JOINS for flag in rest):
        torchrun += _signals_to_the_processes()
    try:
        run(parse_args([*torchrun, str(TOOL), *rest]))
    except SignalException:
        print("[serve] stopped", flush=True)
        return _INTERRUPTED
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        print(f"[serve] a process ended with exit code {failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


def _signals_to_the_processes() -> list[str]:
    """Leave Ctrl-C and SIGTERM to the processes, which put things in order and end.

    Once torchrun itself has taken a signal it ends with an error, whatever its processes did.

    Returns:
        What to tell torchrun.
    """
    from torch.distributed.launcher.api import LaunchConfig

    if "signals_to_handle" not in LaunchConfig.__dataclass_fields__:  # torch before 2.9
        return []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _pass_on)
    return ["--signals-to-handle=SIGHUP,SIGQUIT"]


def _pass_on(number: int, _: object) -> None:
    import psutil

    processes = psutil.Process().children()
    if not processes:
        sys.exit(_INTERRUPTED)
    for process in processes:
        process.send_signal(number)


if __name__ == "__main__":
    try:
        sys.exit(launch(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
