"""One engine's end of the wire: what it needs beside what the engine has itself."""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import replace

from megatron.core.inference.engines.dynamic_engine import EngineState

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.lifecycle import FleetState
from megatron.core.inference.coordinator.runtime import wire
from megatron.core.inference.coordinator.runtime.engine_cache import EngineCache
from megatron.core.inference.coordinator.runtime.engine_signals import signals_towards, told_to_be
from megatron.core.inference.coordinator.runtime.eventlog import EventLog
from megatron.core.inference.coordinator.runtime.group_channel import GroupLeader, GroupMember
from megatron.core.inference.coordinator.runtime.link import CoordinatorLink
from megatron.core.inference.coordinator.runtime.process import CoordinatorProcess

logger = logging.getLogger(__name__)

_AGAIN_SECONDS = 2.0
"""Until a registration or a wish to leave that nobody acknowledged is repeated."""

_ANSWERS_KEPT_SECONDS = 10.0
"""How long answers are kept that a broken connection may have lost: it shows within 3 s."""

_REGISTER_AGAIN = [bytes(frame) for frame in wire.encode(m.RegisterAgain())]
_DRAIN_ACK = [bytes(frame) for frame in wire.encode(m.DrainAck())]


class EngineEnd:
    """What one engine needs to talk to its coordinator, beside what it has itself.

    Args:
        cache: The engine's prefix cache.

    Attributes:
        link: The socket to the coordinator; None on ranks that have none.
        leader: This rank leads its model-parallel group, which has more ranks.
        member: This rank is another one of such a group.
        inbox: Messages drained and not handled yet, in order.
        queue: Requests, by id, that a later step takes into the engine, in order.
        cache: The engine's prefix cache.
        wants_text: Ids of requests whose replies must hold text.
        process: The coordinator process, on the rank that started it.
        registration: What it registered with, to say again when it is asked to.
        generation: What the coordinator last acknowledged this rank as; 0 before.
        asked_again_at: When it last registered again; None once that was acknowledged.
        forsaken: The coordinator gave it up, and has not taken it again yet.
        drop_due: All requests that the engine has are to be dropped once it has its memory back;
            those in the queue wait until then.
        leaving: It is to answer what it has and leave; set from any thread.
        drained: No more requests will come.
        stopping: It has begun to leave.
        stepping: The engine is in the middle of a step.
        reset_due: It was reset in the middle of it.
        ending: The job is ending; it is no error any more that others are gone.
        host: This machine's address within the job.
    """

    def __init__(self, cache: EngineCache):
        self.cache = cache
        self.link: CoordinatorLink | None = None
        self.leader: GroupLeader | None = None
        self.member: GroupMember | None = None
        self.inbox: deque[m.FromCoordinator] = deque()
        self.queue: OrderedDict[int, m.EngineRequest] = OrderedDict()
        self.wants_text: set[int] = set()
        self.process: CoordinatorProcess | None = None
        self.registration: m.Register | None = None
        self.generation = 0
        self._answered: deque[tuple[float, m.Answer]] = deque()
        self.asked_again_at: float | None = None
        self.forsaken = self.leaving = self.drained = self.stopping = False
        self.drop_due = False
        self._asked_to_drain_at: float | None = None
        self.stepping = self.reset_due = False
        self.ending = False
        self.host: str | None = None
        self.events = EventLog(logger)

    def drain(self) -> list[list[bytes]]:
        """The messages of this step, the same on every rank of a model-parallel group."""
        if self.member is not None:
            return self.member.receive(give_up=lambda: self.ending)
        assert self.link is not None
        broke = not self.ending and self.link.check()
        messages = self.link.drain()
        if broke:  # what the coordinator would say, if it had noticed as well
            self.asked_again_at = None
            messages.append(_REGISTER_AGAIN)
        if self.leaving and not self.drained:
            self._ask_to_drain(self.link, messages)
        if self.leader is not None:
            self.leader.publish(messages, give_up=lambda: self.ending)
        return messages

    def reply(self, answers: list[m.Answer]) -> None:
        """Send finished requests to the coordinator, where this rank has a link to it."""
        if self.link is not None and answers:
            self.link.send(m.EngineReply(tuple(answers)))
            now = time.monotonic()
            self._answered.extend((now, answer) for answer in answers)
            while now - self._answered[0][0] > _ANSWERS_KEPT_SECONDS:
                self._answered.popleft()

    def reply_again(self, request_ids: Collection[int]) -> None:
        """Send those answers again that may have been lost with a connection."""
        wanted = frozenset(request_ids)
        again = [answer for _, answer in self._answered if answer.request_id in wanted]
        self._answered.clear()
        self.reply(again)

    def tell_events(self) -> None:
        """Send what has happened to the cache, where this rank has a link to the coordinator."""
        events = self.cache.events()
        if self.link is not None and events is not None:
            self.link.send(events)

    def catch_up(self, state: EngineState, fleet: FleetState) -> None:
        """Take the signals first that lead from the engine's state to the fleet's."""
        signals = [m.Control(signal) for signal in signals_towards(state, fleet)]
        self.inbox.extendleft(reversed(signals))

    def register_again(self, state: EngineState) -> None:
        """Register once more, where this rank has a link and does not want to leave.

        It tells what it has, and goes on with what nobody else was given. Several messages may each
        be answered with the demand, but a second registration would cost the requests that were
        routed after the first.
        """
        now = time.monotonic()
        if self.asked_again_at is not None and now - self.asked_again_at < _AGAIN_SECONDS:
            return
        self.asked_again_at = now
        if self.link is not None and self.registration is not None and not self.leaving:
            self.events.write(m.Log("registering_again", warning=True))
            answered = (answer.request_id for _, answer in self._answered)
            signals = (told.signal for told in self.inbox if isinstance(told, m.Control))
            has = () if self.drop_due else self.cache.found
            registration = replace(
                self.registration,
                weight_epoch=self.cache.epoch,
                generation=self.generation,
                requests=[*has, *self.queue, *answered],
                state=told_to_be(state, signals) if self.generation else "",
            )
            self.link.send(registration)

    def _ask_to_drain(self, link: CoordinatorLink, messages: list[list[bytes]]) -> None:
        if link.broken or _REGISTER_AGAIN in messages:  # no part of the fleet: no requests come
            messages.append(_DRAIN_ACK)
            return
        now = time.monotonic()
        asked_at = self._asked_to_drain_at
        if asked_at is None or now - asked_at >= _AGAIN_SECONDS:
            self._asked_to_drain_at = now
            link.send(m.Drain())
