"""An engine's link to the coordinator: registration, draining, and noticing that it is gone."""

import logging
import time
from collections.abc import Callable

import zmq

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.runtime import sockets, wire
from megatron.core.inference.coordinator.runtime.process import CoordinatorDied

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 1.0
"""How long a broken connection may take to come back before the coordinator counts as dead."""


class CoordinatorLink:
    """The DEALER socket of one engine.

    Args:
        context: Where the socket lives.
        address: The coordinator's.
        identity: Unique among all peers.
        check_process: Raises when the coordinator is a process of ours and has died.
    """

    def __init__(
        self,
        context: zmq.Context,
        address: str,
        identity: bytes,
        check_process: Callable[[], None] = lambda: None,
    ):
        self.address = address
        self._check_process = check_process
        self.socket = sockets.dealer(context, address, identity)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        self._broken_since: float | None = None

    def register(self, register: m.Register, timeout: float) -> m.RegisterAck:
        """Offer the engine and wait until it is taken.

        Raises:
            CoordinatorDied: No answer came in time, or the coordinator is gone.
        """
        self.send(register)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self.check()
            if self.socket.poll(200):
                message = wire.decode_from_coordinator(self.socket.recv_multipart())
                if isinstance(message, m.RegisterAck):
                    return message
                if isinstance(message, m.RequestError):
                    raise CoordinatorDied(f"the coordinator refused this engine: {message.text}")
        raise CoordinatorDied(
            f"the coordinator at {self.address} did not take this engine's registration "
            f"within {timeout:g} s; are all replicas running the same version?"
        )

    def drain(self) -> list[list[bytes]]:
        """Take all messages that have arrived, each as its frames."""
        messages = []
        while True:
            try:
                messages.append(self.socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return messages

    def send(self, message: m.ToCoordinator) -> None:
        """Send a message."""
        self.socket.send_multipart(wire.encode(message))

    def check(self) -> None:
        """Do nothing while the coordinator is there.

        Raises:
            CoordinatorDied: Its process ended, or its connection broke and stays so.
        """
        self._check_process()
        while self._monitor.poll(0):
            event = int.from_bytes(self._monitor.recv_multipart()[0][:2], "little")
            broken = event == zmq.EVENT_DISCONNECTED
            self._broken_since = time.monotonic() if broken else None
        broken_since = self._broken_since
        if broken_since is not None and time.monotonic() - broken_since > _GRACE_SECONDS:
            raise CoordinatorDied(f"the connection to the coordinator at {self.address} broke")

    def close(self) -> None:
        """Stop watching the connection; the socket itself belongs to the engine."""
        if not self._monitor.closed:
            self.socket.disable_monitor()
            self._monitor.close(linger=0)
