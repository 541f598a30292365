"""Many connections at once, and clients that never read their answers."""

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import zmq

from coordinator_fuzz.beside import PADDED, BesideProcess
from coordinator_fuzz.mutations import pack
from coordinator_fuzz.target import Target, TargetFailed, running
from megatron.core.inference.coordinator.runtime import sockets
from megatron.core.inference.coordinator.runtime.keys import KeyRing, Role

_A_PROCESS = 2500
"""Connections of one process: each takes two descriptors of it."""
_AT_ONCE = 100
"""Handshakes under way in one process; all at once would fill the system's queue of them."""
_PATIENCE = 120.0
_IN_A_ROW = 400
"""Requests of a client that never reads, before it is seen whether the engines keep up."""
_GONE_SECONDS = 13.0
"""Until the last client that vanished is missed: clients are pinged every 10 s."""


def _crowd(address: str, ring: KeyRing | None, first: int, count: int, pipe: Connection) -> None:
    """Connect so many clients, stay until told to go, and say how many are there, twice."""
    sockets.raise_descriptor_limit()
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, count + 16)
    keys = None if ring is None else ring.credentials(Role.SUBMIT)
    clients: list[zmq.Socket] = []
    deadline = time.monotonic() + _PATIENCE
    while len(clients) < count and time.monotonic() < deadline:
        new = [
            sockets.dealer(
                context,
                address,
                b"crowd-%d" % (first + len(clients) + n),
                keys,
                sockets.CLIENT_PULSE,
            )
            for n in range(min(_AT_ONCE, count - len(clients)))
        ]
        _introduce(new, deadline)
        clients += new
    pipe.send(_introduced(clients))
    pipe.recv()
    _introduce(clients, time.monotonic() + _PATIENCE)  # who was thrown out meanwhile is not met
    pipe.send(_introduced(clients))
    context.destroy(linger=0)


def _introduce(clients: list[zmq.Socket], deadline: float) -> None:
    for client in clients:
        while client.poll(0):  # pings
            client.recv_multipart()
        client.send(b"\x93\x00\x01\xc2")
    for client in clients:
        client.poll(max(0, int((deadline - time.monotonic()) * 1000)))


def _introduced(clients: list[zmq.Socket]) -> int:
    """To how many CONNECT_ACK has come."""
    return sum(bool(client.poll(0)) for client in clients)


class _Crowd:
    """Connections in processes of their own."""

    def __init__(self, target: Target, connections: int):
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for first in range(0, connections, _A_PROCESS):
            ours, theirs = context.Pipe()
            count = min(_A_PROCESS, connections - first)
            arguments = (target.address, target.ring, first, count, theirs)
            process = context.Process(target=_crowd, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def connected(self) -> int:
        """How many are there."""
        return sum(pipe.recv() for pipe in self._pipes)

    def leave(self) -> int:
        """All go without a word; how many were still there."""
        for pipe in self._pipes:
            pipe.send("go")
        still = self.connected()
        for process in self._processes:
            process.join()
        return still

    def close(self) -> None:
        """End what is still there."""
        for process in self._processes:
            process.kill()
            process.join()


@contextmanager
def _beside(target: Target) -> Iterator[BesideProcess]:
    beside = BesideProcess(target.address, target.ring)
    try:
        yield beside
    finally:
        beside.close()


def crowd(plain: bool, connections: int, seconds: float) -> dict[str, Any]:
    """So many clients connect, stay for so long and vanish."""
    with running(plain) as target, _beside(target) as beside:
        time.sleep(seconds)
        valid = {"before": beside.phase()}
        memory, descriptors = [target.rss_mib], [target.descriptors]
        began = time.monotonic()
        many = _Crowd(target, connections)
        try:
            connected = many.connected()
            took = time.monotonic() - began
            valid["connecting"] = beside.phase()
            time.sleep(seconds)
            memory.append(target.rss_mib)
            descriptors.append(target.descriptors)
            still = many.leave()
        finally:
            many.close()
        valid["connected"] = beside.phase()
        time.sleep(_GONE_SECONDS)
        memory.append(target.rss_mib)
        descriptors.append(target.descriptors)
        valid["after"] = beside.phase("stop")
        lost = target.stop().get("client_lost", 0)
    report = {
        "scenario": "crowd, plain" if plain else "crowd, with keys",
        "connections": connections,
        "connected": connected,
        "still_connected": still,
        "seconds": round(took, 1),
        "kib_a_connection": round((memory[1] - memory[0]) * 1024 / connections, 1),
        "rss_mib": [round(each, 1) for each in memory],
        "descriptors": descriptors,
        "missed": lost,
        "valid": valid,
    }
    failures = harmed(valid)
    if not connected == still == lost == connections:
        failures.append(f"{connected} connected, {still} stayed, {lost} were missed afterwards")
    if descriptors[2] > descriptors[0]:
        failures.append(f"{descriptors[2]} descriptors are open, {descriptors[0]} were")
    return report | {"failures": failures}


def deaf(clients: int, requests: int, seconds: float) -> dict[str, Any]:
    """So many clients ask for 1 KB each time and never read."""
    with running(plain=True) as target, _beside(target) as beside:
        time.sleep(seconds)
        valid = {"before": beside.phase()}
        memory = [target.rss_mib]
        context = zmq.Context()
        asking = [_deaf_client(context, target.address, n) for n in range(clients)]
        pace = sockets.dealer(context, target.address, b"pace")
        _ask(pace, None)
        for start in range(0, requests, _IN_A_ROW):
            for client in asking:
                for name in range(start, start + _IN_A_ROW):
                    client.send_multipart([pack([20, name, -1]), PADDED, pack([name])])
            _ask(pace, start)
            memory.append(target.rss_mib)
        valid["during"] = beside.phase()
        context.destroy(linger=0)
        time.sleep(1.0)
        memory.append(target.rss_mib)
        valid["after"] = beside.phase("stop")
        events = target.stop()
    failures = harmed(valid)
    if events.get("client_lost", 0) != clients:
        failures.append(f"{events.get('client_lost', 0)} of {clients} clients counted as lost")
    return {
        "scenario": "clients that never read",
        "clients": clients,
        "requests_each": requests,
        "lost": events.get("client_lost", 0),
        "refused_then": events.get("request_before_connect", 0),
        "rss_mib": {
            "before": round(memory[0], 1),
            "most": round(max(memory), 1),
            "after": round(memory[-1], 1),
        },
        "valid": valid,
        "failures": failures,
    }


def _ask(pace: zmq.Socket, name: int | None) -> None:
    """Connect, or ask for something: the answer says that the engines keep up."""
    pace.send_multipart([b"\x93\x00\x01\xc2"] if name is None else [pack([20, name, -1]), b"", b""])
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        if pace.poll(1000) and pace.recv_multipart()[0][1] in (1, 21):
            return
    raise TargetFailed(f"no answer for {_PATIENCE:.0f} s")


def _deaf_client(context: zmq.Context, address: str, number: int) -> zmq.Socket:
    client = context.socket(zmq.DEALER)  # without heartbeats: their answers would not be read
    client.setsockopt(zmq.IDENTITY, b"deaf-%d" % number)
    client.setsockopt(zmq.RCVHWM, 1)
    client.setsockopt(zmq.RCVBUF, 4096)
    client.setsockopt(zmq.SNDHWM, 0)
    client.connect(address)
    client.send(b"\x93\x00\x01\xc2")
    return client


def harmed(valid: dict[str, dict[str, Any]]) -> list[str]:
    """What happened to valid requests that should not."""
    return [
        f"{phase[what]} of the valid requests {when} were {what}"
        for when, phase in valid.items()
        for what in ("lost", "wrong", "twice", "errors")
        if phase[what]
    ]
