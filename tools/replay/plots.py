"""The pictures of a comparison, as SVG texts."""

import html
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from replay.experiment import Comparison, Run
from replay.figures import BY_KEY, mean_and_spread
from replay.looks import (
    DASHES,
    MARKERS,
    Colour,
    base_of,
    coinciding,
    colours,
    is_wide,
    joined,
    logarithmic,
    shown_policies,
    way_of,
    without_crossings,
)
from replay.policies import EVENTS, HISTORY

mpl.rcParams.update({
    "svg.fonttype": "path", "svg.hashsalt": "replay", "font.size": 9, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
})  # fmt: skip

_MOST_LINES = 10
_MOST_MAPS = 8
_LABELS = 1.03
"""Where names stand beside the points, in widths of the picture."""

_SWEPT = ("skip", "makespan", "ttft_p99", "busy_cv")


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture for the page.

    Attributes:
        title: Over it.
        note: What it shows, and of which policies and seeds.
        svg: The picture.
    """

    title: str
    note: str
    svg: str


def pictures(comparison: Comparison) -> Iterator[Picture]:
    """All pictures that this comparison allows."""
    count = len(comparison.runs)
    seeds = len(next(iter(comparison.runs.values())))
    means = f"mean of {seeds} seeds" if seeds > 1 else "one seed"
    yield _picture(
        "Skip rate against imbalance", f"{_so_many(count, count)}, {means}. Up and left is better.",
        skip_against_imbalance(comparison),
    )  # fmt: skip
    if sweeps := _sweeps(comparison):
        yield _picture(
            "What beta does", "Mean and spread over seeds, where three betas or more were run.",
            beta_sweep(sweeps),
        )  # fmt: skip
    lines, maps = (shown_policies(comparison, most) for most in (_MOST_LINES, _MOST_MAPS))
    yield _picture(
        "Time to the first token",
        f"{_so_many(len(lines), count)}, {means}. Lower and further left is better. "
        f"Dashed: what replicas hold is guessed.",
        ttft_distributions(comparison, lines),
    )
    yield _picture(
        "Load over time, by replica",
        f"{_so_many(len(maps), count)}, first seed, means of up to 240 stretches of time. "
        f"White: all is done.",
        loads_over_time(comparison, maps),
    )


def write_pictures(folder: Path, comparison: Comparison) -> list[Path]:
    """Write every picture as an SVG file named by its title; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for picture in pictures(comparison):
        name = picture.title.split(",")[0].lower().replace(" ", "-")
        path = folder / f"{name}.svg"
        path.write_text(picture.svg)
        paths.append(path)
    return paths


def _so_many(shown: int, count: int) -> str:
    if count == 1:
        return "One policy"
    return f"{shown} of {count} policies" if shown < count else f"All {count} policies"


def _picture(title: str, note: str, canvas: Canvas) -> Picture:
    text = io.StringIO()
    canvas.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    label = html.escape(f"{title}. {note}")
    root = text.getvalue().partition("<svg ")[2]
    return Picture(title, note, f'<svg role="img" aria-label="{label}" {root}')


def _means(comparison: Comparison, key: str) -> list[float]:
    return [mean_and_spread([r.figures for r in runs], key)[0] for runs in comparison.runs.values()]


def skip_against_imbalance(comparison: Comparison) -> Canvas:
    """A point for every policy: how much it skips, and how uneven its load is."""
    names = list(comparison.runs)
    canvas = Canvas(figsize=(9, max(4.5, 0.19 * len(names))))
    axes = canvas.add_subplot()
    x, y = _means(comparison, "max_median"), _means(comparison, "skip")
    if is_wide(x):
        logarithmic(axes, "x")
    axes.axhline(comparison.bound, color="grey", linestyle=":", lw=1)
    colour = colours(names)
    for name, at, height in zip(names, x, y, strict=True):
        marker, size = MARKERS[way_of(name)]
        axes.plot(at, height, marker, ms=size, mfc="none", mec=colour[name], mew=1.4)
    axes.set(
        xlabel="imbalance: highest load / max(1, median load), mean over busy samples",
        ylabel="skip: share of prompt tokens not prefilled",
    )
    _label_points(axes, names, np.column_stack([x, y]), colour)
    _explain_markers(axes)
    return canvas


def _label_points(
    axes: Any, names: Sequence[str], points: np.ndarray, colour: dict[str, Colour]
) -> None:
    """Names to the right of the picture, evenly apart, each with a line to its point."""
    axes.autoscale_view()  # else the limits, and with them the places, are yet to come
    on_picture = axes.transLimits.transform(axes.transScale.transform(points))
    groups = coinciding(on_picture)
    order = without_crossings(on_picture[[group[0] for group in groups]], _LABELS)
    labels = [joined([names[n] for n in groups[number]]) for number in order]
    lines = np.array([label.count("\n") + 1 for label in labels])
    heights = (np.cumsum(lines) - lines / 2) / lines.sum()
    for number, label, height in zip(order, labels, heights, strict=True):
        first = groups[number][0]
        line = {"arrowstyle": "-", "lw": 0.6, "color": colour[names[first]],
                "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 3}  # fmt: skip
        axes.annotate(
            label, points[first], (_LABELS, height), textcoords="axes fraction", fontsize=7.5,
            va="center", arrowprops=line,
        )  # fmt: skip


def _explain_markers(axes: Any) -> None:
    meanings = {EVENTS: "replicas tell of their caches", HISTORY: "what they hold is guessed",
                "": "caches play no part in it"}  # fmt: skip
    handles = [
        Line2D([], [], marker=MARKERS[way][0], ms=MARKERS[way][1], mfc="none", mec="#333",
               ls="", label=meaning)
        for way, meaning in meanings.items()
    ]  # fmt: skip
    handles.append(Line2D([], [], color="grey", ls=":", lw=1, label="one infinite cache"))
    axes.legend(handles=handles, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)


def ttft_distributions(comparison: Comparison, names: Sequence[str]) -> Canvas:
    """Time to the first token: the share of requests that still wait for it by then."""
    canvas = Canvas(figsize=(9, 4.5))
    axes = canvas.add_subplot()
    colour = colours(list(comparison.runs))
    for name in names:
        middle = np.maximum(np.mean([run.ttft for run in comparison.runs[name]], axis=0), 1e-3)
        waiting = 1 - np.linspace(0, 1, len(middle))
        axes.plot(
            middle[:-1], waiting[:-1], label=name, lw=1.3, color=colour[name],
            ls=DASHES[way_of(name)],
        )  # fmt: skip
    logarithmic(axes, "x")
    logarithmic(axes, "y")
    axes.set(xlabel="time since it was sent, s", ylabel="share of requests without a first token")
    axes.set_ylim(0.01, 1)
    axes.legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return canvas


def loads_over_time(comparison: Comparison, names: Sequence[str]) -> Canvas:
    """Requests in flight on every replica, over the first seed's run."""
    firsts = {name: comparison.runs[name][0] for name in names}
    every = np.concatenate([np.ravel(run.loads) for run in firsts.values()])
    scale = PowerNorm(0.5, vmin=0, vmax=max(1.0, float(np.percentile(every, 99))))
    canvas = Canvas(figsize=(9, 1.3 * len(names) + 1), layout="constrained")
    all_axes = canvas.subplots(len(names), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (name, run) in zip(all_axes, firsts.items(), strict=True):
        image = axes.imshow(
            np.array(run.loads).T, aspect="auto", norm=scale, cmap="viridis",
            extent=(0, run.times[-1], len(run.loads[0]) - 0.5, -0.5), interpolation="nearest",
        )  # fmt: skip
        axes.set_title(name, fontsize=8, loc="left")
        axes.set_ylabel("replica")
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.grid(visible=False)
    all_axes[-1].set(xlabel="seconds", xlim=(0, max(run.times[-1] for run in firsts.values())))
    canvas.colorbar(
        image, ax=list(all_axes), orientation="horizontal", extend="max", aspect=50,
        ticks=MaxNLocator(8, integer=True),
        label="requests in flight (the colours end at the 99th percentile)",
    )  # fmt: skip
    return canvas


def beta_sweep(sweeps: dict[str, dict[float, list[Run]]]) -> Canvas:
    """What beta does, by how caches are known; betas stand evenly apart."""
    canvas = Canvas(figsize=(9, 2.8), layout="constrained")
    betas = sorted({beta for points in sweeps.values() for beta in points})
    for axes, key in zip(canvas.subplots(1, len(_SWEPT)), _SWEPT, strict=True):
        shown: list[float] = []
        for way, points in sweeps.items():
            found = [mean_and_spread([r.figures for r in points[b]], key) for b in sorted(points)]
            means, spreads = zip(*found, strict=True)
            at = [betas.index(beta) for beta in sorted(points)]
            marker, size = MARKERS[way]
            axes.errorbar(
                at, means, spreads, marker=marker, ms=size / 2, mfc="none", capsize=size / 3, lw=1,
                label=f"@{way}", ls=DASHES[way],
            )  # fmt: skip
            shown += means
        axes.set(title=BY_KEY[key].heading, xlabel="beta")
        axes.set_xticks(range(len(betas)), [f"{beta:g}" for beta in betas], fontsize=7)
        if key in ("makespan", "ttft_p99") and is_wide(shown):
            logarithmic(axes, "y")
    canvas.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return canvas


def _sweeps(comparison: Comparison) -> dict[str, dict[float, list[Run]]]:
    """Runs by how caches are known, and by beta; three betas or more."""
    sweeps: dict[str, dict[float, list[Run]]] = {}
    for name, runs in comparison.runs.items():
        kind, _, beta = base_of(name).partition(":")
        if kind == "relative" and way_of(name):
            sweeps.setdefault(way_of(name), {})[float(beta or 1)] = runs
    return {way: points for way, points in sweeps.items() if len(points) > 2}
