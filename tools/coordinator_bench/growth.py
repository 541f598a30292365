"""How the cost of a request grows: with ranks, blocks, what the index holds, what is in flight."""

from dataclasses import replace

from coordinator_bench.decision import Shape, turns
from coordinator_bench.options import Options
from coordinator_bench.rows import FASTER, Row

_RANKS, _BLOCKS = 64, 128
_RELEASED_HOLDS = 1_000_000
"""Blocks up to which the released coordinator is measured too: it needs 350 bytes for each."""

AXES: dict[str, dict[int, Shape]] = {
    "ranks": {n: Shape(_BLOCKS, n) for n in (16, 64, 256, 1024)},
    "blocks of the prompt": {n: Shape(n, _RANKS) for n in (128, 512, 1024, 2048, 4096)},
    "blocks in the index": {
        n: Shape(_BLOCKS, _RANKS, held=n // _RANKS)
        for n in (10_000, 100_000, 1_000_000, 10_000_000)
    },
    "requests in flight": {
        n: Shape(_BLOCKS, _RANKS, standing=0, waiting=n) for n in (10, 100, 1_000, 10_000)
    },
}


def measure(options: Options) -> list[Row]:
    """The rows of this part: one for each point of each axis."""
    small = replace(options, in_flight=16, turns=(0.875, 1.0))
    return [
        _row(axis, value, shape, small)
        for axis, shapes in AXES.items()
        for value, shape in shapes.items()
    ]


def _row(axis: str, value: int, shape: Shape, options: Options) -> Row:
    holds = shape.ranks * (shape.blocks if shape.held is None else shape.held)
    names = ("ours", "released") if holds <= _RELEASED_HOLDS else ("ours",)
    times = turns(shape, options, f"growth, {value:,} {axis}", names)
    return Row(
        "growth",
        f"{value:,} {axis}",
        "us",
        [t.whole_us for t in times["ours"]],
        [t.whole_us for t in times.get("released", [])],
        ratios=(FASTER,) if "released" in names else (),
        axis=axis,
        at=value,
    )
