"""A coordinator that runs alone, and jobs that join it, in subprocesses; what they said and did."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from listening import family
from megatron.core.inference.sampling_params import SamplingParams

from megatron.core.inference.coordinator.runtime import keys
from megatron.core.inference.coordinator.runtime.client import InferenceClient

TOOLS = Path(__file__).parents[2] / "tools"
MEGATRON = "--inference-dynamic-batching"
START_SECONDS = 240


@dataclass
class Started:
    """A process, its folder and its log.

    Attributes:
        process: The process.
        folder: Where its files are.
        family: It and those that it started, as far as they have been seen.
    """

    process: subprocess.Popen
    folder: Path
    family: list[psutil.Process] = field(default_factory=list)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def look(self) -> list[psutil.Process]:
        """Every process that it started, itself first."""
        self.family = family(self.process.pid) or self.family
        return self.family

    def kill(self) -> None:
        """SIGKILL for all of its processes."""
        for process in self.look():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(timeout=10)

    def wait_for_file(self, name: str) -> str:
        """The content of a file that it writes when it is ready."""
        path = self.folder / name
        wait_for(path.exists, START_SECONDS, lambda: self._not_ready())
        return path.read_text()

    def _not_ready(self) -> str | None:
        return self.log if self.process.poll() is not None else None


class Coordinator(Started):
    """`tools/run_coordinator.py`."""

    @property
    def address(self) -> str:
        return self.wait_for_file("address").strip()

    @property
    def key_file(self) -> Path:
        return self.folder / "keys.json"

    @property
    def port(self) -> int:
        return int(self.address.rsplit(":", 1)[1])

    def said(self, event: str) -> list[dict[str, str]]:
        """The fields of every log line of this event."""
        lines = [line.partition(f" {event} ")[2] for line in self.log.splitlines()]
        return [_fields(line) for line in lines if line]

    def stop(self) -> dict[str, int]:
        """SIGTERM; how often each event happened."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout=10) == 0
        return {name: int(count) for name, count in self.said("stopped")[0].items()}


class Job(Started):
    """A server that has joined."""

    def await_ready(self) -> list[str]:
        """Wait until it serves; the URLs of its front ends."""
        return json.loads(self.wait_for_file("urls.json"))["urls"]

    @property
    def worker(self) -> psutil.Process:
        """The process with the engine."""
        return self.look()[1]


def _fields(line: str) -> dict[str, str]:
    """`a='b c' d=1` as a dict."""
    found, rest = {}, line
    while "=" in rest:
        name, _, rest = rest.partition("=")
        quote = rest[0] if rest[0] in "'\"" else " "
        value, _, rest = rest.lstrip(quote).partition(quote)
        found[name.strip()] = value
    return found


def wait_for(
    condition: Callable[[], Any], seconds: float, failed: Callable[[], str | None] = lambda: None
) -> None:
    """Return when something is true; fail after so many seconds, or when something says why."""
    deadline = time.monotonic() + seconds
    while not condition():
        reason = failed()
        assert reason is None, f"it ended:\n{reason}"
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@contextmanager
def started(kind: type, folder: Path, command: Sequence[Any], host: Sequence[str] = ()) -> Iterator:
    """Start something; whatever is left of it is killed at the end.

    Args:
        kind: What it is.
        folder: A new folder, for its log and files.
        command: What to run, in that folder.
        host: Put before the command, to run it elsewhere.
    """
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*host, *map(str, command)], stdout=log, stderr=log, cwd=folder, env=environment
        )
    made = kind(process, folder)
    try:
        yield made
    finally:
        made.kill()


def coordinator(folder: Path, *flags: str, host: Sequence[str] = ()):
    """A coordinator on a port that the system chooses, for engines on the CPU."""
    command = [
        *(sys.executable, TOOLS / "run_coordinator.py", "--port=0"),
        *("--address-file=address", "--coordinator-schedule-output=schedule.json"),
        *("--inference-coordinator-key-file=keys.json", f"{MEGATRON}-block-size=64", *flags),
    ]
    return started(Coordinator, folder, command, host)


def job(
    folder: Path,
    lead: Coordinator,
    *flags: str,
    address: str | None = None,
    host: Sequence[str] = (),
):
    """A job of one replica of the built-in model, which joins a coordinator; at its own address."""
    command = [
        *(sys.executable, TOOLS / "serve.py", "--replicas=1", "--device=cpu", "--port=0"),
        f"--inference-coordinator-address={address or lead.address}",
        *(f"--inference-coordinator-key-file={lead.key_file}", "--url-file=urls.json", *flags),
    ]
    return started(Job, folder, command, host)


@asynccontextmanager
async def client_of(lead: Coordinator) -> AsyncIterator[InferenceClient]:
    """A client of the coordinator that reads its key file."""
    keys.remember(lead.address, keys.KeyRing.read(lead.key_file))
    client = InferenceClient(lead.address, connect_timeout=30)
    client.start(asyncio.get_running_loop())
    try:
        yield client
    finally:
        client.stop()


def ask(client: InferenceClient, prompt: list[int], tokens: int) -> asyncio.Future:
    """Submit a request for a greedy answer."""
    params = SamplingParams(num_tokens_to_generate=tokens, top_k=1, termination_id=-1)
    return client.add_request(prompt, params)


class Gate:
    """An address that leads to a coordinator once it has been opened."""

    def __init__(self, port: int):
        self._port = port
        self._server = socket.socket()
        self._server.bind(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"

    def open(self) -> None:
        self._server.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=_carry, args=ends, daemon=True).start()


def _carry(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError), source, target:
        while data := source.recv(65536):
            target.sendall(data)
