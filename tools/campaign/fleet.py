"""What is broken: a coordinator, and replicas that are each behind a link of their own."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil

from campaign.children import Children
from campaign.coordinator_log import CoordinatorLog
from campaign.relay import Relay

BLOCK = 64
_TOOL = Path(__file__).resolve().parents[1] / "run_coordinator.py"
_START_SECONDS = 180.0
_LAST_WORDS = 200


class CoordinatorEnded(RuntimeError):
    """The coordinator's process ended by itself; the text says how."""


class Replica:
    """A replica's process and its link.

    Args:
        name: What it is called; logs as well.
        start: Starts its process, given the address and how often it was started before.
        relay: Its link, listening.

    Attributes:
        disturbed: Something is being done to it.
        ended: How often it ended although nobody killed it.
    """

    def __init__(self, name: str, start: Callable[[str, int], ForkServerProcess], relay: Relay):
        self.name, self.relay = name, relay
        self.disturbed = False
        self.ended = 0
        self._start, self._starts = start, 0
        self.start()

    def start(self) -> None:
        """Start its process (anew)."""
        self._process = self._start(self.relay.address, self._starts)
        self._starts += 1

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.join()

    def signal(self, number: int) -> None:
        """Send it a signal, if it is there."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid or 0, number)

    def look_after(self) -> None:
        """Start it anew if it has ended by itself."""
        if not self._process.is_alive():
            self.ended += 1
            self.start()


class Fleet:
    """The part that both coordinators have in common.

    Args:
        folder: A folder of its own, for logs and files.
        children: Starts processes.
        count: Replicas.

    Attributes:
        kind: The dialect of its clients.
        log_name: Of the coordinator's log.
        address: The coordinator's; clients use it, replicas their links.
        key_file: Its keys; empty without.
        replicas: The replicas.
        coordinator: The coordinator's process.
    """

    kind: str
    log_name: str
    address: str
    key_file = ""
    coordinator: psutil.Process

    def __init__(self, folder: Path, children: Children, count: int):
        self.folder, self.children, self._count = folder, children, count
        self.replicas: list[Replica] = []

    async def start(self) -> None:
        """Start everything.

        Raises:
            CoordinatorEnded: The coordinator does not come up.
            TimeoutError: A replica does not.
        """
        await self._start_coordinator()
        port = int(self.address.rsplit(":", 1)[1])
        for number in range(self._count):
            relay = Relay(port)
            await relay.open()
            self.replicas.append(self._make_replica(number, relay))
        await self.wait_until(self.all_there, _START_SECONDS)

    async def wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait for something, and look after everybody meanwhile.

        Raises:
            CoordinatorEnded: The coordinator ended.
            TimeoutError: It did not happen in time.
        """
        deadline = time.monotonic() + seconds
        while True:
            self.look_after()
            if condition():
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {seconds:g} s; logs are in {self.folder}")
            await asyncio.sleep(0.05)

    def look_after(self) -> None:
        """Start replicas anew that have ended by themselves.

        Raises:
            CoordinatorEnded: The coordinator ended.
        """
        code = self._exit_code()
        if code is not None:
            raise CoordinatorEnded(f"the coordinator ended with {code} ({self._last_words()})")
        for replica in self.replicas:
            if not replica.disturbed:
                replica.look_after()

    async def close(self) -> None:
        """End everything."""
        for replica in self.replicas:
            replica.kill()
            await replica.relay.close()

    def all_there(self) -> bool:
        """Whether every replica has registered, as far as can be known."""
        raise NotImplementedError

    def _last_words(self) -> str:
        lines = (self.folder / f"{self.log_name}.log").read_text().splitlines()
        return lines[-1][:_LAST_WORDS] if lines else "without a word"

    async def _start_coordinator(self) -> None:
        raise NotImplementedError

    def _make_replica(self, number: int, relay: Relay) -> Replica:
        raise NotImplementedError

    def _exit_code(self) -> int | None:
        raise NotImplementedError


class OurFleet(Fleet):
    """Our coordinator, with keys.

    Args:
        folder: See `Fleet`.
        children: See `Fleet`.
        count: See `Fleet`.
        engines: What the replicas are: "real" or "stub".
        flags: Of the coordinator.
    """

    kind, log_name = "ours", "coordinator"

    def __init__(
        self, folder: Path, children: Children, count: int, engines: str, flags: list[str]
    ):
        super().__init__(folder, children, count)
        self._flags = flags
        self._work = f"campaign.{'real_engine' if engines == 'real' else 'stand_in'}:serve"
        self.key_file = str(folder / "keys.json")
        self.log = CoordinatorLog(folder / "coordinator.log")

    def all_there(self) -> bool:
        """Whether the coordinator's log says that all have registered."""
        return self.log.live() == self._count

    async def stop(self) -> dict[str, int]:
        """End the coordinator as an operator does; how often each event happened in its life."""
        self._popen.send_signal(signal.SIGTERM)
        await asyncio.to_thread(self._popen.wait, 30)
        return self.log.totals()

    async def close(self) -> None:
        """End everything."""
        await super().close()
        self._popen.kill()
        self._popen.wait()

    async def _start_coordinator(self) -> None:
        address = self.folder / "address"
        command = [
            *(sys.executable, _TOOL, "--port=0", f"--address-file={address}"),
            f"--inference-coordinator-key-file={self.key_file}",
            f"--inference-dynamic-batching-block-size={BLOCK}",
            *self._flags,
        ]
        with self.log.path.open("w") as log:
            self._popen = subprocess.Popen([*map(str, command)], stdout=log, stderr=log)
        await self.wait_until(address.exists, _START_SECONDS)
        self.address = address.read_text().strip()
        self.coordinator = psutil.Process(self._popen.pid)

    def _make_replica(self, number: int, relay: Relay) -> Replica:
        name = f"replica-{number}"

        def start(address: str, before: int) -> ForkServerProcess:
            job = f"{name}-{before}"
            return self.children.start(job, self._work, address, self.key_file, job)

        return Replica(name, start, relay)

    def _exit_code(self) -> int | None:
        return self._popen.poll()


class ReleasedFleet(Fleet):
    """Megatron-core's own coordinator, and stand-ins that speak as its engines do."""

    kind, log_name = "released", "released-coordinator"

    def all_there(self) -> bool:
        """Whether the coordinator has seen as many as it waits for, at its start."""
        return bool(self._ready.is_set())

    async def close(self) -> None:
        """End everything."""
        await super().close()
        self._process.kill()
        self._process.join()

    async def _start_coordinator(self) -> None:
        pipe, theirs = self.children.context.Pipe()
        self._ready: Any = self.children.context.Event()
        self._process = self.children.start(
            self.log_name,
            "coordinator_bench.plane_processes:run_released",
            *(theirs, self._ready, self._count, BLOCK),
        )
        theirs.close()
        await self.wait_until(pipe.poll, _START_SECONDS)
        self.address = pipe.recv()
        self.coordinator = psutil.Process(self._process.pid)

    def _make_replica(self, number: int, relay: Relay) -> Replica:
        name = f"mp-coord-{number}"  # as the released engine calls itself, each time

        def start(address: str, before: int) -> ForkServerProcess:
            work = "campaign.stand_in:serve_released"
            return self.children.start(f"{name}-{before}", work, address, name)

        return Replica(name, start, relay)

    def _exit_code(self) -> int | None:
        return self._process.exitcode
