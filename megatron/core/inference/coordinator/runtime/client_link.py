"""A client's link to the coordinator, in an asyncio event loop; it comes back when it breaks."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable

import zmq

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.runtime import keys, wire
from megatron.core.inference.coordinator.runtime.connection import Change, Connection
from megatron.core.inference.coordinator.runtime.sockets import CLIENT_PULSE
from megatron.core.inference.coordinator.settings import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

_AGAIN_SECONDS = 1.0
"""Until a coordinator that did not let the client in is tried again, with the keys of then."""

_FAILURES = 20
"""Handshakes in a row, about 10 a second, that fail until it is tried with the keys of then."""

_LINGER_MS = 100


class CoordinatorUnreachable(ConnectionError):
    """No coordinator answered; the text says what was tried."""


class ClientLink:
    """A client's link to the coordinator. Not thread-safe.

    Args:
        address: The coordinator's.
        text_prompts: See `messages.Connect`.
        receive: Takes each message that comes, a `ConnectAck` first, and another one each time
            that a broken connection is back.
        lose: Called with the reason when the connection has broken.

    Attributes:
        trouble: Why nothing can be sent at present; None if it can, or before `open`.

    Raises:
        ValueError: The address is none, or the key file cannot be used.
    """

    def __init__(
        self,
        address: str,
        text_prompts: bool,
        receive: Callable[[m.FromCoordinator], None],
        lose: Callable[[str], None],
    ):
        self._address = address
        self._greeting = m.Connect(PROTOCOL_VERSION, text_prompts)
        self._receive = receive
        self._lose = lose
        self._loop: asyncio.AbstractEventLoop | None = None
        self.trouble: str | None = None
        self._failures = 0
        self._ended_it = False  # this client ended the coordinator: nobody is to be warned
        self._context = zmq.Context()
        name = b"client-" + uuid.uuid4().bytes
        self._connection = Connection(self._context, address, name, CLIENT_PULSE, self._credentials)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return bool(self._connection.socket.closed)

    def open(self, loop: asyncio.AbstractEventLoop, timeout: float) -> None:
        """Connect, and let messages come in from now on.

        Args:
            loop: The event loop that they arrive on.
            timeout: Seconds to wait for the coordinator.

        Raises:
            CoordinatorUnreachable: Nothing, or something else than our coordinator, answered.
        """
        self._receive(self._handshake(timeout))
        self._loop = loop
        self._listen()

    def send(self, message: m.ToCoordinator) -> None:
        """Send a message."""
        self._ended_it = self._ended_it or isinstance(message, m.Shutdown)
        self._connection.send(wire.encode(message))
        # Sending may swallow the one signal that something has arrived: look again.
        if self._loop is not None and int(self._connection.socket.EVENTS) & zmq.POLLIN:
            self._loop.call_soon_threadsafe(self._on_readable)

    def close(self) -> None:
        """Say good-bye and close the connection."""
        self._ignore()
        self.send(m.Disconnect())
        self._connection.close(_LINGER_MS)
        self._context.term()

    # --- the first time ----------------------------------------------------------------------

    def _credentials(self) -> keys.Credentials | None:
        ring = keys.known(self._address)
        return None if ring is None else ring.credentials(keys.Role.CONTROL, keys.Role.SUBMIT)

    def _handshake(self, timeout: float) -> m.ConnectAck:
        tried = f"{self._address} (CONNECT, protocol {PROTOCOL_VERSION})"
        frames = self._first_answer(tried, timeout)
        try:
            message = wire.decode_from_coordinator(frames)
        except wire.WireError:
            message = None
        if isinstance(message, m.RequestError):
            raise CoordinatorUnreachable(f"{tried} refused: {message.text}")
        if not isinstance(message, m.ConnectAck):
            raise CoordinatorUnreachable(
                f"{tried} answers, but is no prefix-routing coordinator; call "
                "megatron.core.inference.coordinator.patch() where it is started"
            )
        return message

    def _first_answer(self, tried: str, timeout: float) -> list[bytes]:
        its_keys = f"are its keys in the file that {keys.KEY_FILE_VARIABLE} names?"
        deadline = time.monotonic() + timeout
        self.send(self._greeting)
        while time.monotonic() < deadline:
            for change in self._connection.changes():
                if change is Change.REFUSED:
                    raise CoordinatorUnreachable(f"{tried} does not let this client in; {its_keys}")
                if change is Change.BROKE:  # the greeting may have been on its way
                    self.send(self._greeting)
            if self._connection.socket.poll(100):
                return self._connection.socket.recv_multipart()
        raise CoordinatorUnreachable(
            f"no answer from {tried} within {timeout:g} s; is the coordinator running, is this "
            f"its address, and {its_keys}"
        )

    # --- afterwards --------------------------------------------------------------------------

    def _listen(self) -> None:
        assert self._loop is not None
        self._loop.add_reader(self._connection.socket.FD, self._on_readable)
        self._loop.add_reader(self._connection.watch.FD, self._on_change)
        # Nobody tells of what has come already.
        self._loop.call_soon_threadsafe(self._on_readable)
        self._loop.call_soon_threadsafe(self._on_change)

    def _ignore(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._connection.socket.FD)
            self._loop.remove_reader(self._connection.watch.FD)

    def _on_readable(self) -> None:
        # The file descriptor of a ZeroMQ socket signals once: take all there is.
        while not self.closed:
            try:
                frames = self._connection.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(wire.decode_from_coordinator(frames))
            except Exception:
                logger.exception("answer_refused")

    def _take(self, message: m.FromCoordinator) -> None:
        match message:
            case m.Ping(number=number):
                self.send(m.Pong(number))
                return
            case m.ConnectAck():
                self.trouble = None
                logger.warning("client_connected_again address=%s", self._address)
            case m.RequestError(client_request_id=None, text=reason):
                self.trouble = f"the coordinator at {self._address} refused this client: {reason}"
            case m.RequestError(code=m.ErrorCode.NOT_CONNECTED):  # it has given this client up
                self._lost("was given up by it")
                self._try_again()
        self._receive(message)

    def _on_change(self) -> None:
        """Look after the connection."""
        if self.closed or not self._connection.watch.poll(0):
            return
        self._on_readable()  # what came before it broke
        self._ignore()
        for change in self._connection.changes():
            self._heed(change)
        self._listen()

    def _heed(self, change: Change) -> None:
        match change:
            case Change.MET:
                self._failures = 0
            case Change.BROKE:
                self._lost("broke")
                self.send(self._greeting)
            case Change.FAILED:
                self._failures += 1
                if self._failures % _FAILURES == 0:
                    self._try_again_soon()
            case Change.REFUSED:
                self._lost("is refused")
                self._try_again_soon()

    def _lost(self, how: str) -> None:
        self.trouble = f"the connection to the coordinator at {self._address} {how}"
        level = logging.INFO if self._ended_it else logging.WARNING
        logger.log(level, "client_disconnected reason=%r", self.trouble)
        self._lose(self.trouble)

    def _try_again_soon(self) -> None:
        assert self._loop is not None
        self._loop.call_later(_AGAIN_SECONDS, self._try_again)

    def _try_again(self) -> None:
        if not self.closed and self.trouble is not None:
            self._ignore()
            self._connection.renew()
            self.send(self._greeting)
            self._listen()
