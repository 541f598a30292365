"""Real servers for tests: tools/serve.py in a subprocess, and what it said and did."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from listening import family, listened_at

ROOT = Path(__file__).parents[2]
START_SECONDS = 240


@dataclass
class Served:
    """A running server.

    Attributes:
        process: The launcher.
        folder: Where its log and files are.
        urls: Base URLs of its front ends.
        listening: The TCP addresses and ports it listened at when it was ready.
        survivors: Processes of the server that were still there afterwards.
    """

    process: subprocess.Popen
    folder: Path
    urls: list[str] = field(default_factory=list)
    listening: set[tuple[str, int]] = field(default_factory=set)
    stop_seconds: float | None = None
    survivors: list[psutil.Process] = field(default_factory=list)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def schedule(self) -> dict[str, Any]:
        """The coordinator's decisions, once it has ended."""
        return json.loads((self.folder / "schedule.json").read_text())

    def processes(self) -> list[psutil.Process]:
        """Every process of the server, the launcher first."""
        return family(self.process.pid)

    def stop(self) -> int:
        """Press Ctrl-C; returns the exit code."""
        processes = self.processes()
        began = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(timeout=30)
        _, self.survivors = psutil.wait_procs(
            processes, timeout=max(0.5, began + 5 - time.monotonic())
        )
        self.stop_seconds = time.monotonic() - began
        return code


@contextmanager
def serve(
    folder: Path, *flags: str, replicas: int = 2, starter: Sequence[Any] = ()
) -> Iterator[Served]:
    """Start a server and wait until it serves; whatever is left of it is killed at the end.

    Args:
        folder: Where its log and files go.
        flags: Flags of the server.
        replicas: Its processes.
        starter: A script that runs the server, and what is to come before the server's flags;
            else tools/serve.py does.
    """
    url_file = folder / "urls.json"
    default = ROOT / "tools" / "serve.py", f"--replicas={replicas}"
    command = [
        *(sys.executable, *map(str, starter or default)),
        *("--port=0", f"--url-file={url_file}"),
        f"--coordinator-schedule-output={folder / 'schedule.json'}",
        *flags,
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=_environment())
    served = Served(process, folder)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not url_file.exists():
            assert process.poll() is None, f"the server ended:\n{served.log}"
            assert time.monotonic() < deadline, f"the server did not come up:\n{served.log}"
            time.sleep(0.1)
        served.urls = json.loads(url_file.read_text())["urls"]
        served.listening = listened_at(served.processes())
        yield served
    finally:
        leftover = served.processes() if process.poll() is None else served.survivors
        for each in leftover:
            if each.is_running():
                each.kill()
        process.wait(timeout=10)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
