"""A connection to a coordinator: a DEALER socket, another one each time that it breaks."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import Enum, auto

import zmq

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.runtime import sockets
from megatron.core.inference.coordinator.runtime.keys import Credentials


class Change(Enum):
    """What can happen to a connection."""

    REACHED = auto()
    """Something listens at the address."""
    MET = auto()
    """It is a coordinator, and lets this peer in."""
    FAILED = auto()
    """Whoever listens did not let this peer in, without a word; it is tried again."""
    REFUSED = auto()
    """It cannot be spoken to, or not with these keys; it is not tried again."""
    BROKE = auto()
    """The connection broke; another one is being made, and `socket` is a new one."""


_CHANGES = {
    zmq.EVENT_CONNECTED: Change.REACHED,
    zmq.EVENT_HANDSHAKE_SUCCEEDED: Change.MET,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: Change.FAILED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: Change.REFUSED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: Change.REFUSED,
    zmq.EVENT_DISCONNECTED: Change.BROKE,
}


class Connection:
    """A DEALER socket that is watched.

    ZeroMQ would make a broken connection again by itself, but what was on its way is lost, so a
    peer has to begin anew. It has to come under another identity: a ROUTER that has not noticed
    the break yet takes no notice of a second peer of the same identity, nor does it later.

    Args:
        context: Where the sockets live.
        address: The coordinator's.
        name: Unique among all peers; the identities begin with it.
        pulse: How often it sends heartbeats.
        credentials: Gives the peer's keys, each time; None where the coordinator speaks in plain.

    Attributes:
        socket: The socket.
        watch: A socket that is readable when `changes` has something to tell.

    Raises:
        ValueError: The address is none.
    """

    socket: zmq.Socket
    watch: zmq.Socket

    def __init__(
        self,
        context: zmq.Context,
        address: str,
        name: bytes,
        pulse: sockets.Pulse,
        credentials: Callable[[], Credentials | None] = lambda: None,
    ):
        self._context = context
        self._address = address
        self._name = name
        self._pulse = pulse
        self._credentials = credentials
        self._count = 0
        # Who is forgotten, and never closed, must not keep the context from ending.
        self._open_sockets: list[zmq.Socket] = []
        weakref.finalize(self, _close_all, self._open_sockets)
        self._open()

    def send(self, frames: Sequence[m.Body]) -> None:
        """Send a message, or keep it until the connection stands; never waits.

        It is lost where the connection was refused, which `changes` tells: a DEALER has nowhere to
        put it then, and would wait for ever.
        """
        small = all(len(frame) < zmq.COPY_THRESHOLD for frame in frames)
        with suppress(zmq.Again):  # bytes that many messages share are not copied for each
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=small)

    def changes(self) -> Iterator[Change]:
        """What has happened since it was last asked, in order."""
        while self.watch.poll(0):
            number = int.from_bytes(self.watch.recv_multipart()[0][:2], "little")
            change = _CHANGES[zmq.Event(number)]
            if change is Change.MET:
                self._met = True
            elif change is Change.BROKE:
                if not self._met:  # nothing has left yet, and ZeroMQ tries on
                    continue
                self.renew()
            yield change

    def renew(self) -> None:
        """Begin anew, with another socket."""
        self.close(linger_ms=0)
        self._open()

    def close(self, linger_ms: int) -> None:
        """Close it once the last messages have left. Calling it again does nothing.

        Args:
            linger_ms: How long they may take.
        """
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.watch.close(linger=0)
            self.socket.close(linger=linger_ms)
            self._open_sockets.clear()

    def _open(self) -> None:
        self._count += 1
        self._met = False
        identity = b"%s-%d" % (self._name, self._count)

        def watch(socket: zmq.Socket) -> None:
            events = sum(_CHANGES)  # each is a bit of its own
            self.watch = socket.get_monitor_socket(events, f"inproc://{identity.hex()}")
            self._open_sockets[:] = socket, self.watch

        self.socket = sockets.dealer(
            self._context, self._address, identity, self._credentials(), self._pulse, watch
        )


def _close_all(open_sockets: list[zmq.Socket]) -> None:
    for socket in open_sockets:
        socket.close(linger=0)
