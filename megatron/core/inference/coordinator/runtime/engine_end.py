"""One engine's end of the wire: what it needs beside what the engine has itself."""

import logging
from collections import deque

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.runtime.eventlog import EventLog
from megatron.core.inference.coordinator.runtime.group_channel import (
    GroupPublisher,
    GroupSubscriber,
)
from megatron.core.inference.coordinator.runtime.link import CoordinatorLink
from megatron.core.inference.coordinator.runtime.process import CoordinatorProcess

logger = logging.getLogger(__name__)


class EngineEnd:
    """What one engine needs to talk to its coordinator, beside what it has itself.

    Attributes:
        link: The socket to the coordinator; None on ranks that have none.
        publisher: To the other ranks of the model-parallel group, on its first rank.
        subscriber: From the first rank, on the others.
        inbox: Messages drained and not handled yet, in order.
        weight_epoch: Epoch of the weights that the engine holds.
        skipped: Prompt tokens whose prefill was skipped, by request id.
        wants_text: Ids of requests whose replies must hold text.
        process: The coordinator process, on the rank that started it.
        registration: What it registered with, to say again when it is asked to.
        ending: The job is ending; it is no error any more that others are gone.
    """

    def __init__(self):
        self.link: CoordinatorLink | None = None
        self.publisher: GroupPublisher | None = None
        self.subscriber: GroupSubscriber | None = None
        self.inbox: deque[m.FromCoordinator] = deque()
        self.weight_epoch = 0
        self.skipped: dict[int, int] = {}
        self.wants_text: set[int] = set()
        self.process: CoordinatorProcess | None = None
        self.registration: m.Register | None = None
        self.ending = False
        self.events = EventLog(logger)

    def drain(self) -> list[list[bytes]]:
        """The messages of this step, the same on every rank of a model-parallel group."""
        if self.subscriber is not None:
            return self.subscriber.receive(give_up=lambda: self.ending)
        assert self.link is not None
        if not self.ending:
            self.link.check()
        messages = self.link.drain()
        if self.publisher is not None:
            self.publisher.publish(messages)
        return messages

    def reply(self, answers: list[m.Answer]) -> None:
        """Send finished requests to the coordinator, where this rank has a link to it."""
        if self.link is not None and answers:
            self.link.send(m.EngineReply(tuple(answers)))
