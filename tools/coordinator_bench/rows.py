"""Rows: what was measured, what it is compared with, and whether its target is met."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

FASTER = "released / ours"
"""Ratio of times: how many times faster than the released coordinator."""
MORE = "ours / released"
"""Ratio of rates or sizes, against the released coordinator."""
OF_LIMIT = "ours / limit"
AGAINST_BASE = "ours / base"
"""Ratio of two figures of ours; the row's variant says which."""


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on one of a row's ratios, or on ours itself.

    Attributes:
        of: Name of the ratio ("released / ours"), or "ours".
        at_least: Lower bound, or None.
        at_most: Upper bound, or None.
        absolute: It depends on what the machine is, as a time does and a ratio of times does not.
    """

    of: str
    at_least: float | None = None
    at_most: float | None = None
    absolute: bool = False

    def met(self, value: float, share: float = 1.0) -> bool:
        """Tell whether a figure reaches this share of the target.

        Args:
            value: The figure.
            share: 0.5 asks for half: of 6 times as fast 3 times, of at most 1/3 at most 2/3.
        """
        enough = self.at_least is None or value >= self.at_least * share
        return enough and (self.at_most is None or value <= self.at_most / share)

    def __str__(self) -> str:
        bounds = [f">= {figure(self.at_least)}"] if self.at_least is not None else []
        bounds += [f"<= {figure(self.at_most)}"] if self.at_most is not None else []
        return f"{self.of} {' and '.join(bounds)}"


@dataclass(frozen=True, slots=True)
class Row:
    """One measure. Figures are one value a round; what is shown and compared is their median.

    Attributes:
        part: Part of the bench.
        variant: What was measured in it.
        unit: Of the figures.
        ours: Our figures.
        released: The released coordinator's; empty where there is none.
        limit: What is possible at all; empty where that was not measured.
        base: Other figures of ours to compare with.
        ratios: Names of the ratios to show, e.g. `FASTER`.
        targets: What must hold.
        details: Other figures of the same measure, by name.
        axis: What the measure is a point of a curve against; empty where it is none.
        at: The value there.
    """

    part: str
    variant: str
    unit: str
    ours: Sequence[float]
    released: Sequence[float] = ()
    limit: Sequence[float] = ()
    base: Sequence[float] = ()
    ratios: tuple[str, ...] = ()
    targets: tuple[Target, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    axis: str = ""
    at: float = 0.0

    def value(self, name: str) -> float | None:
        """A figure ("ours") or a ratio of two ("ours / limit"); None where it is not known."""
        if "/" not in name:
            figures: Sequence[float] = getattr(self, name)
            return median(figures) if figures else None
        above, below = (self.value(side.strip()) for side in name.split("/"))
        return None if above is None or not below else above / below

    def met(self, share: float = 1.0) -> bool | None:
        """Whether every target that could be measured is met; None where there is none."""
        found = [(target, self.value(target.of)) for target in self.targets]
        measured = [target.met(value, share) for target, value in found if value is not None]
        return all(measured) if measured else None

    def fails(self, share: float) -> bool:
        """Whether a ratio misses this share of its target. Absolute figures never fail."""
        values = [(target, self.value(target.of)) for target in self.targets if not target.absolute]
        return any(value is not None and not target.met(value, share) for target, value in values)

    def as_json(self) -> dict[str, Any]:
        """The row for `--json`."""
        sides = ("ours", "released", "limit", "base")
        return {
            "part": self.part,
            "variant": self.variant,
            "unit": self.unit,
            **{side: self.value(side) for side in sides},
            "ratios": {name: self.value(name) for name in self.ratios},
            "target": [str(target) for target in self.targets],
            "met": self.met(),
            "rounds": {side: list(getattr(self, side)) for side in sides if getattr(self, side)},
            "details": dict(self.details),
            **({"axis": self.axis, "at": self.at} if self.axis else {}),
        }


def figure(value: float | None) -> str:
    """Three digits that count, as people read them."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def table(rows: Sequence[Row]) -> str:
    """Rows for a terminal."""
    heads = ["part", "variant", "unit", "ours", "released", "limit", "ratios", "target", "met"]
    lines = [heads, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if 3 <= place <= 5 else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def details_table(rows: Sequence[Row]) -> str:
    """The details of rows that share their names, for a terminal."""
    names = list(dict.fromkeys(name for row in rows for name in row.details))
    lines = [["variant", *names]]
    lines += [[row.variant, *(_short(row.details.get(name)) for name in names)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cells(row: Row) -> list[str]:
    ratios = ", ".join(f"{name} {figure(row.value(name))}" for name in row.ratios)
    met = {True: "yes", False: "NO", None: ""}[row.met()]
    sides = [figure(row.value(side)) for side in ("ours", "released", "limit")]
    targets = ", ".join(map(str, row.targets))
    return [row.part, row.variant, row.unit, *sides, ratios, targets, met]


def _short(value: Any) -> str:
    return figure(value) if isinstance(value, int | float) else str(value)


def write_json(path: Path, rows: Sequence[Row], **about: Any) -> None:
    """Write everything that was measured, and where.

    Args:
        path: The file.
        rows: The rows.
        about: What else belongs to the run, e.g. its options.
    """
    report = {"machine": machine(), **about, "rows": [row.as_json() for row in rows]}
    path.write_text(json.dumps(report, indent=2) + "\n")


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("megatron-core", "torch", "pyzmq", "msgpack")},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
