"""Turns of conversations through a coordinator: submitted, stored, answered, and timed."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from coordinator_bench.frames import Frames
from coordinator_bench.prompts import Conversation

CLIENT = b"client"

Delivery = list[tuple[bytes, Any]]
"""What a coordinator sends because of one message: peer and frames each."""


class Placement(NamedTuple):
    """Where a request went, and what the coordinator calls it."""

    rank: int
    request_id: int


def engine(rank: int) -> bytes:
    """Identity of an engine's socket."""
    return b"engine-%d" % rank


def rank_of(peer: bytes) -> int:
    """The engine behind an identity."""
    return int(peer.removeprefix(b"engine-"))


class Side(Protocol):
    """What `Ours` and `Released` have in common."""

    def deliver(self, peer: bytes, received: Frames) -> Delivery:
        """Handle a message from the wire."""

    def idle(self) -> None:
        """Do what the loop does when nothing arrives, until nothing is left."""

    def collect_as_in_its_process(self) -> None:
        """Set this process's garbage collector up as the coordinator's process does."""

    def submission(self, request: int, conversation: Conversation, blocks: int) -> Frames:
        """The frames of a request."""

    def short_submission(self, request: int) -> Frames:
        """The frames of a request without one full block."""

    def placement(self, sent: Delivery) -> Placement:
        """Where a submitted request went."""

    def hold(self, rank: int, chains: Sequence[Any]) -> None:
        """Make a rank hold chains."""

    def news(self, rank: int, stored: Sequence[Any]) -> list[tuple[bytes, Frames]]:
        """What an engine tells of chains that it has stored; nothing where it tells nothing."""

    def replies(self, rank: int, request_ids: Sequence[int]) -> tuple[bytes, Frames]:
        """One engine's answers of one step."""


def make_side(name: str, ranks: int, block: int, **options: Any) -> Any:
    """`Ours` for "ours", `Released` for "released".

    They are imported where they are used: megatron.core takes seconds, which the main process of
    the bench need not spend.
    """
    if name == "ours":
        from coordinator_bench.ours import Ours

        return Ours(ranks, block, **options)
    from coordinator_bench.released import Released

    return Released(ranks, block)


@dataclass(slots=True)
class Times:
    """Nanoseconds of processor time that a number of requests took.

    Attributes:
        requests: How many there were.
        submit: From their frames to the frames for the engines.
        events: Of the cache events that they caused.
        reply: From the engines' answers to the clients' frames, and what that put off.
        stored: (block, rank) pairs that were added.
    """

    requests: int = 0
    submit: int = 0
    events: int = 0
    reply: int = 0
    stored: int = 0

    @property
    def submit_us(self) -> float:
        """Microseconds a request for its decision and what it changes in the index."""
        return self.submit / self.requests / 1000

    @property
    def whole_us(self) -> float:
        """Microseconds a request from its submission to its answer."""
        return (self.submit + self.events + self.reply) / self.requests / 1000


class Traffic:
    """Clients and engines around one coordinator.

    Args:
        side: The coordinator.
    """

    def __init__(self, side: Side):
        self._side = side
        self._requests = 0

    def turn(self, conversations: Sequence[Conversation], blocks: int) -> Times:
        """Submit the next turn of these conversations, all in flight at once; answer them.

        Args:
            conversations: Whose turn it is.
            blocks: Blocks of their prompts.
        """
        side = self._side
        messages = [(CLIENT, side.submission(self._number(), c, blocks)) for c in conversations]
        submit, sent = deliver_all(side, messages)
        placed = [side.placement(delivery) for delivery in sent]
        stored, news = self._store(conversations, placed, blocks)
        events, _ = deliver_all(side, news)
        reply, _ = deliver_all(side, self._answers(placed))
        began = time.thread_time_ns()
        side.idle()
        reply += time.thread_time_ns() - began
        return Times(len(conversations), submit, events, reply, stored)

    def submit(self, conversations: Iterable[Conversation], blocks: int) -> list[Placement]:
        """Submit requests that stay unanswered."""
        side = self._side
        frames = (side.submission(self._number(), c, blocks) for c in conversations)
        return [side.placement(side.deliver(CLIENT, message)) for message in frames]

    def submit_short(self, count: int) -> list[Placement]:
        """Submit requests that are too short for any cache; they stay unanswered."""
        side = self._side
        frames = (side.short_submission(self._number()) for _ in range(count))
        return [side.placement(side.deliver(CLIENT, message)) for message in frames]

    def answer(self, placed: Iterable[Placement]) -> None:
        """Answer requests."""
        deliver_all(self._side, self._answers(placed))

    def _number(self) -> int:
        self._requests += 1
        return self._requests

    def _store(
        self, conversations: Sequence[Conversation], placed: Sequence[Placement], blocks: int
    ) -> tuple[int, list[tuple[bytes, Frames]]]:
        """The engines compute what they lack; one batch of events an engine."""
        stored = 0
        new: dict[int, list[Any]] = {}
        for conversation, (rank, _) in zip(conversations, placed, strict=True):
            held = conversation.held_by(rank)
            if held < blocks:
                stored += blocks - held
                conversation.held[rank] = blocks
                new.setdefault(rank, []).append(conversation.hashes[held:blocks])
        return stored, [message for rank, c in new.items() for message in self._side.news(rank, c)]

    def _answers(self, placed: Iterable[Placement]) -> list[tuple[bytes, Frames]]:
        by_rank: dict[int, list[int]] = {}
        for rank, request_id in placed:
            by_rank.setdefault(rank, []).append(request_id)
        return [self._side.replies(rank, ids) for rank, ids in by_rank.items()]


def deliver_all(side: Side, messages: Sequence[tuple[bytes, Frames]]) -> tuple[int, list[Delivery]]:
    """Deliver messages one after the other.

    Returns:
        Nanoseconds of this thread's processor time, which does not count what other processes
        took, and what was sent because of each.
    """
    deliver = side.deliver
    began = time.thread_time_ns()
    sent = [deliver(peer, received) for peer, received in messages]
    return time.thread_time_ns() - began, sent
