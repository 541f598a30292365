"""What was measured, for the terminal and for other programs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replay.experiment import Comparison, Run
from replay.figures import FIGURES, Figure, mean_and_spread

COLUMNS = tuple(f for f in FIGURES if f.key not in ("ttft_p90", "request_p50", "index_blocks"))
"""Figures that the terminal has room for; the rest is in JSON."""


def rows(comparison: Comparison, columns: Sequence[Figure] = COLUMNS) -> list[list[str]]:
    """A header and a row for every policy; over more seeds than one with the spread."""
    table = [["policy", *(column.heading for column in columns)]]
    for name, runs in comparison.runs.items():
        table.append([name, *(shown(runs, column) for column in columns)])
    return table


def shown(runs: Sequence[Run], figure: Figure) -> str:
    """The mean of a figure over seeds, and half the distance of its extremes."""
    mean, spread = mean_and_spread([run.figures for run in runs], figure.key)
    text = f"{round(mean, figure.digits) + 0.0:,.{figure.digits}f}"  # no -0.0
    return f"{text} ±{spread:,.{figure.digits}f}" if len(runs) > 1 else text


def best_of(comparison: Comparison, figure: Figure) -> frozenset[str]:
    """The policies that are best by a figure, as it is shown: several may look the same.

    None of them where neither more nor less is better, or where all look the same.
    """
    means = {
        name: round(mean_and_spread([run.figures for run in runs], figure.key)[0], figure.digits)
        for name, runs in comparison.runs.items()
    }
    best = max(mean * figure.better for mean in means.values())
    names = frozenset(name for name, mean in means.items() if mean * figure.better == best)
    return names if len(names) < len(means) else frozenset()


def aligned(table: Sequence[Sequence[str]]) -> str:
    """Columns side by side: the first to the left, the others to the right."""
    widths = [max(len(row[n]) for row in table) for n in range(len(table[0]))]
    lines = []
    for row in table:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown(table: Sequence[Sequence[str]]) -> str:
    """The same for a page."""
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([lines[0], "| --- " * len(table[0]) + "|", *lines[1:]]) + "\n"


def summary(comparison: Comparison) -> str:
    """The table and what it is of."""
    head = (
        f"{comparison.workload}: {comparison.requests:,} requests a run; one infinite cache would "
        f"skip {comparison.bound:.3f} of the prompt tokens"
    )
    return (
        f"{head}\n\n{aligned(rows(comparison))}\n\n"
        "What the columns are: docs/choosing-a-policy.md, or the page that --html writes."
    )


def as_json(comparison: Comparison, setting: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured.

    Args:
        comparison: The runs.
        setting: How they were made.
    """
    policies = {}
    for name, runs in comparison.runs.items():
        figures = {}
        for figure in FIGURES:
            values = [run.figures[figure.key] for run in runs]
            mean = sum(values) / len(values)
            figures[figure.key] = {"mean": mean, "min": min(values), "max": max(values)}
        by_seed = {str(run.seed): run.figures for run in runs}
        policies[name] = {"figures": figures, "seeds": by_seed}
    return {
        "workload": comparison.workload,
        "setting": setting,
        "requests": comparison.requests,
        "bound": comparison.bound,
        "meanings": {figure.key: figure.meaning for figure in FIGURES},
        "policies": policies,
    }


def write_json(path: Path, content: Any) -> None:
    """Write a file of JSON."""
    path.write_text(json.dumps(content, indent=1) + "\n")
