"""ZeroMQ sockets as every end of the protocol wants them."""

import resource
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import zmq

from megatron.core.inference.coordinator.messages import Right
from megatron.core.inference.coordinator.runtime.heartbeats import Heartbeats
from megatron.core.inference.coordinator.runtime.keys import Credentials

HEARTBEAT_TIMEOUT_MS = 2000
"""An engine of which nothing came for so long, not even a heartbeat, is gone."""


class Pulse(NamedTuple):
    """How often a peer asks the coordinator for a sign of life.

    Attributes:
        every_ms: From one heartbeat to the next.
        timeout_ms: Either end gives the other up when this long nothing came.
    """

    every_ms: int
    timeout_ms: int


ENGINE_PULSE = Pulse(500, HEARTBEAT_TIMEOUT_MS)
CLIENT_PULSE = Pulse(2500, 10_000)
"""Without heartbeats, a peer that was stopped looks like one that has nothing to say.

Engines are few, and requests wait for them. Clients may be ten thousand: with the engines' pulse
their encrypted heartbeats take more than twice the time of an idle coordinator (0.37 of a core, not
0.17), and a busy one that misses them gets busier, with a handshake for each. The kernel finds
links and machines that are gone, in 3 s.

Only peers ask. A ROUTER must not: where one has as many messages waiting as it may have, it does
not read from their peer; when that connection breaks meanwhile, libzmq (4.3.5) ends the process at
its next heartbeat ("Assertion failed: !_io_error"). Anybody could bring that about. The time to
live that a peer sends along does not find all: whatever follows on it stops that clock. So the
coordinator looks itself how long ago anything came (`heartbeats.py`).
"""

_KEEPALIVE = {
    zmq.TCP_MAXRT: HEARTBEAT_TIMEOUT_MS,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 1,
    zmq.TCP_KEEPALIVE_INTVL: 1,
    zmq.TCP_KEEPALIVE_CNT: 2,
}
"""Seconds, and probes: finds machines and links gone over which nothing was on its way. Where
something was, `TCP_MAXRT` does, in milliseconds."""

_WAITING_MESSAGES = 20_000
"""Messages for, or from, one peer of a coordinator that may wait in memory."""

_CONNECT_TIMEOUT_MS = 2000
_HANDSHAKE_TIMEOUT_MS = 10_000
"""Both are over in milliseconds where they succeed. Left to itself a connection attempt that began
while the network was down goes on for up to a minute after it is back."""

# As numbers: each time two members of zmq.Flag are combined costs 0.5 us.
_NOW = int(zmq.NOBLOCK)
_NOW_AND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

_SHARED_BUFFER = 8192
"""libzmq reads from the network into pieces of this size. A frame that fits lies in one together
with others, and whoever keeps it keeps the whole piece; a larger one has memory of its own."""


def raise_descriptor_limit() -> int:
    """Let this process have as many connections as the system allows it; returns how many.

    The usual limit, 1,024, is for programs that call select(); each connection takes a descriptor.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        return most
    return limit


def dealer(
    context: zmq.Context,
    address: str,
    identity: bytes,
    credentials: Credentials | None = None,
    pulse: Pulse = ENGINE_PULSE,
    before: Callable[[zmq.Socket], None] = lambda socket: None,
) -> zmq.Socket:
    """A DEALER connected to a coordinator.

    Args:
        context: Where the socket lives.
        address: The coordinator's, e.g. tcp://127.0.0.1:5000.
        identity: 1 to 255 bytes, unique among all peers; must not begin with a zero byte.
        credentials: Its keys; None where the coordinator speaks in plain.
        pulse: How often it sends heartbeats.
        before: Called before it connects; whoever watches it must have begun by then.

    Raises:
        ValueError: The address is none.
    """
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    _common(socket)
    socket.setsockopt(zmq.HEARTBEAT_IVL, pulse.every_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, pulse.timeout_ms)
    socket.setsockopt(zmq.HEARTBEAT_TTL, pulse.timeout_ms)
    if credentials is not None:
        credentials.apply(socket)
    before(socket)
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ValueError(f"{address!r} is no coordinator address ({error.strerror})") from None
    return socket


def router(context: zmq.Context, max_frame_bytes: int = -1) -> zmq.Socket:
    """A ROUTER, not bound yet, that says when a peer cannot be reached.

    A peer that does not read, or writes faster than it is read, has so many messages waiting and
    no more: then it counts as lost, or has to wait itself.

    Args:
        context: Where the socket lives.
        max_frame_bytes: A peer that sends a larger frame loses its connection; -1: no limit.
    """
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    _common(socket)
    socket.setsockopt(zmq.SNDHWM, _WAITING_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, _WAITING_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    return socket


class Mailbox:
    """Whole messages in and out of a ROUTER, at half the cost of pyzmq's multipart calls.

    Nothing large is copied: frames of more than 8 KB come as the `zmq.Frame` that libzmq received
    them in, and are sent on as such. Smaller ones are bytes, which cost less.

    Args:
        router: The socket.
        rights_of: What the sender of a frame may do (`keys.Guard.rights`); everybody may do
            everything by default.
    """

    def __init__(
        self, router: zmq.Socket, rights_of: Callable[[zmq.Frame], Right] = lambda frame: Right.ALL
    ):
        self._rights_of = rights_of
        self._heartbeats = Heartbeats(HEARTBEAT_TIMEOUT_MS)
        self._latest: zmq.Frame | None = None
        self._receive = router.recv
        self._send = super(zmq.Socket, router).send  # zmq.Socket's own adds only options

    def receive(self) -> tuple[bytes, list[Any], Right] | None:
        """The next message that has arrived, if any: who sent it, its frames, the sender's rights.

        The first frame is always bytes.
        """
        try:
            peer = self._receive(_NOW)
        except zmq.Again:
            return None
        frame = self._receive(_NOW, copy=False)
        frames: list[Any] = [frame.bytes]
        self._latest = frame
        rights = self._rights_of(frame)
        while frame.more:
            frame = self._receive(_NOW, copy=False)
            frames.append(frame if len(frame) > _SHARED_BUFFER else frame.bytes)
        return peer, frames, rights

    def expect_heartbeats(self, peer: bytes) -> None:
        """The peer of the latest message sends heartbeats, over the connection that it came by."""
        assert self._latest is not None
        try:
            descriptor = int(self._latest.get(zmq.SRCFD))
        except zmq.ZMQError:  # it speaks ZMTP 1 or 2: of such a peer libzmq knows nothing
            return
        self._heartbeats.expect(peer, descriptor)

    def watches(self, peer: bytes) -> bool:
        """Whether a peer's heartbeats are expected."""
        return peer in self._heartbeats

    def silent(self, peer: bytes) -> bool:
        """Whether nothing has come for 2 s from a peer whose heartbeats are expected.

        Its process is stopped, or its machine or the network is gone.
        """
        return self._heartbeats.missed(peer)

    def send(self, peer: bytes, frames: list[Any]) -> bool:
        """Send a message; False if the peer cannot be reached."""
        send = self._send
        try:
            send(peer, _NOW_AND_MORE)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        # ROUTER refuses the identity or nothing: the rest goes where that went.
        for frame in frames[:-1]:
            send(frame, _NOW_AND_MORE)
        send(frames[-1], _NOW)
        return True


def _common(socket: zmq.Socket) -> None:
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_TIMEOUT_MS)
    for option, value in _KEEPALIVE.items():
        socket.setsockopt(option, value)
    # No send may block the loop it is made from.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
