"""What to recommend: which of the coordinator's policies, what it gains and costs, how sure."""

from collections.abc import Sequence

from replay.experiment import Comparison, Run
from replay.figures import mean_and_spread
from replay.policies import BASELINES, kind_of

CLOSE = 0.01
"""Makespans that differ by no more than this share are taken as equal; then TTFT p99 decides."""

DEFAULT = "relative:1@events"
LEAST_LOADED = "load_balanced"


def recommended(comparison: Comparison, names: Sequence[str]) -> str:
    """Of the policies with about the shortest makespan, the one with the lowest TTFT p99."""
    span = {name: _mean(comparison.runs[name], "makespan") for name in names}
    shortest = min(span.values())
    close = [name for name in names if span[name] <= shortest * (1 + CLOSE)]
    return min(close, key=lambda name: _mean(comparison.runs[name], "ttft_p99"))


def advice(comparison: Comparison) -> list[str]:
    """The recommendation, in paragraphs."""
    own = [name for name in comparison.runs if kind_of(name) not in BASELINES]
    if not own:
        return ["None of the policies compared is one of the coordinator's."]
    best = recommended(comparison, own)
    paragraphs = [_what(comparison, best)]
    paragraphs += [
        _against(comparison, best, other)
        for other in (LEAST_LOADED, DEFAULT)
        if other in comparison.runs and other != best
    ]
    overall = recommended(comparison, list(comparison.runs))
    if overall != best:
        paragraphs.append(
            f"{overall}, which is not one of the coordinator's, did better by the same rule: "
            + _differences(comparison, best, overall)
        )
    return [*paragraphs, _how_sure(comparison, best, own)]


def _what(comparison: Comparison, best: str) -> str:
    runs = comparison.runs[best]
    return (
        f"Use {best}: it skips {_mean(runs, 'skip'):.1%} of the prompt tokens (one infinite cache "
        f"would skip {comparison.bound:.1%}), all is done after {_mean(runs, 'makespan'):,.0f} s, "
        f"TTFT p99 is {_mean(runs, 'ttft_p99'):.2f} s and the most loaded replica has "
        f"{_mean(runs, 'max_median'):.2f} times the median load. Rule: of the policies within "
        f"{CLOSE:.0%} of the shortest makespan, the lowest TTFT p99."
    )


def _against(comparison: Comparison, best: str, other: str) -> str:
    return f"Against {other}: " + _differences(comparison, other, best)


def _differences(comparison: Comparison, before: str, after: str) -> str:
    parts = []
    for key, title in (("makespan", "makespan"), ("ttft_p99", "TTFT p99"), ("busy_cv", "busy CV")):
        old, new = (_mean(comparison.runs[name], key) for name in (before, after))
        change = (new / old - 1) if old else 0.0
        parts.append(f"{title} {change:+.1%}")
    old, new = (_mean(comparison.runs[name], "skip") for name in (before, after))
    parts.append(f"skip rate {100 * (new - old):+.1f} points")
    return ", ".join(parts) + "."


def _how_sure(comparison: Comparison, best: str, own: Sequence[str]) -> str:
    seeds = len(comparison.runs[best])
    others = [name for name in own if name != best]
    if not others:
        return "It was compared with no other policy of the coordinator's."
    second = recommended(comparison, others)
    if seeds == 1:
        return f"How sure: one seed was run, so nothing is known of chance. Next is {second}."
    wins = sum(
        _order(a) <= _order(b)
        for a, b in zip(comparison.runs[best], comparison.runs[second], strict=True)
    )
    spread = mean_and_spread([run.figures for run in comparison.runs[best]], "makespan")[1]
    return (
        f"How sure: next is {second}; seed by seed {best} is ahead of it in {wins} of {seeds}, "
        f"and its own makespan varies by ±{spread:,.0f} s between seeds. The replicas are a model: "
        f"trust the order of policies that differ by more than a few percent, not the seconds."
    )


def _order(run: Run) -> float:
    return run.figures["makespan"] * (1 + CLOSE * run.figures["ttft_p99"])


def _mean(runs: Sequence[Run], key: str) -> float:
    return mean_and_spread([run.figures for run in runs], key)[0]
