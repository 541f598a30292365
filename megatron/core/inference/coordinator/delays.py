"""The cost policy `added_delay`: the rank where a request delays everybody least, itself included.

    added delay = queued + new + new * min(mean load, HELD_UP) * STANDSTILL
                  + request charge * (load + pausing / 2) + RECOMPUTED * evicted

in tokens of prefill, which stand for the time that they take: only ratios matter, so that no
profile is needed. `new` is what of the prompt the rank would have to compute, `queued` the prefill
that it was given and has not done: together the request's own wait.

Each of the `load` requests there makes the steps of this one longer, now or when it runs, and this
one theirs: by what has to be read of its context, so that the charge for it goes with the length of
prompts (`request_charge.py`). So will the `pausing` conversations that are likely to come back
there, half of the time: without them, conversations that pause at the same time gather on one rank,
and have to be moved later. The one that this request goes on with is not counted.

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

from collections.abc import Callable, Iterable, Mapping

from megatron.core.inference.coordinator.conversations import FULL
from megatron.core.inference.coordinator.rank_order import Key, RankOrder, number_of, value_of
from megatron.core.inference.coordinator.standing import Standing

HELD_UP = 64
"""Requests that count as held up by a prefill, at most. In replay 48 to 96 do alike."""

STANDSTILL = 3 / 16
"""What a request that stands still counts, against one that waits for its first token. In replay
more skips more where caches are far too small, less has earlier first tokens; 1/8 to 1/4 do."""

RECOMPUTED = 5
"""What a token costs that has to be computed again: of the order of a new one on a busy fleet."""

_LEVEL_SHIFT = 64
"""Ranks are ordered by level, then by charge, side by side as one int."""

Found = tuple[int, Key]
"""The delay that a rank would add, and the rank's key: what comes first in order is better."""


def added_delay(
    new: int,
    queued: int,
    load: int,
    mean_load: float,
    request_charge: int,
    *,
    pausing: int = 0,
    evicted: int = 0,
) -> int:
    """Tokens of prefill, by the formula above."""
    held_up = new * min(mean_load, HELD_UP) * STANDSTILL
    shared = request_charge * load + request_charge // 2 * pausing
    return int(queued + new + held_up + shared + RECOMPUTED * evicted)


class Delays:
    """Live ranks by what they would cost a request.

    Ties go to the lower level, then to where what is there already costs less, then to the rank
    assigned least recently, then to the lowest number.

    Args:
        standing: The same ranks by load; a change there has to be followed by one here.
        deterministic: Leave recency out.

    Attributes:
        request_charge: What one more request costs; `update` of every rank has to follow a change.
    """

    def __init__(self, standing: Standing, deterministic: bool = False):
        self.request_charge = 0
        self._standing = standing
        self._ranks = RankOrder(deterministic)
        self._levels = 0  # of all ranks together

    def update(
        self, rank: int, queued: int, last_assigned: int, *, pausing: int = 0, level: int = 0
    ) -> None:
        """A rank is new, or its load, its queue or its conversations have changed.

        Args:
            rank: Its number, below 65,536.
            queued: Tokens of prefill that it was given and has not done.
            last_assigned: Sequence number of its latest assignment, -1 for never.
            pausing: Conversations that pause there, and are likely to come back.
            level: How full its cache is of conversations that go on, 0 to `FULL`.
        """
        self._levels += level - self._level_of(rank)
        load = self._standing.load(rank)
        charge = added_delay(0, queued, load, 0, self.request_charge, pausing=pausing)
        self._ranks.put(rank, level << _LEVEL_SHIFT | charge, last_assigned)

    def remove(self, rank: int) -> None:
        """A rank is live no more, if it was."""
        self._levels -= self._level_of(rank)
        self._ranks.remove(rank)

    def best(
        self, new: int, limit: int = 0, accept: Callable[[int], object] = lambda number: True
    ) -> Found | None:
        """The best of the ranks that are accepted and would have to compute so much.

        Args:
            new: Tokens.
            limit: Ranks with so many requests get none; 0 for no limit.
            accept: Called with numbers of ranks, in their order.
        """
        ranks, load = self._ranks, self._standing.load
        at, best = 0, None
        while at < len(ranks.sorted):
            key = ranks.sorted[at]
            caused = self._caused(new, _level(key))
            if best is not None and caused >= best[0]:
                break
            number = number_of(key)
            if (not limit or load(number) < limit) and accept(number):
                found = caused + _charge(key), key
                best = found if best is None else min(best, found)
                at = ranks.index_from(_level(key) + 1 << _LEVEL_SHIFT, at)
            else:
                at += 1
        return best

    def best_of(self, ranks: Iterable[int], new: int, limit: int = 0) -> Found | None:
        """The best of some ranks, which must be live; takes a step for each of them."""
        keys, load = self._ranks.keys, self._standing.load
        firsts: dict[int, Key] = {}
        for rank in ranks:
            key = keys[rank]
            level = _level(key)
            if (level not in firsts or key < firsts[level]) and (not limit or load(rank) < limit):
                firsts[level] = key
        found = ((self._caused(new, lv) + _charge(key), key) for lv, key in firsts.items())
        return min(found, default=None)

    def best_own(self, ranks: Iterable[int], new: int, limit: int = 0) -> Found | None:
        """The same where the request goes on with a conversation that pauses on these ranks."""
        found = self.best_of(ranks, new, limit)
        return found and (found[0] - self.request_charge // 2, found[1])

    def _caused(self, new: int, level: int) -> int:
        """What the prompt itself adds on a rank of some level."""
        ranks = len(self._standing)
        evicted = new * level * (FULL * ranks - self._levels) // (FULL * FULL * ranks)
        return added_delay(new, 0, 0, self._standing.mean_load, 0, evicted=evicted)

    def _level_of(self, rank: int) -> int:
        key = self._ranks.keys.get(rank)
        return 0 if key is None else _level(key)

    def check_integrity(self, charged: Mapping[int, tuple[int, int]]) -> None:
        """Compare what is kept with what it was made from.

        Args:
            charged: Of every live rank, queued tokens and conversations that pause.

        Raises:
            AssertionError: They differ.
        """
        keys = self._ranks.keys
        assert keys.keys() == charged.keys(), "other ranks than the fleet's"
        assert self._ranks.sorted == sorted(keys.values()), "the order is none"
        for rank, key in keys.items():
            (queued, pausing), load = charged[rank], self._standing.load(rank)
            charge = added_delay(0, queued, load, 0, self.request_charge, pausing=pausing)
            assert _charge(key) == charge
        assert self._levels == sum(map(_level, keys.values()))


def _level(key: Key) -> int:
    return value_of(key) >> _LEVEL_SHIFT


def _charge(key: Key) -> int:
    return value_of(key) & ((1 << _LEVEL_SHIFT) - 1)
