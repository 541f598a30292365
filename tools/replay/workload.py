"""Sessions, their turns, and the requests made of them.

A session's prompts grow along a *chain* of block hashes: a turn's prompt is the first blocks of its
chain. Hashes stand for the tokens; nothing here knows a text.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from megatron.core.inference.coordinator.hashing import HASH_BYTES

_LARGEST_HASH = np.uint64(2**63 - 2)


class InputError(ValueError):
    """A file of traffic cannot be used; the text says which, where, and what is wrong."""


@dataclass(slots=True)
class Turn:
    """One request of a session.

    Attributes:
        prompt_tokens: Tokens of its prompt.
        output_tokens: Tokens generated, 1 or more.
        gap: Seconds between the answer before it and this turn; None to draw them.
        at: Seconds from the trace's start, for an open loop; None where there is none.
        chain: Which of the session's chains its prompt lies on.
    """

    prompt_tokens: int
    output_tokens: int
    gap: float | None = None
    at: float | None = None
    chain: int = 0


@dataclass(slots=True)
class Session:
    """Turns that follow each other.

    Attributes:
        name: What it is called.
        turns: Its turns, at least one.
        chains: Packed block hashes; each turn's prompt is the beginning of one of them.
        group: Name of the group of sessions that begin with the same prompt.
    """

    name: str
    turns: list[Turn]
    chains: list[bytes]
    group: str = ""


@dataclass(slots=True)
class Workload:
    """Sessions in the order in which they start.

    Attributes:
        name: What it is called.
        block_size: Tokens in a block of its hashes.
        sessions: The sessions.
        timed: Whether its turns have a time of their own, so that it can be replayed in open loop.
        replicas: How many it was recorded on; None if that is not known.
    """

    name: str
    block_size: int
    sessions: list[Session]
    timed: bool = False
    replicas: int | None = None

    def __post_init__(self):
        if not self.sessions:
            raise InputError(f"{self.name}: there are no sessions")

    @property
    def requests(self) -> int:
        """Turns of all sessions."""
        return sum(len(session.turns) for session in self.sessions)

    def largest(self) -> int:
        """Tokens of prompt and output of the largest request."""
        return max(t.prompt_tokens + t.output_tokens for s in self.sessions for t in s.turns)


@dataclass(slots=True, eq=False)
class Request:
    """A turn on its way. Times are seconds of the run's clock.

    Attributes:
        session: Number of its session in the workload.
        turn: Number of its turn in the session.
        name: Name of the session, which some policies route on.
        prompt_tokens: Tokens of its prompt.
        output_tokens: Tokens to generate.
        hashes: Packed hashes of its prompt's full blocks.
        chain: What `hashes` is the beginning of.
        arrival: When it was sent.
        last: Whether its session ends with it.
        replica: Where it went; -1 before that.
        scheduled: When the replica scheduled it.
        first_token: When its first token was there.
        finished: When its last one was.
        cached_tokens: Tokens of prefill that were skipped.
        compared: Whether the two below were looked at.
        passed_over: Cached tokens that another replica had more of.
        load_saved: Requests that this other replica had more than the one chosen.
    """

    session: int
    turn: int
    name: str
    prompt_tokens: int
    output_tokens: int
    hashes: bytes
    chain: bytes
    arrival: float
    last: bool = False
    replica: int = -1
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    cached_tokens: int = 0
    compared: bool = False
    passed_over: int = 0
    load_saved: int = 0


def request_of(workload: Workload, session: int, turn: int, now: float) -> Request:
    """Make the request of a session's turn."""
    of = workload.sessions[session]
    what = of.turns[turn]
    chain = of.chains[what.chain]
    size = what.prompt_tokens // workload.block_size * HASH_BYTES
    return Request(
        session, turn, of.name, what.prompt_tokens, what.output_tokens, chain[:size], chain, now,
        turn + 1 == len(of.turns),
    )  # fmt: skip


def block_names(numbers: np.ndarray, scope: int) -> bytes:
    """Packed hashes for numbered blocks: equal numbers of one scope get equal hashes.

    The finalizer of splitmix64, made positive.

    Args:
        numbers: Any whole numbers, shape [n].
        scope: Keeps numbers apart that mean different blocks.
    """
    with np.errstate(over="ignore"):
        x = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64((scope * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) % 2**64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x % _LARGEST_HASH + np.uint64(1)).astype("<i8").tobytes()


@dataclass(slots=True)
class ChainBuilder:
    """Puts a session's prompts on as few chains as it can.

    Attributes:
        chains: The chains so far.
    """

    chains: list[bytes] = field(default_factory=list)

    def add(self, hashes: bytes) -> int:
        """The number of the chain that begins with these blocks; the last is made longer if it can.

        Only the last chain is looked at: a session goes on from its latest prompt.
        """
        if not self.chains:
            self.chains.append(hashes)
        elif hashes.startswith(self.chains[-1]):
            self.chains[-1] = hashes
        elif not self.chains[-1].startswith(hashes):
            self.chains.append(hashes)
        return len(self.chains) - 1


def members(session: Session, count: int, shared: int, scope: int) -> Iterator[Session]:
    """Make a group of a session: the first blocks are shared, each member's others are its own.

    Args:
        session: Of one chain.
        count: How many members.
        shared: Blocks of the chain that all members have.
        scope: Number of the first member's blocks, as for `block_names`.
    """
    (chain,) = session.chains
    blocks = len(chain) // HASH_BYTES
    for member in range(count):
        own = block_names(np.arange(shared, blocks), scope + member)
        name = f"{session.name}#{member}"
        yield Session(name, session.turns, [chain[: shared * HASH_BYTES] + own], session.name)
