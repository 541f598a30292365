#!/usr/bin/env python3
"""Run a script as several processes of this machine, which meet at a file, not at a port.

    tools/launch.py --processes N SCRIPT [flags of the script]

Each process finds RANK, WORLD_SIZE and the like in its environment, as under torchrun. torchrun has
its processes meet at a TCP port that listens on every interface, asks nobody for a password, and
unpickles what it is sent. Here they meet at a file that only this user can open; the launcher
itself opens no port. The script must set its processes up with
megatron.core.inference.coordinator.runtime.model, which knows of that file; any other script, and
processes on several machines, need torchrun.

Ctrl-C, or a signal to the launcher, goes to each process once. When a process fails, the launcher
ends the others and returns its exit code.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

STORE_VARIABLE = "MEGATRON_STORE_FILE"  # as in runtime/model.py
INTERRUPTED = 130
"""What a shell calls "ended by Ctrl-C"."""

STOP_SECONDS = 30.0
"""How long processes have to end, before they are killed."""

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_processes(
    count: int,
    command: Sequence[str],
    stop_seconds: float = STOP_SECONDS,
    ctrl_c: signal.Signals = signal.SIGINT,
    name: str = "launch",
) -> int:
    """Run a Python script in several processes until all have ended.

    Once a signal came, the processes are left to end by themselves: it went to all of them.

    Args:
        count: Processes, 1 or more.
        command: The script and its arguments.
        stop_seconds: How long processes have to end after a signal, before they are killed. Those
            that the launcher ends because another one failed always have 30 s.
        ctrl_c: What the processes get for SIGINT.
        name: What its messages begin with.

    Returns:
        The exit code for the shell: 0 if every process ended with 0, 130 if they ended otherwise
        after a signal, else that of the first process to fail, or 1 if a signal killed it.
    """
    with _signals_blocked() as signals, tempfile.TemporaryDirectory(prefix="megatron-") as folder:
        processes: list[subprocess.Popen] = []
        try:
            for rank in range(count):
                environment = _environment(rank, count, Path(folder, "store"))
                processes.append(_start(command, environment, signals))
            stopped, failure = _wait(processes, signals, stop_seconds, ctrl_c)
        finally:
            _kill(processes)
    if stopped and any(process.returncode for process in processes):
        print(f"[{name}] stopped", flush=True)
        return INTERRUPTED
    if failure != 0:
        print(f"[{name}] a process ended with exit code {failure}", file=sys.stderr, flush=True)
    return failure if failure >= 0 else 1


def _environment(rank: int, count: int, store: Path) -> dict[str, str]:
    """What torchrun would set, without an address to meet at."""
    return (
        {"OMP_NUM_THREADS": "1"}
        | os.environ
        | {
            STORE_VARIABLE: str(store),
            "GROUP_RANK": "0",
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count)),
        }
    )


@contextlib.contextmanager
def _signals_blocked() -> Iterator[set[signal.Signals]]:
    """Block what `_wait` waits for, so that nothing is missed, or comes in the middle of things."""
    signals = {signal.SIGCHLD, *_PASSED_ON}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
        signals.remove(signal.SIGHUP)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield signals
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(
    command: Sequence[str], environment: dict[str, str], signals: set[signal.Signals]
) -> subprocess.Popen:
    launcher = os.getpid()
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the launcher may be killed
        if os.getppid() != launcher:  # it already was
            os._exit(1)

    return subprocess.Popen(
        [sys.executable, "-u", *command],
        env=environment,
        # Ctrl-C in a terminal reaches the launcher alone, which passes it on: nobody gets it twice.
        start_new_session=True,
        preexec_fn=prepare,
    )


def _wait(
    processes: Sequence[subprocess.Popen],
    signals: set[signal.Signals],
    stop_seconds: float,
    ctrl_c: signal.Signals,
) -> tuple[bool, int]:
    """Wait until all processes have ended, or have had their time to.

    Returns:
        Whether a signal came first, and if not, the exit code of the first process that failed.
    """
    stopped, failure, deadline = False, 0, float("inf")
    while True:
        alive = [process for process in processes if process.poll() is None]
        if not (stopped or failure):
            failure = next((each.returncode for each in processes if each.returncode), 0)
            if failure:
                deadline = time.monotonic() + STOP_SECONDS
                _signal(alive, signal.SIGTERM)
        left = deadline - time.monotonic()
        if not alive or left <= 0:
            return stopped, failure
        got = signal.sigtimedwait(signals, min(left, 3600))
        if got is None or got.si_signo == signal.SIGCHLD:
            continue
        if not (stopped or failure):
            stopped, deadline = True, time.monotonic() + stop_seconds
        _signal(alive, ctrl_c if got.si_signo == signal.SIGINT else got.si_signo)


def _signal(processes: Sequence[subprocess.Popen], number: int) -> None:
    for process in processes:
        process.send_signal(number)  # to the process alone: what it started is its own to end


def _kill(processes: Sequence[subprocess.Popen]) -> None:
    """End what is left, with all it started."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main(argv: Sequence[str]) -> int:
    """Read the flags, and run the script."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary,
        usage="%(prog)s --processes N SCRIPT [flags of the script]",
        epilog=details.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--processes", type=int, required=True, metavar="N", help="Processes to start; 1 or more."
    )
    parser.add_argument("script", metavar="SCRIPT", help="The Python script that each runs.")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="Passed on to the script.")
    args = parser.parse_args(argv)
    if args.processes < 1:
        parser.error(f"--processes is {args.processes}; give 1 or more")
    return run_processes(args.processes, [args.script, *args.flags])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
