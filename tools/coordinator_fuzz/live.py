"""Fuzzing peers on sockets: as fast as the coordinator takes it, and never further ahead."""

import random
import time
from collections import deque
from collections.abc import Callable

import zmq

from coordinator_fuzz.mutations import Frames
from coordinator_fuzz.peer import Peer
from coordinator_fuzz.target import LARGER_FRAME, Target
from megatron.core.inference.coordinator.runtime import sockets
from megatron.core.inference.coordinator.runtime.keys import Role

_GOING_SECONDS = 1.0
"""For the last words; no linger, since a socket that lingers and sends heartbeats may abort."""
_AT_ONCE = 10
"""Messages between two probes; a peer stops when the probe before the last is unanswered."""
_PATIENCE = 30.0
_A_LIFE = 3000
"""Messages after which a peer goes, and another one comes in its place."""
_TOO_LARGE = 0.0005
"""Share of the messages of clients that are larger than allowed: the peer has to come again."""

_DISCONNECT, _CONNECT = [b"\x91\x3c"], [b"\x93\x00\x01\xc2"]
_ROLES = {"client": [Role.SUBMIT, Role.CONTROL], "engine": [Role.ENGINE], "stranger": list(Role)}
_KINDS = ["client"] * 4 + ["engine"] * 3 + ["stranger"]


class Stuck(RuntimeError):
    """The coordinator answers no probe any more."""


class LivePeer:
    """A fuzzing peer and its socket."""

    def __init__(self, context: zmq.Context, target: Target, number: int, rng: random.Random):
        kind = _KINDS[number % len(_KINDS)]
        stock = target.ring is None and rng.random() < 0.4
        keys = None
        if target.ring is not None:
            keys = target.ring.credentials(rng.choice(_ROLES[kind]))
        self._rng = rng
        self._peer = Peer(kind, stock, number, rng)
        name = b"mp-coord-%d" % number if stock and kind == "engine" else b"fuzz-%d" % number
        self.socket = sockets.dealer(context, target.address, name, keys)
        self._probes = self.sent = 0
        self.heard = time.monotonic()
        self._say(self._peer.introduction())

    @property
    def waits(self) -> bool:
        """Whether it has said enough for now."""
        return self._probes - self._peer.acknowledged > 1

    @property
    def done(self) -> bool:
        """Whether its life is over."""
        return self.sent >= _A_LIFE

    def attack(self) -> int:
        """Say some things; returns how many."""
        count = 0
        while count < _AT_ONCE and not self.done:
            self._say(self._peer.mutant())
            count += 1
            if self._peer.kind == "client" and self._rng.random() < _TOO_LARGE:
                self._lose_connection()
        self._probes += 1
        self._say(self._peer.probe(self._probes))
        self.sent += count
        return count

    def listen(self) -> None:
        """Take what has come, and answer it."""
        while self.socket.poll(0):
            self.heard = time.monotonic()
            for frames in self._peer.take(self.socket.recv_multipart()):
                self._say(frames)

    def leave(self) -> None:
        """Take leave: who has requests and goes without a word is missed only a second later."""
        self.listen()
        self._say(_DISCONNECT)

    def _lose_connection(self) -> None:
        # As a client that has no request: what an engine has would wait until it is missed.
        for frames in (_DISCONNECT, _CONNECT, [b"\x93\x14\x01\x02", bytes(LARGER_FRAME)]):
            self._say(frames)
        self.sent = _A_LIFE

    def _say(self, frames: Frames) -> None:
        self.socket.send_multipart(frames)


class Attack:
    """Many fuzzing peers.

    Args:
        target: The coordinator.
        peers: How many at a time.
        seed: Of all chance.

    Attributes:
        sent: Messages so far, without introductions, answers and probes.
    """

    def __init__(self, target: Target, peers: int, seed: int):
        self._target, self._rng = target, random.Random(seed)
        self._context = zmq.Context()
        self._born = self.sent = 0
        self._poller = zmq.Poller()
        self._going: deque[tuple[float, zmq.Socket]] = deque()
        self._peers = [self._new() for _ in range(peers)]

    def run(self, messages: int, deadline: float, each: Callable[[int], None]) -> None:
        """Send so many messages.

        Args:
            messages: How many.
            deadline: Stop then at the latest.
            each: Called now and then with the number of those that were sent.

        Raises:
            Stuck: See there.
            TargetFailed: The coordinator has ended.
        """
        end = self.sent + messages
        while self.sent < end and time.monotonic() < deadline:
            self._target.check()
            for place, peer in enumerate(self._peers):
                peer.listen()
                if not peer.waits:
                    self.sent += peer.attack()
                if peer.done:
                    self._replace(place)
            if all(peer.waits for peer in self._peers):
                self._wait()
            each(self.sent)

    def close(self) -> None:
        """All peers go."""
        for peer in self._peers:
            peer.leave()
        time.sleep(_GOING_SECONDS)
        self._context.destroy(linger=0)

    def _wait(self) -> None:
        if not self._poller.poll(1000):
            silent = time.monotonic() - max(peer.heard for peer in self._peers)
            if silent > _PATIENCE:
                raise Stuck(f"the coordinator has answered nothing for {silent:.0f} s")

    def _replace(self, place: int) -> None:
        self._poller.unregister(self._peers[place].socket)
        self._peers[place].leave()
        self._going.append((time.monotonic(), self._peers[place].socket))
        while time.monotonic() - self._going[0][0] > _GOING_SECONDS:
            self._going.popleft()[1].close(linger=0)
        self._peers[place] = self._new()

    def _new(self) -> LivePeer:
        rng = random.Random(self._rng.getrandbits(64))
        peer = LivePeer(self._context, self._target, self._born, rng)
        self._born += 1
        self._poller.register(peer.socket, zmq.POLLIN)
        return peer
