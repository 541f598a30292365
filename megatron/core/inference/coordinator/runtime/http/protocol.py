"""uvicorn's HTTP/1.1 protocol, with an end to every wait for the client and errors as JSON."""

import sys
from enum import Enum, auto
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron.core.inference.coordinator.runtime.http import errors, jsons
from megatron.core.inference.coordinator.runtime.http.errors import ApiError
from megatron.core.inference.coordinator.runtime.http.limits import HttpSettings


class Wait(Enum):
    """What a connection waits for the client to do."""

    BEGIN = auto()  # the first request
    HEAD = auto()  # the rest of a request's head
    END = auto()  # the rest of a body that nobody reads: its answer is out
    TAKE = auto()  # reading the answer


class Protocol(H11Protocol):
    """A connection. uvicorn itself ends those that are idle after an answer.

    The body's time runs in the application, which can tell a body that it needs from another.
    """

    _waiting: tuple[Wait | None, Any] = (None, None)
    _since = 0.0

    def data_received(self, data: bytes) -> None:
        """Takes bytes, no more of a head at a time than it may have."""
        most = self.config.h11_max_incomplete_event_size + 1
        while len(data) > most and self.conn.their_state is h11.IDLE:
            super().data_received(data[:most])
            data = data[most:]
            if self.transport.is_closing():
                return
        super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP; called while the parser's error is being handled."""
        fault = sys.exception()
        hint = fault.error_status_hint if isinstance(fault, h11.RemoteProtocolError) else 400
        hint = hint if hint < 500 else 400  # a transfer encoding that nobody knows is no fault here
        reason = f"This is no HTTP request that the server understands: {fault or msg}."
        self.refuse(errors.of_status(hint, "", "", reason))

    def refuse(self, error: ApiError) -> None:
        """Ends the connection, with an answer where none has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = jsons.dumps(error.body).encode()
            headers = {
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
                "Connection": "close",
            }
            reason = HTTPStatus(error.status).phrase
            for event in (
                h11.Response(
                    status_code=error.status, headers=list(headers.items()), reason=reason
                ),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event))
        if self.cycle is not None:  # the application must not answer as well
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def enforce(self, limits: HttpSettings, now: float) -> None:
        """Ends a wait that has become too long; to be called about once a second.

        Args:
            limits: How long a wait may be.
            now: Seconds, on any clock.
        """
        waiting = self._waits_for(), self.cycle  # a new request is another wait
        if waiting != self._waiting:
            self._waiting, self._since = waiting, now
            return
        seconds = {
            Wait.BEGIN: limits.idle_timeout,
            Wait.HEAD: limits.header_timeout,
            Wait.END: limits.header_timeout,
            Wait.TAKE: limits.body_timeout,
        }
        wait, _ = waiting
        if wait is None or now - self._since < seconds[wait]:
            return
        if wait is Wait.HEAD:
            self.refuse(errors.of_status(408, "", ""))
        else:  # close() would wait until the client has taken everything
            self.transport.abort()

    def _waits_for(self) -> Wait | None:
        if self.transport.is_closing() or self.flow.write_paused:
            return Wait.TAKE
        if self.cycle is not None and not self.cycle.response_complete:
            return None  # the application has it
        if self.timeout_keep_alive_task is not None:
            return None  # uvicorn's timer runs
        if self.conn.their_state is not h11.IDLE:
            return Wait.END
        begun, _ = self.conn.trailing_data
        return Wait.HEAD if begun else Wait.BEGIN
