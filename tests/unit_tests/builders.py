"""Small factories for tests that drive a coordinator without any socket."""

from dataclasses import fields
from typing import Any

import hypothesis
from megatron.core.inference.config import PrefixCachingEvictionPolicy

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.core import Coordinator
from megatron.core.inference.coordinator.hashing import block_hashes, pack_hashes
from megatron.core.inference.coordinator.lifecycle import Signal
from megatron.core.inference.coordinator.settings import (
    PROTOCOL_VERSION,
    CoordinatorSettings,
    FleetSettings,
    RoutingSettings,
)

# How long an example takes says nothing on a machine that is busy with other things.
hypothesis.settings.register_profile("busy_machine", deadline=None)
hypothesis.settings.load_profile("busy_machine")

BLOCK = 4
"""Tokens in a block of every coordinator made here."""

CLIENT, OTHER = b"client", b"other"
SAMPLING, PROMPT, BODY = b"sampling", b"prompt", b"body"
"""Bodies, which nobody in the core looks into."""

LRU, REF_ZERO = PrefixCachingEvictionPolicy.LRU, PrefixCachingEvictionPolicy.REF_ZERO

_ROUTING = {field.name for field in fields(RoutingSettings)}
_FLEET = {field.name for field in fields(FleetSettings)}


def make_settings(**values: Any) -> CoordinatorSettings:
    """Coordinator settings; fields of `RoutingSettings` and `FleetSettings` go there.

    A rank that cannot be reached is lost at once, and one that says nothing after the hung timeout,
    its first answer or not, unless `return_wait` or `first_answer_timeout` say otherwise.
    """
    values = {"return_wait": 0.0, "first_answer_timeout": 0.0} | values
    routing = {name: value for name, value in values.items() if name in _ROUTING}
    fleet = {name: value for name, value in values.items() if name in _FLEET}
    rest = {name: value for name, value in values.items() if name not in _ROUTING | _FLEET}
    return CoordinatorSettings(
        **{
            "routing": RoutingSettings(**routing),
            "fleet": FleetSettings(**fleet),
            "block_size_tokens": BLOCK,
            **rest,
        }
    )


def make_register(dp_rank: int = 0, replica: str = "job", **values: Any) -> m.Register:
    """A registration of an engine of ours: lru, 64 places, more room than any test needs."""
    usual = {
        "version": PROTOCOL_VERSION,
        "max_requests": 64,
        "block_size": BLOCK,
        "total_blocks": 10_000,
        "eviction": "lru",
    }
    return m.Register(replica=replica, dp_rank=dp_rank, **usual | values)


def stock_register() -> m.Register:
    """The registration of a released engine."""
    return m.Register(version=None)


def make_connect(text_prompts: bool = False) -> m.Connect:
    """The greeting of a client of ours."""
    return m.Connect(PROTOCOL_VERSION, text_prompts)


def tokens(blocks: int, name: int = 0) -> list[int]:
    """A prompt of full blocks; of one name, the shorter is a prefix of the longer."""
    return [1000 * name + i for i in range(blocks * BLOCK)]


def hashes(prompt: list[int]) -> list[int]:
    """The block hashes of a prompt."""
    return block_hashes(prompt, BLOCK)


def submission(name: Any, prompt: list[int] | None = None) -> m.SubmitRequest:
    """A request: of these tokens, hashed; or of text, not hashed."""
    if prompt is None:
        return m.SubmitRequest(name, -1, SAMPLING, PROMPT)
    return m.SubmitRequest(name, len(prompt), SAMPLING, PROMPT, pack_hashes(hashes(prompt)))


def answer(request_id: int, body: bytes = BODY, cached_tokens: int = 0) -> m.Answer:
    """A finished request."""
    return m.Answer(request_id, "COMPLETED", cached_tokens, 0, body)


def replies(*request_ids: int) -> m.EngineReply:
    """The reply of one step that finished these requests."""
    return m.EngineReply(tuple(answer(request_id) for request_id in request_ids))


def engine_request(request_id: int, epoch: int = 0) -> m.EngineRequest:
    """What an engine gets of a request made by `submission`."""
    return m.EngineRequest(request_id, epoch, SAMPLING, PROMPT)


class _AtLeast(dict):
    """Equals what holds all this, and maybe more."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, dict) and self.items() <= other.items()


def registered(count: int, expected: int | None = None, **who: Any) -> m.Log:
    """What is logged when so many are registered; all that are expected unless it says more.

    It also says who registered, which is compared where it is given.
    """
    fields = {"registered": count, "expected": expected or count}
    return m.Log("ranks_registered", _AtLeast(fields | who))


def lost(rank: int, cause: str, requests: int) -> m.Log:
    """What is logged when a rank is lost."""
    return m.Log("rank_lost", {"rank": rank, "cause": cause, "requests": requests}, warning=True)


def none_left(waiting: int, orderly: bool = False) -> m.Log:
    """What is logged when the last live rank is gone: no warning if it said so and nobody waits."""
    return m.Log("no_rank_left", {"waiting": waiting}, warning=not orderly)


def sends(effects: list[m.Effect]) -> list[m.Send]:
    """Only what is sent."""
    return [effect for effect in effects if isinstance(effect, m.Send)]


def logs(effects: list[m.Effect]) -> list[str]:
    """Only the names of what is logged."""
    return [effect.event for effect in effects if isinstance(effect, m.Log)]


class Fleet:
    """A coordinator with one client, told one message at a time and checked after each.

    Args:
        ranks: How many engines of ours register at once, as peers b"0", b"1", …
        values: See `make_settings`; and what `make_register` takes, for these engines.
    """

    def __init__(self, ranks: int = 0, register: dict[str, Any] | None = None, **values: Any):
        self.core = Coordinator(make_settings(**values))
        self.now = 0.0
        self._asked = 0
        self._register = register or {}
        self.tell(CLIENT, make_connect())
        for _ in range(ranks):
            self.join()

    def tell(
        self, peer: bytes, message: m.ToCoordinator, rights: m.Right = m.Right.ALL
    ) -> list[m.Effect]:
        """Handle one message."""
        effects = self.core.handle(m.Incoming(peer, message, rights), self.now)
        self.core.check_integrity()
        return effects

    def tick(self, at: float | None = None) -> list[m.Effect]:
        """Let the coordinator look at the clock, which is moved on if a time is given.

        Returns:
            The effects, without what clients are told of the fleet.
        """
        self.now = self.now if at is None else at
        effects = self.tell(b"", m.Tick())
        return [
            effect
            for effect in effects
            if not (isinstance(effect, m.Send) and isinstance(effect.message, m.Serving))
        ]

    def join(self, **values: Any) -> int:
        """Another engine of ours registers; returns its number."""
        dp_rank = len(self.core.fleet.ranks)
        self.tell(b"%d" % dp_rank, make_register(dp_rank, **self._register | values))
        return dp_rank

    def submit(self, *names: Any, peer: bytes = CLIENT) -> list[m.Effect]:
        """A client submits requests shorter than a block, 14 bytes each: load alone places them."""
        return [effect for name in names for effect in self.tell(peer, submission(name, [7]))]

    def signal(self, *signals: Signal) -> None:
        """The client sends control signals, none of which has arguments."""
        for signal in signals:
            self.tell(CLIENT, m.Control(signal))

    def ask(self, prompt: list[int] | None = None, message: m.SubmitRequest | None = None):
        """The client submits a request, which must be routed at once.

        Returns:
            The number of the rank that got it, and the id that it got.
        """
        self._asked += 1
        effects = self.tell(CLIENT, message or submission(self._asked, prompt))
        (sent,) = sends(effects)
        assert isinstance(sent.message, m.EngineRequest), sent
        rank = self.core.fleet.ranks.of_peer(sent.peer)
        assert rank is not None
        return rank.number, sent.message.request_id

    def holders(self, prompt: list[int]) -> dict[int, int]:
        """Blocks of the prompt that each rank is believed to hold, where it holds any."""
        index = self.core.fleet.index
        groups = index.holders(index.match(pack_hashes(hashes(prompt))))
        return {rank: depth for slots, depth in groups for rank in index.ranks(slots)}

    def route(self, prompt: list[int] | None = None) -> int:
        """The rank that gets this request."""
        return self.ask(prompt)[0]

    def answer(self, *request_ids: int) -> list[m.Effect]:
        """Engines answer these requests."""
        effects = []
        for request_id in request_ids:
            (record,) = (r for r in self.core.fleet.ledger if r.request_id == request_id)
            assert record.rank is not None
            rank = self.core.fleet.ranks.get(record.rank)
            assert rank is not None
            effects += self.tell(rank.peer, replies(request_id))
        return effects

    def answer_all(self) -> None:
        """Engines answer everything."""
        self.answer(*[record.request_id for record in self.core.fleet.ledger])

    def load_up(self, rank: int, load: int) -> list[int]:
        """Send unhashed requests until this rank, which must be the least loaded, has `load`."""
        ids = []
        while self.core.fleet.ledger.load(rank) < load:
            got, request_id = self.ask()
            assert got == rank
            ids.append(request_id)
        return ids

    @property
    def loads(self) -> list[int]:
        """Requests in flight, by rank."""
        return [self.core.fleet.ledger.load(rank.number) for rank in self.core.fleet.ranks]
