"""Placing a request: from its hashes and the present state to a rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.inference.config import PrefixCachingCoordinatorPolicy

from megatron.core.inference.coordinator.accuracy import Accuracy
from megatron.core.inference.coordinator.decision import (
    Candidate,
    Situation,
    choose,
    least_loaded,
)
from megatron.core.inference.coordinator.hashing import expected_skip, unpack_hashes
from megatron.core.inference.coordinator.index import PrefixIndex
from megatron.core.inference.coordinator.ledger import Ledger, RequestRecord
from megatron.core.inference.coordinator.messages import Answer, SubmitRequest
from megatron.core.inference.coordinator.ranks import Rank, Ranks
from megatron.core.inference.coordinator.settings import CoordinatorSettings


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
        self._bursts: dict[int, _Burst] = {}
        self.accuracy: dict[int, Accuracy] = {}

    def hashes_of(self, message: SubmitRequest) -> list[int] | None:
        """The hashes that the signal policy reads.

        Returns:
            The hashes; an empty list where there is no full block or nobody reads them; None
            when the client did not hash, or what it sent cannot be right.
        """
        if not self._settings.hashed:
            return []
        if message.hashes is None:
            return None
        known = message.prompt_tokens >= 0
        size = self._settings.block_size_tokens or 1
        return unpack_hashes(message.hashes, message.prompt_tokens // size if known else None)

    def place(self, record: RequestRecord, hashes: Sequence[int]) -> Rank:
        """Give a waiting request to a rank. There must be a live one."""
        record.blocks = len(hashes)
        record.chain = hashes[-1] if hashes else None
        if self._settings.signal is PrefixCachingCoordinatorPolicy.FIRST_PREFIX_BLOCK:
            hashes = hashes[:1]
        rank = self._burst_rank(record) or self._best(hashes)
        if hashes:
            self._predict(record, rank, hashes)
            record.lease = self._index.pin(rank.number, hashes)
        self._ledger.assign(record.request_id, rank.number)
        rank.last_assigned = self._assignments
        self._assignments += 1
        self._lead_burst(record, rank)
        return rank

    def settle(self, record: RequestRecord, now: float) -> None:
        """The request is finished: what was held for it is given back."""
        if record.lease is not None:
            self._index.release(record.lease, now)
        burst = self._bursts.get(record.chain) if record.chain is not None else None
        if burst is not None and burst.leader == record.request_id:
            del self._bursts[record.chain]  # type: ignore[arg-type]

    def compare(self, record: RequestRecord, rank: Rank, answer: Answer) -> bool:
        """Compare what was predicted with what the engine really skipped.

        Returns:
            Whether the request was in the window (`accuracy.Accuracy`).
        """
        lease = record.lease
        if lease is None or answer.cached_tokens < 0 or record.prompt_tokens < 0:
            return False
        held, lacking = lease.hashes[: record.held_blocks], lease.hashes[record.held_blocks :]
        in_window = lease.table.dropped or rank.events.changed(
            record.events_seen, answer.event_number, held, lacking
        )
        if self._settings.signal is PrefixCachingCoordinatorPolicy.LONGEST_PREFIX:
            accuracy = self.accuracy.setdefault(rank.number, Accuracy())
            accuracy.add(record.predicted_tokens, answer.cached_tokens, in_window=in_window)
        return in_window

    def note_stored(self, rank: Rank, events: Sequence[int]) -> None:
        """A prompt's last block is stored: equal prompts need not follow it any more."""
        if not self._bursts:
            return
        for event in events:
            burst = self._bursts.get(event)
            if burst is not None and burst.rank is rank:
                del self._bursts[event]

    def forget_bursts(self) -> None:
        """What is being computed now will be of no use to requests that come later."""
        self._bursts.clear()

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

    def _best(self, hashes: Sequence[int]) -> Rank:
        """The holders and the least loaded rank compete (`decision.choose`)."""
        settings, deterministic = self._settings.routing, self._settings.deterministic
        depths = self._index.holders(hashes) if hashes else {}
        everyone = [
            Candidate(
                rank.number,
                self._ledger.load(rank.number),
                depths.get(rank.number, 0) / len(hashes) if hashes else 0.0,
                rank.last_assigned,
            )
            for rank in self._ranks
        ]
        if not depths:
            winner = least_loaded(everyone, deterministic=deterministic)
        else:
            situation = Situation(
                blocks=len(hashes),
                mean_load=self._ledger.assigned / len(self._ranks),
                max_requests=self._ranks.smallest_max_requests,
                alpha=settings.routing_alpha,
                beta=settings.load_beta,
            )
            winner = choose(everyone, settings.cost_policy, situation, deterministic=deterministic)
        rank = self._ranks.get(winner.rank)
        assert rank is not None
        return rank

    def _predict(self, record: RequestRecord, rank: Rank, hashes: Sequence[int]) -> None:
        record.held_blocks = self._index.depth(rank.number, hashes)
        record.events_seen = rank.events.next
        if record.prompt_tokens >= 0:
            size = self._settings.block_size_tokens or 1
            record.predicted_tokens = expected_skip(record.prompt_tokens, record.held_blocks, size)

    def _burst_rank(self, record: RequestRecord) -> Rank | None:
        burst = self._bursts.get(record.chain) if record.chain is not None else None
        if burst is None or burst.followers >= self._settings.routing.burst_cap:
            return None
        if self._ranks.get(burst.rank.number) is not burst.rank:
            return None
        burst.followers += 1
        return burst.rank

    def _lead_burst(self, record: RequestRecord, rank: Rank) -> None:
        if not self._settings.routing.burst_cap or record.chain is None:
            return
        burst = self._bursts.get(record.chain)
        if burst is None or burst.rank is not rank:
            self._bursts[record.chain] = _Burst(record.request_id, rank)
