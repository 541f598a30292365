"""Which conversations are likely to come back to the ranks, and what they take of the caches.

A conversation that pauses is work that a rank will have, and what a prompt throws out of a full
cache is lost time only if somebody comes back for it. Nobody says when a conversation is over, but
those that go on do so after a while that can be learned: one that was silent for several times the
usual pause is not waited for any more.

A conversation is known by its latest prompt: a request of which the rank holds just what an earlier
prompt of its was, and perhaps the answer, goes on with that one. What it takes of the cache is what
the rank had to compute for it, so that a beginning which many share counts once.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.core.inference.coordinator.hashing import HASH_BYTES

FULL = 8
"""The level of a cache that holds nothing but conversations which go on, or should hold more."""

_SOME, _ALL = 0.6, 1.0
"""Shares of a cache: up to `_SOME` there is room for conversations to grow, and the level is 0."""

_PATIENCE = 4.0
"""Usual pauses for which a conversation is waited for: of pauses as spread as those of agents
(lognormal, sigma 0.7), 98 % are shorter."""

_FIRST_PAUSE, _LONGEST_WAIT = 30.0, 300.0
"""Seconds: the usual pause before any is known, and the most that a conversation is waited for."""

_LEARNING = 1 / 64
"""Weight of the latest pause in the usual one."""


@dataclass(slots=True)
class _Conversation:
    """A conversation on a rank.

    Attributes:
        rank: Number of the rank.
        chain: Packed hash of the last full block of its latest prompt.
        tokens: What it takes of the rank's cache.
        running: Requests with this prompt that the rank has not answered.
        ended: When it answered the latest one, seconds.
    """

    rank: int
    chain: bytes
    tokens: int = 0
    running: int = 0
    ended: float = 0.0


class Conversations:
    """The conversations of each rank, by their latest prompts.

    Args:
        answer_blocks: Blocks of an answer after which a conversation is still known, where ranks
            cache answers.
    """

    def __init__(self, answer_blocks: int = 0):
        self._looked_at = (1 + answer_blocks) * HASH_BYTES
        self._capacity: dict[int, int | None] = {}
        self._tokens: dict[int, int] = {}
        self._pausing: dict[int, int] = {}  # how many
        self._known: dict[bytes, dict[int, _Conversation]] = {}
        # Those that pause, by when that began; by rank and chain.
        self._order: dict[tuple[int, bytes], _Conversation] = {}
        self._pause = _FIRST_PAUSE

    # --- ranks -------------------------------------------------------------------------------

    def add_rank(self, rank: int, capacity: int | None) -> None:
        """A rank is new, and has no conversations.

        Args:
            rank: Its number.
            capacity: Tokens that its cache keeps; None if that is unknown, or it keeps nothing.
        """
        self.drop_rank(rank)
        self._capacity[rank], self._tokens[rank], self._pausing[rank] = capacity, 0, 0

    def drop_rank(self, rank: int) -> None:
        """A rank is gone, if it was there, and its cache with it; takes a step for each chain."""
        if rank not in self._capacity:
            return
        for chain in [chain for chain, ranks in self._known.items() if rank in ranks]:
            self._order.pop((rank, chain), None)
            self._remove(rank, chain)
        del self._capacity[rank], self._tokens[rank], self._pausing[rank]

    def level(self, rank: int) -> int:
        """From 0 to `FULL`: how full a rank's cache is of conversations that go on."""
        capacity = self._capacity[rank]
        if not capacity:
            return 0
        share = (self._tokens[rank] / capacity - _SOME) / (_ALL - _SOME)
        return min(FULL, max(0, int(FULL * share)))

    def pausing(self, rank: int) -> int:
        """How many conversations of a rank pause, and are likely to come back."""
        return self._pausing[rank]

    # --- requests ----------------------------------------------------------------------------

    def paused_before(self, held: bytes) -> list[int]:
        """Ranks where the conversation pauses that a prompt goes on with.

        Args:
            held: Packed hashes of what some rank holds of the prompt.
        """
        chain = self._latest(held)
        return [rank for rank, c in self._known.get(chain, {}).items() if not c.running]

    def begin(
        self, rank: int, chain: bytes, *, held: bytes, new: int, tokens: int, now: float
    ) -> None:
        """A rank is given a prompt.

        Args:
            rank: The rank's number.
            chain: Packed hash of the prompt's last full block.
            held: Packed hashes of the blocks that the rank holds of it.
            new: Tokens that the rank has to compute for it.
            tokens: The prompt's length.
            now: Seconds.
        """
        earlier = self._known.get(self._latest(held), {}).get(rank)
        if earlier is not None and not earlier.running:
            # A request that is tried again came before others ended: that was no pause.
            self._pause += _LEARNING * (max(0.0, now - earlier.ended) - self._pause)
            new += earlier.tokens
            self._forget(earlier)
        ranks = self._known.setdefault(chain, {})
        conversation = ranks.get(rank)
        if conversation is None:
            conversation = ranks[rank] = _Conversation(rank, chain)
        elif not conversation.running:
            self._wake(conversation)
        grown = min(tokens, conversation.tokens + new) - conversation.tokens
        conversation.tokens += grown
        self._tokens[rank] += grown
        conversation.running += 1

    def end(self, rank: int, chain: bytes, now: float) -> None:
        """A rank has answered a prompt, or was relieved of it."""
        conversation = self._known.get(chain, {}).get(rank)
        if conversation is None:  # of the rank's last life
            return
        conversation.running -= 1
        conversation.ended = now
        if not conversation.running:
            self._order[rank, chain] = conversation
            self._pausing[rank] += 1

    def clear(self) -> None:
        """What is cached is of no use to anybody any more."""
        for conversation in list(self._order.values()):
            self._forget(conversation)
        for ranks in self._known.values():
            for conversation in ranks.values():
                self._tokens[conversation.rank] -= conversation.tokens
                conversation.tokens = 0

    def expire(self, now: float) -> set[int]:
        """Give up who has paused for too long; returns the ranks that had such."""
        since = now - min(_PATIENCE * self._pause, _LONGEST_WAIT)
        ranks = set()
        while self._order:
            conversation = next(iter(self._order.values()))
            if conversation.ended >= since:
                break
            self._forget(conversation)
            ranks.add(conversation.rank)
        return ranks

    def _latest(self, held: bytes) -> bytes:
        """The last of these hashes with which a conversation's latest prompt ends, if one does."""
        for end in range(len(held), max(0, len(held) - self._looked_at), -HASH_BYTES):
            chain = held[end - HASH_BYTES : end]
            if chain in self._known:
                return chain
        return b""

    def _wake(self, conversation: _Conversation) -> None:
        del self._order[conversation.rank, conversation.chain]
        self._pausing[conversation.rank] -= 1

    def _forget(self, conversation: _Conversation) -> None:
        """One that pauses is over, or has another latest prompt."""
        self._wake(conversation)
        self._tokens[conversation.rank] -= conversation.tokens
        self._remove(conversation.rank, conversation.chain)

    def _remove(self, rank: int, chain: bytes) -> None:
        ranks = self._known[chain]
        del ranks[rank]
        if not ranks:
            del self._known[chain]

    def check_integrity(self, running: Mapping[tuple[int, bytes], int]) -> None:
        """Compare what is counted with the requests.

        Args:
            running: How many requests in flight a live rank has with a chain.

        Raises:
            AssertionError: Something differs.
        """
        assert all(self._known.values()), "a chain of nobody"
        every = [c for ranks in self._known.values() for c in ranks.values()]
        assert {(c.rank, c.chain): c.running for c in every if c.running} == running
        pausing = {(c.rank, c.chain) for c in every if not c.running}
        assert self._order.keys() == pausing, "a conversation neither runs nor pauses"
        counts = Counter(rank for rank, _ in pausing)
        for rank, tokens in self._tokens.items():
            assert tokens == sum(c.tokens for c in every if c.rank == rank), "miscounted"
            assert self._pausing[rank] == counts[rank], "miscounted"
