"""The decision: which rank gets a request.

Pure functions of what is known about each rank. A rank's *fraction* is how much of the prompt it
already holds (0 to 1); a cost policy turns fraction and load into a score, and the highest wins.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from megatron.core.inference.coordinator.policies import PrefixCachingCostPolicy


class Candidate(NamedTuple):
    """A live rank as the decision sees it.

    Attributes:
        rank: Its number.
        load: Requests assigned to it and not yet answered.
        fraction: Share of the prompt's full blocks that it holds, in [0, 1].
        last_assigned: Sequence number of its latest assignment; -1 when it never got any.
    """

    rank: int
    load: int
    fraction: float = 0.0
    last_assigned: int = -1


class Situation(NamedTuple):
    """What the score of every candidate of one request shares.

    Attributes:
        blocks: Full blocks of the prompt.
        mean_load: Mean load over all live ranks.
        max_requests: The smallest number of places that any live rank registered.
        alpha: Weight of the fraction in `free_capacity_weighted`.
        beta: Weight of load in `relative_load_weighted`.
    """

    blocks: int
    mean_load: float
    max_requests: int
    alpha: float
    beta: float


def relative_load_weighted(rank: Candidate, now: Situation) -> float:
    """Score = fraction - beta * (load - mean) / max(1, mean).

    The mean is floored at 1, so that one request in a near-idle fleet is no large relative load.
    """
    return rank.fraction - now.beta * (rank.load - now.mean_load) / max(1.0, now.mean_load)


def free_capacity_weighted(rank: Candidate, now: Situation) -> float:
    """Score = alpha * fraction + (1 - alpha) * max(0, max_requests - load) / max_requests."""
    free = max(0, now.max_requests - rank.load) / now.max_requests
    return now.alpha * rank.fraction + (1.0 - now.alpha) * free


def prefill_work(rank: Candidate, now: Situation) -> float:
    """Score = -(blocks not cached) * (1 + load)."""
    return -now.blocks * (1.0 - rank.fraction) * (1 + rank.load)


SCORES: dict[PrefixCachingCostPolicy, Callable[[Candidate, Situation], float]] = {
    PrefixCachingCostPolicy.RELATIVE_LOAD_WEIGHTED: relative_load_weighted,
    PrefixCachingCostPolicy.FREE_CAPACITY_WEIGHTED: free_capacity_weighted,
    PrefixCachingCostPolicy.PREFILL_WORK: prefill_work,
}


def least_loaded(candidates: Iterable[Candidate], *, deterministic: bool = False) -> Candidate:
    """The rank with the lowest load.

    Ties go to the rank assigned least recently, so that equal ranks take turns, then to the lowest
    number. In deterministic mode they go to the lowest number at once: recency depends on the
    order in which requests happened to arrive.

    Raises:
        ValueError: There is no candidate.
    """
    if deterministic:
        return min(candidates, key=lambda c: (c.load, c.rank))
    return min(candidates, key=lambda c: (c.load, c.last_assigned, c.rank))


def choose(
    candidates: Sequence[Candidate],
    policy: PrefixCachingCostPolicy,
    situation: Situation,
    *,
    deterministic: bool = False,
) -> Candidate:
    """Pick the rank for one request.

    No score rises with load, so among ranks that hold equally much only the one that ties prefer
    can win: `candidates` may be the best of the holders of each depth, and the least loaded rank.

    Scores are rounded to 9 decimals before they are compared, since 1 - 1/3 and 2/3 must tie.
    Ties go to the lower load (the request waits less there at no loss), then to the rank assigned
    least recently (never counts as least), then to the lowest number. In deterministic mode:
    score, load, number.

    Args:
        candidates: The best holder of each depth, and at least the least loaded rank.
        policy: The cost policy.
        situation: What all candidates share.
        deterministic: Leave recency out of the tie-break.

    Returns:
        The winner. Without any holder it is the least loaded rank, whatever the policy.

    Raises:
        ValueError: There is no candidate.
    """
    score = SCORES[policy]
    scores = [round(score(candidate, situation), 9) for candidate in candidates]
    highest = max(scores)
    best = [c for c, found in zip(candidates, scores, strict=True) if found == highest]
    return best[0] if len(best) == 1 else least_loaded(best, deterministic=deterministic)
