"""Who decides where requests go: the interface of the coordinator core and of the baselines."""

from collections.abc import Sequence
from typing import Protocol

from replay.replica import Replica
from replay.workload import Request

Placed = tuple[int, Request]
"""A replica's number, and the request that it gets."""


class Route(Protocol):
    """Takes requests and tells replicas to take them."""

    def submit(self, request: Request, now: float) -> Sequence[Placed]:
        """A request came in. What is to be sent to replicas now; it may have to wait."""

    def answered(self, replica: int, requests: list[Request], now: float) -> Sequence[Placed]:
        """A replica's requests ended, in one step. What is to be sent to replicas now."""

    def stored(self, replica: int, events: bytes, now: float) -> None:
        """A replica's cache changed: packed events (`kv_events.py`). Only where caches are true."""

    def tick(self, now: float) -> None:
        """A second has passed."""

    @property
    def index_blocks(self) -> int:
        """Blocks that it believes to be held, over all replicas."""


class RouteMaker(Protocol):
    """Makes the route of one run."""

    def __call__(self, replicas: Sequence[Replica], seed: int) -> Route:
        """A fresh route to these replicas, which it may look at as far as its policy says."""
