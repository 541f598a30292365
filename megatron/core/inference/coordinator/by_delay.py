"""Requests, queues and conversations as the cost policy `added_delay` sees them (`delays.py`)."""

from collections import Counter
from collections.abc import Sequence

from megatron.core.inference.config import PrefixCachingCoordinatorPolicy

from megatron.core.inference.coordinator.conversations import Conversations
from megatron.core.inference.coordinator.delays import Delays
from megatron.core.inference.coordinator.hashing import HASH_BYTES, expected_skip
from megatron.core.inference.coordinator.index import PrefixIndex
from megatron.core.inference.coordinator.ledger import Ledger, RequestRecord
from megatron.core.inference.coordinator.queues import PrefillQueues
from megatron.core.inference.coordinator.rank_order import number_of
from megatron.core.inference.coordinator.ranks import Rank, Ranks
from megatron.core.inference.coordinator.request_charge import RequestCharge
from megatron.core.inference.coordinator.settings import CoordinatorSettings
from megatron.core.inference.coordinator.standing import Standing

FEW_HOLDERS = 32
"""Holders up to which each is looked at; of more, the first is soon met in the order of all."""

ANSWER_BLOCKS = 64
"""Blocks of an answer after which the conversation is still known, where engines keep answers."""


class ByDelay:
    """Chooses by added delay, and keeps what that is made up of.

    Args:
        settings: The policies, the size of a block, the limit of a rank.
        ranks: The live ranks.
        standing: The same by load; a change there has to be followed by `update`.
        index: What the ranks hold.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        ranks: Ranks,
        standing: Standing,
        index: PrefixIndex,
    ):
        self._ranks = ranks
        self._index = index
        self._limit = settings.fleet.max_rank_requests
        self._block_size = settings.block_size_tokens or 1
        self._first_block_only = (
            settings.signal is PrefixCachingCoordinatorPolicy.FIRST_PREFIX_BLOCK
        )
        self._delays = Delays(standing, settings.deterministic)
        self._charge = RequestCharge()
        self._delays.request_charge = self._charge.tokens
        self._queues = PrefillQueues()
        keeps_answers = settings.routing.generated_tokens
        self._conversations = Conversations(ANSWER_BLOCKS if keeps_answers else 0)

    # --- ranks -------------------------------------------------------------------------------

    def add_rank(self, rank: Rank) -> None:
        """A rank is live from now on; `update` has to follow."""
        blocks = rank.total_blocks if rank.retains else None
        self._conversations.add_rank(rank.number, blocks and blocks * self._block_size)

    def drop_rank(self, rank: Rank) -> None:
        """A rank is live no more."""
        self._delays.remove(rank.number)
        self._conversations.drop_rank(rank.number)

    def update(self, rank: Rank) -> None:
        """A live rank's load has changed, or what it has to compute."""
        number, conversations = rank.number, self._conversations
        self._delays.update(
            number,
            self._queues.tokens(number),
            rank.last_assigned,
            pausing=conversations.pausing(number),
            level=conversations.level(number),
        )

    def clear(self) -> None:
        """What is cached is of no use to anybody any more."""
        self._conversations.clear()
        self._update_all()

    def _update_all(self) -> None:
        for rank in self._ranks:
            self.update(rank)

    # --- requests ----------------------------------------------------------------------------

    def choose(
        self, record: RequestRecord, hashes: bytes, groups: Sequence[tuple[int, int]]
    ) -> tuple[int, int]:
        """The best of each group of equal holders, and of all ranks as if they held nothing.

        Args:
            record: The request.
            hashes: Packed hashes of its prompt.
            groups: Slots that hold equally much of it, and how many blocks; from few to many.

        Returns:
            The rank's number, and how many blocks it holds.
        """
        delays, index, limit = self._delays, self._index, self._limit
        self._prepare(record)
        best, deepest = delays.best(self._missing(record, 0), limit), 0
        for slots, depth in groups:
            new = self._missing(record, depth)
            if slots.bit_count() <= FEW_HOLDERS:
                found = delays.best_of(index.ranks(slots), new, limit)
            else:
                found = delays.best(new, limit, lambda n, slots=slots: slots & index.slot(n))  # type: ignore[misc]
            if found is not None and (best is None or found <= best):
                best, deepest = found, depth
        if not groups:
            assert best is not None
            return number_of(best[1]), deepest
        slots, depth = groups[-1]
        held = hashes[: depth * HASH_BYTES]
        own = [n for n in self._conversations.paused_before(held) if slots & index.slot(n)]
        found = delays.best_own(own, self._missing(record, depth), limit)
        if found is not None and (best is None or found <= best):
            best, deepest = found, depth
        assert best is not None
        chosen = number_of(best[1])
        if len(own) == 1 and chosen not in own:
            self._conversations.leave(own[0], held)
            self.update(self._ranks.get(own[0]))  # type: ignore[arg-type]
        return chosen, deepest

    def _prepare(self, record: RequestRecord) -> None:
        """What has changed with the time, or with this request."""
        for number in self._conversations.expire(record.came):
            self.update(self._ranks.get(number))  # type: ignore[arg-type]
        if self._charge.learn(self._missing(record, 0)):
            self._delays.request_charge = self._charge.tokens
            self._update_all()

    def begin(self, record: RequestRecord, rank: Rank, held: bytes) -> None:
        """A request is given to a rank; `update` has to follow.

        Its prefill waits from now on, unless less than a block of it is to be computed.

        Args:
            record: The request.
            rank: The rank.
            held: Packed hashes of what the rank holds of the prompt.
        """
        new = self._missing(record, len(held) // HASH_BYTES)
        if new > self._block_size:
            self._queues.begin(rank.number, record.request_id, new, record.chain)
        self.converse(record, rank, held, new)

    def converse(self, record: RequestRecord, rank: Rank, held: bytes = b"", new: int = 0) -> None:
        """A request goes on with a conversation on a rank, or is found there; see `begin`."""
        if record.chain is not None and self._knows_conversations(rank):
            tokens = max(record.prompt_tokens, record.blocks * self._block_size)
            self._conversations.begin(
                rank.number, record.chain, held=held, new=new, tokens=tokens, now=record.came
            )

    def end(self, record: RequestRecord, now: float, completed: bool) -> None:
        """A request is answered, or refused, or taken from its rank; `update` has to follow."""
        if record.rank is None:
            return
        leave = self._queues.finish if completed else self._queues.drop
        leave(record.rank, record.request_id)
        if record.chain is not None:
            self._conversations.end(record.rank, record.chain, now, completed)

    def stored(self, rank: Rank, chains: Sequence[bytes]) -> bool:
        """A rank has stored these packed chains; whether `update` has to follow."""
        return self._queues.stored(rank.number, chains, self._block_size)

    def check_integrity(self, ledger: Ledger) -> None:
        """Compare what is counted with the requests.

        Raises:
            AssertionError: They differ.
        """
        queues, conversations = self._queues, self._conversations
        live = {rank.number: rank for rank in self._ranks}
        self._delays.check_integrity(
            {number: (queues.tokens(number), conversations.pausing(number)) for number in live}
        )
        queues.check_integrity({r.request_id: r.rank for r in ledger if r.rank is not None})
        chains = [(r.rank, r.chain) for r in ledger if r.rank in live and r.chain is not None]
        known = (chain for chain in chains if self._knows_conversations(live[chain[0]]))
        conversations.check_integrity(Counter(known))

    def _knows_conversations(self, rank: Rank) -> bool:
        """Where only first blocks are read, nobody can tell what goes on with what."""
        return rank.retains and not self._first_block_only

    def _missing(self, record: RequestRecord, depth: int) -> int:
        """Tokens that a rank which holds so many blocks would have to compute of a prompt."""
        held = record.blocks if self._first_block_only and depth else depth
        if record.prompt_tokens < 0:
            return (record.blocks - held) * self._block_size
        return record.prompt_tokens - expected_skip(record.prompt_tokens, held, self._block_size)
