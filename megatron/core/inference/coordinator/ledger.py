"""The ledger of requests: one record each, and the only ways to change it.

A request is admitted, assigned to a rank and finished; on the way it may lose its client, or its
rank, and is requeued then. A rank's load is the number of records that it has: it is counted, never
kept beside them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.inference.coordinator.messages import SubmitRequest
from megatron.core.inference.coordinator.slots import Lease

REQUEST_IDS = 2**31
"""Requests are numbered below this, from 0 again at the end: engines keep ids as int32."""


class LedgerError(Exception):
    """A request id is unknown, or is used twice: a fault of the caller."""


@dataclass(slots=True)
class RequestRecord:
    """All there is to know of one request.

    Attributes:
        request_id: The coordinator's number for this attempt at it.
        arrival: Its number at its first attempt; the earlier it came, the smaller.
        came: When it came, seconds.
        client: Identity of who asked; None once the client is gone.
        client_request_id: The client's name for it.
        message: What the client sent, as long as it may have to be sent again.
        size: Bytes of the message's bodies.
        owner: Whose places it takes: the client's identity, or the name that the client gave.
        rank: Number of the rank that has it; None while it waits.
        lost_with: Numbers of the ranks that had it when they were lost, and are not back.
        deadline: When to give up waiting for a rank, where there is none.
        lease: Its hold on the index, if its prompt was hashed.
        blocks: Full blocks of its prompt that were hashed.
        prompt_tokens: Length of its prompt, -1 if unknown.
        predicted_tokens: Prefill that the engine was expected to skip when it was routed, tokens.
        held_blocks: Blocks of its prompt that its rank was believed to hold when it was routed.
        events_seen: How many of its rank's cache events were known when it was routed.
        chain: Packed hash of its last full block, which names the whole chain; None if not hashed.
        hashes: Its packed hashes, where requests are traced; None if not hashed.
    """

    request_id: int
    client: bytes | None
    client_request_id: Any
    message: SubmitRequest | None
    size: int = 0
    owner: bytes | str = b""
    rank: int | None = None
    lost_with: tuple[int, ...] = ()
    deadline: float = 0.0
    lease: Lease | None = None
    blocks: int = 0
    prompt_tokens: int = -1
    predicted_tokens: int = 0
    held_blocks: int = 0
    events_seen: int = 0
    chain: bytes | None = None
    hashes: bytes | None = None
    arrival: int = 0
    came: float = 0.0

    @property
    def attempts(self) -> int:
        """How many ranks it was given to and lost with."""
        return len(self.lost_with)


@dataclass(slots=True)
class Share:
    """What one owner has waiting or in flight.

    Attributes:
        requests: How many.
        size: Bytes of their bodies.
    """

    requests: int = 0
    size: int = 0


class Ledger:
    """Every request that is waiting or in flight.

    Args:
        first_id: Number of the first one.
    """

    def __init__(self, first_id: int = 0):
        self._next_id = first_id
        self._arrivals = 0
        self._bytes = 0
        self._shares: dict[bytes | str, Share] = {}
        self._records: dict[int, RequestRecord] = {}
        self._waiting: dict[int, RequestRecord] = {}
        self._by_rank: dict[int, dict[int, RequestRecord]] = {}
        self._by_client: dict[bytes, dict[int, RequestRecord]] = {}

    def __len__(self) -> int:
        """Requests waiting or in flight."""
        return len(self._records)

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(self._records.values())

    @property
    def size(self) -> int:
        """Bytes of the bodies of all requests."""
        return self._bytes

    @property
    def first_waiting(self) -> RequestRecord | None:
        """The request that has waited for a rank longest."""
        return next(iter(self._waiting.values()), None)

    @property
    def waiting(self) -> list[RequestRecord]:
        """Requests without a rank, in the order of their arrival."""
        return list(self._waiting.values())

    @property
    def assigned(self) -> int:
        """Requests in flight."""
        return len(self._records) - len(self._waiting)

    def share(self, owner: bytes | str) -> Share:
        """What an owner has waiting or in flight; to be read only."""
        return self._shares.get(owner) or Share()

    def load(self, rank: int) -> int:
        """Requests that a rank has and has not answered."""
        return len(self._by_rank.get(rank, ()))

    def admit(self, client: bytes, message: SubmitRequest, now: float = 0.0) -> RequestRecord:
        """Open a record under a number that no other has, nor had for long."""
        record = RequestRecord(self._number(), client, message.client_request_id, message)
        record.prompt_tokens = message.prompt_tokens
        record.size = message.size
        record.owner = message.owner or client
        record.arrival = self._arrivals
        self._arrivals += 1
        record.came = now
        self._open(record)
        self._by_client.setdefault(client, {})[record.request_id] = record
        return record

    def assign(self, request_id: int, rank: int) -> None:
        """Give a waiting request to a rank.

        Raises:
            LedgerError: There is no such request, or it has a rank already.
        """
        record = self._waiting.pop(request_id, None)
        if record is None:
            raise LedgerError(f"request {request_id} is not waiting")
        record.rank = rank
        self._by_rank.setdefault(rank, {})[request_id] = record

    def held_by(self, request_id: int, rank: int) -> bool:
        """Whether this rank has this request in flight."""
        return request_id in self._by_rank.get(rank, ())

    def finish(self, request_id: int) -> RequestRecord:
        """Close a record: it was answered, or it never will be.

        Raises:
            LedgerError: There is no such request, or it is finished already.
        """
        record = self._records.pop(request_id, None)
        if record is None:
            raise LedgerError(f"request {request_id} is unknown or finished")
        self._waiting.pop(request_id, None)
        self._count(record, -1)
        if record.rank is not None:
            _take(self._by_rank, record.rank, request_id)
        if record.client is not None:
            _take(self._by_client, record.client, request_id)
        return record

    def requeue(self, record: RequestRecord) -> None:
        """Take a request from its rank; it waits again, under a new number.

        Raises:
            LedgerError: It has no rank.
        """
        if record.rank is None:
            raise LedgerError(f"request {record.request_id} has no rank")
        number = self._number()  # while it has its own, which is not to be used again at once
        self.finish(record.request_id)
        record.request_id = number
        record.rank = record.lease = None
        self._open(record)
        if record.client is not None:
            self._by_client.setdefault(record.client, {})[record.request_id] = record

    def sort_waiting(self) -> None:
        """Let those who came first be first, also of those that lost their rank."""
        waiting = sorted(self._waiting.values(), key=lambda record: record.arrival)
        self._waiting = {record.request_id: record for record in waiting}

    def lose_client(self, client: bytes) -> int:
        """The client is gone: what waits is closed, what runs goes on for nobody.

        Returns:
            How many of its requests are still running.
        """
        records = self._by_client.pop(client, {})
        for record in records.values():
            record.client = record.message = None
            if record.rank is None:
                self.finish(record.request_id)
        return sum(record.rank is not None for record in records.values())

    def for_nobody(self, rank: int) -> bool:
        """Whether a rank has requests in flight, and nobody waits for any of them."""
        records = self._by_rank.get(rank, {}).values()
        return bool(records) and all(record.client is None for record in records)

    def of_rank(self, rank: int) -> list[RequestRecord]:
        """What a rank has in flight, in the order of assignment."""
        return list(self._by_rank.get(rank, {}).values())

    def _number(self) -> int:
        """The next number that is free."""
        while self._next_id in self._records:
            self._next_id = (self._next_id + 1) % REQUEST_IDS
        number = self._next_id
        self._next_id = (number + 1) % REQUEST_IDS
        return number

    def _open(self, record: RequestRecord) -> None:
        """A record waits under its number."""
        self._records[record.request_id] = self._waiting[record.request_id] = record
        self._count(record, 1)

    def _count(self, record: RequestRecord, one: int) -> None:
        """Count a record in, or out with -1."""
        self._bytes += one * record.size
        share = self._shares.setdefault(record.owner, Share())
        share.requests += one
        share.size += one * record.size
        if not share.requests:
            del self._shares[record.owner]

    def check_integrity(self) -> None:
        """Compare every view with the records.

        Raises:
            AssertionError: A view and the records differ.
        """
        records = self._records
        assert self._bytes == sum(record.size for record in records.values())
        shares: dict[bytes | str, Share] = {}
        for record in records.values():
            share = shares.setdefault(record.owner, Share())
            share.requests, share.size = share.requests + 1, share.size + record.size
        assert self._shares == shares
        assert all(number == record.request_id for number, record in records.items())
        assert self._waiting == {i: r for i, r in records.items() if r.rank is None}
        for views, key in ((self._by_rank, "rank"), (self._by_client, "client")):
            for owner, view in views.items():
                assert view, f"an empty view of {key} {owner!r} was left behind"
                assert view == {i: r for i, r in records.items() if getattr(r, key) == owner}
            owners = {getattr(r, key) for r in records.values()} - {None}
            assert owners == set(views), f"the views by {key} differ from the records"


def _take(views: dict, owner: Any, request_id: int) -> None:
    view = views[owner]
    del view[request_id]
    if not view:
        del views[owner]
