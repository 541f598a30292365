"""Which signal routes a request, and how that signal is weighed against load."""

from enum import StrEnum

from megatron.core.inference.config import PrefixCachingCoordinatorPolicy


class PrefixCachingCostPolicy(StrEnum):
    """How the share of a prompt that a rank holds is weighed against the rank's load.

    The scores stand in `decision.py`, and the highest wins; `added_delay` stands in `delays.py`.
    """

    RELATIVE_LOAD_WEIGHTED = "relative_load_weighted"
    """fraction - beta * (load - mean load) / max(1, mean load)."""

    FREE_CAPACITY_WEIGHTED = "free_capacity_weighted"
    """alpha * fraction + (1 - alpha) * free places / max_requests."""

    PREFILL_WORK = "prefill_work"
    """-(blocks not cached) * (1 + load): the earlier multiplicative cost, kept as a baseline."""

    ADDED_DELAY = "added_delay"
    """The least of own wait and delay of others, in tokens of prefill."""


_PREFIX_AWARE = frozenset(
    {
        PrefixCachingCoordinatorPolicy.LONGEST_PREFIX,
        PrefixCachingCoordinatorPolicy.FIRST_PREFIX_BLOCK,
    }
)


def routes_on_prefix(policy: PrefixCachingCoordinatorPolicy | str | None) -> bool:
    """Tell whether anybody will read block hashes under this signal policy.

    Args:
        policy: The enum, its string, or None for "no routing policy".

    Returns:
        True where hashes steer the routing, so that clients should compute them.

    Raises:
        ValueError: The string names no policy.
    """
    return policy is not None and PrefixCachingCoordinatorPolicy(policy) in _PREFIX_AWARE
