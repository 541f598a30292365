"""How pictures show policies: which, in what colours, under what labels and on what scales."""

import textwrap
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from replay.advice import DEFAULT, advised
from replay.experiment import Comparison
from replay.policies import EVENTS, HISTORY, STOCK, kind_of

_HUES = [*mpl.colormaps["tab10"].colors, *mpl.colormaps["Dark2"].colors]  # type: ignore[attr-defined]
DASHES = {EVENTS: "-", "": "-", HISTORY: "--", STOCK: ":"}
MARKERS = {EVENTS: ("o", 9), HISTORY: ("s", 6), STOCK: ("s", 3), "": ("^", 6)}
"""Shape and size (points) by how caches are known: sizes differ, so that one shows in another."""

Colour = tuple[float, ...]


def shown_policies(comparison: Comparison, most: int) -> list[str]:
    """As many policies as can be told apart.

    The recommended one and the default first, then one of each kind, then the others; in the
    order of the comparison.
    """
    first = [name for name in (advised(comparison), DEFAULT) if name in comparison.runs]
    kinds = {kind_of(name) for name in first}
    for name in comparison.runs:
        if kind_of(name) not in kinds:
            kinds.add(kind_of(name))
            first.append(name)
    wanted = list(dict.fromkeys([*first, *comparison.runs]))[:most]
    return [name for name in comparison.runs if name in wanted]


def colours(names: Sequence[str]) -> dict[str, Colour]:
    """A hue for every kind of policy; the further back a weight in the list, the darker."""
    shades: dict[str, list[str]] = {}
    for name in names:
        weights = shades.setdefault(kind_of(name), [])
        if (base := base_of(name)) not in weights:
            weights.append(base)
    found = {}
    for name in names:
        hue = _HUES[list(shades).index(kind_of(name)) % len(_HUES)]
        weights = shades[kind_of(name)]
        light = 1 - 0.65 * weights.index(base_of(name)) / max(1, len(weights) - 1)
        found[name] = tuple(light * part for part in hue)
    return found


def base_of(name: str) -> str:
    """A policy's name without how it knows of caches."""
    return name.partition("@")[0]


def way_of(name: str) -> str:
    """How a policy knows of caches; empty if it does not."""
    return name.partition("@")[2]


def logarithmic(axes: Any, side: str) -> None:
    """A log scale, `x` or `y`, whose numbers are written out."""
    axes.set(**{f"{side}scale": "log"})
    axis = getattr(axes, f"{side}axis")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_locator(NullLocator())


def is_wide(values: Sequence[float]) -> bool:
    """Whether values are so far apart that a log scale has more than a tick or two."""
    return min(values) > 0 and max(values) > 5 * min(values)


def coinciding(points: np.ndarray, closer: float = 0.01) -> list[list[int]]:
    """Points by their numbers, those together that lie on each other.

    Args:
        points: (points, 2), in shares of the picture.
        closer: Two closer than this in both directions are one to the eye.
    """
    groups: list[list[int]] = []
    for number, point in enumerate(points):
        for group in groups:
            if np.abs(points[group[0]] - point).max() < closer:
                group.append(number)
                break
        else:
            groups.append([number])
    return groups


def without_crossings(points: np.ndarray, right: float) -> list[int]:
    """The points in the order of their labels, from below: no lines to labels cross.

    Two points swap labels while that makes their lines shorter; lines that cross are never the
    shortest.

    Args:
        points: (points, 2), in shares of the picture.
        right: Where labels stand; they are evenly apart from 0 to 1.
    """
    order = sorted(range(len(points)), key=lambda point: tuple(points[point][::-1]))
    heights = (np.arange(len(points)) + 0.5) / max(1, len(points))

    def length(point: int, place: int) -> float:
        return float(np.hypot(right - points[point][0], heights[place] - points[point][1]))

    swapped = True
    while swapped:
        swapped = False
        for a, b in combinations(range(len(order)), 2):
            one, other = order[a], order[b]
            gain = length(one, a) + length(other, b) - length(one, b) - length(other, a)
            if gain > 1e-9:
                order[a], order[b], swapped = other, one, True
    return order


def joined(names: Sequence[str]) -> str:
    """Several names in one label, a few on each line: `relative:1@events, @history`."""
    parts: list[str] = []
    for before, name in zip(("", *names), names, strict=False):
        same = way_of(name) and base_of(before) == base_of(name)
        parts.append(f"@{way_of(name)}" if same else name)
    return textwrap.fill(", ".join(parts), 44)
