"""The coordinator's loop: receive, let the core decide, perform what it says."""

import logging
import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import zmq

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.core import Coordinator
from megatron.core.inference.coordinator.runtime import wire
from megatron.core.inference.coordinator.runtime.codec import Codec
from megatron.core.inference.coordinator.runtime.eventlog import EventLog
from megatron.core.inference.coordinator.runtime.sockets import Mailbox
from megatron.core.inference.coordinator.runtime.text import generated_text

logger = logging.getLogger(__name__)

_TICK_MS = 1000
_STILL_SECONDS = 2.0
"""Between two ticks: beyond, the process itself was stopped, or its machine was."""
_MESSAGES_AT_ONCE = 8
"""Of those that wait, so many are handled before what came of them is sent. That is enough to share
the cost of a first send; with 64 everybody else waits meanwhile, and a fifth fewer go through."""
_SAID_BY_RANKS = (m.Register, m.Pong)
"""By those that are pinged; released engines, which send no heartbeats, never are."""


class CoordinatorLoop:
    """Drives a `Coordinator` from a bound ROUTER socket until it is stopped.

    What is to be sent is collected while messages wait, and then sent in one go, in order: the
    first send wakes libzmq's thread, which costs more than the sending, and the others find it
    awake. At full load that saves a sixth of the time a request takes.

    Args:
        core: The coordinator.
        router: Its socket, bound.
        tokenizer: For replies of released engines to clients without a tokenizer; may be None
            where neither occurs.
        stop_when_readable: A file descriptor that ends the loop when it becomes readable, e.g.
            the parent process's sentinel.
        each_tick: Called about once a second, between two messages.
        rights_of: See `sockets.Mailbox`.
        traced: Called with every trace that the core makes.
    """

    def __init__(
        self,
        core: Coordinator,
        router: zmq.Socket,
        tokenizer: Any = None,
        stop_when_readable: int | None = None,
        each_tick: Callable[[], None] = lambda: None,
        rights_of: Callable[[zmq.Frame], m.Right] = lambda frame: m.Right.ALL,
        traced: Callable[[m.Trace], None] = lambda trace: None,
    ):
        self.core = core
        self.events = EventLog(logger)
        self._router = router
        self._mailbox = Mailbox(router, rights_of)
        self._codec = Codec(lambda body: self._with_text(tokenizer, body))
        self._outgoing: list[tuple[m.Send, list[m.Body]]] = []
        self._each_tick = each_tick
        self._stopped = False
        self._last_tick = -math.inf
        self._poller = zmq.Poller()
        self._poller.register(router, zmq.POLLIN)
        self._wake_up, self._woken = os.pipe()[::-1]
        self._stop_fds = {self._woken}
        if stop_when_readable is not None:
            self._stop_fds.add(stop_when_readable)
        for descriptor in self._stop_fds:
            self._poller.register(descriptor, zmq.POLLIN)
        self._performers: dict[type, Callable[[Any], None]] = {
            m.Send: self._send,
            m.Log: self.events.write,
            m.Trace: traced,
            m.Stop: lambda effect: self.stop(),
        }

    def run(self) -> None:
        """Receive and decide until stopped."""
        while not self._stopped:
            sweeps = self.core.backlog
            ready = dict(self._poller.poll(0 if sweeps else _TICK_MS))
            if self._stop_fds & ready.keys():
                return
            self._tick_if_due()  # first: after a standstill, deadlines are to know of it
            if self._router in ready:
                self._receive()
            elif sweeps:
                self._handle(m.Incoming(b"", m.Sweep()))
            self._send_all()

    def stop(self) -> None:
        """End `run` after the message at hand. Safe in a signal handler."""
        self._stopped = True
        os.write(self._wake_up, b".")

    def stop_at(self, number: int) -> None:
        """End `run`, in the main thread, when this process gets a signal.

        A handler alone would have to wait, as long as a tick, where the signal comes just before
        the poll goes to sleep.
        """
        os.set_blocking(self._wake_up, False)
        signal.set_wakeup_fd(self._wake_up)
        signal.signal(number, lambda *_: self.stop())

    def _receive(self) -> None:
        for _ in range(_MESSAGES_AT_ONCE):
            received = self._mailbox.receive()
            if received is None:
                return
            peer, frames, rights = received
            message = self._codec.decode(peer, frames)
            self._handle(m.Incoming(peer, message, rights))
            if type(message) in _SAID_BY_RANKS and rights & m.Right.ENGINE:
                self._watch(peer, message)
            if self._stopped:
                return

    def _watch(self, peer: bytes, message: m.ToCoordinator) -> None:
        """Expect heartbeats of who registers; with each PONG anew: it may have connected again.

        Clients, which answer pings as well, are not watched: thousands of them would take long.
        """
        if type(message) is m.Register or self._mailbox.watches(peer):
            self._mailbox.expect_heartbeats(peer)

    def _tick_if_due(self) -> None:
        now = time.monotonic()
        passed, usual = now - self._last_tick, _TICK_MS / 1000
        if passed < usual:
            return
        still = passed - usual if _STILL_SECONDS < passed < math.inf else 0.0
        if still:
            self.events.write(m.Log("stood_still", {"seconds": round(still, 1)}, warning=True))
        self._last_tick = now
        self._handle(m.Incoming(b"", m.Tick(still)))
        self._each_tick()

    def _handle(self, incoming: m.Incoming) -> None:
        for effect in self.core.handle(incoming, time.monotonic()):
            self._performers[type(effect)](effect)

    def _send(self, effect: m.Send) -> None:
        frames = self._codec.encode(effect.peer, effect.message)
        if frames is not None:
            self._outgoing.append((effect, frames))

    def _send_all(self) -> None:
        while self._outgoing:  # what the core does about those who are lost is sent as well
            outgoing, self._outgoing = self._outgoing, []
            unreached: dict[bytes, list[int]] = {}  # peers, and requests meant for them
            for effect, frames in outgoing:
                # Whoever is pinged sends heartbeats, and a ping is the occasion to miss them.
                missed = type(effect.message) is m.Ping and self._mailbox.silent(effect.peer)
                if not missed and self._mailbox.send(effect.peer, frames):
                    continue
                requests = unreached.setdefault(effect.peer, [])
                if isinstance(effect.message, m.EngineRequest):
                    requests.append(effect.message.request_id)
            for peer, requests in unreached.items():
                self._codec.forget(peer)
                self._handle(m.Incoming(peer, m.PeerLost(tuple(requests))))

    def _with_text(self, tokenizer: Any, body: bytes) -> bytes:
        """A packed reply with the text of its tokens; as it is where that cannot be made."""
        if tokenizer is None:
            return body
        try:
            reply = wire.unpack(body)
            reply["generated_text"] = generated_text(tokenizer, reply)
            return wire.pack(reply)
        except Exception as error:  # an engine's odd reply must not end the coordinator
            self.events.write(m.Log("reply_without_text", {"error": str(error)}, True, peer=b""))
            return body
