"""Requests on their way through the fleet: admitted, given to a rank, answered or tried again."""

from collections.abc import Collection, Iterable

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.ledger import Ledger, RequestRecord
from megatron.core.inference.coordinator.ranks import Rank, Ranks
from megatron.core.inference.coordinator.router import Router
from megatron.core.inference.coordinator.settings import CoordinatorSettings

_SHARE = 9
"""How much one owner may have of what is free: a tenth of the fleet stays free for others, and two
who take all that they get have as much (Choudhury and Hahne 1998, dynamic thresholds)."""


class Dispatcher:
    """Gives requests to ranks and answers to clients.

    Deadlines are on a clock that stands still while the coordinator does, not in a pause.

    Args:
        settings: What the coordinator was started with.
        ranks: The replicas.
        ledger: The requests.
        router: Chooses ranks.

    Attributes:
        opened: Whether requests are given to ranks, or still wait for as many as expected.
        weight_epoch: The present one, which requests carry to the engines.
        refusal: Why no request is taken; None while they are.
    """

    def __init__(self, settings: CoordinatorSettings, ranks: Ranks, ledger: Ledger, router: Router):
        self._settings = settings
        self._limits = settings.fleet
        self._ranks = ranks
        self._ledger = ledger
        self._router = router
        self.opened = settings.expected_ranks == 0
        self.weight_epoch = 0
        self.refusal: str | None = None

    def submit(
        self, client: bytes, message: m.SubmitRequest, now: float, clock: float
    ) -> list[m.Effect]:
        """A client asks for something: admit it, if there is room, and give it to a rank."""
        code, refusal = m.ErrorCode.FLEET_PAUSED, self.refusal
        if refusal is None:
            code = m.ErrorCode.OVERLOADED
            refusal = self._overloaded(message.owner or client, message.size)
        if refusal is not None:
            error = m.RequestError(message.client_request_id, code, refusal)
            return [m.Send(client, error), m.Log("request_refused", warning=True, peer=client)]
        record = self._ledger.admit(client, message, now)
        if self._settings.trace and self._settings.hashed:
            record.hashes = self._router.hashes_of(message)
        return self._route(record, clock) if self.opened else []

    def route_waiting(self, clock: float) -> list[m.Effect]:
        """Give what waits to ranks that may have it, first come first served."""
        effects: list[m.Effect] = []
        while self.opened and self._router.has_room:
            record = self._ledger.first_waiting
            if record is None:
                break
            effects += self._route(record, clock)
        return effects

    def answer(self, rank: Rank, answer: m.Answer, now: float, effects: list[m.Effect]) -> None:
        """A rank's answer to a request that it has in flight goes to whoever asked."""
        record = self._ledger.finish(answer.request_id)
        in_window = self._router.compare(record, rank, answer)
        completed = answer.status == "COMPLETED"
        rank.proven |= completed
        self._router.settle(record, now, completed=completed)
        if record.client is not None:
            effects.append(m.Send(record.client, m.Reply(record.client_request_id, answer.body)))
        if self._settings.trace:
            trace = _trace(record, m.Outcome.ANSWERED if completed else m.Outcome.FAILED)
            trace.predicted_tokens = record.predicted_tokens
            trace.cached_tokens, trace.in_window = answer.cached_tokens, in_window
            trace.reply = answer.body
            effects.append(trace)

    def take_back(
        self,
        rank: Rank,
        cause: str,
        undelivered: Collection[int],
        now: float,
        clock: float,
        *,
        rest: bool = True,
    ) -> list[m.Effect]:
        """What a rank had goes to others, or back with an error after too many tries.

        Args:
            rank: The rank, not live at present.
            cause: Why, for whoever gets an error.
            undelivered: Of its requests, those that it never got; they count as no try.
            now: The time.
            clock: Seconds that the coordinator was awake.
            rest: It is lost, so that all others go as well.
        """
        missed = frozenset(undelivered)
        effects: list[m.Effect] = []
        again = []
        for record in self._ledger.of_rank(rank.number):
            tried = record.request_id not in missed
            if tried and not rest:
                continue
            self._router.settle(record, now, completed=False)
            if tried:
                record.lost_with = (*record.lost_with, rank.number)
            if self._may_try_again(record, now):
                self._ledger.requeue(record)
                again.append(record)
            else:
                effects += self._lose(record, rank, cause, tried)
        self._ledger.sort_waiting()
        for record in sorted(again, key=lambda record: record.arrival):
            effects += self._route(record, clock)
        return effects

    def abandon(
        self, records: Iterable[RequestRecord], now: float, text: str = ""
    ) -> list[m.Effect]:
        """Give requests up in a pause: late answers will be dropped.

        Args:
            records: The requests.
            now: The time.
            text: Why, for whoever waits for one of them.
        """
        effects: list[m.Effect] = []
        for record in records:
            effects += self._close(record, m.Outcome.FLEET_PAUSED)
            if record.rank is not None:
                self._router.settle(record, now, completed=False)
            effects += _error(record, m.ErrorCode.FLEET_PAUSED, text)
        return effects

    def came_back(self, number: int) -> None:
        """A rank that was lost is back, so what it had did not end it: it counts as no try."""
        for record in self._ledger:
            if number in record.lost_with:
                record.lost_with = tuple(n for n in record.lost_with if n != number)

    def _may_try_again(self, record: RequestRecord, now: float) -> bool:
        limits = self._limits
        in_time = now - record.came < limits.retry_deadline
        return record.message is not None and record.attempts <= limits.max_retries and in_time

    def _lose(self, record: RequestRecord, rank: Rank, cause: str, tried: bool) -> list[m.Effect]:
        """A request is lost with its rank."""
        when = "while it had" if tried else "before it got"
        tries = f", try {record.attempts} of {1 + self._limits.max_retries}" if tried else ""
        text = f"replica {rank.number} was lost {when} the request ({cause}{tries})"
        error = _error(record, m.ErrorCode.REPLICA_LOST, f"{text}; send it again")
        return self._close(record, m.Outcome.REPLICA_LOST) + error

    def none_left(self, clock: float, *, orderly: bool) -> m.Log:
        """The last live rank is gone: what waits for a place waits for another rank from now on.

        Args:
            clock: Seconds that the coordinator was awake.
            orderly: It drains, or left with nothing unanswered: no news while nobody waits.
        """
        waiting = self._ledger.waiting
        for record in waiting:
            record.deadline = clock + self._patience
        warning = bool(waiting) or not orderly
        return m.Log("no_rank_left", {"waiting": len(waiting)}, warning=warning)

    def expire(self, clock: float) -> list[m.Effect]:
        """Where there is no rank: answer those that have waited for one for too long."""
        effects: list[m.Effect] = []
        if self.opened and not len(self._ranks):
            for record in self._ledger.waiting:
                if record.deadline <= clock:
                    effects += self._give_up(record)
        return effects

    @property
    def _patience(self) -> float:
        """Seconds that a request waits for a rank, where none is live."""
        limits = self._limits
        return limits.replica_wait or (limits.return_wait if self._ranks.present else 0.0)

    def _route(self, record: RequestRecord, clock: float) -> list[m.Effect]:
        if not self._router.has_room:
            record.deadline = clock + self._patience
            if not len(self._ranks) and not self._patience:
                return self._give_up(record)
            return []
        message = record.message
        assert message is not None
        effects: list[m.Effect] = []
        hashes = self._router.hashes_of(message)
        if hashes is None:
            if message.hashes is not None:
                effects.append(m.Log("hashes_refused", warning=True, peer=record.client))
            else:
                effects.append(m.Log("request_not_hashed", peer=record.client))
        rank = self._router.place(record, hashes or b"")
        request = m.EngineRequest(
            record.request_id, self.weight_epoch, message.sampling, message.prompt
        )
        if not self._limits.max_retries:
            record.message = None
        effects.append(m.Send(rank.peer, request))
        return effects

    def _give_up(self, record: RequestRecord) -> list[m.Effect]:
        effects = self._close(record, m.Outcome.NO_REPLICA)
        wait = self._limits.replica_wait
        waited = f", nor was for {wait:g} s" if wait else ""
        text = f"no replica is registered{waited}; send it again later"
        return effects + _error(record, m.ErrorCode.NO_REPLICA, text)

    def _close(self, record: RequestRecord, outcome: m.Outcome) -> list[m.Effect]:
        """A request will not be answered."""
        self._ledger.finish(record.request_id)
        return [_trace(record, outcome)] if self._settings.trace else []

    def _overloaded(self, owner: bytes | str, size: int) -> str | None:
        """Why a request of this many bytes cannot be taken; None if it can."""
        limits, ledger = self._limits, self._ledger
        places = limits.max_inflight_requests - len(ledger)
        room = limits.max_inflight_bytes - ledger.size
        share = ledger.share(owner)
        if places <= 0:
            full = f"{len(ledger)} requests"
        elif len(ledger) and size > room:
            full = f"{ledger.size} bytes in {len(ledger)} requests"
        elif share.requests and (
            share.requests >= _SHARE * places or share.size + size > _SHARE * room
        ):
            full = (
                f"{ledger.size} bytes in {len(ledger)} requests, {share.size} bytes in "
                f"{share.requests} requests of this user's, who may have no more,"
            )
        else:
            return None
        return f"the fleet has {full} waiting or in flight; send it again later"


def _error(record: RequestRecord, code: m.ErrorCode, text: str) -> list[m.Effect]:
    if record.client is None:
        return []
    return [m.Send(record.client, m.RequestError(record.client_request_id, code, text))]


def _trace(record: RequestRecord, outcome: m.Outcome) -> m.Trace:
    return m.Trace(
        outcome,
        record.request_id,
        record.client,
        record.came,
        record.prompt_tokens,
        record.hashes,
        record.rank,
    )
