"""How full the ranks' caches are of conversations that are likely to go on.

What a prompt throws out of a full cache is lost time only if somebody comes back for it. Nobody
says when a conversation is over, but those that go on do so after a while that can be learned: one
that was silent for several times the usual pause is not waited for any more.

A conversation is known by its latest prompt: a request of which the rank holds just what an earlier
prompt of its was goes on with that one. What it takes of the cache is what the rank had to compute
for it, so that a beginning which many share counts once.
"""

from collections.abc import Mapping
from dataclasses import dataclass

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
    """The conversations of each rank, by their latest prompts."""

    def __init__(self):
        self._capacity: dict[int, int | None] = {}
        self._tokens: dict[int, int] = {}
        self._known: dict[int, dict[bytes, _Conversation]] = {}
        # Those that pause, by when that began; by rank and chain.
        self._pausing: dict[tuple[int, bytes], _Conversation] = {}
        self._pause = _FIRST_PAUSE

    def add_rank(self, rank: int, capacity: int | None) -> None:
        """A rank is new, and has no conversations.

        Args:
            rank: Its number.
            capacity: Tokens that its cache keeps; None if that is unknown, or it keeps nothing.
        """
        self.drop_rank(rank)
        self._capacity[rank], self._tokens[rank], self._known[rank] = capacity, 0, {}

    def drop_rank(self, rank: int) -> None:
        """A rank is gone, if it was there, and its cache with it."""
        for chain in self._known.pop(rank, ()):
            self._pausing.pop((rank, chain), None)
        self._capacity.pop(rank, None)
        self._tokens.pop(rank, None)

    def level(self, rank: int) -> int:
        """From 0 to `FULL`: how full a rank's cache is of conversations that go on."""
        capacity = self._capacity[rank]
        if not capacity:
            return 0
        share = (self._tokens[rank] / capacity - _SOME) / (_ALL - _SOME)
        return min(FULL, max(0, int(FULL * share)))

    def begin(
        self, rank: int, chain: bytes, *, before: bytes, new: int, tokens: int, now: float
    ) -> None:
        """A rank is given a prompt.

        Args:
            rank: The rank's number.
            chain: Packed hash of the prompt's last full block.
            before: The same of the last block that the rank holds of it; empty if it holds none.
            new: Tokens that the rank has to compute for it.
            tokens: The prompt's length.
            now: Seconds.
        """
        known = self._known[rank]
        earlier = known.get(before)
        if earlier is not None and not earlier.running:
            # A request that is tried again came before others ended: that was no pause.
            self._pause += _LEARNING * (max(0.0, now - earlier.ended) - self._pause)
            new += earlier.tokens
            self._forget(earlier)
        conversation = known.get(chain)
        if conversation is None:
            conversation = known[chain] = _Conversation(rank, chain)
        else:
            self._pausing.pop((rank, chain), None)
        grown = min(tokens, conversation.tokens + new) - conversation.tokens
        conversation.tokens += grown
        self._tokens[rank] += grown
        conversation.running += 1

    def end(self, rank: int, chain: bytes, now: float) -> None:
        """A rank has answered a prompt, or was relieved of it."""
        conversation = self._known.get(rank, {}).get(chain)
        if conversation is None:  # of the rank's last life
            return
        conversation.running -= 1
        conversation.ended = now
        if not conversation.running:
            self._pausing[rank, chain] = conversation

    def clear(self) -> None:
        """What is cached is of no use to anybody any more."""
        for conversation in list(self._pausing.values()):
            self._forget(conversation)
        for rank, known in self._known.items():
            self._tokens[rank] = 0
            for conversation in known.values():
                conversation.tokens = 0

    def expire(self, now: float) -> set[int]:
        """Give up who has paused for too long; returns the ranks that had such."""
        since = now - min(_PATIENCE * self._pause, _LONGEST_WAIT)
        ranks = set()
        while self._pausing:
            conversation = next(iter(self._pausing.values()))
            if conversation.ended >= since:
                break
            self._forget(conversation)
            ranks.add(conversation.rank)
        return ranks

    def _forget(self, conversation: _Conversation) -> None:
        rank, chain = conversation.rank, conversation.chain
        del self._known[rank][chain], self._pausing[rank, chain]
        self._tokens[rank] -= conversation.tokens

    def check_integrity(self, running: Mapping[tuple[int, bytes], int]) -> None:
        """Compare what is counted with the requests.

        Args:
            running: How many requests in flight a live rank has with a chain.

        Raises:
            AssertionError: They differ.
        """
        every = [c for known in self._known.values() for c in known.values()]
        assert {(c.rank, c.chain): c.running for c in every if c.running} == running
        pausing = {(c.rank, c.chain) for c in every if not c.running}
        assert self._pausing.keys() == pausing, "a conversation neither runs nor pauses"
        for rank, known in self._known.items():
            assert self._tokens[rank] == sum(c.tokens for c in known.values()), "miscounted"
