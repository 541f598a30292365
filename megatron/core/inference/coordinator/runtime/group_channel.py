"""What the ranks of a process group tell each other over sockets of their own.

The first rank of a group leads: it listens, and the others join. Nobody else can: on one machine
the socket is a file in a folder of mode 0700, which is removed once all have joined; between
machines both ends have CURVE keys that travelled over the process group.

All ranks of a model-parallel group must see the same messages at the same step (`publish`,
`receive`). A member that has not joined yet would miss the first ones, and the group would hang; so
the leader counts who said hello, by rank, and nothing is sent before all have. `group_votes.py` has
the other use.
"""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from socket import gethostbyname
from typing import Any

import zmq

from megatron.core.inference.coordinator.runtime import wire
from megatron.core.inference.coordinator.runtime.keys import Credentials, Guard, Lock, Role

_PATIENCE_SECONDS = 120.0
"""How long a member may take to join, or to read when as many messages wait as may."""

_GONE_SECONDS = 5.0
"""How long a member may be gone before it is an error: a job's ranks are not told to end at the
same moment."""

_WAITING_MESSAGES = 1000
"""Messages for one member that may wait in memory, at either end."""

_GIVE_UP_MS = 100
_AGAIN_SECONDS = 0.01
_LINGER_MS = 500
_LONGEST_FOLDER = 80  # the path of a Unix socket has 107 bytes

_KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
"""A minute until a machine that is gone counts as gone: as patient as collectives are."""

Frames = Sequence[bytes]


class GroupError(RuntimeError):
    """A rank of the group did not join, is gone or does not read; the text says which."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """What a member needs to join. Pickles; only for the group's own eyes.

    Attributes:
        address: Where the leader listens.
        credentials: The members' keys; None on one machine.
    """

    address: str
    credentials: Credentials | None


class GroupLeader:
    """The first rank's end.

    Args:
        members: How many other ranks the group has.
        host: Address of this machine that they can reach; None if all are on this machine.
    """

    def __init__(self, members: int, host: str | None = None):
        self._members = {_name(rank): rank for rank in range(1, members + 1)}
        self._sent = 0
        self._context = zmq.Context()
        self._socket = _socket(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._folder: str | None = None
        self._guard: Guard | None = None
        self.invitation = self._listen_here() if host is None else self._listen_at(host)

    def wait_for_members(self) -> None:
        """Return when every other rank has joined, and tell them so.

        Raises:
            GroupError: Some did not.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        joined: set[int] = set()
        while len(joined) < len(self._members):
            heard = self.hear(deadline - time.monotonic())
            if heard is None:
                missing = ", ".join(map(str, sorted(set(self._members.values()) - joined)))
                raise GroupError(
                    f"ranks {missing} of a group of {len(self._members) + 1} did not join at "
                    f"{self.invitation.address} within {_PATIENCE_SECONDS:g} s"
                )
            joined.add(heard[0])
        self._remove_folder()
        self.tell([b"welcome"])

    def publish(self, messages: Sequence[Frames], give_up: Callable[[], bool]) -> None:
        """Hand over the messages of one drain, frames kept apart.

        Args:
            messages: The messages.
            give_up: Asked while a member cannot be reached or does not read.

        Raises:
            GroupError: A member is gone, or does not read.
            CancelledError: `give_up` said yes.
        """
        counts = wire.pack([len(frames) for frames in messages])
        self.tell([counts, *(frame for frames in messages for frame in frames)], give_up)

    def tell(self, frames: Frames, give_up: Callable[[], bool] = lambda: False) -> None:
        """Send frames to every member; see `publish`."""
        number = self._sent.to_bytes(8, "little")
        self._sent += 1
        for name, rank in self._members.items():
            self._send([name, number, *frames], rank, give_up)

    def hear(self, seconds: float) -> tuple[int, list[bytes]] | None:
        """What a member says, and its rank; None if nobody says anything in time.

        Args:
            seconds: How long to wait.
        """
        deadline = time.monotonic() + seconds
        while self._socket.poll(_milliseconds(deadline - time.monotonic())):
            name, *frames = self._socket.recv_multipart()
            if name in self._members:
                return self._members[name], frames
        return None

    def close(self, linger: Any = None) -> None:
        """Close the socket once the last messages have left. Calling it again does nothing.

        Args:
            linger: Not used; the released engine passes it to all its sockets.
        """
        self._remove_folder()
        _close(self._socket, self._context, self._guard)

    def _listen_here(self) -> Invitation:
        folder = tempfile.mkdtemp(prefix="megatron-")
        if len(folder) > _LONGEST_FOLDER:
            shutil.rmtree(folder)
            folder = tempfile.mkdtemp(prefix="megatron-", dir="/tmp")
        self._folder = folder
        self._socket.bind(f"ipc://{folder}/group")
        return Invitation(f"ipc://{folder}/group", None)

    def _listen_at(self, host: str) -> Invitation:
        lock = Lock.generate()
        self._guard = lock.guard(self._context)
        lock.apply(self._socket)
        host = gethostbyname(host)  # ZeroMQ binds to no names
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        return Invitation(f"tcp://{host}:{port}", lock.ring.credentials(Role.ENGINE))

    def _remove_folder(self) -> None:
        """Nobody can join any more; connections stay."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _send(self, frames: Frames, rank: int, give_up: Callable[[], bool]) -> None:
        since = time.monotonic()
        while True:
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
                return
            except zmq.Again:
                patience, state = _PATIENCE_SECONDS, "has not read what it was told"
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                patience, state = _GONE_SECONDS, "is gone"
            if give_up():
                raise asyncio.CancelledError
            if time.monotonic() - since > patience:
                raise GroupError(f"rank {rank} of the group {state} for {patience:g} s")
            time.sleep(_AGAIN_SECONDS)


class GroupMember:
    """Another rank's end; it is there once all members have joined.

    Args:
        invitation: The leader's.
        rank: This process's rank in the group, 1 or more.

    Raises:
        GroupError: The others did not join.
    """

    def __init__(self, invitation: Invitation, rank: int):
        self._received = 0
        self._context = zmq.Context()
        self._socket = _socket(self._context, zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, _name(rank))
        if invitation.credentials is not None:
            invitation.credentials.apply(self._socket)
        self._socket.connect(invitation.address)
        self.tell([b"hello"])
        if self.hear(_PATIENCE_SECONDS) is None:
            self.close()
            raise GroupError(
                f"rank {rank} of a group waited for the others at {invitation.address} for "
                f"{_PATIENCE_SECONDS:g} s"
            )

    def receive(self, give_up: Callable[[], bool]) -> list[list[bytes]]:
        """Wait for the messages of the next drain, each as its frames.

        Args:
            give_up: Asked now and then while nothing comes.

        Raises:
            GroupError: A message is missing.
            CancelledError: `give_up` said yes.
        """
        while (heard := self.hear(_GIVE_UP_MS / 1000)) is None:
            if give_up():
                raise asyncio.CancelledError
        counts, *frames = heard
        rest = iter(frames)
        return [[next(rest) for _ in range(count)] for count in wire.unpack(counts)]

    def hear(self, seconds: float | None) -> list[bytes] | None:
        """What the leader says next; None if nothing comes in time.

        Args:
            seconds: How long to wait; None without end.

        Raises:
            GroupError: A message is missing: the connection broke on the way.
        """
        if not self._socket.poll(None if seconds is None else _milliseconds(seconds)):
            return None
        number, *frames = self._socket.recv_multipart()
        if int.from_bytes(number, "little") != self._received:
            raise GroupError(
                "the connection to the first rank of the group broke, and what it said is lost"
            )
        self._received += 1
        return frames

    def tell(self, frames: Frames) -> None:
        """Send frames to the leader."""
        self._socket.send_multipart(frames)

    def close(self, linger: Any = None) -> None:
        """Close the socket once the last messages have left. Calling it again does nothing.

        Args:
            linger: Not used; the released engine passes it to all its sockets.
        """
        _close(self._socket, self._context)


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1000))


def _name(rank: int) -> bytes:
    return b"rank %d" % rank


def _socket(context: zmq.Context, kind: int) -> zmq.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, _WAITING_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, _WAITING_MESSAGES)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    for option, value in _KEEPALIVE.items():
        socket.setsockopt(option, value)
    return socket


def _close(socket: zmq.Socket, context: zmq.Context, guard: Guard | None = None) -> None:
    if not socket.closed:
        socket.close()
        if guard is not None:
            guard.stop()
        context.term()
