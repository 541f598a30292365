"""What the processes of a job listen at."""

import ipaddress
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil


def family(pid: int) -> list[psutil.Process]:
    """A process and all that it started, itself first; empty if it has ended."""
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def listened_at(processes: Iterable[psutil.Process]) -> set[tuple[str, int]]:
    """The TCP addresses and ports that any of them listens at."""
    found = set()
    for process in processes:
        try:
            connections = process.net_connections(kind="tcp")
        except psutil.Error:  # it has just ended
            continue
        found |= {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}
    return found


def beyond_loopback(listening: set[tuple[str, int]]) -> list[tuple[str, int]]:
    """Those that another machine may reach; all of torch's TCP stores are among them."""
    assert listening, "nothing listens: this is no look at a running job"
    return [each for each in listening if not ipaddress.ip_address(each[0]).is_loopback]


def _look(pid: int, launcher: bool) -> set[tuple[str, int]]:
    found = family(pid)
    if launcher:
        return listened_at(found)
    # What it starts has its sockets, too, from the fork to the exec.
    return listened_at(found[1:]) - listened_at(found[:1])


def run_and_look(
    command: Sequence[Any],
    folder: Path,
    seconds: float,
    env: dict[str, str] | None = None,
    launcher: bool = True,
) -> tuple[subprocess.CompletedProcess, set[tuple[str, int]]]:
    """Run a job to its end; what came of it, and what it was seen to listen at meanwhile.

    Args:
        command: What to run.
        folder: Where to run it; gets its output.
        seconds: How long it may take.
        env: Its environment; that of this process if None.
        launcher: Whether what the first process listens at counts too.
    """
    seen = set()
    output, errors = folder / "stdout", folder / "stderr"
    with output.open("w") as out, errors.open("w") as err:
        process = subprocess.Popen(
            list(map(str, command)), stdout=out, stderr=err, cwd=folder, env=env
        )
        deadline = time.monotonic() + seconds
        try:
            while process.poll() is None:
                assert time.monotonic() < deadline, f"it does not end:\n{errors.read_text()}"
                seen |= _look(process.pid, launcher)
                time.sleep(0.2)
        finally:
            for each in family(process.pid):
                each.kill()
            process.wait()
    done = subprocess.CompletedProcess(
        command, process.returncode, output.read_text(), errors.read_text()
    )
    return done, seen
