"""Burst fairness: what becomes of 400 requests that come at once and have most in common."""

import random
from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import Any

from coordinator_bench.options import Options
from coordinator_bench.prompts import Conversation
from coordinator_bench.rows import Row, Target
from coordinator_bench.traffic import Placement, Traffic, make_side
from coordinator_bench.workers import Worker, alternate, workers

RANKS = 8
GROUPS, MEMBERS = 8, 50
_BLOCKS, _SHARED = 128, 112
_NAMES_APART = 100


@dataclass(frozen=True, slots=True)
class Load:
    """What the ranks have to do before the burst.

    Attributes:
        base: Requests in flight on each rank.
        doubled: Whether the first rank has twice as many.
    """

    base: int
    doubled: bool = False

    @property
    def name(self) -> str:
        """In words."""
        return f"base load {self.base}" + (", one rank twice as loaded" if self.doubled else "")


LOADS = (Load(0), Load(4), Load(32), Load(4, True), Load(32, True))


class Bursts:
    """One policy, asked to place bursts.

    Args:
        name: "ours" or "released".
        policy: Name of the cost policy; the released coordinator has but one.
        block: Tokens in a block.
    """

    def __init__(self, name: str, policy: str, block: int):
        self._name, self._block = name, block
        self._options = {"cost_policy": policy} if name == "ours" else {}

    def policies(self) -> list[str]:
        """Names of our cost policies, the default first."""
        from megatron.core.inference.coordinator.policies import PrefixCachingCostPolicy
        from megatron.core.inference.coordinator.settings import RoutingSettings

        default = RoutingSettings().cost_policy
        return sorted((policy.value for policy in PrefixCachingCostPolicy), key=default.__ne__)

    def round(self, load: Load, number: int) -> dict[str, float]:
        """Place one burst on a fresh fleet.

        Args:
            load: What it has to do already.
            number: Of the round; the groups arrive in another order in each.

        Returns:
            `spread` (most requests of a rank over the mean), `load spread` (the same, the base
            load counted), `skipped` (share of the blocks), `hits` (requests of which the shared
            part was there), `cold` (requests that found nothing) and `own parts` (how often a
            group's own blocks were computed), both a group.
        """
        traffic = Traffic(make_side(self._name, RANKS, self._block, **self._options))
        loads = _base_load(traffic, load)
        groups = [
            Conversation(_NAMES_APART * (number + 1) + n, _BLOCKS, self._block, _SHARED)
            for n in range(GROUPS)
        ]
        order = random.Random(number).sample(groups * MEMBERS, GROUPS * MEMBERS)
        return _judged(order, traffic.submit(order, _BLOCKS), loads)


def _base_load(traffic: Traffic, load: Load) -> Counter[int]:
    placed = traffic.submit_short(load.base * RANKS * (2 if load.doubled else 1))
    kept: Counter[int] = Counter()
    answered = []
    for where in placed:
        if where.rank and kept[where.rank] == load.base:
            answered.append(where)
        else:
            kept[where.rank] += 1
    traffic.answer(answered)
    return kept


def _judged(
    order: list[Conversation], placed: list[Placement], loads: Counter[int]
) -> dict[str, float]:
    """What a burst's requests find. A prompt counts as held from its routing on."""
    found = []
    seen: set[int] = set()
    for conversation, (rank, _) in zip(order, placed, strict=True):
        found.append(conversation.held.get(rank, _SHARED if rank in seen else 0))
        conversation.held[rank] = _BLOCKS
        seen.add(rank)
    requests = Counter(rank for rank, _ in placed)
    total = requests + loads
    count = len(order)
    return {
        "spread": max(requests.values()) * RANKS / count,
        "load spread": max(total.values()) * RANKS / total.total(),
        "skipped": sum(found) / (count * _BLOCKS),
        "hits": sum(held >= _SHARED for held in found) / count,
        "cold": found.count(0) / GROUPS,
        "own parts": sum(held < _BLOCKS for held in found) / GROUPS,
    }


def measure(options: Options) -> list[Row]:
    """The rows of this part: two for each load and policy."""
    with workers(released=(Bursts, "released", "", options.block)) as first:
        released = first["released"]
        names = released.call("policies")
        ours = {name: (Bursts, "ours", name, options.block) for name in names}
        with workers(**ours) as sides:
            return [row for load in LOADS for row in _rows(load, sides, released, options)]


def _rows(load: Load, sides: dict[str, Worker], released: Worker, options: Options) -> list[Row]:
    measures = {
        name: lambda number, worker=worker: worker.call("round", load, number)
        for name, worker in {**sides, "released": released}.items()
    }
    found = alternate(options.burst_rounds, measures, f"bursts, {load.name}")
    spread, hits = Target("ours", at_most=1.3), Target("ours", at_least=7 / 8)
    default = next(iter(sides))
    rows = [
        _row(f"{load.name}: {name}", "spread", found[name], found["released"],
             (spread,) if name == default else ())
        for name in sides
    ]  # fmt: skip
    rows.append(_row(f"{load.name}: released coordinator", "spread", [], found["released"], ()))
    name = f"{load.name}: {default}, share of requests that hit"
    return [*rows, _row(name, "hits", found[default], found["released"], (hits,))]


def _row(
    name: str,
    what: str,
    ours: list[dict[str, float]],
    released: list[dict[str, float]],
    targets: tuple[Target, ...],
) -> Row:
    return Row(
        "bursts",
        name,
        {"spread": "max/mean", "hits": "share"}[what],
        [one[what] for one in ours],
        [one[what] for one in released],
        targets=targets,
        details=_medians(ours or released) if what == "spread" else {},
    )


def _medians(rounds: list[dict[str, float]]) -> dict[str, Any]:
    return {name: round(median(one[name] for one in rounds), 3) for name in rounds[0]}
