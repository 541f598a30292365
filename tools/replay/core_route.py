"""The coordinator core as it is, driven by messages, with modelled replicas as its engines."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.core import Coordinator
from megatron.core.inference.coordinator.kv_events import CLEARED, pack_events
from megatron.core.inference.coordinator.settings import (
    PROTOCOL_VERSION,
    CoordinatorSettings,
    FleetSettings,
    RoutingSettings,
)
from replay.profiles import Profile
from replay.replica import Replica
from replay.routes import Placed
from replay.workload import Request

_CLIENT = b"client"
_BODY = b""


@dataclass(frozen=True, slots=True)
class CoreMaker:
    """Makes routes that ask the coordinator core.

    Attributes:
        routing: Fields of `RoutingSettings`.
        true_caches: Whether replicas tell of their caches, or it goes by its own history.
        eviction: What replicas register: `lru` or `ref_zero`.
        fleet: Fields of `FleetSettings`.
        max_requests: What replicas register; 0 for what they really run at once.
        sized: Whether they tell how large their caches are, as released engines do not.
    """

    routing: dict[str, Any] = field(default_factory=dict)
    true_caches: bool = True
    eviction: str = "lru"
    fleet: dict[str, Any] = field(default_factory=dict)
    max_requests: int = 0
    sized: bool = True

    def __call__(self, replicas: Sequence[Replica], seed: int) -> "CoreRoute":
        """A coordinator with these engines registered."""
        return CoreRoute(self, replicas)


_UNBOUNDED = 2**62
"""Blocks of a cache whose size the coordinator is not to reckon with."""


class CoreRoute:
    """One coordinator, one client and the modelled replicas as its engines.

    Args:
        made: What to make it of.
        replicas: The replicas.
    """

    def __init__(self, made: CoreMaker, replicas: Sequence[Replica]):
        profile = replicas[0].profile
        routing = {"generated_tokens": replicas[0].generated} | made.routing
        self.core = Coordinator(
            CoordinatorSettings(
                routing=RoutingSettings(**routing),
                fleet=FleetSettings(**made.fleet),
                block_size_tokens=profile.block_size,
                expected_ranks=len(replicas),
            )
        )
        self._peers = [b"%d" % number for number in range(len(replicas))]
        self._numbers = {peer: number for number, peer in enumerate(self._peers)}
        self._told = [0] * len(replicas)
        self._pending: dict[int, Request] = {}  # by the client's name for them
        self._ids: dict[Request, int] = {}
        self._next = 0
        self._say(_CLIENT, m.Connect(PROTOCOL_VERSION, text_prompts=False), 0.0)
        for number, peer in enumerate(self._peers):
            self._say(peer, _registration(made, profile, number), 0.0)
            if made.true_caches:
                self.stored(number, pack_events([CLEARED]), 0.0)

    def submit(self, request: Request, now: float) -> Sequence[Placed]:
        """The client submits it."""
        self._next += 1
        self._pending[self._next] = request
        name = self._next.to_bytes(8)
        message = m.SubmitRequest(self._next, request.prompt_tokens, _BODY, name, request.hashes)
        return self._placed(self._say(_CLIENT, message, now))

    def answered(self, replica: int, requests: list[Request], now: float) -> Sequence[Placed]:
        """An engine answers; a freed place may go to one that waits."""
        answers = [
            m.Answer(self._ids.pop(r), "COMPLETED", r.cached_tokens, 0, _BODY) for r in requests
        ]
        return self._placed(self._say(self._peers[replica], m.EngineReply(tuple(answers)), now))

    def stored(self, replica: int, events: bytes, now: float) -> None:
        """An engine tells of its cache."""
        count = len(events) // 8
        message = m.KvEvents(0, self._told[replica], count, events)
        self._told[replica] += count
        refused = self._say(self._peers[replica], message, now)
        assert not refused, f"the core does not believe a modelled replica: {refused}"

    def tick(self, now: float) -> None:
        """Let what is past its time be forgotten."""
        self._say(b"", m.Sweep(), now)

    @property
    def index_blocks(self) -> int:
        """Blocks in the core's index."""
        return len(self.core.fleet.index)

    def _say(self, peer: bytes, message: m.ToCoordinator, now: float) -> list[m.Effect]:
        return self.core.handle(m.Incoming(peer, message), now)

    def _placed(self, effects: list[m.Effect]) -> list[Placed]:
        placed = []
        for effect in effects:
            if isinstance(effect, m.Send) and isinstance(effect.message, m.EngineRequest):
                request = self._pending.pop(int.from_bytes(effect.message.prompt))
                self._ids[request] = effect.message.request_id
                placed.append((self._numbers[effect.peer], request))
        return placed


def _registration(made: CoreMaker, profile: Profile, number: int) -> m.Register:
    return m.Register(
        version=PROTOCOL_VERSION,
        replica="replay",
        dp_rank=number,
        max_requests=made.max_requests or profile.max_requests,
        block_size=profile.block_size,
        total_blocks=profile.total_blocks if made.sized else _UNBOUNDED,
        eviction=made.eviction,
    )
