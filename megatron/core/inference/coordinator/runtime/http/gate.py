"""What stands before the application: who may pass, and what every answer is, come what may."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from megatron.core.inference.coordinator.runtime.http import errors, jsons
from megatron.core.inference.coordinator.runtime.http.access import ApiKeys, is_loopback
from megatron.core.inference.coordinator.runtime.http.errors import ApiError
from megatron.core.inference.coordinator.runtime.http.limits import LARGE_BODY

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/v1/health", "/health/live", "/v1/health/live"})
"""Load balancers ask these without a key."""

LINGER_S = 1.0
"""Seconds between an answer that does not wait for the request's body and the connection's end: one
that is closed while more is coming is reset, and some systems forget the answer then."""

ROOM_WAIT_S = 10.0
"""Seconds that a large body waits, unread, for those before it to be done with."""

_NOT_JSON = (
    "Send POST requests with 'Content-Type: application/json'. Without API keys, this keeps web "
    "pages from sending requests through their readers' browsers."
)
_NOT_THIS_HOST = (
    "The Host header names neither this machine's loopback nor the host that is served. Without "
    "API keys, this keeps web pages from reaching this server under a name of their own. Use its "
    "own address, or start it with --api-key."
)
_NO_ROOM = "This server has no memory for another large request body now. Try again later."


class Gate:
    """An ASGI application around another.

    Whoever has no key, or announces a body that is too large, is answered here: nothing of the
    body is read, and the application does not hear of it. So is a web page that sends requests
    from a browser on a machine that asks for no key. What the application lets escape becomes an
    answer as well. The application finds the key's id in `scope["api_key_id"]`, and
    what keeps its cached prefixes apart in `scope["cache_salt"]`.

    Args:
        app: The application; it sees HTTP requests whose paths begin with a slash.
        keys: The keys that open the gate.
        max_body_bytes: Larger bodies are refused. The application counts those that grow.
        replica: Which front end this is; sent along as header `x-frontend-replica`.
        body_budget: Bytes for all bodies larger than `LARGE_BODY`, at least `max_body_bytes`. Room
            is taken for a whole body once that much of it has come, so that it can come to its end,
            and given back when the application calls `scope["body_is_done"]`, or has answered. A
            body that finds no room is answered with 503, not 429: it is this server that lacks
            something, whoever asks.
        loopback_host: The name or address that is served, where it is one of this machine alone:
            requests without a key must then name it, or the loopback. None: any Host will do.
    """

    def __init__(
        self,
        app: App,
        keys: ApiKeys,
        max_body_bytes: int,
        replica: int = 0,
        body_budget: int | None = None,
        loopback_host: str | None = None,
    ):
        self._app = app
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._replica = str(replica)
        self._budget = _Budget(body_budget)
        self._loopback_host = loopback_host

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answers one request, or lets it pass."""
        largest = self._max_body_bytes
        exchange = _Exchange(scope["headers"], receive, send, self._budget, largest)
        scope["body_is_done"] = exchange.give_back
        error = self._refusal(scope)
        try:
            if error is None:
                error = await self._pass(scope, exchange)
            if error is not None:
                await exchange.answer(error, self._replica)
        finally:
            exchange.give_back()

    async def _pass(
        self, scope: MutableMapping[str, Any], exchange: "_Exchange"
    ) -> ApiError | None:
        """Lets the application answer; the error to answer with where it does not."""
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception as fault:
            if exchange.refusal is not None and not exchange.answered:
                return exchange.refusal
            logger.error("http_request_failed path=%r", scope["path"], exc_info=fault)
            if exchange.answered:
                raise
            return errors.internal()
        return None

    def _refusal(self, scope: MutableMapping[str, Any]) -> ApiError | None:
        path = scope["path"]
        authorization = _header(scope["headers"], b"authorization")
        scope["api_key_id"] = self._keys.identify(authorization)
        scope["cache_salt"] = self._keys.salt(authorization)
        if path not in OPEN_PATHS:
            if scope["api_key_id"] is None:
                return errors.of_status(401, scope["method"], path)
            refusal = self._page_refusal(scope)
            if refusal is not None:
                return refusal
        length = _header(scope["headers"], b"content-length")
        if length.isdigit() and int(length[:20]) > self._max_body_bytes:
            return errors.of_status(413, scope["method"], path)
        if not path.startswith("/"):  # e.g. "OPTIONS *"; the application counts on a slash
            return errors.of_status(404, scope["method"], path)
        return None

    def _page_refusal(self, scope: MutableMapping[str, Any]) -> ApiError | None:
        """Refuses what a web page could send that knows no key.

        A browser sends other pages' JSON only after asking for it with OPTIONS, which nothing here
        permits; and a page that has its own name lead here still sends that name.
        """
        if len(self._keys):
            return None
        if scope["method"] == "POST" and not _is_json(_header(scope["headers"], b"content-type")):
            return ApiError(415, _NOT_JSON, code="unsupported_media_type")
        host = _name_of(_header(scope["headers"], b"host"))
        if self._loopback_host is None or host in ("", self._loopback_host) or is_loopback(host):
            return None
        return ApiError(403, _NOT_THIS_HOST, code="forbidden")


class _Budget:
    """Bytes that large bodies may hold together; who finds no room waits, first come first served.

    Args:
        total: How many; None: any number.
    """

    def __init__(self, total: int | None):
        self._left = math.inf if total is None else total
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> bool:
        """Takes room for a body; False if there was none for too long."""
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((size, turn))
        self._serve()
        try:
            await asyncio.wait_for(asyncio.shield(turn), ROOM_WAIT_S)
        except TimeoutError:
            return False
        finally:
            if not turn.done():
                turn.cancel()
                self._serve()  # who comes next may need less
        return True

    def give_back(self, size: int) -> None:
        """Takes room back."""
        self._left += size
        self._serve()

    def _serve(self) -> None:
        while self._queue:
            size, turn = self._queue[0]
            if not turn.done():
                if size > self._left:
                    return
                self._left -= size
                turn.set_result(None)
            self._queue.popleft()


class _Exchange:
    """A request and its answer, whose end waits a moment where the client may still be sending.

    Attributes:
        answered: Whether an answer has begun.
        refusal: Why no more of the body is taken.
    """

    def __init__(
        self,
        headers: Iterable[tuple[bytes, bytes]],
        receive: Receive,
        send: Send,
        budget: _Budget,
        max_body_bytes: int,
    ):
        headers = list(headers)
        self.answered = False
        self.refusal: ApiError | None = None
        self._budget = budget
        self._received = self._taken = 0
        length = _header(headers, b"content-length")
        chunked = bool(_header(headers, b"transfer-encoding"))  # then the length does not count
        self._size = int(length) if length.isdigit() and not chunked else max_body_bytes
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
        before, self._received = self._received, self._received + len(message.get("body", b""))
        if before <= LARGE_BODY < self._received:
            if not await self._budget.take(self._size):
                self.refusal = ApiError(503, _NO_ROOM, code="no_memory", unread=True)
                raise self.refusal
            self._taken = self._size
        return message

    def give_back(self) -> None:
        """Gives back the room of the body."""
        self._budget.give_back(self._taken)
        self._taken = 0

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


def _is_json(content_type: bytes) -> bool:
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == b"application/json" or (
        kind.startswith(b"application/") and kind.endswith(b"+json")
    )


def _name_of(host: bytes) -> str:
    """The name or address in a Host header, without its port."""
    text = host.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].removesuffix(".")


def _header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes:
    """The first value of a header; empty if it is missing."""
    return next((value for each, value in headers if each.lower() == name), b"")
