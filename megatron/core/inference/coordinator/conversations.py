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

_FIRST_PAUSE = 30.0
"""Seconds: the usual pause before any is known."""

_SHORTEST_WAIT, _LONGEST_WAIT = 20.0, 300.0
"""Seconds that a conversation is waited for. Longer pauses than that are never seen, so that a wait
as short as the pauses of a while would never become longer again."""

_LEARNING = 1 / 64
"""Weight of the latest pause in the usual one."""


@dataclass(slots=True)
class _Conversation:
    """A conversation on a rank.

    Attributes:
        rank: Number of the rank.
        chain: Packed hash of the last full block of its latest prompt.
        length: Tokens of that prompt.
        tokens: What it takes of the rank's cache.
        running: Requests with this prompt that the rank has not answered.
        ended: When it answered the latest one, seconds.
        stale: What is cached of it is of no use any more.
    """

    rank: int
    chain: bytes
    length: int
    tokens: int = 0
    running: int = 0
    ended: float = 0.0
    stale: bool = False


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
        self._known: dict[int, dict[bytes, _Conversation]] = {}
        self._where: dict[bytes, dict[int, None]] = {}  # ranks, by chain
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
        self._known[rank] = {}

    def drop_rank(self, rank: int) -> None:
        """A rank is gone, if it was there, and its cache with it; a step for each of its chains."""
        if rank not in self._capacity:
            return
        for chain in list(self._known[rank]):
            self._order.pop((rank, chain), None)
            self._remove(rank, chain)
        del self._capacity[rank], self._tokens[rank], self._pausing[rank], self._known[rank]

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
        return [rank for rank in self._where.get(chain, ()) if (rank, chain) in self._order]

    def leave(self, rank: int, held: bytes) -> None:
        """The conversation that pauses on a rank, and that a prompt goes on with, goes elsewhere.

        Args:
            rank: Its number; one of those that `paused_before` names.
            held: The same as there.
        """
        self._forget(self._order[rank, self._latest(held)])

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
        known = self._known[rank]
        earlier = known.get(self._latest(held))
        if earlier is not None and not earlier.running and earlier.chain != chain:
            # A request that is tried again came before others ended: that was no pause.
            self._pause += _LEARNING * (max(0.0, now - earlier.ended) - self._pause)
            # What was answered meanwhile may be cached, and takes of it as well.
            new = earlier.tokens + max(new, tokens - earlier.length)
            self._forget(earlier)
        conversation = known.get(chain)
        if conversation is None:
            conversation = known[chain] = _Conversation(rank, chain, tokens)
            self._where.setdefault(chain, {})[rank] = None
        elif not conversation.running:
            self._wake(conversation)
        conversation.stale = False
        grown = min(tokens, conversation.tokens + new) - conversation.tokens
        conversation.tokens += grown
        self._tokens[rank] += grown
        conversation.running += 1

    def end(self, rank: int, chain: bytes, now: float, completed: bool = True) -> None:
        """A rank has answered a prompt, or has nothing of it (`completed` is False)."""
        conversation = self._known.get(rank, {}).get(chain)
        if conversation is None:  # of the rank's last life
            return
        conversation.running -= 1
        conversation.ended = now
        if conversation.running:
            return
        self._order[rank, chain] = conversation
        self._pausing[rank] += 1
        if conversation.stale or not completed:
            self._forget(conversation)

    def clear(self) -> None:
        """What is cached is of no use to anybody any more; a step for each conversation."""
        for conversation in list(self._order.values()):
            self._forget(conversation)
        for rank, known in self._known.items():
            self._tokens[rank] = 0
            for conversation in known.values():
                conversation.tokens, conversation.stale = 0, True

    def expire(self, now: float) -> set[int]:
        """Give up who has paused for too long; returns the ranks that had such."""
        since = now - min(max(_PATIENCE * self._pause, _SHORTEST_WAIT), _LONGEST_WAIT)
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
            if chain in self._where:
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
        del self._known[rank][chain]
        ranks = self._where[chain]
        del ranks[rank]
        if not ranks:
            del self._where[chain]

    def check_integrity(self, running: Mapping[tuple[int, bytes], int]) -> None:
        """Compare what is counted with the requests.

        Args:
            running: How many requests in flight a live rank has with a chain.

        Raises:
            AssertionError: Something differs.
        """
        every = [c for known in self._known.values() for c in known.values()]
        where = {(rank, chain) for chain, ranks in self._where.items() for rank in ranks}
        assert where == {(c.rank, c.chain) for c in every}, "a chain is elsewhere"
        assert all(self._where.values()), "a chain of nobody"
        assert {(c.rank, c.chain): c.running for c in every if c.running} == running
        pausing = {(c.rank, c.chain) for c in every if not c.running}
        assert self._order.keys() == pausing, "a conversation neither runs nor pauses"
        counts = Counter(rank for rank, _ in pausing)
        for rank, tokens in self._tokens.items():
            assert tokens == sum(c.tokens for c in every if c.rank == rank), "miscounted"
            assert self._pausing[rank] == counts[rank], "miscounted"
