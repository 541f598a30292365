"""Our coordinator without its sockets: what the loop does with a message, and engines to match."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coordinator_bench import frames
from coordinator_bench.frames import Frames
from coordinator_bench.prompts import Conversation
from coordinator_bench.traffic import CLIENT, Delivery, Placement, engine, rank_of
from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.core import Coordinator
from megatron.core.inference.coordinator.policies import PrefixCachingCostPolicy
from megatron.core.inference.coordinator.runtime import garbage
from megatron.core.inference.coordinator.runtime.codec import Codec
from megatron.core.inference.coordinator.settings import CoordinatorSettings, RoutingSettings

FOREVER = 1e9
"""Seconds of a time to live that nothing outlives."""

_SUBMIT, _PING, _RESYNC = 20, 34, 37
_REPLY_BODY = frames.pack(frames.reply_of(0, range(300, 316)))


class Ours:
    """The core and its codec, with engines of ours registered.

    Args:
        ranks: Engines.
        block: Tokens in a block.
        events: Whether the engines tell what their caches hold.
        ttl: Seconds that a block is believed held on engines that do not tell.
        cost_policy: Name of the cost policy; empty for the default.
        total_blocks: Room of each engine's cache.

    Attributes:
        now: The clock that the core is told.
        tells: Whether the engines tell what their caches hold.
    """

    def __init__(
        self,
        ranks: int,
        block: int,
        *,
        events: bool = True,
        ttl: float = FOREVER,
        cost_policy: str = "",
        total_blocks: int = 100_000_000,
    ):
        costs: dict[str, Any] = {}
        if cost_policy:
            costs["cost_policy"] = PrefixCachingCostPolicy(cost_policy)
        routing = RoutingSettings(ttl_seconds=ttl, **costs)
        self._core = Coordinator(CoordinatorSettings(routing=routing, block_size_tokens=block))
        self._codec = Codec(lambda body: body)
        self._next = [0] * ranks
        self._each_tick: Callable[[], None] = lambda: None
        self.now = 1000.0
        self.tells = events
        self.deliver(CLIENT, frames.connect())
        for rank in range(ranks):
            self.deliver(engine(rank), frames.register(rank, block, 1024, total_blocks))
            if events:
                self.tell(rank, np.zeros(1, dtype=np.int64))

    def deliver(self, peer: bytes, received: Frames) -> Delivery:
        """What the loop does with a message: decode, decide, encode what is to be sent."""
        return self._handled(peer, self._codec.decode(peer, received))

    def _handled(self, peer: bytes, message: Any) -> Delivery:
        sent: Delivery = []
        for effect in self._core.handle(m.Incoming(peer, message), self.now):
            if type(effect) is m.Send:
                encoded = self._codec.encode(effect.peer, effect.message)
                if encoded is not None:
                    sent.append((effect.peer, encoded))
        return sent

    def tick(self, seconds: float = 1.0) -> Delivery:
        """Let time pass, as the loop does about once a second; returns what is sent."""
        self.now += seconds
        sent = self._handled(b"", m.Tick())
        self._each_tick()
        return sent

    def collect_as_in_its_process(self) -> None:
        """Set this process's garbage collector up as the coordinator's is, from now on."""
        garbage.spare_the_old()
        self._each_tick = garbage.freeze

    def answer_pings(self, sent: Delivery) -> None:
        """Engines show that they are alive, where a tick asked for it."""
        for peer, encoded in sent:
            if encoded[0][1] == _PING and peer != CLIENT:
                self.deliver(peer, frames.pong(frames.int_at(encoded[0], 2)))

    @property
    def backlog(self) -> bool:
        """Whether the loop would have something to do when nothing arrives."""
        return self._core.backlog

    def sweep(self) -> None:
        """A piece of what the loop does when nothing arrives."""
        self._handled(b"", m.Sweep())

    def idle(self) -> None:
        """Nothing arrives until all of that is done."""
        while self.backlog:
            self.sweep()

    # --- clients ---------------------------------------------------------------------------------

    def submission(self, request: int, conversation: Conversation, blocks: int) -> Frames:
        """The frames of a request for a conversation's first blocks."""
        hashes = conversation.hashes[:blocks].astype("<i8").tobytes()
        tokens = conversation.tokens(blocks)
        return frames.submit(request, tokens, conversation.body(blocks), hashes)

    def short_submission(self, request: int) -> Frames:
        """The frames of a request without one full block."""
        return frames.submit(request, 1, b"\x91\xcd\x01\x00", b"")

    def placement(self, sent: Delivery) -> Placement:
        """Where a submitted request went."""
        for peer, encoded in sent:
            if encoded[0][1] == _SUBMIT:
                return Placement(rank_of(peer), frames.int_at(encoded[0], 2))
        raise RuntimeError(f"a request was not routed: {sent!r}")

    # --- engines ---------------------------------------------------------------------------------

    def hold(self, rank: int, chains: Sequence[np.ndarray]) -> None:
        """An engine that tells has these chains in its cache from now on."""
        self.tell(rank, frames.chains(*chains))

    def tell(self, rank: int, packed: np.ndarray) -> None:
        """An engine sends a batch of events."""
        sent = self.deliver(*self.batch(rank, packed))
        if any(encoded[0][1] == _RESYNC for _, encoded in sent):
            raise RuntimeError(f"rank {rank} is not believed any more")

    def news(self, rank: int, stored: Sequence[np.ndarray]) -> list[tuple[bytes, Frames]]:
        """What an engine tells of chains that it has stored."""
        return [self.batch(rank, frames.chains(*stored))] if self.tells else []

    def batch(self, rank: int, packed: np.ndarray, epoch: int = 0) -> tuple[bytes, Frames]:
        """An engine's next batch of events, to be delivered in this order."""
        first = self._next[rank]
        self._next[rank] += len(packed)
        return engine(rank), frames.events(first, packed, epoch)

    def replies(
        self, rank: int, request_ids: Sequence[int], body: bytes = _REPLY_BODY
    ) -> tuple[bytes, Frames]:
        """One engine's answers of one step."""
        seen = self._next[rank] if self.tells else -1
        answers = [(number, 0, seen) for number in request_ids]
        return engine(rank), frames.replies(answers, [body] * len(answers))
