"""The coordinator without its sockets: `handle(incoming, now) -> effects`.

The loop in `runtime/` receives, calls `handle` and performs the effects; tests and the replay tool
drive the same object. Nothing a peer says can raise here: what is wrong is logged and dropped, or
answered with an error.
"""

import re
from collections.abc import Callable
from typing import Any

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.fleet import BROKE, LEFT, Fleet
from megatron.core.inference.coordinator.lifecycle import (
    EPOCH_SIGNALS,
    OWNING,
    REDUNDANT,
    Signal,
    advance,
)
from megatron.core.inference.coordinator.settings import PROTOCOL_VERSION, CoordinatorSettings

_CLIENT_PING_TICKS = 10
"""Clients are pinged this much more rarely than engines: only to find those that vanished. They
take turns, since 10,000 pings in one tick would hold up whoever comes next."""


_NUMBER = re.compile(rb"-\d+\Z")
_ANY = m.Right.ALL
_NEEDED = {
    m.Connect: m.Right.SUBMIT | m.Right.CONTROL,
    m.SubmitRequest: m.Right.SUBMIT,
    m.Control: m.Right.CONTROL,
    m.Shutdown: m.Right.CONTROL,
    m.Register: m.Right.ENGINE,
    m.EngineReply: m.Right.ENGINE,
    m.KvEvents: m.Right.ENGINE,
    m.Drain: m.Right.ENGINE,
}
"""What a peer needs one of to say something; any right will do for the rest."""


Handler = Callable[[bytes, Any, float], list[m.Effect]]


class Coordinator:
    """Clients, and the fleet that serves them; changed by `handle` alone.

    Args:
        settings: What it was started with.

    Attributes:
        fleet: The replicas, the requests and what is known of caches.
    """

    def __init__(self, settings: CoordinatorSettings):
        self.settings = settings
        self.fleet = Fleet(settings)
        self._clients: dict[bytes, dict[bytes, None]] = {}  # and who is pinged with each
        self._turns: list[dict[bytes, None]] = [{} for _ in range(_CLIENT_PING_TICKS)]
        self._never_pinged: dict[bytes, None] = {}  # the released dialect has no pings
        self._ticks = 0
        self._told = self.fleet.serving
        self._handlers: dict[type, Handler] = {
            m.Connect: self._connect,
            m.SubmitRequest: self._submit,
            m.Control: self._control,
            m.Shutdown: self._shutdown,
            m.Register: self._engines_only("register_from_client", self.fleet.register),
            m.EngineReply: self._engines_only("reply_from_client", self.fleet.engine_reply),
            m.KvEvents: self._engines_only("events_from_client", self.fleet.kv_events),
            m.Pong: self._pong,
            m.Drain: self._engines_only("drain_from_client", self.fleet.drain),
            m.Disconnect: self._disconnect,
            m.Malformed: self._malformed,
            m.PeerLost: self._peer_lost,
            m.Tick: self._tick,
            m.Sweep: self._sweep,
        }

    def handle(self, incoming: m.Incoming, now: float) -> list[m.Effect]:
        """Take one message.

        Args:
            incoming: The message and who sent it.
            now: Seconds of a monotonic clock; never less than at the call before.

        Returns:
            What to do, in this order.
        """
        message = incoming.message
        kind = type(message)
        if incoming.rights is not m.Right.ALL and not incoming.rights & _NEEDED.get(kind, _ANY):
            return _forbidden(incoming.peer, message)
        return self._handlers[kind](incoming.peer, message, now)

    @property
    def backlog(self) -> bool:
        """Whether `Sweep` would find something to do."""
        return self.fleet.index.backlog

    def check_integrity(self) -> None:
        """Compare everything that is counted with the records it is counted from.

        Raises:
            AssertionError: Something drifted.
        """
        self.fleet.check_integrity()
        assert all(r.client is None or r.client in self._clients for r in self.fleet.ledger)
        together = [peer for turn in (*self._turns, self._never_pinged) for peer in turn]
        assert sorted(together) == sorted(self._clients), "who is pinged is not who is there"

    # --- clients -----------------------------------------------------------------------------

    def _connect(self, peer: bytes, message: m.Connect, now: float) -> list[m.Effect]:
        if self.fleet.ranks.of_peer(peer) or peer in self.fleet.joining:
            return [m.Log("connect_from_engine", warning=True, peer=peer)]
        if message.version not in (None, PROTOCOL_VERSION):
            text = f"the coordinator speaks protocol {PROTOCOL_VERSION}, not {message.version}"
            return [
                m.Send(peer, m.RequestError(None, m.ErrorCode.NOT_CONNECTED, text)),
                m.Log("wrong_protocol", {"version": message.version}, warning=True, peer=peer),
            ]
        self._forget_client(peer)
        released = message.version is None
        together = self._never_pinged if released else min(self._turns, key=len)
        together[peer] = None
        self._clients[peer] = together
        if _name_of(peer) == self.fleet.pause.owner:
            self.fleet.pause.belongs_to(_name_of(peer))
        acknowledgement = m.ConnectAck(
            PROTOCOL_VERSION,
            self.settings.signal.value,
            (self.settings.block_size_tokens or 0) if self.settings.prefix_caching else 0,
            self.fleet.weight_epoch,
        )
        effects: list[m.Effect] = [m.Send(peer, acknowledgement)]
        if not released and not self.fleet.serving.serving:
            effects.append(m.Send(peer, self.fleet.serving))
        return effects

    def _submit(self, peer: bytes, message: m.SubmitRequest, now: float) -> list[m.Effect]:
        if peer not in self._clients:
            text = "send CONNECT before any request"
            error = m.RequestError(message.client_request_id, m.ErrorCode.NOT_CONNECTED, text)
            return [
                m.Send(peer, error),
                m.Log("request_before_connect", warning=True, peer=peer),
            ]
        return self.fleet.submit(peer, message, now)

    def _control(self, peer: bytes, message: m.Control, now: float) -> list[m.Effect]:
        if peer not in self._clients:
            return [m.Log("control_before_connect", warning=True, peer=peer)]
        signal, args = message.signal, message.args
        fleet = self.fleet
        redundant = (fleet.state, signal) in REDUNDANT
        state = fleet.state if redundant else advance(fleet.state, signal)
        if state is None:
            fields = {"signal": signal.name, "state": fleet.state.value}
            return [m.Log("signal_refused", fields, warning=True, peer=peer)]
        if signal in OWNING:
            fleet.enter(state, _name_of(peer), now)
        if redundant:
            return []
        if signal in EPOCH_SIGNALS:
            self._begin_epoch_if_due(signal, args)
            args = (*args, fleet.weight_epoch)
        told: list[m.Effect] = [
            m.Send(rank.peer, m.Control(signal, args)) for rank in fleet.ranks.present
        ]
        return told + fleet.stop(now) if signal is Signal.STOP else told

    def _begin_epoch_if_due(self, signal: Signal, args: tuple[Any, ...]) -> None:
        """A generation epoch may be told again; a resume after a suspend always counts."""
        if signal is Signal.SET_GENERATION_EPOCH:
            if args[0] == self.fleet.generation_epoch:
                return
            self.fleet.generation_epoch = args[0]
        self.fleet.begin_epoch()

    def _shutdown(self, peer: bytes, message: m.Shutdown, now: float) -> list[m.Effect]:
        if peer not in self._clients:
            return [m.Log("control_before_connect", warning=True, peer=peer)]
        return [m.Log("shutdown_asked_for"), m.Stop()]

    # --- engines -----------------------------------------------------------------------------

    def _engines_only(self, event: str, handler: Handler) -> Handler:
        """What only engines say is not taken from clients."""

        def handle(peer: bytes, message: Any, now: float) -> list[m.Effect]:
            if peer in self._clients:
                return [m.Log(event, warning=True, peer=peer)]
            return handler(peer, message, now)

        return handle

    def _pong(self, peer: bytes, message: m.Pong, now: float) -> list[m.Effect]:
        return [] if peer in self._clients else self.fleet.pong(peer, message, now)

    # --- leaving -----------------------------------------------------------------------------

    def _disconnect(self, peer: bytes, message: m.Disconnect, now: float) -> list[m.Effect]:
        return self._leave(peer, now, LEFT)

    def _peer_lost(self, peer: bytes, message: m.PeerLost, now: float) -> list[m.Effect]:
        rank = self.fleet.ranks.of_peer(peer)
        if rank is not None:
            return self.fleet.lose_connection(rank, now, message.undelivered)
        return self._leave(peer, now, BROKE)

    def _leave(self, peer: bytes, now: float, cause: str) -> list[m.Effect]:
        self.fleet.joining.pop(peer, None)
        rank = self.fleet.ranks.of_peer(peer)
        if rank is not None:
            return self.fleet.lose_ranks([rank], now, cause)
        if not self._forget_client(peer):
            return []
        owner = self.fleet.pause.owner
        if _name_of(peer) == owner and not any(_name_of(c) == owner for c in self._clients):
            self.fleet.owner_left(now)
        running = self.fleet.ledger.lose_client(peer)
        return [m.Log("client_lost", {"cause": cause, "requests_running": running}, peer=peer)]

    def _forget_client(self, peer: bytes) -> bool:
        """Returns whether it was one."""
        together = self._clients.pop(peer, None)
        if together is None:
            return False
        together.pop(peer, None)
        return True

    def _malformed(self, peer: bytes, message: m.Malformed, now: float) -> list[m.Effect]:
        return [m.Log("message_refused", {"reason": message.reason}, warning=True, peer=peer)]

    def _tick(self, peer: bytes, message: m.Tick, now: float) -> list[m.Effect]:
        """Let time do its work, and find those who are gone: a send to them fails."""
        self._ticks += 1
        self.fleet.index.expire(now)
        effects = self.fleet.tick(self._ticks, now, message.stood_still)
        ping = m.Ping(self._ticks)
        effects += [m.Send(client, ping) for client in self._turns[self._ticks % len(self._turns)]]
        if self.fleet.serving != self._told:
            self._told = self.fleet.serving
            effects += [m.Send(client, self._told) for turn in self._turns for client in turn]
        return effects

    def _sweep(self, peer: bytes, message: m.Sweep, now: float) -> list[m.Effect]:
        self.fleet.index.expire(now)
        return []


def _name_of(client: bytes) -> bytes:
    """What a client's connections have in common: each is numbered (`runtime/connection.py`)."""
    return _NUMBER.sub(b"", client)


def _forbidden(peer: bytes, message: Any) -> list[m.Effect]:
    """Refuse what a peer has no right to; whoever waits for an answer gets one."""
    needed = _NEEDED.get(type(message), _ANY).name
    effects: list[m.Effect] = [
        m.Log("message_forbidden", {"needed": needed}, warning=True, peer=peer)
    ]
    if isinstance(message, m.Connect | m.SubmitRequest | m.Register):
        name = message.client_request_id if isinstance(message, m.SubmitRequest) else None
        text = f"the key of this peer does not give it the right {needed}"
        effects.insert(0, m.Send(peer, m.RequestError(name, m.ErrorCode.FORBIDDEN, text)))
    return effects
