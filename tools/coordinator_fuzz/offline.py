"""The same messages without any socket: how long does the coordinator's own work take at most?

On a machine that others use as well, a round trip says little; the processor time that the codec
and the core take for one message says what a message can hold up.
"""

import gc
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from coordinator_fuzz.mutations import Frames
from coordinator_fuzz.peer import BLOCK, Peer
from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.core import Coordinator
from megatron.core.inference.coordinator.runtime import garbage
from megatron.core.inference.coordinator.runtime.codec import Codec
from megatron.core.inference.coordinator.settings import CoordinatorSettings, FleetSettings

_KINDS = ["client", "engine", "client", "stranger"]
_PEERS = 24
_A_TICK = 2000
"""Messages between two ticks, about a second at full load."""


class Offline:
    """Peers and a coordinator in one thread.

    Args:
        seed: Of all chance.
        integrity: Check the coordinator's own books after so many messages; 0: never.
    """

    def __init__(self, seed: int, integrity: int = 0):
        fleet = FleetSettings(max_retries=9)
        self._core = Coordinator(CoordinatorSettings(fleet=fleet, block_size_tokens=BLOCK))
        self._codec = Codec(lambda body: body)
        self._rng = random.Random(seed)
        self._peers: dict[bytes, Peer] = {}
        self._born = self._told = 0
        self._integrity = integrity
        self._took: list[int] = []
        self._waiting: deque[tuple[bytes, Frames]] = deque()
        for _ in range(_PEERS):
            self._new()

    def run(
        self, messages: int, deadline: float, each: Callable[[int], None] = lambda sent: None
    ) -> dict[str, Any]:
        """Handle so many messages; processor time of each in milliseconds."""
        garbage.spare_the_old()
        while self._told < messages and time.monotonic() < deadline:
            peer = self._rng.choice(list(self._peers))
            self._waiting.append((peer, self._peers[peer].mutant()))
            while self._waiting:
                self._tell(*self._waiting.popleft())
            if self._told % _A_TICK == 0:
                self._second()
                each(self._told)
        took = np.array(self._took) / 1e6
        return {
            "messages": len(took),
            "mean_us": round(float(took.mean()) * 1000, 1),
            "p99_9_ms": round(float(np.percentile(took, 99.9)), 3),
            "max_ms": round(float(took.max()), 2),
        }

    def _second(self) -> None:
        """Time passes, and somebody goes without a word."""
        self._told += 1
        self._perform(self._timed(lambda: self._handle(m.Incoming(b"", m.Tick()))))
        while self._core.backlog:
            self._timed(lambda: self._handle(m.Incoming(b"", m.Sweep())))
        gone = self._rng.choice(list(self._peers))
        del self._peers[gone]
        self._codec.forget(gone)
        self._perform(self._timed(lambda: self._handle(m.Incoming(gone, m.PeerLost()))))
        self._new()
        garbage.freeze()

    def _tell(self, peer: bytes, frames: Frames) -> None:
        def take() -> list[tuple[bytes, Frames]]:
            message = self._codec.decode(peer, frames)
            return self._handle(m.Incoming(peer, message))

        self._told += 1
        self._perform(self._timed(take))
        if self._integrity and self._told % self._integrity == 0:
            self._core.check_integrity()

    def _handle(self, incoming: m.Incoming) -> list[tuple[bytes, Frames]]:
        sent = []
        for effect in self._core.handle(incoming, time.monotonic()):
            if isinstance(effect, m.Send):
                frames = self._codec.encode(effect.peer, effect.message)
                if frames is not None:
                    sent.append((effect.peer, [bytes(frame) for frame in frames]))
        return sent

    def _timed(self, call: Callable[[], Any]) -> Any:
        began = time.thread_time_ns()
        result = call()
        self._took.append(time.thread_time_ns() - began)
        return result

    def _perform(self, sent: list[tuple[bytes, Frames]]) -> None:
        for name, frames in sent:
            peer = self._peers.get(name)
            if peer is not None:
                self._waiting.extend((name, answer) for answer in peer.take(frames))

    def _new(self) -> None:
        number = self._born
        self._born += 1
        rng = random.Random(self._rng.getrandbits(64))
        peer = Peer(_KINDS[number % len(_KINDS)], rng.random() < 0.4, number, rng)
        name = b"mp-coord-%d" % number if peer.stock else b"fuzz-%d" % number
        self._peers[name] = peer
        self._waiting.append((name, peer.introduction()))


def measure(seed: int, messages: int, deadline: float, each: Callable[[int], None]) -> Any:
    """The figures of one run (`Offline.run`)."""
    gc.collect()
    return Offline(seed).run(messages, deadline, each)
