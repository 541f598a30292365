"""An engine's link to the coordinator: registration, and noticing that the coordinator is gone."""

import logging
import time
from collections.abc import Callable

import zmq

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.runtime import wire
from megatron.core.inference.coordinator.runtime.connection import Change, Connection
from megatron.core.inference.coordinator.runtime.keys import Credentials
from megatron.core.inference.coordinator.runtime.process import CoordinatorDied
from megatron.core.inference.coordinator.runtime.sockets import ENGINE_PULSE

logger = logging.getLogger(__name__)

GRACE_SECONDS = 1.0
"""How long a broken connection to a coordinator of the same job may take to come back."""

_PATIENCE_SECONDS = 30.0
"""How long it may take at least where something listens: a busy machine, or a debugger."""

_SILENT_SECONDS, _TOLD_SECONDS = 3.0, 60.0
"""How long a registration is waited for without a word, and until it is said again."""

_FAILURES_TOLD = 20
"""Handshakes that fail in a row, about 10 a second, before it is said what may be wrong."""

_DRAINED_BYTES = 16 << 20
"""What is read of what has arrived at once, about 10 ms: a group's ranks copy it to each other."""

_LINGER_MS = 500
"""How long the last messages, e.g. an answer and the good-bye, may take to leave this machine."""


class CoordinatorLink:
    """The connection of one engine.

    Args:
        context: Where the sockets live.
        address: The coordinator's.
        name: Unique among all peers; the identities begin with it.
        check_process: Raises when the coordinator is a process of ours and has died.
        grace: Seconds that a broken connection may take to come back before the coordinator counts
            as dead.
        credentials: Its keys; None where the coordinator speaks in plain.
    """

    def __init__(
        self,
        context: zmq.Context,
        address: str,
        name: bytes,
        check_process: Callable[[], None] = lambda: None,
        grace: float = GRACE_SECONDS,
        credentials: Credentials | None = None,
    ):
        self.address = address
        self._plain = credentials is None
        self._connection = Connection(context, address, name, ENGINE_PULSE, lambda: credentials)
        self._grace = self._patience = grace
        self._check_process = check_process
        self._failures, self._reached = 0, False
        self._broken_since: float | None = None

    @property
    def socket(self) -> zmq.Socket:
        """The socket of the present connection."""
        return self._connection.socket

    def register(self, register: m.Register, timeout: float) -> m.RegisterAck:
        """Offer the engine and wait until it is taken.

        Raises:
            CoordinatorDied: No answer came in time, or the coordinator is gone.
        """
        self.send(register)
        began = time.monotonic()
        deadline, tell_at = began + timeout, began + _SILENT_SECONDS
        while (now := time.monotonic()) < deadline:
            if now > tell_at:
                tell_at = now + _TOLD_SECONDS
                self._tell_what_is_awaited(deadline - now)
            if self.check():  # it may have been on its way
                self.send(register)
            if self.socket.poll(200):
                message = wire.decode_from_coordinator(self.socket.recv_multipart())
                if isinstance(message, m.RegisterAck):
                    return message
                if isinstance(message, m.RequestError):
                    raise CoordinatorDied(f"the coordinator refused this engine: {message.text}")
        raise CoordinatorDied(
            f"the coordinator at {self.address} did not take this engine's registration "
            f"within {timeout:g} s; is it running, is this its address, are these its keys, and "
            "are all replicas running the same version?"
        )

    def _tell_what_is_awaited(self, seconds_left: float) -> None:
        state = "it has not taken this engine yet" if self._reached else "nothing listens there"
        logger.warning(
            "waiting_for_coordinator address=%s state=%r; another %.0f s, then it is given up",
            self.address,
            state,
            seconds_left,
        )

    def drain(self) -> list[list[bytes]]:
        """Take messages that have arrived, each as its frames: all, or 16 MiB and the last one."""
        messages: list[list[bytes]] = []
        size = 0
        while size < _DRAINED_BYTES:
            try:
                messages.append(self.socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
            size += sum(map(len, messages[-1]))
        return messages

    def send(self, message: m.ToCoordinator) -> None:
        """Send a message."""
        self._connection.send(wire.encode(message))

    def check(self) -> bool:
        """Look after the connection; one that broke is replaced.

        Returns:
            Whether it broke, so that the engine has to be registered anew.

        Raises:
            CoordinatorDied: The coordinator's process ended, its connection broke and stays so, or
                it does not let this engine in.
        """
        self._check_process()
        broke = False
        for change in self._connection.changes():
            broke |= change is Change.BROKE
            self._heed(change)
        broken_since = self._broken_since
        if broken_since is not None and time.monotonic() - broken_since > self._patience:
            raise CoordinatorDied(f"the connection to the coordinator at {self.address} broke")
        return broke

    def _heed(self, change: Change) -> None:
        match change:
            case Change.REACHED:
                self._reached = True
                self._patience = max(self._grace, _PATIENCE_SECONDS)
            case Change.MET:
                self._failures, self._broken_since = 0, None
            case Change.BROKE:
                self._reached = False
                self._patience, self._broken_since = self._grace, time.monotonic()
            case Change.FAILED:
                self._failures += 1
                if self._failures == _FAILURES_TOLD:
                    logger.warning(
                        "handshakes_fail address=%s; does a coordinator listen there, and is the "
                        "key file the one that it wrote?",
                        self.address,
                    )
            case Change.REFUSED:
                how = "with keys" if self._plain else "with other keys, or in plain"
                raise CoordinatorDied(
                    f"the coordinator at {self.address} does not take this engine; does it speak "
                    f"{how}, or is something else there?"
                )

    @property
    def broken(self) -> bool:
        """Whether the connection has broken and is not back yet, as far as `check` has seen."""
        return self._broken_since is not None

    def close(self) -> None:
        """Close the connection once the last messages have left. Calling it again does nothing."""
        self._connection.close(_LINGER_MS)
