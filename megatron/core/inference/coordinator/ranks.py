"""The replicas that have registered, and which of them are live."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron.core.inference.coordinator.kv_events import EventStream
from megatron.core.inference.coordinator.messages import Register
from megatron.core.inference.coordinator.settings import PROTOCOL_VERSION, CoordinatorSettings

REMEMBERED = 4096
"""Replicas whose numbers are kept for when they come back; of more, those longest ago give way."""

_RELEASED_IDENTITY = re.compile(rb"mp-coord-(\d+)")


@dataclass(slots=True)
class Rank:
    """A replica that has registered.

    Attributes:
        number: Its index in the coordinator; the same replica gets the same one again.
        generation: How often this replica has registered, counted from 1.
        peer: Identity of its socket.
        released: It is a released engine, which knows none of our messages.
        max_requests: Requests that it can run at once.
        total_blocks: Blocks in its cache; None when unknown.
        retains: Whether it keeps cached blocks that no request uses.
        last_assigned: Sequence number of its latest assignment; -1 for never.
        heard: When it last said anything, on the fleet's clock.
        proven: It has completed a request: what its first steps compile is compiled.
        draining: It gets no more requests, and leaves once it has answered those that it has.
        away_until: It cannot be reached; when it counts as lost, in seconds that the coordinator
            was awake. None while it can.
        events: The numbering of its cache events.
    """

    number: int
    generation: int
    peer: bytes
    released: bool
    max_requests: int
    total_blocks: int | None
    retains: bool
    last_assigned: int = -1
    heard: float = 0.0
    proven: bool = False
    draining: bool = False
    away_until: float | None = None
    events: EventStream = field(default_factory=EventStream)


class Ranks:
    """Replicas by number and by peer: the live ones, and those that are drained or away.

    Iteration, length and `get` know the live ones alone.

    Args:
        settings: Says what released engines do not tell of themselves.
    """

    def __init__(self, settings: CoordinatorSettings):
        self._settings = settings
        self._live: dict[int, Rank] = {}
        self._present: dict[int, Rank] = {}
        self._by_peer: dict[bytes, Rank] = {}
        self._numbers: dict[tuple[str, int], int] = {}
        self._generations: dict[int, int] = {}
        self.smallest_max_requests = settings.max_requests

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._live.values())

    def __len__(self) -> int:
        return len(self._live)

    @property
    def present(self) -> list[Rank]:
        """The live ones, and those that are drained or away."""
        return list(self._by_peer.values())

    def get(self, number: int) -> Rank | None:
        """The live rank with this number."""
        return self._live.get(number)

    def of_peer(self, peer: bytes) -> Rank | None:
        """The rank behind this peer, live or not."""
        return self._by_peer.get(peer)

    def is_live(self, rank: Rank) -> bool:
        """Whether it may get requests: it is neither being drained nor away."""
        return self._live.get(rank.number) is rank

    def predecessors(self, peer: bytes, register: Register) -> list[Rank]:
        """The ranks that this registration takes the place of: its peer's, its replica's."""
        number = self._numbers.get(name_of(peer, register))
        same_replica = None if number is None else self._present.get(number)
        found = (self._by_peer.get(peer), same_replica)
        return list({rank.number: rank for rank in found if rank is not None}.values())

    def add(self, peer: bytes, register: Register) -> Rank:
        """Make a replica live. Its predecessors, if any, must have been removed."""
        number = self._number_of(name_of(peer, register))
        self._generations[number] = generation = self._generations.get(number, 0) + 1
        released = register.version is None
        eviction = self._settings.eviction.value if released else register.eviction
        rank = Rank(
            number=number,
            generation=generation,
            peer=peer,
            released=released,
            max_requests=self._settings.max_requests if released else register.max_requests,
            total_blocks=None if released else register.total_blocks,
            retains=eviction == "lru",
        )
        self._live[number] = self._present[number] = self._by_peer[peer] = rank
        self._refresh()
        return rank

    def retire(self, rank: Rank) -> None:
        """Let a live replica get no more requests."""
        del self._live[rank.number]
        self._refresh()

    def revive(self, rank: Rank) -> None:
        """Let a replica that is present get requests again."""
        self._live[rank.number] = rank
        self._refresh()

    def move(self, rank: Rank, peer: bytes) -> None:
        """A replica is reached at another socket from now on."""
        del self._by_peer[rank.peer]
        rank.peer = peer
        self._by_peer[peer] = rank

    def resumed(self, peer: bytes, register: Register) -> Rank | None:
        """The rank that this registration goes on with; None if it begins anew."""
        number = self._numbers.get(name_of(peer, register))
        rank = None if number is None else self._present.get(number)
        same = rank is not None and 0 < register.generation == rank.generation
        return rank if same else None

    def remove(self, rank: Rank) -> None:
        """Take a replica out of the fleet."""
        self._live.pop(rank.number, None)
        del self._present[rank.number]
        del self._by_peer[rank.peer]
        self._refresh()

    def _number_of(self, name: tuple[str, int]) -> int:
        """The number that a replica had before, or one that is free."""
        number = self._numbers.pop(name, None)
        if number is None:
            number = len(self._numbers)
            gone = (who for who, taken in self._numbers.items() if taken not in self._present)
            if number >= REMEMBERED and (forgotten := next(gone, None)) is not None:
                number = self._numbers.pop(forgotten)
                del self._generations[number]
        self._numbers[name] = number  # last in order: who registered longest ago is forgotten first
        return number

    def _refresh(self) -> None:
        places = [rank.max_requests for rank in self._live.values()]
        self.smallest_max_requests = min(places, default=self._settings.max_requests)


def name_of(peer: bytes, register: Register) -> tuple[str, int]:
    """What tells replicas apart, and orders them: (job, DP rank).

    A released engine tells both only by its socket's identity, `mp-coord-<DP rank>`; sorted as
    text, 10 would come before 2.
    """
    if register.version is not None:
        return register.replica, register.dp_rank
    match = _RELEASED_IDENTITY.fullmatch(peer)
    return ("", int(match[1])) if match else (peer.hex(), 0)


def refusal(register: Register, settings: CoordinatorSettings) -> str | None:
    """Why an engine cannot be taken, and what to do about it; None if it can."""
    size = settings.block_size_tokens
    if register.version is None:  # a released one, which tells nothing of itself
        return None
    if register.version != PROTOCOL_VERSION:
        return f"protocol {register.version} is not {PROTOCOL_VERSION}"
    if not 0 <= register.weight_epoch < 2**62:
        return f"weight epoch is {register.weight_epoch}"
    if register.max_requests < 1:
        return f"max_requests is {register.max_requests}"
    if not settings.hashed or register.block_size == size:
        return None
    if not register.block_size:
        return (
            "it caches no prefixes, and the coordinator routes by them; start both with "
            "--inference-dynamic-batching-prefix-caching, or both without"
        )
    return (
        f"its cache blocks hold {register.block_size} tokens, and the coordinator's {size}; start "
        "both with the same --inference-dynamic-batching-block-size"
    )
