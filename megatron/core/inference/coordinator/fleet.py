"""The fleet: engines that register, get requests, answer, tell of their caches and are lost."""

from collections.abc import Sequence
from typing import Any

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.dispatch import Dispatcher
from megatron.core.inference.coordinator.index import PrefixIndex
from megatron.core.inference.coordinator.kv_events import Change, EventStream, segments
from megatron.core.inference.coordinator.ledger import Ledger
from megatron.core.inference.coordinator.lifecycle import FleetState, Signal
from megatron.core.inference.coordinator.pause import Pause
from megatron.core.inference.coordinator.ranks import Rank, Ranks, name_of, refusal
from megatron.core.inference.coordinator.router import Router
from megatron.core.inference.coordinator.settings import CoordinatorSettings

LEFT = "it left"
BROKE = "its connection broke"
_ADVICE = {
    "eviction": "ref_zero",
    "effect": "an answered request leaves no cached block behind",
    "set": "--inference-dynamic-batching-prefix-caching-eviction-policy lru",
}


class FleetClock:
    """Seconds that the fleet was running: deadlines stand still while it is paused.

    So they do while the coordinator itself stands still, e.g. stopped by a signal: what others said
    meanwhile is still unread.
    """

    def __init__(self):
        self._stopped_at: float | None = None
        self._lost = 0.0

    def read(self, now: float) -> float:
        """The clock at a time."""
        return (now if self._stopped_at is None else self._stopped_at) - self._lost

    def run(self, running: bool, now: float) -> None:
        """Stop it, or let it go on."""
        if running and self._stopped_at is not None:
            self._lost += now - self._stopped_at
            self._stopped_at = None
        elif not running and self._stopped_at is None:
            self._stopped_at = now

    def skip(self, seconds: float) -> None:
        """So much of the time until now does not count."""
        if self._stopped_at is None:
            self._lost += seconds


class Fleet:
    """The replicas and everything that depends on them.

    Args:
        settings: What the coordinator was started with.

    Attributes:
        state: What the engines were last told to be.
        generation_epoch: The last one that they were told; None before the first.
        ranks: The replicas.
        ledger: The requests.
        index: What the ranks hold.
        router: Chooses ranks.
        dispatcher: Takes requests through the fleet.
        pause: Whose it is that the fleet does not run, and what that means for requests.
        joining: Who waits for the others, to be numbered in order (deterministic mode).
    """

    def __init__(self, settings: CoordinatorSettings):
        self._settings = settings
        self.state = FleetState.RUNNING
        self.generation_epoch: int | None = None
        self.ranks = Ranks(settings)
        self.ledger = Ledger(settings.first_request_id)
        self.index = PrefixIndex(settings.routing.ttl_seconds)
        self.router = Router(settings, self.ranks, self.ledger, self.index)
        self.dispatcher = Dispatcher(settings, self.ranks, self.ledger, self.router)
        self.joining: dict[bytes, m.Register] = {}
        self._clock = FleetClock()
        self._awake = FleetClock()  # goes on in a pause
        self.pause = Pause(settings, self.ranks, self.ledger, self.dispatcher)
        self._hashed = settings.hashed
        self._advised = False
        self._began = False

    @property
    def weight_epoch(self) -> int:
        """How often the weights were updated."""
        return self.dispatcher.weight_epoch

    @property
    def serving(self) -> m.Serving:
        """Whether requests would be served: nobody left them paused, and a replica is there.

        As many as were expected must have come once.
        """
        if self.dispatcher.refusal is not None:
            state = self.state.value
            return m.Serving(False, f"has a {state} fleet, and the client that {state} it is gone")
        return m.Serving(self.dispatcher.opened and len(self.ranks) > 0)

    def check_integrity(self) -> None:
        """Compare everything that is counted with the records it is counted from.

        Raises:
            AssertionError: Something drifted.
        """
        self.ledger.check_integrity()
        self.index.check_integrity(r.lease for r in self.ledger if r.lease is not None)
        self.router.check_integrity()
        present = {rank.number for rank in self.ranks.present}
        assert all(r.rank is None or r.rank in present for r in self.ledger)
        limit = self._settings.fleet.max_rank_requests
        assert not limit or all(self.ledger.load(rank) <= limit for rank in present)
        idle = self.dispatcher.opened and self.router.has_room
        assert not idle or self.ledger.first_waiting is None, "a request waits for nothing"

    def enter(self, state: FleetState, owner: bytes, now: float) -> None:
        """The engines are told what to be, by a client of this name."""
        running = state is FleetState.RUNNING
        self._began = True
        self.state = state
        self._clock.run(running, now)
        self.pause.belongs_to(None if running else owner)

    def owner_left(self, now: float) -> None:
        """The client whose pause it is is gone; it may come back."""
        self.pause.owner_left(self._awake.read(now))

    def begin_epoch(self) -> None:
        """The weights are others now: KV computed so far must not be reused."""
        self.dispatcher.weight_epoch += 1
        self.index.clear()
        self.router.begin_epoch()

    # --- requests ----------------------------------------------------------------------------

    def submit(self, client: bytes, message: m.SubmitRequest, now: float) -> list[m.Effect]:
        """A client asks for something."""
        return self.dispatcher.submit(client, message, now, self._awake.read(now))

    def engine_reply(self, peer: bytes, message: m.EngineReply, now: float) -> list[m.Effect]:
        """An engine's answers go to whoever asked."""
        rank = self.ranks.of_peer(peer)
        if rank is None:
            return self.stranger(peer, "reply_from_stranger")
        effects = self._hear(rank, now)
        for answer in message.answers:
            if self.ledger.held_by(answer.request_id, rank.number):
                self.dispatcher.answer(rank, answer, now, effects)
            else:  # a second reply, or one for a request that was never given to this rank
                effects.append(m.Log("reply_dropped", warning=True, peer=peer))
        if self.ledger.first_waiting is not None:
            effects += self.dispatcher.route_waiting(self._awake.read(now))
        return effects

    # --- coming and going --------------------------------------------------------------------

    def register(self, peer: bytes, message: m.Register, now: float) -> list[m.Effect]:
        """An engine offers itself."""
        reason = refusal(message, self._settings)
        if reason is not None:
            return self._refuse(peer, reason)
        if self._settings.deterministic and not self.dispatcher.opened:
            name = name_of(peer, message)  # whoever comes again takes the place of who he was
            self.joining = {p: r for p, r in self.joining.items() if name_of(p, r) != name}
            self.joining[peer] = message
            if len(self.joining) < self._settings.expected_ranks:
                return [self._progress(len(self.joining), message)]
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
        rank = self.ranks.resumed(peer, message)
        predecessors = [r for r in self.ranks.predecessors(peer, message) if r is not rank]
        effects = self.lose_ranks(predecessors, now, "it registered again")
        if rank is not None:
            return effects + self._resume(rank, peer, message, now)
        if not self.ranks.present:  # a coordinator that was started again; its engines go on
            effects += self._go_on(message, now)
            suspended = FleetState.SUSPENDED
            # Who is resumed by the acknowledgement may hold other weights than before.
            resumed = message.state == suspended and self.state is not suspended
            epoch = message.weight_epoch + resumed
            self.dispatcher.weight_epoch = max(self.weight_epoch, epoch)
        rank = self.ranks.add(peer, message)
        rank.heard = self._clock.read(now)
        self.router.add_rank(rank)
        if message.generation:
            self.dispatcher.came_back(rank.number)
        effects += self._welcome(rank)
        effects.append(self._progress(len(self.ranks), message, rank))
        if self._hashed and not rank.retains and not self._advised:
            self._advised = True
            effects.append(m.Log("nothing_kept_between_turns", _ADVICE, warning=True))
        if len(self.ranks) >= self._settings.expected_ranks:
            self.dispatcher.opened = True
        return effects + self.dispatcher.route_waiting(self._awake.read(now))

    def _go_on(self, message: m.Register, now: float) -> list[m.Effect]:
        """The fleet is what the first engine is that comes, unless a client has said otherwise.

        A trainer may be about to write its weights: an engine is not to run because the coordinator
        was started again. Whose pause it is, nobody knows any more.
        """
        began, self._began = self._began, True
        if began or message.state in ("", FleetState.RUNNING):
            return []
        self.enter(FleetState(message.state), b"", now)
        self.owner_left(now)
        return [m.Log("pause_found", {"state": message.state}, warning=True)]

    def _welcome(self, rank: Rank, kept: list[int] | None = None) -> list[m.Effect]:
        """Tell a rank what it is, and what the fleet is."""
        effects: list[m.Effect] = []
        if not rank.released:
            acknowledgement = m.RegisterAck(
                rank.number, rank.generation, self.weight_epoch, self.state, kept or []
            )
            effects.append(m.Send(rank.peer, acknowledgement))
        if self.generation_epoch is not None:  # which its answers are stamped with
            args = self.generation_epoch, self.weight_epoch
            effects.append(m.Send(rank.peer, m.Control(Signal.SET_GENERATION_EPOCH, args)))
        return effects

    def _resume(self, rank: Rank, peer: bytes, message: m.Register, now: float) -> list[m.Effect]:
        """A rank is back over another connection; what was on its way over the old one is lost."""
        self._retire(rank)
        self.ranks.move(rank, peer)
        rank.draining = False
        rank.away_until, rank.heard = None, self._clock.read(now)
        has = frozenset(message.requests)
        held = [record.request_id for record in self.ledger.of_rank(rank.number)]
        kept = [number for number in held if number in has]
        lost = [number for number in held if number not in has]
        effects = self._welcome(rank, kept)
        effects.append(_back(rank, len(kept), len(lost)))
        awake = self._awake.read(now)
        effects += self.dispatcher.take_back(rank, BROKE, lost, now, awake, rest=False)
        self._revive(rank)
        return effects + self.dispatcher.route_waiting(self._awake.read(now))

    def _revive(self, rank: Rank) -> None:
        """A rank is live again; what it holds it has to tell anew."""
        rank.events = EventStream()
        self.ranks.revive(rank)
        self.router.revive_rank(rank)

    def _hear(self, rank: Rank, now: float) -> list[m.Effect]:
        """A rank says something: it is there, and may have been away."""
        rank.heard = self._clock.read(now)
        if rank.away_until is None:
            return []
        rank.away_until = None
        effects: list[m.Effect] = [_back(rank, self.ledger.load(rank.number), 0)]
        if rank.draining:
            return effects
        self._revive(rank)
        if self._hashed:
            rank.events.asked = True
            effects.append(m.Send(rank.peer, m.Resync()))
        return effects + self.dispatcher.route_waiting(self._awake.read(now))

    def _progress(self, registered: int, message: m.Register, rank: Rank | None = None) -> m.Log:
        expected = max(registered, self._settings.expected_ranks)
        fields: dict[str, Any] = {"registered": registered, "expected": expected}
        if rank is not None:
            fields |= {"rank": rank.number, "generation": rank.generation}
        if message.version is not None:
            fields |= {"replica": message.replica, "dp_rank": message.dp_rank}
        return m.Log("ranks_registered", fields)

    def drain(self, peer: bytes, message: m.Drain, now: float) -> list[m.Effect]:
        """An engine wants to leave once it has answered what it has."""
        rank = self.ranks.of_peer(peer)
        if rank is None:
            return self.stranger(peer, "drain_from_stranger")
        effects = [*self._hear(rank, now), m.Send(peer, m.DrainAck())]
        rank.draining = True
        if self._retire(rank):
            fields = {"rank": rank.number, "requests": self.ledger.load(rank.number)}
            effects.append(m.Log("rank_draining", fields))
            if not len(self.ranks):
                effects.append(self.dispatcher.none_left(self._awake.read(now), orderly=True))
        return effects

    def pong(self, peer: bytes, message: m.Pong, now: float) -> list[m.Effect]:
        """An engine shows that it is alive."""
        rank = self.ranks.of_peer(peer)
        if rank is None:
            return self.stranger(peer, "pong_from_stranger")
        return self._hear(rank, now)

    def lose_connection(
        self, rank: Rank, now: float, undelivered: tuple[int, ...]
    ) -> list[m.Effect]:
        """A rank cannot be reached. Ours may come back soon, with the requests that they have."""
        wait = self._settings.fleet.return_wait
        if rank.released or not wait:
            return self.lose_ranks([rank], now, BROKE, undelivered)
        effects: list[m.Effect] = []
        awake, was_live = self._awake.read(now), self._retire(rank)
        if rank.away_until is None:
            rank.away_until = awake + wait
            fields = {"rank": rank.number, "requests": self.ledger.load(rank.number)}
            effects.append(m.Log("rank_away", fields, warning=True))
        effects += self.dispatcher.take_back(rank, BROKE, undelivered, now, awake, rest=False)
        if was_live and not len(self.ranks):
            effects.append(self.dispatcher.none_left(awake, orderly=False))
        return effects

    def lose_ranks(
        self, ranks: Sequence[Rank], now: float, cause: str, undelivered: tuple[int, ...] = ()
    ) -> list[m.Effect]:
        """Ranks are gone: their caches are forgotten, their requests go to others."""
        awake = self._awake.read(now)
        effects: list[m.Effect] = []
        # First of all none of them is live any more: none gets what another one had.
        were_live = [self._retire(rank) for rank in ranks]
        orderly = True
        for rank in ranks:
            self.ranks.remove(rank)
            requests = self.ledger.load(rank.number)
            fields = {"rank": rank.number, "cause": cause, "requests": requests}
            left = cause == LEFT and not requests
            orderly &= left
            effects.append(m.Log("rank_left" if left else "rank_lost", fields, warning=not left))
            effects += self.dispatcher.take_back(rank, cause, undelivered, now, awake)
        if any(were_live) and not len(self.ranks):
            effects.append(self.dispatcher.none_left(awake, orderly=orderly))
        return effects

    def stop(self, now: float) -> list[m.Effect]:
        """The engines are told to end: what comes from now on is for those that come next."""
        were_live = [self._retire(rank) for rank in self.ranks.present]
        for rank in self.ranks.present:
            rank.draining = True
        if not any(were_live):
            return []
        return [self.dispatcher.none_left(self._awake.read(now), orderly=True)]

    def _retire(self, rank: Rank) -> bool:
        """A rank gets no more requests. Returns whether it was live."""
        live = self.ranks.is_live(rank)
        if live:
            self.ranks.retire(rank)
            self.router.drop_rank(rank)
        return live

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
        effects = self._hear(rank, now)
        if not self._hashed or not self.ranks.is_live(rank):
            return effects
        changes = segments(message.events, message.count)
        follows = (
            changes is not None
            and message.weight_epoch <= self.weight_epoch
            and rank.events.take(message.first, message.count, message.events)
        )
        if not follows or changes is None:
            return effects + self._distrust(rank, message)
        if message.weight_epoch != self.weight_epoch:
            # Blocks of an older epoch are of no use any more, but a clear among them still counts.
            changes = [change for change in changes[:1] if change[0] is Change.CLEARED]
        if not self.index.apply(rank.number, changes):
            return effects + self._distrust(rank, message)
        self.router.note_stored(rank, (h for change, h in changes if change is Change.STORED))
        return effects

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

    def tick(self, ticks: int, now: float, stood_still: float = 0.0) -> list[m.Effect]:
        """Let time do its work: find those who are gone, ask again who owes its table.

        A send over a broken connection fails; an engine that hangs keeps silent.
        """
        self._clock.skip(stood_still)
        self._awake.skip(stood_still)
        clock, awake = self._clock.read(now), self._awake.read(now)
        effects = self.dispatcher.expire(awake)
        gone = [r for r in self.ranks.present if r.away_until is not None and r.away_until <= awake]
        effects += self.lose_ranks(gone, now, BROKE)
        patience = self._patience
        ours = [rank for rank in self.ranks.present if not rank.released]
        hung = [rank for rank in ours if clock - rank.heard > patience(rank)]
        seconds = min(map(patience, hung), default=0.0)
        effects += self.lose_ranks(hung, now, f"no sign of life for {seconds:g} s")
        effects += self.pause.look_after(self.state, now, awake)
        for rank in self.ranks.present:
            if rank.released:
                continue
            effects.append(m.Send(rank.peer, m.Ping(ticks)))
            if rank.events.asked and self.ranks.is_live(rank):
                effects.append(m.Send(rank.peer, m.Resync()))
        return effects

    def _patience(self, rank: Rank) -> float:
        """Seconds that a rank may say nothing."""
        limits = self._settings.fleet
        if rank.proven:
            return limits.hung_timeout
        return max(limits.hung_timeout, limits.first_answer_timeout)


def _back(rank: Rank, kept: int, lost: int) -> m.Log:
    return m.Log("rank_back", {"rank": rank.number, "requests": kept, "lost": lost})
