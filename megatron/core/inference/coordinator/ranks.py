"""The replicas that have registered, and which of them are live."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron.core.inference.coordinator.kv_events import EventStream
from megatron.core.inference.coordinator.messages import Register
from megatron.core.inference.coordinator.settings import CoordinatorSettings

_RELEASED_IDENTITY = re.compile(rb"mp-coord-(\d+)")


@dataclass(slots=True)
class Rank:
    """A live replica.

    Attributes:
        number: Its index in the coordinator; the same replica gets the same one again.
        generation: How often this replica has registered, counted from 1.
        peer: Identity of its socket.
        released: It is a released engine, which knows none of our messages.
        max_requests: Requests that it can run at once.
        total_blocks: Blocks in its cache; None when unknown.
        retains: Whether it keeps cached blocks that no request uses.
        last_assigned: Sequence number of its latest assignment; -1 for never.
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
    events: EventStream = field(default_factory=EventStream)


class Ranks:
    """Live replicas by number and by peer.

    Args:
        settings: Says what released engines do not tell of themselves.
    """

    def __init__(self, settings: CoordinatorSettings):
        self._settings = settings
        self._live: dict[int, Rank] = {}
        self._by_peer: dict[bytes, Rank] = {}
        self._numbers: dict[tuple[str, int], int] = {}
        self._generations: dict[int, int] = {}
        self.smallest_max_requests = settings.max_requests

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._live.values())

    def __len__(self) -> int:
        return len(self._live)

    def get(self, number: int) -> Rank | None:
        """The live rank with this number."""
        return self._live.get(number)

    def of_peer(self, peer: bytes) -> Rank | None:
        """The live rank behind this peer."""
        return self._by_peer.get(peer)

    def predecessor(self, peer: bytes, register: Register) -> Rank | None:
        """The live rank that this registration takes the place of."""
        number = self._numbers.get(name_of(peer, register))
        same_replica = None if number is None else self._live.get(number)
        return self._by_peer.get(peer) or same_replica

    def add(self, peer: bytes, register: Register) -> Rank:
        """Make a replica live. Its predecessor, if any, must have been removed."""
        number = self._numbers.setdefault(name_of(peer, register), len(self._numbers))
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
        self._live[number] = self._by_peer[peer] = rank
        self._refresh()
        return rank

    def remove(self, rank: Rank) -> None:
        """Take a replica out of the fleet."""
        del self._live[rank.number]
        del self._by_peer[rank.peer]
        self._refresh()

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
