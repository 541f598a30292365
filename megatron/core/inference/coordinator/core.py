"""The coordinator without its sockets: `handle(incoming, now) -> effects`.

The loop in `runtime/` receives, calls `handle` and performs the effects; tests and the replay tool
drive the same object. Nothing a peer says can raise here: what is wrong is logged and dropped, or
answered with an error.
"""

from collections.abc import Callable
from typing import Any

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.index import PrefixIndex
from megatron.core.inference.coordinator.ledger import Ledger, RequestRecord
from megatron.core.inference.coordinator.lifecycle import (
    EPOCH_SIGNALS,
    REDUNDANT,
    FleetState,
    Signal,
    advance,
)
from megatron.core.inference.coordinator.ranks import Rank, Ranks, name_of
from megatron.core.inference.coordinator.router import Router
from megatron.core.inference.coordinator.settings import PROTOCOL_VERSION, CoordinatorSettings

_LEFT = "it left"
_CLIENT_PING_TICKS = 10
"""Clients are pinged this much more rarely than engines: only to find those that vanished."""


class Coordinator:
    """Requests, ranks, clients and the fleet's state; changed by `handle` alone.

    Args:
        settings: What it was started with.
    """

    def __init__(self, settings: CoordinatorSettings):
        self.settings = settings
        self.state = FleetState.RUNNING
        self.weight_epoch = 0
        self.ranks = Ranks(settings)
        self.ledger = Ledger()
        self.index = PrefixIndex(settings.routing.ttl_seconds)
        self._router = Router(settings, self.ranks, self.ledger, self.index)
        self._clients: dict[bytes, m.Connect] = {}
        self._assembled = settings.expected_ranks == 0
        self._joining: dict[bytes, m.Register] = {}
        self._generation_epoch: Any = None
        self._ticks = 0
        self._handlers: dict[type, Callable[[bytes, Any, float], list[m.Effect]]] = {
            m.Connect: self._connect,
            m.SubmitRequest: self._submit,
            m.Control: self._control,
            m.Shutdown: self._shutdown,
            m.Register: self._register,
            m.EngineReply: self._engine_reply,
            m.Pong: self._pong,
            m.Disconnect: self._disconnect,
            m.Malformed: self._malformed,
            m.PeerLost: self._peer_lost,
            m.Tick: self._tick,
        }

    def handle(self, incoming: m.Incoming, now: float) -> list[m.Effect]:
        """Take one message.

        Args:
            incoming: The message and who sent it.
            now: Seconds of a monotonic clock; never less than at the call before.

        Returns:
            What to do, in this order.
        """
        return self._handlers[type(incoming.message)](incoming.peer, incoming.message, now)

    def check_integrity(self) -> None:
        """Compare everything that is counted with the records it is counted from.

        Raises:
            AssertionError: Something drifted.
        """
        self.ledger.check_integrity()
        self.index.check_integrity(r.lease for r in self.ledger if r.lease is not None)
        self._router.check_integrity()
        live = {rank.number for rank in self.ranks}
        assert all(r.rank is None or r.rank in live for r in self.ledger)
        assert all(r.client is None or r.client in self._clients for r in self.ledger)

    # --- clients -----------------------------------------------------------------------------

    def _connect(self, peer: bytes, message: m.Connect, now: float) -> list[m.Effect]:
        if self.ranks.of_peer(peer) or peer in self._joining:
            return [m.Log("connect_from_engine", warning=True, peer=peer)]
        if message.version not in (None, PROTOCOL_VERSION):
            text = f"the coordinator speaks protocol {PROTOCOL_VERSION}, not {message.version}"
            return [
                m.Send(peer, m.RequestError(None, m.ErrorCode.NOT_CONNECTED, text)),
                m.Log("wrong_protocol", {"version": message.version}, warning=True, peer=peer),
            ]
        self._clients[peer] = message
        acknowledgement = m.ConnectAck(
            PROTOCOL_VERSION,
            self.settings.signal.value,
            (self.settings.block_size_tokens or 0) if self.settings.prefix_caching else 0,
            self.weight_epoch,
        )
        return [m.Send(peer, acknowledgement)]

    def _submit(self, peer: bytes, message: m.SubmitRequest, now: float) -> list[m.Effect]:
        if peer not in self._clients:
            text = "send CONNECT before any request"
            error = m.RequestError(message.client_request_id, m.ErrorCode.NOT_CONNECTED, text)
            return [
                m.Send(peer, error),
                m.Log("request_before_connect", warning=True, peer=peer),
            ]
        record = self.ledger.admit(peer, message)
        return self._route(record, now) if self._assembled else []

    def _route(self, record: RequestRecord, now: float) -> list[m.Effect]:
        message = record.message
        if not len(self.ranks):
            return self._fail([record], m.ErrorCode.NO_REPLICA, "no replica is registered")
        effects: list[m.Effect] = []
        hashes = self._router.hashes_of(message)
        if hashes is None and message.hashes is not None:
            effects.append(m.Log("hashes_refused", warning=True, peer=record.client))
        elif hashes is None:
            effects.append(m.Log("request_not_hashed", peer=record.client))
        rank = self._router.place(record, hashes or [])
        # Forgetting keeps pace with learning.
        self.index.expire(now, budget=2 * record.blocks)
        request = m.EngineRequest(
            record.request_id, self.weight_epoch, message.sampling, message.prompt
        )
        return [*effects, m.Send(rank.peer, request)]

    def _fail(self, records: list[RequestRecord], code: str, text: str) -> list[m.Effect]:
        """Close waiting or lost requests with an error to whoever still waits for them."""
        effects: list[m.Effect] = []
        for record in records:
            if record.rank is None:
                self.ledger.finish(record.request_id)
            if record.client is not None:
                error = m.RequestError(record.client_request_id, code, text)
                effects.append(m.Send(record.client, error))
        return effects

    def _control(self, peer: bytes, message: m.Control, now: float) -> list[m.Effect]:
        if peer not in self._clients:
            return [m.Log("control_before_connect", warning=True, peer=peer)]
        signal, args = message.signal, message.args
        state = advance(self.state, signal)
        if state is None:
            if (self.state, signal) in REDUNDANT:
                return []
            fields = {"signal": signal.name, "state": self.state.value}
            return [m.Log("signal_refused", fields, warning=True, peer=peer)]
        self.state = state
        if signal in EPOCH_SIGNALS:
            self._begin_epoch_if_due(signal, args)
            args = (*args, self.weight_epoch)
        return [m.Send(rank.peer, m.Control(signal, args)) for rank in self.ranks]

    def _begin_epoch_if_due(self, signal: Signal, args: tuple[Any, ...]) -> None:
        """KV computed before a weight update must not be reused: forget who holds what."""
        if signal is Signal.SET_GENERATION_EPOCH:
            if args[0] == self._generation_epoch:
                return
            self._generation_epoch = args[0]
        self.weight_epoch += 1
        self.index.clear()
        self._router.forget_bursts()

    def _shutdown(self, peer: bytes, message: m.Shutdown, now: float) -> list[m.Effect]:
        if peer not in self._clients:
            return [m.Log("control_before_connect", warning=True, peer=peer)]
        return [m.Log("shutdown_asked_for"), m.Stop()]

    # --- engines -----------------------------------------------------------------------------

    def _register(self, peer: bytes, message: m.Register, now: float) -> list[m.Effect]:
        if peer in self._clients:
            return [m.Log("register_from_client", warning=True, peer=peer)]
        if message.version not in (None, PROTOCOL_VERSION):
            return self._refuse(peer, f"protocol {message.version} is not {PROTOCOL_VERSION}")
        if message.version is not None and message.max_requests < 1:
            return self._refuse(peer, f"max_requests is {message.max_requests}")
        size = self.settings.block_size_tokens
        if message.version is not None and self.settings.hashed and message.block_size != size:
            return self._refuse(
                peer, f"its cache blocks hold {message.block_size} tokens, and clients hash {size}"
            )
        if self.settings.deterministic and not self._assembled:
            name = name_of(peer, message)  # whoever comes again takes the place of who he was
            self._joining = {p: r for p, r in self._joining.items() if name_of(p, r) != name}
            self._joining[peer] = message
            if len(self._joining) < self.settings.expected_ranks:
                return [self._progress(len(self._joining))]
            # Numbered by (job, DP rank), not by who came first.
            joining = sorted(self._joining.items(), key=lambda item: name_of(*item))
            self._joining = {}
            return [e for who, register in joining for e in self._join(who, register, now)]
        return self._join(peer, message, now)

    def _refuse(self, peer: bytes, reason: str) -> list[m.Effect]:
        error = m.RequestError(None, m.ErrorCode.REGISTRATION_REFUSED, reason)
        log = m.Log("registration_refused", {"reason": reason}, warning=True, peer=peer)
        return [m.Send(peer, error), log]

    def _join(self, peer: bytes, message: m.Register, now: float) -> list[m.Effect]:
        effects: list[m.Effect] = []
        while (predecessor := self.ranks.predecessor(peer, message)) is not None:
            effects += self._lose_rank(predecessor, now, "it registered again")
        rank = self.ranks.add(peer, message)
        self.index.add_rank(rank.number, capacity=rank.total_blocks, retains=rank.retains)
        if not rank.released:
            acknowledgement = m.RegisterAck(
                rank.number, rank.generation, self.weight_epoch, self.state
            )
            effects.append(m.Send(peer, acknowledgement))
        effects.append(self._progress(len(self.ranks)))
        if not self._assembled and len(self.ranks) >= self.settings.expected_ranks:
            self._assembled = True
            for record in self.ledger.waiting:
                effects += self._route(record, now)
        return effects

    def _progress(self, registered: int) -> m.Log:
        expected = max(registered, self.settings.expected_ranks)
        return m.Log("ranks_registered", {"registered": registered, "expected": expected})

    def _engine_reply(self, peer: bytes, message: m.EngineReply, now: float) -> list[m.Effect]:
        rank = self.ranks.of_peer(peer)
        if rank is None:
            return self._stranger(peer, "reply_from_stranger")
        effects: list[m.Effect] = []
        for answer in message.answers:
            if self.ledger.held_by(answer.request_id, rank.number):
                effects += self._answer(answer, now)
            else:  # a second reply, or one for a request that was never given to this rank
                effects.append(m.Log("reply_dropped", warning=True, peer=peer))
        return effects

    def _answer(self, answer: m.Answer, now: float) -> list[m.Effect]:
        record = self.ledger.finish(answer.request_id)
        self._router.settle(record, now)
        effects: list[m.Effect] = []
        if record.client is not None:
            effects.append(m.Send(record.client, m.Reply(record.client_request_id, answer.body)))
        if self.settings.trace:
            assert record.rank is not None
            effects.append(
                m.Trace(
                    record.request_id,
                    record.rank,
                    record.blocks,
                    record.prompt_tokens,
                    record.predicted_tokens,
                    answer.cached_tokens,
                )
            )
        return effects

    def _pong(self, peer: bytes, message: m.Pong, now: float) -> list[m.Effect]:
        if self.ranks.of_peer(peer) or peer in self._clients:
            return []
        return self._stranger(peer, "pong_from_stranger")

    def _stranger(self, peer: bytes, event: str) -> list[m.Effect]:
        """Someone speaks as an engine and is none: one of ours may register (again)."""
        if peer in self._clients:
            return [m.Log(event, warning=True, peer=peer)]
        return [m.Send(peer, m.RegisterAgain()), m.Log(event, warning=True, peer=peer)]

    # --- leaving -----------------------------------------------------------------------------

    def _disconnect(self, peer: bytes, message: m.Disconnect, now: float) -> list[m.Effect]:
        return self._leave(peer, now, _LEFT)

    def _peer_lost(self, peer: bytes, message: m.PeerLost, now: float) -> list[m.Effect]:
        return self._leave(peer, now, "its connection broke", message.undelivered)

    def _leave(
        self, peer: bytes, now: float, cause: str, undelivered: tuple[int, ...] = ()
    ) -> list[m.Effect]:
        self._joining.pop(peer, None)
        rank = self.ranks.of_peer(peer)
        if rank is not None:
            return self._lose_rank(rank, now, cause, undelivered)
        if self._clients.pop(peer, None) is None:
            return []
        running = self.ledger.lose_client(peer)
        return [m.Log("client_lost", {"cause": cause, "requests_running": running}, peer=peer)]

    def _lose_rank(
        self, rank: Rank, now: float, cause: str, undelivered: tuple[int, ...] = ()
    ) -> list[m.Effect]:
        """Its requests end in errors, but those that never reached it go to other ranks."""
        self.ranks.remove(rank)
        self.index.drop_rank(rank.number)
        records = self.ledger.lose_rank(rank.number)
        for record in records:
            self._router.settle(record, now)
        lost = [record for record in records if record.request_id not in undelivered]
        fields = {"rank": rank.number, "cause": cause, "requests": len(lost)}
        text = f"replica {rank.number} was lost while it had the request ({cause}); send it again"
        left = cause == _LEFT
        effects: list[m.Effect] = [
            m.Log("rank_left" if left else "rank_lost", fields, warning=not left)
        ]
        effects += self._fail(lost, m.ErrorCode.REPLICA_LOST, text)
        for record in records:
            if record.request_id in undelivered and record.client is not None:
                effects += self._route(self.ledger.admit(record.client, record.message), now)
        return effects

    def _malformed(self, peer: bytes, message: m.Malformed, now: float) -> list[m.Effect]:
        return [m.Log("message_refused", {"reason": message.reason}, warning=True, peer=peer)]

    def _tick(self, peer: bytes, message: m.Tick, now: float) -> list[m.Effect]:
        """Let time do its work, and find those who are gone: a send to them fails."""
        self._ticks += 1
        self.index.expire(now)
        ping = m.Ping(self._ticks)
        pinged = [rank.peer for rank in self.ranks if not rank.released]
        if self._ticks % _CLIENT_PING_TICKS == 0:
            pinged += [peer for peer, c in self._clients.items() if c.version is not None]
        return [m.Send(peer, ping) for peer in pinged]
