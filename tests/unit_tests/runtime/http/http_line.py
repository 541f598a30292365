"""A connection to the front end's application, in process: uvicorn's protocol without a socket."""

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.server import ServerState

from megatron.core.inference.coordinator.runtime.http.gate import Gate
from megatron.core.inference.coordinator.runtime.http.limits import HttpSettings
from megatron.core.inference.coordinator.runtime.http.protocol import Protocol
from megatron.core.inference.coordinator.runtime.http.replica import server_config


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.data)


class Transport(asyncio.Transport):
    """Keeps what is written; `taken` False means that the client reads nothing."""

    def __init__(self):
        super().__init__()
        self.protocol: Any = None
        self.written = bytearray()
        self.reading = True
        self.closing = self.aborted = False
        self.taken = True

    def write(self, data):
        if not self.closing:
            self.written += data

    def is_closing(self):
        return self.closing

    def close(self):
        if not self.closing:
            self.closing = True
            if self.taken:
                self._lose()

    def abort(self):
        self.aborted = self.closing = True
        self._lose()

    def _lose(self):
        asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True

    def get_write_buffer_size(self):
        return 0 if self.taken else len(self.written)


class Line:
    """One connection; to be used inside a running event loop."""

    def __init__(self, app: Gate, limits: HttpSettings | None = None, config: Any = None):
        config = config or server_config(app, limits or HttpSettings())
        self.transport = Transport()
        self.server = ServerState()
        self.protocol = Protocol(config, self.server, {}, asyncio.get_running_loop())
        self.transport.protocol = self.protocol
        self.protocol.connection_made(self.transport)

    async def send(self, pieces: bytes | Iterable[bytes]) -> None:
        """Sends pieces as long as the server reads, and lets it work in between."""
        for piece in [pieces] if isinstance(pieces, bytes) else pieces:
            await _until(lambda: self.transport.reading or self.transport.closing)
            if self.transport.closing:
                return
            if piece:  # an empty one would mean the end to the parser
                self.protocol.data_received(piece)
            await asyncio.sleep(0)

    async def settle(self) -> None:
        """Waits until the server waits for the client."""
        await _until(lambda: self.transport.closing or self._waits())
        if self.transport.closing:
            await _until(lambda: not self.server.tasks)

    async def hang_up(self) -> None:
        """Ends the connection as a client that goes away."""
        if not self.transport.closing:
            self.transport.abort()
        await _until(lambda: not self.server.tasks and not self.server.connections)

    def _waits(self) -> bool:
        cycle, conn = self.protocol.cycle, self.protocol.conn
        if cycle is None or cycle.response_complete:
            return True
        # The application may answer without the body: give it the time to.
        self._turns = getattr(self, "_turns", 0) + 1
        return conn.their_state is h11.SEND_BODY and self._turns > 50

    def answers(self, methods: Iterable[str] = ()) -> list[Answer]:
        """The answers so far.

        Args:
            methods: Of the requests, in their order; only HEAD makes a difference.
        """
        data, found, methods = bytes(self.transport.written), [], list(methods)
        while data:
            head, blank, data = data.partition(b"\r\n\r\n")
            assert blank, f"an answer without an end: {head!r}"
            first, *lines = head.decode().split("\r\n")
            status = int(first.split()[1])
            headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
            if status < 200:
                continue
            length = int(headers["content-length"])
            if len(found) < len(methods) and methods[len(found)] == "HEAD":
                length = 0
            found.append(Answer(status, headers, data[:length]))
            assert len(found[-1].data) == length, "an answer is cut off"
            data = data[length:]
        return found


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "the server neither answers nor waits"
        await asyncio.sleep(0)


def request(
    path: str, body: Any = None, *, method: str = "POST", headers: dict[str, str] | None = None
) -> bytes:
    """A request as bytes; a body that is no bytes is sent as JSON."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"Host": "test", "Content-Length": str(len(data))}
    lines |= {"Content-Type": "application/json"} | (headers or {})
    head = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in lines.items())]
    return "\r\n".join([*head, "", ""]).encode() + data
