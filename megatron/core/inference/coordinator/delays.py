"""The cost policy `added_delay`: the rank where a request delays everybody least, itself included.

    added delay = queued + new + new * min(load, HELD_UP) + REQUEST_TOKENS * load

in tokens of prefill, which stand for the time that they take: only ratios matter, so that no clock
and no profile is needed. `new` is what of the prompt the rank would have to compute, `queued` the
prefill that it was given and has not done: together the request's own wait. While its prompt is
computed the rank's other requests stand still for `new`. And each of these `load` requests makes
the steps of this one longer, now or when it runs, and this one theirs, by what `REQUEST_TOKENS`
stands for.

Of those held up only so many count. If all did, the sum of all delays would indeed be least, and
nobody would want it: ranks with long queues would get ever more short prompts, a few others all the
long ones, and these would wait for minutes and work on when the others are through.

Source: issue 6, and replay of its workloads. Unlike the scores of `decision.py` this one falls as a
queue empties, so the best rank without the prompt need not be the least loaded one. Ranks are kept
by how many are held up there, then by the rest of the formula: of each number only the first can
win, and there are few numbers.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence

HELD_UP = 8
"""Requests of a rank that count as held up by a prefill, at most. In replay 5 to 16 do alike."""

REQUEST_TOKENS = 500
"""What one more request costs the others and itself, in tokens of prefill. In replay less leaves
ranks idle when few sessions are left, more drives sessions away from what is cached for them."""

_MOST_TOKENS = 2**40  # prompt lengths are told by clients
_NUMBER_BITS, _RECENCY_BITS, _CHARGE_BITS = 16, 48, 64
_CHARGE_SHIFT = _NUMBER_BITS + _RECENCY_BITS
_HELD_UP_SHIFT = _CHARGE_SHIFT + _CHARGE_BITS

Found = tuple[int, int]
"""The delay that a rank would add, and the rank's key: what comes first in order is better."""


def added_delay(new: int, queued: int, load: int) -> int:
    """Tokens of prefill, by the formula above."""
    return queued + new + new * min(load, HELD_UP) + REQUEST_TOKENS * load


def number_of(found: Found) -> int:
    """The rank that was found."""
    return found[1] & ((1 << _NUMBER_BITS) - 1)


class Delays:
    """Live ranks by what they would cost a request, and what makes up their queues.

    A request's prefill is queued from its routing until its last full block is stored, or it is
    answered; engines prefill first come first served, so both also end what was routed before.
    Ties go to where fewer are held up, then to where queue and load cost less, then to the rank
    assigned least recently, then to the lowest number.

    Args:
        deterministic: Leave recency out.
    """

    def __init__(self, deterministic: bool = False):
        self._deterministic = deterministic
        self._order: list[int] = []
        self._keys: dict[int, int] = {}
        self._loads: dict[int, int] = {}
        self._queues: dict[int, dict[int, tuple[int, bytes | None]]] = {}
        self._tokens: dict[int, int] = {}

    # --- ranks -------------------------------------------------------------------------------

    def update(self, rank: int, load: int, last_assigned: int) -> None:
        """A rank is new, or its load or its queue has changed.

        Args:
            rank: Its number, below 65,536.
            load: Requests that it has and has not answered.
            last_assigned: Sequence number of its latest assignment, -1 for never.
        """
        self.remove(rank)
        recency = 0 if self._deterministic else last_assigned + 1
        charge = added_delay(0, self._tokens.get(rank, 0), load)
        key = (min(load, HELD_UP) << _CHARGE_BITS | charge) << _RECENCY_BITS | recency
        self._loads[rank] = load
        self._keys[rank] = key = key << _NUMBER_BITS | rank
        insort(self._order, key)

    def remove(self, rank: int) -> None:
        """A rank is live no more, if it was."""
        key = self._keys.pop(rank, None)
        if key is not None:
            del self._loads[rank]
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

    def stored(self, rank: int, chains: Sequence[bytes]) -> bool:
        """A rank has stored these packed chains; returns whether its queue is shorter now."""
        queue = self._queues.get(rank)
        if not queue:
            return False
        for request, (_, chain) in reversed(queue.items()):
            if chain is not None and any(hashes.find(chain) % 8 == 0 for hashes in chains):
                self.finish(rank, request)
                return True
        return False

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
            held_up = key >> _HELD_UP_SHIFT
            if best is not None and added_delay(new, 0, held_up) >= best[0]:
                break
            rank = key & ((1 << _NUMBER_BITS) - 1)
            if (not limit or self._loads[rank] < limit) and accept(rank):
                found = _delay(key, new), key
                best = found if best is None else min(best, found)
                at = bisect_left(order, (held_up + 1) << _HELD_UP_SHIFT, at)
            else:
                at += 1
        return best

    def best_of(self, ranks: Iterable[int], new: int, limit: int = 0) -> Found | None:
        """The best of some ranks, which must be live; takes a step for each of them."""
        keys = (self._keys[rank] for rank in ranks if not limit or self._loads[rank] < limit)
        return min(((_delay(key, new), key) for key in keys), default=None)

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
            assert key >> _HELD_UP_SHIFT == min(live[rank], HELD_UP)
            assert _charge(key) == added_delay(0, self.queued(rank), live[rank])


def _charge(key: int) -> int:
    return key >> _CHARGE_SHIFT & ((1 << _CHARGE_BITS) - 1)


def _delay(key: int, new: int) -> int:
    return new + new * (key >> _HELD_UP_SHIFT) + _charge(key)
