"""The pictures of a comparison, as SVG texts."""

import io
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure as Canvas

from replay.advice import DEFAULT
from replay.experiment import Comparison, Run
from replay.figures import BY_KEY, mean_and_spread
from replay.policies import kind_of

mpl.rcParams.update({
    "svg.fonttype": "path", "font.size": 9, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
})  # fmt: skip

_MOST_LINES = 10
_MOST_MAPS = 8


def _svg(canvas: Canvas) -> str:
    text = io.StringIO()
    canvas.savefig(text, format="svg", bbox_inches="tight")
    return text.getvalue().partition("<svg")[1] + text.getvalue().partition("<svg")[2]


def _means(comparison: Comparison, key: str) -> list[float]:
    return [mean_and_spread([r.figures for r in runs], key)[0] for runs in comparison.runs.values()]


def skip_against_imbalance(comparison: Comparison) -> str:
    """A point for every policy: how much it skips, and how uneven its load is."""
    names = list(comparison.runs)
    canvas = Canvas(figsize=(9, max(5.0, 0.19 * len(names))))
    axes = canvas.add_subplot()
    x, y = _means(comparison, "max_median"), _means(comparison, "skip")
    kinds = list(dict.fromkeys(kind_of(name) for name in names))
    if max(x) > 5 * min(x):
        axes.set_xscale("log")
    axes.axhline(comparison.bound, color="grey", linestyle=":", lw=1)
    for name, at, height, label in zip(names, x, y, _apart(y), strict=True):
        marker = "o" if "@events" in name else "s" if "@" in name else "^"
        colour = mpl.colormaps["tab20"](kinds.index(kind_of(name)) % 20)
        axes.scatter(at, height, color=colour, marker=marker, zorder=3)
        axes.annotate(
            name, (at, height), (1.03, label), textcoords="axes fraction", fontsize=7,
            va="center", arrowprops={"arrowstyle": "-", "lw": 0.3, "color": colour},
        )  # fmt: skip
    axes.set(xlabel="imbalance: highest load / median, busy phase", ylabel="skip rate")
    return _svg(canvas)


def _apart(heights: Sequence[float]) -> list[float]:
    """Heights of labels, 0 to 1, in the order of the points and evenly apart."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    places = {point: (n + 0.5) / len(order) for n, point in enumerate(order)}
    return [places[point] for point in range(len(heights))]


def ttft_distributions(comparison: Comparison) -> str:
    """Time to the first token: the share of requests that had it by then."""
    canvas = Canvas(figsize=(9, 4.5))
    axes = canvas.add_subplot()
    for name, runs in _spread_out(comparison):
        middle = np.mean([run.ttft for run in runs], axis=0)
        axes.plot(np.maximum(middle, 1e-3), np.linspace(0, 1, len(middle)), label=name, lw=1.2)
    axes.set(xscale="log", xlabel="time to the first token, s", ylabel="share of requests")
    axes.legend(fontsize=7)
    return _svg(canvas)


def loads_over_time(comparison: Comparison) -> str:
    """Requests in flight on every replica, over the first seed's run."""
    shown = _spread_out(comparison)[:_MOST_MAPS]
    highest = max(float(np.max(run[0].loads)) for _, run in shown)
    scale = PowerNorm(0.5, vmin=0, vmax=max(1.0, highest))
    canvas = Canvas(figsize=(9, 1.5 * len(shown)), layout="constrained")
    all_axes = canvas.subplots(len(shown), 1, squeeze=False)[:, 0]
    for axes, (name, runs) in zip(all_axes, shown, strict=True):
        first = runs[0]
        image = axes.imshow(
            np.array(first.loads).T, aspect="auto", norm=scale, cmap="viridis",
            extent=(0, first.times[-1], len(first.loads[0]) - 0.5, -0.5), interpolation="nearest",
        )  # fmt: skip
        axes.set_title(name, fontsize=8, loc="left")
        axes.set_ylabel("replica")
        axes.grid(visible=False)
    all_axes[-1].set_xlabel("seconds")
    canvas.colorbar(image, ax=list(all_axes), label="requests in flight")
    return _svg(canvas)


def beta_sweep(comparison: Comparison) -> str | None:
    """What beta does, where three of them or more were compared in the same way."""
    sweeps = _sweeps(comparison)
    if not sweeps:
        return None
    canvas = Canvas(figsize=(9, 2.6), layout="constrained")
    figures = ("skip", "makespan", "ttft_p99", "busy_cv")
    for axes, key in zip(canvas.subplots(1, len(figures)), figures, strict=True):
        for way, points in sweeps.items():
            betas = sorted(points)
            values = [mean_and_spread([r.figures for r in points[b]], key) for b in betas]
            means, spreads = zip(*values, strict=True)
            axes.errorbar(betas, means, spreads, marker="o", ms=3, capsize=2, lw=1, label=way)
        axes.set(title=BY_KEY[key].title, xlabel="beta")
        if key in ("makespan", "ttft_p99"):
            axes.set_yscale("log")
    axes.legend(fontsize=7)
    return _svg(canvas)


def _sweeps(comparison: Comparison) -> dict[str, dict[float, list[Run]]]:
    """Runs by how caches are known, and by beta."""
    sweeps: dict[str, dict[float, list[Run]]] = {}
    for name, runs in comparison.runs.items():
        base, _, way = name.partition("@")
        kind, _, beta = base.partition(":")
        if kind == "relative" and way:
            sweeps.setdefault(way, {})[float(beta or 1)] = runs
    return {way: points for way, points in sweeps.items() if len(points) > 2}


def _spread_out(comparison: Comparison) -> list[tuple[str, Sequence[Run]]]:
    """As many policies as can be told apart: one of each kind first, the default of its kind."""
    first: dict[str, str] = {}
    for name in (DEFAULT, *comparison.runs):
        if name in comparison.runs:
            first.setdefault(kind_of(name), name)
    rest = [name for name in comparison.runs if name not in first.values()]
    names = [*first.values(), *rest][:_MOST_LINES]
    return [(name, runs) for name, runs in comparison.runs.items() if name in names]
