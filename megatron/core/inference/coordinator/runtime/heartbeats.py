"""When anything last came over a peer's connection, heartbeats included, by the kernel's word."""

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_LAST_DATA_RECEIVED = struct.Struct("=52xI")
"""In Linux's `struct tcp_info`: milliseconds."""


@dataclass(frozen=True, slots=True)
class _Connection:
    """A TCP connection of this process: its descriptor may be another's once it is closed."""

    descriptor: int
    remote: Any


class Heartbeats:
    """Connections of peers that send heartbeats, and whether these still come.

    libzmq tells nobody when it last heard of a peer, but which descriptor a message came over.

    Args:
        timeout_ms: A peer of whom nothing came for longer is silent.
    """

    def __init__(self, timeout_ms: int):
        self._timeout_ms = timeout_ms
        self._connections: dict[bytes, _Connection] = {}
        self._peers: dict[int, bytes] = {}  # by descriptor: so there are never more than of these

    def expect(self, peer: bytes, descriptor: int) -> None:
        """A peer sends heartbeats, over the connection with this descriptor."""
        before = self._peers.get(descriptor)
        if before is not None:
            del self._connections[before]
        old = self._connections.get(peer)
        if old is not None and old.descriptor != descriptor:
            del self._peers[old.descriptor]
        remote = _ask(descriptor, socket.socket.getpeername)
        self._connections[peer], self._peers[descriptor] = _Connection(descriptor, remote), peer

    def __contains__(self, peer: bytes) -> bool:
        """Whether heartbeats of a peer are expected."""
        return peer in self._connections

    def missed(self, peer: bytes) -> bool:
        """Whether nothing at all has come from a peer for too long.

        False where that cannot be known: nothing is expected of it, or its connection is gone, as
        sending will show, or was replaced by another.
        """
        expected = self._connections.get(peer)
        if expected is None:
            return False
        remote, milliseconds = _ask(expected.descriptor, _last_received) or (None, 0)
        return bool(remote == expected.remote and milliseconds > self._timeout_ms)


def _last_received(connection: socket.socket) -> tuple[Any, int]:
    """The other end of a connection, and how many milliseconds ago anything came from there."""
    size = _LAST_DATA_RECEIVED.size
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    return connection.getpeername(), _LAST_DATA_RECEIVED.unpack(info)[0]


def _ask(descriptor: int, question: Callable[[socket.socket], Any]) -> Any:
    """Ask about a connection of libzmq's, which may close it meanwhile; None where it is gone."""
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    except OSError:
        return None
    try:
        return question(connection)
    except OSError:
        return None
    finally:
        connection.detach()
