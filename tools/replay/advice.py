"""What to recommend: which of the coordinator's policies, what it gains and costs, how sure."""

import math
from collections.abc import Mapping, Sequence

from replay.experiment import Comparison, Run
from replay.figures import BY_KEY, Measured, mean_and_spread
from replay.policies import BASELINES, kind_of

CLOSE = 0.01
"""Makespans that differ by no more than this share are taken as equal; then TTFT p99 decides."""

DEFAULT = "relative:1@events"
FEW = 1_000
"""Requests of a run below which its TTFT p99 is that of a handful of them."""

LEAST_LOADED = "load_balanced"
_DECIDING = ("makespan", "ttft_p99")


def recommended(comparison: Comparison, names: Sequence[str]) -> str:
    """Of the policies with about the shortest makespan, the one with the lowest TTFT p99.

    Among equals the default, which costs no change, or else the one named first.
    """
    ordered = sorted(names, key=lambda name: name != DEFAULT)
    return chosen({name: _means(comparison.runs[name]) for name in ordered})


def chosen(figures: Mapping[str, Measured]) -> str:
    """The same rule, for any figures: of one seed, or means over seeds."""
    shortest = min(measured["makespan"] for measured in figures.values())
    close = [name for name in figures if figures[name]["makespan"] <= shortest * (1 + CLOSE)]
    return min(close, key=lambda name: figures[name]["ttft_p99"])


def ahead(one: Measured, other: Measured) -> bool | None:
    """Whether the rule prefers one of two runs to the other; None if it takes them as equal."""
    either_way = chosen({"one": one, "other": other}), chosen({"other": other, "one": one})
    return either_way[0] == "one" if either_way[0] == either_way[1] else None


def advised(comparison: Comparison) -> str | None:
    """The policy of the coordinator's that is recommended; None if none was run."""
    own = _own(comparison)
    return recommended(comparison, own) if own else None


def advice(comparison: Comparison) -> list[str]:
    """The recommendation, in paragraphs."""
    best = advised(comparison)
    if len(comparison.runs) == 1:
        return [f"Only {next(iter(comparison.runs))} was run: nothing was compared."]
    if best is None:
        return ["None of the policies compared is one of the coordinator's."]
    paragraphs = [_what(comparison, best)]
    equals = _equals(comparison, best)
    if equals:
        paragraphs.append(f"By this rule it is equal to {', '.join(equals)}.")
    paragraphs += [
        f"Against {other}: " + _differences(comparison, other, best)
        for other in (LEAST_LOADED, DEFAULT)
        if other in comparison.runs and other != best
    ]
    overall = recommended(comparison, list(comparison.runs))
    if ahead(_means(comparison.runs[overall]), _means(comparison.runs[best])):
        paragraphs.append(
            f"{overall}, which is not one of the coordinator's, did better by the same rule. "
            f"Against {best}: " + _differences(comparison, best, overall)
        )
    paragraphs.append(_how_sure(comparison, best))
    if comparison.requests < FEW:
        paragraphs.append(
            f"A run has {comparison.requests:,} requests only: TTFT p99 is that of the slowest "
            f"{math.ceil(comparison.requests / 100)}. Judge on more of them."
        )
    return paragraphs


def _equals(comparison: Comparison, best: str) -> list[str]:
    """Policies of the coordinator's that the rule cannot tell from the best."""
    means = _means(comparison.runs[best])
    others = (name for name in _own(comparison) if name != best)
    return [name for name in others if ahead(means, _means(comparison.runs[name])) is None]


def _own(comparison: Comparison) -> list[str]:
    return [name for name in comparison.runs if kind_of(name) not in BASELINES]


def _what(comparison: Comparison, best: str) -> str:
    runs = comparison.runs[best]
    return (
        f"Use {best}: it skips {_mean(runs, 'skip'):.1%} of the prompt tokens (one infinite cache "
        f"would skip {comparison.bound:.1%}), all is done after {_mean(runs, 'makespan'):,.0f} s, "
        f"TTFT p99 is {_mean(runs, 'ttft_p99'):.2f} s, and while the fleet is busy the highest "
        f"load is on average {_mean(runs, 'max_median'):.2f} times the median (a median below 1 "
        f"counts as 1). Rule: of the policies within {CLOSE:.0%} of the shortest makespan, the "
        f"lowest TTFT p99."
    )


def _differences(comparison: Comparison, before: str, after: str) -> str:
    parts = []
    for key in ("makespan", "ttft_p99", "busy_cv"):
        old, new = (_mean(comparison.runs[name], key) for name in (before, after))
        parts.append(f"{BY_KEY[key].title} {_change(old, new)}{_verdict(key, old, new)}")
    old, new = (_mean(comparison.runs[name], "skip") for name in (before, after))
    parts.append(f"skip rate {100 * (new - old):+.1f} points{_verdict('skip', old, new)}")
    return ", ".join(parts) + "."


def _change(old: float, new: float) -> str:
    return f"{new / old - 1:+.1%}" if old else f"from 0 to {new:.2f}"


def _verdict(key: str, old: float, new: float) -> str:
    gain = (new - old) * BY_KEY[key].better
    if abs(gain) < 0.0005 * (abs(old) or 1.0):
        return " (equal)"  # it is shown as 0.0 %
    return " (better)" if gain > 0 else " (worse)"


def _how_sure(comparison: Comparison, best: str) -> str:
    others = [name for name in _own(comparison) if name != best]
    if not others:
        return "How sure: it was compared with no other policy of the coordinator's."
    second = recommended(comparison, others)
    runs = comparison.runs[best]
    if len(runs) == 1:
        return f"How sure: one seed was run, so nothing is known of chance. Next is {second}."
    spread = mean_and_spread([run.figures for run in runs], "makespan")[1]
    return (
        f"How sure: next is {second}; seed by seed, by the same rule, {best} is ahead of it in "
        f"{_wins(runs, comparison.runs[second])}; its own makespan varies by ±{spread:,.0f} s "
        f"between seeds. The replicas are a model: trust the order of policies that differ by more "
        f"than a few percent, not the seconds."
    )


def _wins(runs: Sequence[Run], others: Sequence[Run]) -> str:
    results = [ahead(a.figures, b.figures) for a, b in zip(runs, others, strict=True)]
    equal = results.count(None)
    return f"{results.count(True)} of {len(results)}" + (f" (equal in {equal})" if equal else "")


def _means(runs: Sequence[Run]) -> Measured:
    return {key: _mean(runs, key) for key in _DECIDING}


def _mean(runs: Sequence[Run], key: str) -> float:
    return mean_and_spread([run.figures for run in runs], key)[0]
