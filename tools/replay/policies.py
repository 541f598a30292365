"""Policies by name: the core's own, in all their variants, and the baselines."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.inference.config import PrefixCachingCoordinatorPolicy

from megatron.core.inference.coordinator.policies import PrefixCachingCostPolicy
from replay.baselines import (
    Baseline,
    BaselineMaker,
    ConsistentHash,
    Pinned,
    Random,
    RoundRobin,
    WorkTimesBatch,
)
from replay.block_cost import BlockCost
from replay.core_route import CoreMaker
from replay.released_scoring import ReleasedScoring
from replay.routes import RouteMaker

EVENTS, HISTORY, STOCK = "events", "history", "stock"
"""How caches are known: replicas tell of them; or by the routing history, as far as it fits into
caches whose size is known; or by the history of 300 s alone, as of released engines."""

_SIGNALS = {
    "": PrefixCachingCoordinatorPolicy.LONGEST_PREFIX,
    "first+": PrefixCachingCoordinatorPolicy.FIRST_PREFIX_BLOCK,
}
_SHORT = {
    "relative": PrefixCachingCostPolicy.RELATIVE_LOAD_WEIGHTED,
    "capacity": PrefixCachingCostPolicy.FREE_CAPACITY_WEIGHTED,
}
_WEIGHTS = {
    PrefixCachingCostPolicy.RELATIVE_LOAD_WEIGHTED: "load_beta",
    PrefixCachingCostPolicy.FREE_CAPACITY_WEIGHTED: "routing_alpha",
}
_CACHELESS: dict[str, type[Baseline]] = {
    "round_robin": RoundRobin,
    "random": Random,
    "consistent_hash": ConsistentHash,
    "pinned": Pinned,
}

BASELINES = frozenset([*_CACHELESS, "released", "work_batch", "block_cost"])
"""Kinds of policies that are not the coordinator's."""

BETAS = ("0", "0.25", "0.5", "0.75", "1", "1.5", "2", "4")
ALPHAS = ("0.25", "0.5", "0.75", "0.9")

SETS = {
    "quick": (
        "load_balanced", "pinned", "relative:0.5", "relative:1", "prefill_work@events",
        "added_delay@events",
    ),
    "reference": (
        "round_robin", "load_balanced", "released:256@history", "released:1024@history",
        "consistent_hash", "pinned", "prefill_work@stock", "relative:0.5@stock",
        "relative:1@stock", "relative:2@stock", "relative:0.75@events", "work_batch@events",
    ),
    "betas": tuple(f"relative:{beta}@events" for beta in BETAS),
    "alphas": tuple(f"capacity:{alpha}@events" for alpha in ALPHAS),
    "all": (
        "round_robin", "random", "load_balanced", "consistent_hash", "pinned", "released:256",
        "work_batch", "block_cost", "prefill_work", "added_delay", "first+relative:1",
        "first+capacity:0.5", "first+prefill_work", "first+added_delay",
        *(f"relative:{beta}" for beta in BETAS),
        *(f"capacity:{alpha}" for alpha in ALPHAS),
    ),
}  # fmt: skip
"""Named lists of policies, for the command line."""


class UnknownPolicy(ValueError):
    """No policy is called that; the text says what there is."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy to compare.

    Attributes:
        name: What it is called, e.g. `relative:0.5@events`.
        maker: Makes its route.
        true_caches: Whether replicas tell it of their caches.
    """

    name: str
    maker: RouteMaker
    true_caches: bool


@dataclass(frozen=True, slots=True)
class Conditions:
    """What all policies of a comparison share.

    Attributes:
        eviction: What replicas do with blocks that nobody uses: `lru` or `ref_zero`.
        max_rank_requests: Limit of the coordinator's queue; 0 for none.
    """

    eviction: str = "lru"
    max_rank_requests: int = 0


def kind_of(name: str) -> str:
    """The kind of a policy, without its weight and how it knows of caches."""
    return name.partition("@")[0].partition(":")[0]


def parse_policies(names: str, conditions: Conditions) -> list[Policy]:
    """Policies from a list of names and of names of sets, separated by commas.

    A name that says not how caches are known means both, where that makes a difference.

    Raises:
        UnknownPolicy: A name means nothing.
    """
    found: dict[str, Policy] = {}
    for name in names.split(","):
        for one in SETS.get(name.strip(), (name.strip(),)):
            for policy in _variants(one, conditions):
                found[policy.name] = policy
    return list(found.values())


def _variants(name: str, conditions: Conditions) -> Iterator[Policy]:
    base, _, knows = name.partition("@")
    kind, weight = kind_of(name), base.partition(":")[2]
    if knows not in ("", EVENTS, HISTORY, STOCK):
        raise UnknownPolicy(f"{name}: after @ stands {EVENTS}, {HISTORY} or {STOCK}")
    if knows and kind in ("load_balanced", *_CACHELESS):
        raise UnknownPolicy(f"{name}: to {kind} caches make no difference; leave out @{knows}")
    if kind in _CACHELESS and not weight:
        yield Policy(base, BaselineMaker(_CACHELESS[kind]), False)
        return
    if kind == "load_balanced" and not weight:
        routing = {"coordinator_policy": PrefixCachingCoordinatorPolicy.LOAD_BALANCED}
        yield Policy(base, _core(routing, HISTORY, conditions), False)
        return
    for way in (EVENTS, HISTORY) if not knows else (knows,):
        maker = _baseline(kind, _number(name, weight), way) or _weighed(name, way, conditions)
        yield Policy(f"{base}@{way}", maker, way == EVENTS)


def _baseline(kind: str, number: float | None, way: str) -> RouteMaker | None:
    """A baseline that knows of caches; None if the name is not one's."""
    options: dict[str, Any] = {"sized": way != STOCK}
    if kind == "work_batch" and number is None:
        return BaselineMaker(WorkTimesBatch, way == EVENTS, options)
    if kind == "block_cost":
        options |= {} if number is None else {"weight": number}
        return BaselineMaker(BlockCost, way == EVENTS, options)
    if kind == "released":
        options |= {} if number is None else {"max_requests": int(number)}
        return BaselineMaker(ReleasedScoring, way == EVENTS, options)
    return None


def _weighed(name: str, way: str, conditions: Conditions) -> RouteMaker:
    """One of the core's cost policies, with one of its signals."""
    kind, _, weight = name.partition("@")[0].partition(":")
    prefix = "first+" if kind.startswith("first+") else ""
    try:
        short = kind.removeprefix(prefix)
        cost = _SHORT.get(short) or PrefixCachingCostPolicy(short)
    except ValueError:
        raise UnknownPolicy(f"there is no policy {name!r}; {_what_there_is()}") from None
    routing: dict[str, Any] = {"coordinator_policy": _SIGNALS[prefix], "cost_policy": cost}
    if weight:
        if cost not in _WEIGHTS:
            raise UnknownPolicy(f"{name}: {cost.value} has no weight")
        routing[_WEIGHTS[cost]] = _number(name, weight)
    return _core(routing, way, conditions)


def _core(routing: dict[str, Any], way: str, conditions: Conditions) -> CoreMaker:
    fleet = {"max_rank_requests": conditions.max_rank_requests}
    return CoreMaker(routing, way == EVENTS, conditions.eviction, fleet, sized=way != STOCK)


def _number(name: str, weight: str) -> float | None:
    try:
        return float(weight) if weight else None
    except ValueError:
        raise UnknownPolicy(f"{name}: {weight!r} is no number") from None


def _what_there_is() -> str:
    costs = [*_SHORT, *(c.value for c in PrefixCachingCostPolicy if c not in _SHORT.values())]
    names = [*_CACHELESS, "load_balanced", "released", "work_batch", "block_cost", *costs]
    return f"there are {', '.join(names)}, first+ before a cost, and the sets {', '.join(SETS)}"
