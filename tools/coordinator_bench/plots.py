"""The plot of a run: a panel a part, with what was compared side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator_bench.rows import Row, figure

_SIDES = {"ours": "#0072b2", "released": "#d55e00", "limit": "#999999"}
_WIDTH, _BAR, _CURVE = 11.0, 0.26, 3.0
_LOG_FROM = 30
"""Ratio of the largest to the smallest bar from which an axis is logarithmic."""


def write_plot(path: Path, rows: Sequence[Row]) -> None:
    """Draw rows.

    Args:
        path: File to write; its suffix names the format.
        rows: Of any parts.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars, curves = panels(rows)
    heights = [0.9 + _BAR * _count(panel) for panel in bars.values()]
    heights += [_CURVE] * ((len(curves) + 1) // 2)
    drawing = pyplot.figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
    grid = drawing.add_gridspec(len(heights), 2, height_ratios=heights)
    for place, (title, panel) in enumerate(bars.items()):
        _draw_bars(_framed(drawing.add_subplot(grid[place, :]), title, panel), panel)
    for place, (title, panel) in enumerate(curves.items()):
        cell = grid[len(bars) + place // 2, place % 2]
        _draw_curve(_framed(drawing.add_subplot(cell), title, panel), panel)
    drawing.savefig(path, dpi=120)
    pyplot.close(drawing)


def panels(rows: Sequence[Row]) -> tuple[dict[str, list[Row]], dict[str, list[Row]]]:
    """Panels of bars, and of curves, by title.

    Rows of a part that share a unit share a panel; comparisons of ours to ours are left out.
    """
    bars: dict[str, list[Row]] = {}
    curves: dict[str, list[Row]] = {}
    for row in rows:
        if row.axis:
            curves.setdefault(f"{row.unit} a request against {row.axis}", []).append(row)
        elif row.ours and not row.base:
            bars.setdefault(f"{row.part}, {row.unit}", []).append(row)
    return bars, curves


def _count(panel: Sequence[Row]) -> int:
    return sum(bool(getattr(row, side)) for row in panel for side in _SIDES)


def _framed(axis: Any, title: str, panel: Sequence[Row]) -> Any:
    from matplotlib.patches import Patch

    axis.set_title(title, loc="left", fontweight="bold", fontsize=9 if panel[0].axis else 11)
    axis.spines[["top", "right"]].set_visible(False)
    shown = [side for side in _SIDES if any(getattr(row, side) for row in panel)]
    handles = [Patch(color=_SIDES[side], label=side) for side in shown]
    beside = {} if panel[0].axis else {"loc": "upper left", "bbox_to_anchor": (1, 1)}
    axis.legend(handles=handles, fontsize=8, frameon=False, **beside)
    return axis


def _draw_bars(axis: Any, panel: Sequence[Row]) -> None:
    drawn, labels, places, place = [], [], [], 0.0
    for row in panel:
        shown = [(side, value) for side in _SIDES if (value := row.value(side)) is not None]
        for side, value in shown:
            axis.barh(place, value, height=0.9, color=_SIDES[side])
            axis.annotate(f" {figure(value)}", (value, place), va="center", fontsize=8)
            drawn.append(value)
            place += 1
        places.append(place - (len(shown) + 1) / 2)
        labels.append(row.variant)
        place += 0.6
    axis.set_yticks(places, labels, fontsize=8)
    axis.margins(x=0.12, y=0.02)
    if min(drawn) > 0 and max(drawn) / min(drawn) > _LOG_FROM:
        axis.set_xscale("log")
        axis.set_xlim(left=min(drawn) / 4)
    axis.invert_yaxis()


def _draw_curve(axis: Any, panel: Sequence[Row]) -> None:
    for side, color in _SIDES.items():
        points = [(row.at, row.value(side)) for row in panel if getattr(row, side)]
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", color=color)
    axis.set_xscale("log")
    axis.set_xticks([row.at for row in panel], [f"{row.at:,}" for row in panel], minor=False)
    axis.set_xticks([], minor=True)
    axis.set_yscale("log")
    axis.grid(alpha=0.3)
