"""Valid traffic beside an attack: a client and honest engines, in a process of their own."""

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import msgpack
import numpy as np
import zmq

from coordinator_fuzz.mutations import Frames, pack, packed_hashes
from coordinator_fuzz.peer import BLOCK, chain, digest
from megatron.core.inference.coordinator.runtime import sockets
from megatron.core.inference.coordinator.runtime.keys import KeyRing, Role

_ENGINES = 2
_A_SECOND = 150
"""Requests: few enough that the machine has room for the attack, enough for a 99th percentile."""
_PATIENCE = 30.0
"""Seconds after which a request counts as lost."""
PADDED = pack({"padded": True})
"""Sampling parameters of requests whose answers are to be 1 KB long."""
_SAMPLING = pack({"temperature": 1.0, "num_tokens_to_generate": 16})


class Beside:
    """One client and its engines on sockets of their own.

    Args:
        address: The coordinator's.
        ring: Its keys; None where it speaks in plain.
    """

    def __init__(self, address: str, ring: KeyRing | None):
        context = zmq.Context()

        def dealer(name: str, role: Role, pulse: sockets.Pulse) -> zmq.Socket:
            keys = None if ring is None else ring.credentials(role)
            return sockets.dealer(context, address, name.encode(), keys, pulse)

        self._client = dealer("valid-client", Role.SUBMIT, sockets.CLIENT_PULSE)
        self._engines = [
            dealer(f"valid-engine-{n}", Role.ENGINE, sockets.ENGINE_PULSE) for n in range(_ENGINES)
        ]
        self._events = [0] * _ENGINES
        self._poller = zmq.Poller()
        for socket in (self._client, *self._engines):
            self._poller.register(socket, zmq.POLLIN)
        self._sent: dict[int, float] = {}
        self._next = 0
        self._start_phase()
        for n in range(_ENGINES):
            self._register(n)
        self._client.send_multipart([pack([0, 1, False])])

    def run(self, pipe: Connection) -> None:
        """Keep asking; whenever told to, answer with what came of the last phase."""
        due = time.monotonic()
        while True:
            if pipe.poll():
                self._finish()
                pipe.send(self._report())
                if pipe.recv() == "stop":
                    return
                self._start_phase()
                due = time.monotonic()
            now = time.monotonic()
            if now >= due:
                self._submit(now)
                due = max(due + 1 / _A_SECOND, now - 0.1)  # no burst after a pause of this process
            self._receive(max(0.0, due - time.monotonic()))

    def _start_phase(self) -> None:
        self._trips: list[float] = []
        self._by_others = self._wrong = self._twice = self._asked = 0
        self._errors: list[str] = []

    def _finish(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        while self._sent and time.monotonic() < deadline:
            self._receive(0.1)

    def _report(self) -> dict[str, Any]:
        trips = np.array(self._trips or [0.0]) * 1000
        lost, self._sent = len(self._sent), {}
        return {
            "asked": self._asked,
            "answered": len(self._trips) + self._by_others,
            "by_fuzzing_engines": self._by_others,
            "lost": lost,
            "wrong": self._wrong,
            "twice": self._twice,
            "errors": len(self._errors),
            "first_error": self._errors[0] if self._errors else None,
            "p50_ms": round(float(np.percentile(trips, 50)), 2),
            "p99_ms": round(float(np.percentile(trips, 99)), 2),
            "max_ms": round(float(trips.max()), 1),
        }

    def _submit(self, now: float) -> None:
        number = self._next
        self._next += 1
        hashes = chain(1000 + number // 4 % 50, 4 + number % 4)
        self._sent[number] = now
        self._asked += 1
        metadata = pack([20, number, len(hashes) * BLOCK])
        body = [_SAMPLING, pack([number]), packed_hashes(hashes)]
        self._client.send_multipart([metadata, *body])

    def _receive(self, seconds: float) -> None:
        for socket, _ in self._poller.poll(int(seconds * 1000)):
            while socket.poll(0):
                frames = socket.recv_multipart()
                if socket is self._client:
                    self._answered(frames)
                else:
                    self._serve(self._engines.index(socket), frames)

    def _answered(self, frames: Frames) -> None:
        items = msgpack.unpackb(frames[0])
        if items[0] not in (21, 33) or items[1] is None:
            return
        asked = self._sent.pop(items[1], None)
        if asked is None:
            self._twice += 1
        elif items[0] == 33:
            self._errors.append(items[3])
        else:
            reply = msgpack.unpackb(frames[1])
            self._wrong += reply["answer"] != digest(pack([items[1]]))
            if "honest" in reply:  # an attacker's engine takes its time
                self._trips.append(time.monotonic() - asked)
            else:
                self._by_others += 1

    # --- engines ---------------------------------------------------------------------------------

    def _register(self, n: int) -> None:
        metadata = [30, 1, "valid", n, 0, 64, BLOCK, 10_000, "lru"]
        self._engines[n].send_multipart([pack(metadata)])
        self._events[n] = 0

    def _serve(self, n: int, frames: Frames) -> None:
        items = msgpack.unpackb(frames[0], strict_map_key=False)
        engine = self._engines[n]
        match items[0]:
            case 20:
                padding = bytes(1000 * (frames[1] == PADDED))
                answer = pack({"answer": digest(frames[2]), "honest": True, "padding": padding})
                told = [[items[1], "COMPLETED", 0, items[2], self._events[n]]]
                engine.send_multipart([pack([21, told]), answer])
                self._tell(n, items[2], chain(1000 + items[1] % 50, 6))
            case 34:
                engine.send_multipart([pack([35, items[1]])])
            case 36 | 45:  # after STOP, which attackers say too, the next engine comes at once
                self._register(n)
            case 37:
                self._tell(n, 0, [0])

    def _tell(self, n: int, epoch: int, events: list[int]) -> None:
        """Of its cache, whose blocks it names freely: they only steer."""
        if not self._events[n] and events[0]:
            events = [0, *events]
        metadata = pack([32, epoch, self._events[n], len(events)])
        self._engines[n].send_multipart([metadata, packed_hashes(events)])
        self._events[n] += len(events)


def _run(address: str, ring: KeyRing | None, pipe: Connection) -> None:
    beside = Beside(address, ring)
    pipe.send("ready")
    try:
        beside.run(pipe)
    except EOFError:  # whoever started it is gone
        return


class BesideProcess:
    """The valid traffic, seen from the attacker's process."""

    def __init__(self, address: str, ring: KeyRing | None):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(address, ring, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def phase(self, then: str = "on") -> dict[str, Any]:
        """End a phase: what came of its requests. Then it goes "on", or is to "stop".

        Raises:
            RuntimeError: It has ended.
        """
        self._pipe.send(then)
        try:
            report: dict[str, Any] = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the valid traffic's process ended") from None
        return report

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
