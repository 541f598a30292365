"""What stands before the application: who may pass, and what every answer is, come what may."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from megatron.core.inference.coordinator.runtime.http import errors, jsons
from megatron.core.inference.coordinator.runtime.http.access import ApiKeys
from megatron.core.inference.coordinator.runtime.http.errors import ApiError

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/v1/health"})
"""Load balancers ask these without a key."""

LINGER_S = 1.0
"""Seconds between an answer that does not wait for the request's body and the connection's end: one
that is closed while more is coming is reset, and some systems forget the answer then."""


class Gate:
    """An ASGI application around another.

    Whoever has no key, or announces a body that is too large, is answered here: nothing of the
    body is read, and the application does not hear of it. What the application lets escape
    becomes an answer as well.

    Args:
        app: The application; it sees HTTP requests whose paths begin with a slash.
        keys: The keys that open the gate.
        max_body_bytes: Larger bodies are refused. The application counts those that grow.
        replica: Which front end this is; sent along as header `x-frontend-replica`.
    """

    def __init__(self, app: App, keys: ApiKeys, max_body_bytes: int, replica: int = 0):
        self._app = app
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._replica = str(replica)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answers one request, or lets it pass."""
        exchange = _Exchange(scope["headers"], receive, send)
        error = self._refusal(scope)
        if error is None:
            try:
                return await self._app(scope, exchange.receive, exchange.send)
            except Exception as fault:
                logger.error("http_request_failed path=%r", scope["path"], exc_info=fault)
                if exchange.answered:
                    raise
                error = errors.internal()
        return await exchange.answer(error, self._replica)

    def _refusal(self, scope: MutableMapping[str, Any]) -> ApiError | None:
        path = scope["path"]
        if path not in OPEN_PATHS and not self._keys.admit(
            _header(scope["headers"], b"authorization")
        ):
            return errors.of_status(401, scope["method"], path)
        length = _header(scope["headers"], b"content-length")
        if length.isdigit() and int(length[:20]) > self._max_body_bytes:
            return errors.of_status(413, scope["method"], path)
        if not path.startswith("/"):  # e.g. "OPTIONS *"; the application counts on a slash
            return errors.of_status(404, scope["method"], path)
        return None


class _Exchange:
    """A request and its answer, whose end waits a moment where the client may still be sending.

    Attributes:
        answered: Whether an answer has begun.
    """

    def __init__(self, headers: Iterable[tuple[bytes, bytes]], receive: Receive, send: Send):
        headers = list(headers)
        self.answered = False
        self._receive = receive
        self._send = send
        self._closing = False
        self._coming = _header(headers, b"content-length") not in (b"", b"0") or bool(
            _header(headers, b"transfer-encoding")
        )

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._coming = False
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.answered = True
            connection = _header(message.get("headers", ()), b"connection")
            self._closing = connection.lower() == b"close"
        elif self._closing and self._coming and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await asyncio.sleep(LINGER_S)
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def answer(self, error: ApiError, replica: str) -> None:
        body = jsons.dumps(error.body).encode()
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "x-frontend-replica": replica,
            **error.headers,
        }
        encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": error.status, "headers": encoded})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})


def _header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes:
    """The first value of a header; empty if it is missing."""
    return next((value for each, value in headers if each.lower() == name), b"")
