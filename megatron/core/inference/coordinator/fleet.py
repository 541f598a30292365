"""The fleet: engines that register, get requests, answer, tell of their caches and are lost."""

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.index import PrefixIndex
from megatron.core.inference.coordinator.kv_events import CLEARED, unpack_events
from megatron.core.inference.coordinator.ledger import Ledger, RequestRecord
from megatron.core.inference.coordinator.lifecycle import FleetState
from megatron.core.inference.coordinator.ranks import Rank, Ranks, name_of
from megatron.core.inference.coordinator.router import Router
from megatron.core.inference.coordinator.settings import PROTOCOL_VERSION, CoordinatorSettings

LEFT = "it left"
_ADVICE = {
    "eviction": "ref_zero",
    "effect": "an answered request leaves no cached block behind",
    "set": "--inference-dynamic-batching-prefix-caching-eviction-policy lru",
}


class Fleet:
    """The replicas and everything that depends on them.

    Args:
        settings: What the coordinator was started with.

    Attributes:
        state: What the engines were last told to be.
        weight_epoch: How often their weights were updated.
        ranks: The live ones.
        ledger: The requests.
        index: What the ranks hold.
        router: Places requests.
        assembled: Whether as many as expected have registered, so that requests are routed.
        joining: Who waits for the others, to be numbered in order (deterministic mode).
    """

    def __init__(self, settings: CoordinatorSettings):
        self._settings = settings
        self.state = FleetState.RUNNING
        self.weight_epoch = 0
        self.ranks = Ranks(settings)
        self.ledger = Ledger()
        self.index = PrefixIndex(settings.routing.ttl_seconds)
        self.router = Router(settings, self.ranks, self.ledger, self.index)
        self.assembled = settings.expected_ranks == 0
        self.joining: dict[bytes, m.Register] = {}
        self._advised = False

    def check_integrity(self) -> None:
        """Compare everything that is counted with the records it is counted from.

        Raises:
            AssertionError: Something drifted.
        """
        self.ledger.check_integrity()
        self.index.check_integrity(r.lease for r in self.ledger if r.lease is not None)
        self.router.check_integrity()
        live = {rank.number for rank in self.ranks}
        assert all(r.rank is None or r.rank in live for r in self.ledger)

    def begin_epoch(self) -> None:
        """The weights are others now: KV computed so far must not be reused."""
        self.weight_epoch += 1
        self.index.clear()
        self.router.forget_bursts()

    # --- requests ----------------------------------------------------------------------------

    def route(self, record: RequestRecord, now: float) -> list[m.Effect]:
        """Give a waiting request to a rank, or fail it where there is none."""
        message = record.message
        if not len(self.ranks):
            return self.fail([record], m.ErrorCode.NO_REPLICA, "no replica is registered")
        effects: list[m.Effect] = []
        hashes = self.router.hashes_of(message)
        if hashes is None and message.hashes is not None:
            effects.append(m.Log("hashes_refused", warning=True, peer=record.client))
        elif hashes is None:
            effects.append(m.Log("request_not_hashed", peer=record.client))
        rank = self.router.place(record, hashes or [])
        # Forgetting keeps pace with learning.
        self.index.expire(now, budget=2 * record.blocks)
        request = m.EngineRequest(
            record.request_id, self.weight_epoch, message.sampling, message.prompt
        )
        return [*effects, m.Send(rank.peer, request)]

    def fail(self, records: list[RequestRecord], code: str, text: str) -> list[m.Effect]:
        """Close waiting or lost requests with an error to whoever still waits for them."""
        effects: list[m.Effect] = []
        for record in records:
            if record.rank is None:
                self.ledger.finish(record.request_id)
            if record.client is not None:
                error = m.RequestError(record.client_request_id, code, text)
                effects.append(m.Send(record.client, error))
        return effects

    def engine_reply(self, peer: bytes, message: m.EngineReply, now: float) -> list[m.Effect]:
        """An engine's answers go to whoever asked."""
        rank = self.ranks.of_peer(peer)
        if rank is None:
            return self.stranger(peer, "reply_from_stranger")
        effects: list[m.Effect] = []
        for answer in message.answers:
            if self.ledger.held_by(answer.request_id, rank.number):
                effects += self._answer(rank, answer, now)
            else:  # a second reply, or one for a request that was never given to this rank
                effects.append(m.Log("reply_dropped", warning=True, peer=peer))
        return effects

    def _answer(self, rank: Rank, answer: m.Answer, now: float) -> list[m.Effect]:
        record = self.ledger.finish(answer.request_id)
        in_window = self.router.compare(record, rank, answer)
        self.router.settle(record, now)
        effects: list[m.Effect] = []
        if record.client is not None:
            effects.append(m.Send(record.client, m.Reply(record.client_request_id, answer.body)))
        if self._settings.trace:
            effects.append(
                m.Trace(
                    record.request_id,
                    rank.number,
                    record.blocks,
                    record.prompt_tokens,
                    record.predicted_tokens,
                    answer.cached_tokens,
                    in_window,
                )
            )
        return effects

    # --- coming and going --------------------------------------------------------------------

    def register(self, peer: bytes, message: m.Register, now: float) -> list[m.Effect]:
        """An engine offers itself."""
        if message.version not in (None, PROTOCOL_VERSION):
            return self._refuse(peer, f"protocol {message.version} is not {PROTOCOL_VERSION}")
        if message.version is not None and message.max_requests < 1:
            return self._refuse(peer, f"max_requests is {message.max_requests}")
        size = self._settings.block_size_tokens
        if message.version is not None and self._settings.hashed and message.block_size != size:
            return self._refuse(
                peer, f"its cache blocks hold {message.block_size} tokens, and clients hash {size}"
            )
        if self._settings.deterministic and not self.assembled:
            name = name_of(peer, message)  # whoever comes again takes the place of who he was
            self.joining = {p: r for p, r in self.joining.items() if name_of(p, r) != name}
            self.joining[peer] = message
            if len(self.joining) < self._settings.expected_ranks:
                return [self._progress(len(self.joining))]
            # Numbered by (job, DP rank), not by who came first.
            joining = sorted(self.joining.items(), key=lambda item: name_of(*item))
            self.joining = {}
            return [e for who, register in joining for e in self._join(who, register, now)]
        return self._join(peer, message, now)

    def _refuse(self, peer: bytes, reason: str) -> list[m.Effect]:
        error = m.RequestError(None, m.ErrorCode.REGISTRATION_REFUSED, reason)
        log = m.Log("registration_refused", {"reason": reason}, warning=True, peer=peer)
        return [m.Send(peer, error), log]

    def _join(self, peer: bytes, message: m.Register, now: float) -> list[m.Effect]:
        effects: list[m.Effect] = []
        while (predecessor := self.ranks.predecessor(peer, message)) is not None:
            effects += self.lose_rank(predecessor, now, "it registered again")
        rank = self.ranks.add(peer, message)
        self.index.add_rank(rank.number, capacity=rank.total_blocks, retains=rank.retains)
        if not rank.released:
            acknowledgement = m.RegisterAck(
                rank.number, rank.generation, self.weight_epoch, self.state
            )
            effects.append(m.Send(peer, acknowledgement))
        effects.append(self._progress(len(self.ranks)))
        if self._settings.hashed and not rank.retains and not self._advised:
            self._advised = True
            effects.append(m.Log("nothing_kept_between_turns", _ADVICE, warning=True))
        if not self.assembled and len(self.ranks) >= self._settings.expected_ranks:
            self.assembled = True
            for record in self.ledger.waiting:
                effects += self.route(record, now)
        return effects

    def _progress(self, registered: int) -> m.Log:
        expected = max(registered, self._settings.expected_ranks)
        return m.Log("ranks_registered", {"registered": registered, "expected": expected})

    def lose_rank(
        self, rank: Rank, now: float, cause: str, undelivered: tuple[int, ...] = ()
    ) -> list[m.Effect]:
        """Its requests end in errors, but those that never reached it go to other ranks."""
        self.ranks.remove(rank)
        self.index.drop_rank(rank.number)
        records = self.ledger.lose_rank(rank.number)
        for record in records:
            self.router.settle(record, now)
        lost = [record for record in records if record.request_id not in undelivered]
        fields = {"rank": rank.number, "cause": cause, "requests": len(lost)}
        text = f"replica {rank.number} was lost while it had the request ({cause}); send it again"
        left = cause == LEFT
        effects: list[m.Effect] = [
            m.Log("rank_left" if left else "rank_lost", fields, warning=not left)
        ]
        effects += self.fail(lost, m.ErrorCode.REPLICA_LOST, text)
        for record in records:
            if record.request_id in undelivered and record.client is not None:
                effects += self.route(self.ledger.admit(record.client, record.message), now)
        return effects

    def stranger(self, peer: bytes, event: str) -> list[m.Effect]:
        """Someone speaks as an engine and is none: one of ours may register (again)."""
        return [m.Send(peer, m.RegisterAgain()), m.Log(event, warning=True, peer=peer)]

    # --- caches ------------------------------------------------------------------------------

    def kv_events(self, peer: bytes, message: m.KvEvents, now: float) -> list[m.Effect]:
        """What an engine stored, removed and cleared.

        A gap, a duplicate or an epoch that is yet to come: from then on its rank is scored by
        history, until the engine has told its whole table.
        """
        rank = self.ranks.of_peer(peer)
        if rank is None:
            return self.stranger(peer, "events_from_stranger")
        if not self._settings.hashed:
            return []
        events = unpack_events(message.events, message.count)
        follows = (
            events is not None
            and message.weight_epoch <= self.weight_epoch
            and rank.events.take(message.first, events)
        )
        if not follows or events is None:
            return self._distrust(rank, message)
        # Blocks of an older epoch are of no use any more, but a clear among them still counts.
        is_current = message.weight_epoch == self.weight_epoch
        if not is_current:
            events = [event for event in events[:1] if event == CLEARED]
        self.index.apply(rank.number, events)
        self.router.note_stored(rank, events)
        return []

    def _distrust(self, rank: Rank, message: m.KvEvents) -> list[m.Effect]:
        rank.events.trusted = False
        self.index.distrust(rank.number)
        if rank.events.asked:
            return []
        rank.events.asked = True
        fields = {"rank": rank.number, "first": message.first, "expected": rank.events.next}
        return [
            m.Log("rank_untrusted", fields, warning=True, peer=rank.peer),
            m.Send(rank.peer, m.Resync()),
        ]

    def tick(self, ticks: int) -> list[m.Effect]:
        """Find broken connections: a send over one fails. Ask again who owes its table."""
        ours = [rank for rank in self.ranks if not rank.released]
        asked = [rank for rank in ours if rank.events.asked]
        return [
            *(m.Send(rank.peer, m.Ping(ticks)) for rank in ours),
            *(m.Send(rank.peer, m.Resync()) for rank in asked),
        ]
