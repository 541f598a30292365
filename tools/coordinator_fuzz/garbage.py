"""Those who do not speak the protocol at all: bytes on the port, and keys that nobody gave."""

import random
import socket
from collections import deque
from contextlib import suppress

import zmq

from coordinator_fuzz.target import Target
from megatron.core.inference.coordinator.runtime import sockets
from megatron.core.inference.coordinator.runtime.keys import Credentials, Pair

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
_MECHANISMS = [b"NULL", b"CURVE", b"PLAIN", b"GSSAPI", b"\xff" * 20]
_HUGE_FRAME = b"\x06" + (2**63 - 1).to_bytes(8, "big")
_READY = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
_OLD_PEER = b"\x01\x00"
"""A peer without a name that speaks ZMTP 1; each of its frames begins with its length."""
_OLD_PONG = b"\x04\x00\x92\x23\x01"
_KEPT_OPEN = 30
"""Connections that are kept, half open as they are, before the oldest is closed."""


class Garbage:
    """Throws one piece of garbage at a time.

    Args:
        target: The coordinator.
        seed: Of all chance.

    Attributes:
        thrown: How many pieces so far.
    """

    def __init__(self, target: Target, seed: int):
        self._target, self._rng = target, random.Random(seed)
        self._open: deque[socket.socket] = deque()
        self._strangers: deque[zmq.Socket] = deque()
        self._context = zmq.Context()
        self.thrown = 0

    def throw(self) -> None:
        """A connection with garbage; sometimes a peer with a key of its own.

        Raises:
            TargetFailed: The coordinator has ended.
        """
        self.thrown += 1
        if self._target.ring is not None and self._rng.random() < 0.05:
            self._wrong_key()
            return
        try:
            connection = socket.create_connection(("127.0.0.1", self._target.port), 10)
        except OSError:
            self._target.check(patience=5)
            raise
        with suppress(OSError):  # closed by the coordinator in the middle
            for piece in self._pieces():
                connection.sendall(piece)
        self._open.append(connection)
        if len(self._open) > _KEPT_OPEN:
            self._open.popleft().close()

    def close(self) -> None:
        """Everything is closed."""
        for connection in self._open:
            connection.close()
        self._context.destroy(linger=0)

    def _pieces(self) -> list[bytes]:
        rng = self._rng
        noise = rng.randbytes(rng.choice([0, 1, 10, 70, 5000]))
        mechanism = rng.choice(_MECHANISMS).ljust(20, b"\0")
        greeting = _GREETING[:11] + bytes([rng.randrange(4)]) + mechanism + bytes(32)
        match rng.randrange(7):
            case 0:
                return [noise]
            case 1:
                return [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", noise]
            case 2:
                return [greeting[: rng.randrange(64)]]
            case 3:
                return [greeting, noise]
            case 4:
                return [greeting, _HUGE_FRAME, noise]
            case 5:
                return [_OLD_PEER, _OLD_PONG, noise]
            case _:
                return [greeting, _READY, rng.choice([_HUGE_FRAME, b"\x01\xff", noise]), noise]

    def _wrong_key(self) -> None:
        ring, rng = self._target.ring, self._rng
        assert ring is not None
        server = ring.server if rng.random() < 0.7 else Pair.generate().public
        keys = rng.choice([Credentials(server, Pair.generate()), None])
        stranger = sockets.dealer(
            self._context, self._target.address, b"wrong-%d" % self.thrown, keys
        )
        with suppress(zmq.Again):  # refused already
            stranger.send(b"\x91\x3d", zmq.NOBLOCK)  # SHUTDOWN, should anybody listen
        self._strangers.append(stranger)
        if len(self._strangers) > 5:
            self._strangers.popleft().close(linger=0)
