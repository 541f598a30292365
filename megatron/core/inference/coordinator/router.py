"""Placing a request: from its hashes and the present state to a rank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.core.inference.config import PrefixCachingCoordinatorPolicy

from megatron.core.inference.coordinator.accuracy import Accuracy
from megatron.core.inference.coordinator.by_delay import FEW_HOLDERS, ByDelay
from megatron.core.inference.coordinator.decision import Candidate, Situation, choose
from megatron.core.inference.coordinator.hashing import HASH_BYTES, checked_hashes, expected_skip
from megatron.core.inference.coordinator.index import PrefixIndex
from megatron.core.inference.coordinator.ledger import Ledger, RequestRecord
from megatron.core.inference.coordinator.messages import Answer, SubmitRequest
from megatron.core.inference.coordinator.policies import PrefixCachingCostPolicy
from megatron.core.inference.coordinator.prefixes import Match
from megatron.core.inference.coordinator.ranks import Rank, Ranks
from megatron.core.inference.coordinator.settings import CoordinatorSettings
from megatron.core.inference.coordinator.standing import Standing


@dataclass(slots=True)
class _Burst:
    """A prompt being computed, and how many equal ones have followed it to its rank."""

    leader: int
    rank: Rank
    followers: int = 0


class Router:
    """Chooses ranks, and keeps index and ledger in step with the choices.

    Args:
        settings: The policies and their weights.
        ranks: The live ranks.
        ledger: The requests.
        index: What the ranks hold.

    Attributes:
        accuracy: How well each rank's cache is known, by rank number; kept when a rank is lost.
    """

    def __init__(
        self, settings: CoordinatorSettings, ranks: Ranks, ledger: Ledger, index: PrefixIndex
    ):
        self._settings = settings
        self._ranks = ranks
        self._ledger = ledger
        self._index = index
        self._assignments = 0
        self._standing = Standing(settings.deterministic)
        self._hashed = settings.hashed
        by_delay = settings.routing.cost_policy is PrefixCachingCostPolicy.ADDED_DELAY
        self._by_delay: ByDelay | None = None
        if by_delay and self._hashed:
            self._by_delay = ByDelay(settings, ranks, self._standing, index)
        self._block_size = settings.block_size_tokens or 1
        self._limit = settings.fleet.max_rank_requests
        self._first_block_only = (
            settings.signal is PrefixCachingCoordinatorPolicy.FIRST_PREFIX_BLOCK
        )
        self._bursts: dict[bytes, _Burst] = {}
        self.accuracy: dict[int, Accuracy] = {}

    def hashes_of(self, message: SubmitRequest) -> bytes | None:
        """The packed hashes that the signal policy reads.

        Returns:
            The hashes; empty where there is no full block or nobody reads them; None when the
            client did not hash, or what it sent cannot be right.
        """
        if not self._hashed:
            return b""
        if message.hashes is None:
            return None
        known = message.prompt_tokens >= 0
        full_blocks = message.prompt_tokens // self._block_size if known else None
        return checked_hashes(message.hashes, full_blocks)

    @property
    def has_room(self) -> bool:
        """Whether a live rank may get a request."""
        standing, limit = self._standing, self._limit
        return len(standing) > 0 and (not limit or standing.load(standing.first()) < limit)

    def place(self, record: RequestRecord, hashes: bytes) -> Rank:
        """Give a waiting request to a rank. There must be one that `has_room`."""
        record.blocks = len(hashes) // HASH_BYTES
        record.chain = hashes[-HASH_BYTES:] or None
        if self._first_block_only:
            hashes = hashes[:HASH_BYTES]
        match = self._index.match(hashes)
        rank, depth = self._burst_rank(record, match) or self._best(record, match)
        if hashes:
            self._predict(record, rank, depth)
            record.lease = self._index.pin(rank.number, match)
        self._ledger.assign(record.request_id, rank.number)
        if self._by_delay is not None:
            self._by_delay.begin(record, rank, hashes[: depth * HASH_BYTES])
        rank.last_assigned = self._assignments
        self._assignments += 1
        self._note_load(rank)
        self._lead_burst(record, rank)
        return rank

    def settle(self, record: RequestRecord, now: float, *, completed: bool) -> None:
        """The request is finished: what was held for it is given back.

        Args:
            record: The request.
            now: Seconds.
            completed: It was answered; if not, it was refused, or its rank is lost.
        """
        if record.lease is not None:
            self._index.release(record.lease, now)
        if self._by_delay is not None:
            self._by_delay.end(record, now, completed)
        rank = self._ranks.get(record.rank) if record.rank is not None else None
        if rank is not None:
            self._note_load(rank)
        burst = self._bursts.get(record.chain) if record.chain is not None else None
        if burst is not None and burst.leader == record.request_id:
            del self._bursts[record.chain]  # type: ignore[arg-type]

    def add_rank(self, rank: Rank) -> None:
        """A rank is live from now on."""
        self._index.add_rank(rank.number, capacity=rank.total_blocks, retains=rank.retains)
        if rank.generation == 1:  # the number may have been another replica's
            self.accuracy.pop(rank.number, None)
        if self._by_delay is not None:
            self._by_delay.add_rank(rank)
        self._note_load(rank)

    def revive_rank(self, rank: Rank) -> None:
        """A rank is live again, and has what it had in flight."""
        self.add_rank(rank)
        if self._by_delay is not None:
            for record in self._ledger.of_rank(rank.number):
                self._by_delay.converse(record, rank)
            self._note_load(rank)

    def drop_rank(self, rank: Rank) -> None:
        """A rank is live no more."""
        self._index.drop_rank(rank.number)
        self._standing.remove(rank.number)
        if self._by_delay is not None:
            self._by_delay.drop_rank(rank)

    def compare(self, record: RequestRecord, rank: Rank, answer: Answer) -> bool:
        """Compare what was predicted with what the engine really skipped.

        Returns:
            Whether the request was in the window (`accuracy.Accuracy`).
        """
        lease = record.lease
        if lease is None or answer.cached_tokens < 0 or record.prompt_tokens < 0:
            return False
        split = record.held_blocks * HASH_BYTES
        in_window = lease.void or rank.events.changed(
            record.events_seen, answer.event_number, lease.hashes[:split], lease.hashes[split:]
        )
        if self._settings.signal is PrefixCachingCoordinatorPolicy.LONGEST_PREFIX:
            accuracy = self.accuracy.get(rank.number)
            if accuracy is None:
                accuracy = self.accuracy[rank.number] = Accuracy()
            accuracy.add(record.predicted_tokens, answer.cached_tokens, in_window=in_window)
        return in_window

    def note_stored(self, rank: Rank, chains: Iterable[bytes]) -> None:
        """Blocks are stored: prompts equal to one of which all are need not follow it any more.

        Nor does the prefill of such a prompt wait on its rank.
        """
        if self._by_delay is not None:
            chains = tuple(chains)
            if self._by_delay.stored(rank, chains):
                self._note_load(rank)
        if not self._bursts:
            return
        led = [chain for chain, burst in self._bursts.items() if burst.rank is rank]
        for hashes in chains:
            for chain in led:
                if hashes.find(chain) % HASH_BYTES == 0:
                    self._bursts.pop(chain, None)

    def begin_epoch(self) -> None:
        """What was computed, or is being computed now, is of no use to requests that come later."""
        self._bursts.clear()
        if self._by_delay is not None:
            self._by_delay.clear()

    def check_integrity(self) -> None:
        """Compare the bursts with the requests that lead them.

        Raises:
            AssertionError: A burst has outlived its leader, or is another prompt's.
        """
        leaders = {record.request_id: record for record in self._ledger}
        for chain, burst in self._bursts.items():
            leader = leaders.get(burst.leader)
            assert leader is not None, "a burst outlived its leader"
            assert (leader.chain, leader.rank) == (chain, burst.rank.number)
        assert len(self._standing) == len(self._ranks), "the order has other ranks than the fleet"
        for rank in self._ranks:
            load = self._ledger.load(rank.number)
            assert self._standing.load(rank.number) == load, "the order does not follow the load"
        if self._by_delay is not None:
            self._by_delay.check_integrity(self._ledger)

    def _best(self, record: RequestRecord, match: Match) -> tuple[Rank, int]:
        """The best rank, and how many of the prompt's blocks it holds."""
        groups = self._index.holders(match)
        if self._by_delay is not None:
            number, depth = self._by_delay.choose(record, match.hashes, groups)
        elif groups:
            number, depth = self._choose(groups, match.blocks)
        else:
            number, depth = self._standing.first(), 0
        rank = self._ranks.get(number)
        assert rank is not None
        return rank, depth

    def _choose(self, groups: Sequence[tuple[int, int]], blocks: int) -> tuple[int, int]:
        """Of each group of equal holders the first compete, and the least loaded of all ranks."""
        settings, standing = self._settings.routing, self._standing
        depths = {self._first_of(slots): depth for slots, depth in groups}
        depths.setdefault(standing.first(), 0)
        limit = self._limit
        candidates = [
            Candidate(
                number,
                standing.load(number),
                depth / blocks,
                self._ranks.get(number).last_assigned,  # type: ignore[union-attr]
            )
            for number, depth in depths.items()
            if not limit or standing.load(number) < limit
        ]
        situation = Situation(
            blocks=blocks,
            mean_load=standing.mean_load,
            max_requests=self._ranks.smallest_max_requests,
            alpha=settings.routing_alpha,
            beta=settings.load_beta,
        )
        deterministic = self._settings.deterministic
        winner = choose(candidates, settings.cost_policy, situation, deterministic=deterministic)
        return winner.rank, depths[winner.rank]

    def _first_of(self, slots: int) -> int:
        """The rank that ties prefer in a set of slots."""
        index = self._index
        if slots.bit_count() <= FEW_HOLDERS:
            return self._standing.first_of(index.ranks(slots))
        return self._standing.first_where(lambda number: slots & index.slot(number))

    def _note_load(self, rank: Rank) -> None:
        load = self._ledger.load(rank.number)
        self._standing.update(rank.number, load, rank.last_assigned)
        if self._by_delay is not None:
            self._by_delay.update(rank)

    def _predict(self, record: RequestRecord, rank: Rank, depth: int) -> None:
        record.held_blocks = depth
        record.events_seen = rank.events.next
        if record.prompt_tokens >= 0:
            record.predicted_tokens = expected_skip(record.prompt_tokens, depth, self._block_size)

    def _burst_rank(self, record: RequestRecord, match: Match) -> tuple[Rank, int] | None:
        burst = self._bursts.get(record.chain) if record.chain is not None else None
        if burst is None or burst.followers >= self._settings.routing.burst_cap:
            return None
        if self._ranks.get(burst.rank.number) is not burst.rank:
            return None
        limit = self._limit
        if limit and self._standing.load(burst.rank.number) >= limit:
            return None
        burst.followers += 1
        return burst.rank, self._index.depth(burst.rank.number, match)

    def _lead_burst(self, record: RequestRecord, rank: Rank) -> None:
        if not self._settings.routing.burst_cap or record.chain is None:
            return
        burst = self._bursts.get(record.chain)
        if burst is None or burst.rank is not rank:
            self._bursts[record.chain] = _Burst(record.request_id, rank)
