"""The cost policy `added_delay`: the rank where a request delays everybody least, itself included.

    added delay = queued + new + new * min(mean load, HELD_UP) * STANDSTILL
                  + REQUEST_TOKENS * load + RECOMPUTED * evicted

in tokens of prefill, which stand for the time that they take: only ratios matter, so that no
profile is needed. `new` is what of the prompt the rank would have to compute, `queued` the prefill
that it was given and has not done: together the request's own wait. Each of the `load` requests
there makes the steps of this one longer, now or when it runs, and this one theirs, by what
`REQUEST_TOKENS` stands for.

While a prompt is computed, others stand still for `new`. They are counted as many as ranks have on
average, not as this one has: what is computed twice is lost to the whole fleet, and by its own load
a rank with few requests would get the long prompts, however long they wait there already. Each
counts only `STANDSTILL`, since an answer that ends later is no first token that comes later; and no
more than `HELD_UP` count, or under long queues one would wait for minutes rather than compute
anything twice.

`evicted` is what the prompt throws out of the rank's cache although somebody will come back for it,
where another rank would have room for it:

    evicted = new * level / FULL * (1 - mean level / FULL)

with `level` and `FULL` of `conversations.py`. It has to be computed again, and holds up others
then. Where all caches are full of conversations, some are thrown out anyway: nothing is charged.

Source: issue 6, and replay of its workloads. Unlike the scores of `decision.py` this one falls as a
queue empties, so the best rank without the prompt need not be the least loaded one. Ranks are kept
by level, then by queue and load: of each level only the first can win, and there are few levels.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence

from megatron.core.inference.coordinator.conversations import FULL
from megatron.core.inference.coordinator.hashing import HASH_BYTES

HELD_UP = 64
"""Requests that count as held up by a prefill, at most. In replay 48 to 96 do alike."""

STANDSTILL = 3 / 16
"""What a request that stands still counts, against one that waits for its first token. In replay
more skips more where caches are far too small, less has earlier first tokens; 1/8 to 1/4 do."""

REQUEST_TOKENS = 800
"""What one more request costs the others and itself, in tokens of prefill. In replay less leaves
ranks idle when few sessions are left, more drives sessions away from what is cached for them; 700
to 1,400 do."""

RECOMPUTED = 5
"""What a token costs that has to be computed again: of the order of a new one on a busy fleet."""

_MOST_TOKENS = 2**40  # prompt lengths are told by clients
_NUMBER_BITS, _RECENCY_BITS, _CHARGE_BITS = 16, 48, 64
_CHARGE_SHIFT = _NUMBER_BITS + _RECENCY_BITS
_LEVEL_SHIFT = _CHARGE_SHIFT + _CHARGE_BITS

Found = tuple[int, int]
"""The delay that a rank would add, and the rank's key: what comes first in order is better."""


def added_delay(new: int, queued: int, load: int, mean_load: float, evicted: int = 0) -> int:
    """Tokens of prefill, by the formula above."""
    held_up = new * min(mean_load, HELD_UP) * STANDSTILL
    return int(queued + new + held_up + REQUEST_TOKENS * load + RECOMPUTED * evicted)


def number_of(found: Found) -> int:
    """The rank that was found."""
    return found[1] & ((1 << _NUMBER_BITS) - 1)


class Delays:
    """Live ranks by what they would cost a request, and what makes up their queues.

    A request's prefill is queued from its routing until its last full block is stored, or it is
    answered; engines prefill first come first served, so both also end what was routed before.
    Ties go to the lower level, then to where queue and load cost less, then to the rank assigned
    least recently, then to the lowest number.

    Args:
        deterministic: Leave recency out.
    """

    def __init__(self, deterministic: bool = False):
        self._deterministic = deterministic
        self._order: list[int] = []
        self._keys: dict[int, int] = {}
        self._loads: dict[int, int] = {}
        self._load = self._level = 0  # of all ranks together
        self._queues: dict[int, dict[int, tuple[int, bytes | None]]] = {}
        self._tokens: dict[int, int] = {}

    # --- ranks -------------------------------------------------------------------------------

    def update(self, rank: int, load: int, last_assigned: int, level: int = 0) -> None:
        """A rank is new, or its load, its queue or its level has changed.

        Args:
            rank: Its number, below 65,536.
            load: Requests that it has and has not answered.
            last_assigned: Sequence number of its latest assignment, -1 for never.
            level: How full its cache is of conversations that go on, 0 to `FULL`.
        """
        self.remove(rank)
        recency = 0 if self._deterministic else last_assigned + 1
        charge = self._tokens.get(rank, 0) + REQUEST_TOKENS * load
        key = (level << _CHARGE_BITS | charge) << _RECENCY_BITS | recency
        self._keys[rank] = key = key << _NUMBER_BITS | rank
        self._loads[rank] = load
        self._load += load
        self._level += level
        insort(self._order, key)

    def remove(self, rank: int) -> None:
        """A rank is live no more, if it was."""
        key = self._keys.pop(rank, None)
        if key is not None:
            self._load -= self._loads.pop(rank)
            self._level -= key >> _LEVEL_SHIFT
            del self._order[bisect_left(self._order, key)]

    # --- queues ------------------------------------------------------------------------------

    def queued(self, rank: int) -> int:
        """Tokens of prefill that a rank was given and has not done."""
        return self._tokens.get(rank, 0)

    def begin(self, rank: int, request: int, new: int, chain: bytes | None) -> None:
        """A request is given to a rank; `update` has to follow.

        Args:
            rank: The rank's number.
            request: The request's.
            new: Tokens that have to be computed for it.
            chain: Packed hash of its last full block; None where nobody will say it is stored.
        """
        new = min(new, _MOST_TOKENS)
        self._queues.setdefault(rank, {})[request] = new, chain
        self._tokens[rank] = self._tokens.get(rank, 0) + new

    def finish(self, rank: int, request: int) -> None:
        """A request left its rank, or its prompt is computed; `update` has to follow."""
        queue = self._queues.get(rank, {})
        if request not in queue:
            return
        for earlier in list(queue):
            self._tokens[rank] -= queue.pop(earlier)[0]
            if earlier == request:
                break
        if not queue:
            del self._queues[rank], self._tokens[rank]

    def stored(self, rank: int, chains: Sequence[bytes], block_size: int) -> bool:
        """A rank has stored these packed chains; returns whether its queue is shorter now.

        What is left of them when the prompts that are done are taken off is of the next one: long
        prompts are computed in chunks.
        """
        queue = self._queues.get(rank)
        if not queue:
            return False
        before = self._tokens[rank]
        for request, (_, chain) in reversed(queue.items()):
            if chain is not None and any(hashes.find(chain) % HASH_BYTES == 0 for hashes in chains):
                self.finish(rank, request)
                break
        done = sum(map(len, chains)) // HASH_BYTES * block_size
        done -= before - self._tokens.get(rank, 0)
        if queue and done > 0:
            request, (new, chain) = next(iter(queue.items()))
            queue[request] = max(0, new - done), chain
            self._tokens[rank] -= min(new, done)
        return self._tokens.get(rank, 0) < before

    # --- the choice --------------------------------------------------------------------------

    def best(
        self, new: int, limit: int = 0, accept: Callable[[int], object] = lambda number: True
    ) -> Found | None:
        """The best of the ranks that are accepted and would have to compute so much.

        Args:
            new: Tokens.
            limit: Ranks with so many requests get none; 0 for no limit.
            accept: Called with numbers of ranks, in their order.
        """
        order, at, best = self._order, 0, None
        while at < len(order):
            key = order[at]
            caused = self._caused(new, key >> _LEVEL_SHIFT)
            if best is not None and caused >= best[0]:
                break
            rank = key & ((1 << _NUMBER_BITS) - 1)
            if (not limit or self._loads[rank] < limit) and accept(rank):
                found = caused + _charge(key), key
                best = found if best is None else min(best, found)
                at = bisect_left(order, (key >> _LEVEL_SHIFT) + 1 << _LEVEL_SHIFT, at)
            else:
                at += 1
        return best

    def best_of(self, ranks: Iterable[int], new: int, limit: int = 0) -> Found | None:
        """The best of some ranks, which must be live; takes a step for each of them."""
        keys = (self._keys[rank] for rank in ranks if not limit or self._loads[rank] < limit)
        found = ((self._caused(new, key >> _LEVEL_SHIFT) + _charge(key), key) for key in keys)
        return min(found, default=None)

    def _caused(self, new: int, level: int) -> int:
        """What the prompt itself adds on a rank of some level."""
        ranks = len(self._keys)
        evicted = new * level * (FULL * ranks - self._level) // (FULL * FULL * ranks)
        return added_delay(new, 0, 0, self._load / ranks, evicted)

    def check_integrity(self, ranks: Mapping[int, int], live: Mapping[int, int]) -> None:
        """Compare what is counted with the requests.

        Args:
            ranks: Of every request in flight, the number of the rank that has it.
            live: Of every live rank, its load.

        Raises:
            AssertionError: They differ.
        """
        for rank, queue in self._queues.items():
            assert queue, "an empty queue was left behind"
            assert all(ranks.get(request) == rank for request in queue), "a queue of others"
            assert self._tokens[rank] == sum(new for new, _ in queue.values()), "miscounted"
        assert self._tokens.keys() == self._queues.keys(), "tokens of nobody"
        assert self._order == sorted(self._keys.values()), "the order is none"
        assert self._loads == live
        for rank, key in self._keys.items():
            assert _charge(key) == self.queued(rank) + REQUEST_TOKENS * live[rank]
        assert self._load == sum(live.values())
        assert self._level == sum(key >> _LEVEL_SHIFT for key in self._keys.values())


def _charge(key: int) -> int:
    return key >> _CHARGE_SHIFT & ((1 << _CHARGE_BITS) - 1)
