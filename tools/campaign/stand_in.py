"""Replicas that compute nothing: they speak the real wire, take a while, and answer a checksum."""

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import zmq

from campaign.prompts import checksum
from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.lifecycle import FleetState, Signal
from megatron.core.inference.coordinator.runtime import keys, wire
from megatron.core.inference.coordinator.runtime.link import CoordinatorLink
from megatron.core.inference.coordinator.settings import PROTOCOL_VERSION

PLACES = 8
"""Requests that one has under way at once."""
SECONDS = 0.05
"""How long each takes."""

_AGAIN_SECONDS = 2.0
_RECONNECT_SECONDS = 300.0
_POLL_MS = 20

Back = Any
"""What an answer must give back to be known."""


class Work:
    """Requests under way: so many at once, each for the same time; in a pause none ends."""

    def __init__(self) -> None:
        self.paused = False
        self._order = itertools.count()
        self._waiting: deque[tuple[Back, bytes]] = deque()
        self._running: list[tuple[float, int, Back, bytes]] = []

    def add(self, back: Back, packed_prompt: bytes) -> None:
        """Take a request."""
        self._waiting.append((back, packed_prompt))

    @property
    def requests(self) -> list[Back]:
        """What it has."""
        return [back for back, _ in self._waiting] + [back for _, _, back, _ in self._running]

    def keep(self, kept: Collection[Back]) -> None:
        """Forget all other requests."""
        self._waiting = deque(each for each in self._waiting if each[0] in kept)
        self._running = [each for each in self._running if each[2] in kept]
        heapq.heapify(self._running)

    def finished(self, now: float) -> list[tuple[Back, list[int]]]:
        """What is through by now, with the answers; others take the places."""
        done: list[tuple[Back, list[int]]] = []
        if self.paused:
            return done
        while self._running and self._running[0][0] <= now:
            _, _, back, packed = heapq.heappop(self._running)
            done.append((back, checksum(packed)))
        while self._waiting and len(self._running) < PLACES:
            back, packed = self._waiting.popleft()
            heapq.heappush(self._running, (now + SECONDS, next(self._order), back, packed))
        return done

    def wait_ms(self, now: float) -> int:
        """Milliseconds until it should be looked at again."""
        if self.paused or not self._running:
            return _POLL_MS
        return max(0, min(_POLL_MS, round((self._running[0][0] - now) * 1000)))


def body(request_id: int, tokens: list[int]) -> dict[str, Any]:
    """A reply's content, as far as anybody reads it."""
    return {
        "request_id": request_id,
        "status": "COMPLETED",
        "generated_tokens": tokens,
        "sampling_params": {},
    }


def serve(address: str, key_file: str, name: str) -> None:
    """A replica of a job of its own, until it is killed.

    Args:
        address: The coordinator's.
        key_file: Its keys.
        name: Of the job; no other one has it.
    """
    credentials = keys.KeyRing.read(key_file).credentials(keys.Role.ENGINE)
    link = CoordinatorLink(
        zmq.Context(),
        address,
        name.encode(),
        grace=_RECONNECT_SECONDS,
        credentials=credentials,
    )
    registration = m.Register(PROTOCOL_VERSION, name, 0, 0, PLACES, 64, 10_000, "lru")
    _StandIn(link, registration).run()


class _StandIn:
    """The real engine's end of the wire without an engine (`runtime/engine_step.py`)."""

    def __init__(self, link: CoordinatorLink, registration: m.Register):
        self._link, self._registration = link, registration
        self._work = Work()
        self._epoch = self._generation = 0
        self._asked_at: float | None = None
        self._take(link.register(registration, _RECONNECT_SECONDS))

    def run(self) -> None:
        while True:
            if self._link.check():
                self._register_again(at_once=True)
            self._link.socket.poll(self._work.wait_ms(time.monotonic()))
            for frames in self._link.drain():
                self._take(wire.decode_from_coordinator(frames))
            answers = [
                m.Answer(number, "COMPLETED", -1, self._epoch, wire.pack(body(number, tokens)))
                for number, tokens in self._work.finished(time.monotonic())
            ]
            if answers:
                self._link.send(m.EngineReply(tuple(answers)))

    def _take(self, message: m.FromCoordinator) -> None:
        match message:
            case m.EngineRequest(request_id=number, prompt=prompt):
                self._work.add(number, bytes(prompt))
            case m.Ping(number=number):
                self._link.send(m.Pong(number))
            case m.Control(signal=signal):
                self._obey(signal)
            case m.RegisterAgain():
                self._register_again()
            case m.RegisterAck(weight_epoch=epoch, state=state, kept=kept):
                self._asked_at, self._epoch = None, epoch
                self._generation = message.generation
                self._work.keep(kept)
                self._work.paused = state is not FleetState.RUNNING

    def _obey(self, signal: Signal) -> None:
        if signal in (Signal.PAUSE, Signal.UNPAUSE):
            self._work.paused = signal is Signal.PAUSE

    def _register_again(self, at_once: bool = False) -> None:
        """Tell what it has; several demands are one."""
        now = time.monotonic()
        asked = self._asked_at
        if not at_once and asked is not None and now - asked < _AGAIN_SECONDS:
            return
        self._asked_at = now
        registration = replace(
            self._registration,
            weight_epoch=self._epoch,
            generation=self._generation,
            requests=self._work.requests,
        )
        self._link.send(registration)


def serve_released(address: str, name: str) -> None:
    """The same for megatron-core's own coordinator, as its engine speaks, until it is killed.

    The released engine sends its requests' answers over a socket that ZeroMQ connects again by
    itself, and registers once.
    """
    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, name.encode())
    socket.connect(address)
    socket.send(b"")
    work = Work()
    signals: dict[int, Callable[[], None]] = {
        Signal.PAUSE: lambda: setattr(work, "paused", True),
        Signal.UNPAUSE: lambda: setattr(work, "paused", False),
    }
    while True:
        if socket.poll(work.wait_ms(time.monotonic())):
            header, *items = wire.unpack(socket.recv())
            if header == m.Header.SUBMIT_REQUEST:
                work.add(items[0], wire.pack(items[1]))
            elif header in signals:
                signals[header]()
        done = [body(number, tokens) for number, tokens in work.finished(time.monotonic())]
        if done:
            socket.send(wire.pack([int(m.Header.ENGINE_REPLY), done]))
