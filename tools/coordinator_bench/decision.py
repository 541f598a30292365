"""Decision and index update: one submission, from its frames to the frames for an engine."""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from coordinator_bench.options import Options
from coordinator_bench.prompts import Conversation, random_chain, system_hashes
from coordinator_bench.rows import AGAINST_BASE, FASTER, Row, Target
from coordinator_bench.traffic import Times, Traffic, make_side
from coordinator_bench.workers import alternate, workers

SYSTEM_BLOCKS = 16
_CONVERSATIONS_APART = 1_000_000
"""Names of one round's conversations begin at its multiple of this."""
_WAITING = 10**12
"""Names of the conversations that are never answered begin here."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A fleet and its prompts.

    Attributes:
        blocks: Blocks of a conversation's last prompt.
        ranks: Engines.
        system_blocks: Blocks that all prompts begin with, and that every rank holds.
        held: Blocks that each rank holds of other conversations to begin with; None for as many
            as a prompt has.
        standing: Short requests in flight on every rank, all the time.
        waiting: Requests of prompts of this length in flight, all the time, over all ranks.
    """

    blocks: int
    ranks: int
    system_blocks: int = 0
    held: int | None = None
    standing: int = 1
    waiting: int = 0

    @property
    def name(self) -> str:
        """As the issue calls it."""
        kind = f"system prompt of {self.system_blocks}" if self.system_blocks else "unrelated"
        return f"{self.blocks:,} blocks x {self.ranks:,} ranks, {kind}"


class DecisionSide:
    """One coordinator with a fleet of this shape, whose turns are timed.

    Args:
        name: "ours" or "released".
        shape: The fleet and its prompts.
        options: Sizes of the run.
    """

    def __init__(self, name: str, shape: Shape, options: Options):
        self._shape, self._options = shape, options
        side = make_side(name, shape.ranks, options.block)
        self.traffic = Traffic(side)
        rng = np.random.default_rng(1)
        system = system_hashes(shape.system_blocks, options.block)
        for rank in range(shape.ranks):
            held = shape.blocks if shape.held is None else shape.held
            for chain in _chains(rng, held, shape.blocks):
                side.hold(rank, [np.concatenate([system, chain[shape.system_blocks :]])])
        self.traffic.submit_short(shape.standing * shape.ranks)
        waiting = (
            Conversation(_WAITING + n, shape.blocks, options.block) for n in range(shape.waiting)
        )
        self.traffic.submit(waiting, shape.blocks)
        gc.collect()
        side.collect_as_in_its_process()

    def round(self, number: int) -> Times:
        """Let new conversations go through all their turns; the last is what counts."""
        shape, options = self._shape, self._options
        first = (number + 1) * _CONVERSATIONS_APART
        conversations = [
            Conversation(first + n, shape.blocks, options.block, shape.system_blocks)
            for n in range(options.in_flight)
        ]
        for share in options.turns:
            times = self.traffic.turn(conversations, max(1, round(share * shape.blocks)))
        return times


def _chains(rng: np.random.Generator, blocks: int, longest: int) -> Iterator[np.ndarray]:
    while blocks > 0:
        yield random_chain(rng, min(blocks, longest))
        blocks -= longest


def measure(options: Options) -> list[Row]:
    """The rows of this part."""
    rows = []
    figures: dict[Shape, Sequence[float]] = {}
    for blocks, ranks, faster in ((128, 64, 15.0), (2048, 512, 100.0)):
        for system in (0, SYSTEM_BLOCKS):
            shape = Shape(blocks, ranks, system)
            times = turns(shape, options, f"decision, {shape.name}")
            figures[shape] = [t.submit_us for t in times["ours"]]
            rows += _rows(shape, times, faster)
    small, large = Shape(128, 64), Shape(2048, 512)
    rows.append(
        Row(
            "decision",
            f"{large.name}; base: {small.name}",
            "us",
            figures[large],
            base=figures[small],
            ratios=(AGAINST_BASE,),
            targets=(Target(AGAINST_BASE, at_most=2.5),),
        )
    )
    return rows


def turns(
    shape: Shape, options: Options, about: str, names: Sequence[str] = ("ours", "released")
) -> dict[str, list[Times]]:
    """The last turns of conversations, round by round, on each side.

    Args:
        shape: The fleet and its prompts.
        options: Sizes of the run.
        about: What is measured, for the progress line.
        names: The sides.
    """
    with workers(**{name: (DecisionSide, name, shape, options) for name in names}) as sides:
        measures = {
            name: lambda number, worker=worker: worker.call("round", number)
            for name, worker in sides.items()
        }
        for measure_once in measures.values():
            measure_once(-1)  # the first turns of a process also warm it up
        return alternate(options.rounds, measures, about)


def _rows(shape: Shape, times: dict[str, list[Times]], faster: float) -> list[Row]:
    ours, released = times["ours"], times["released"]
    return [
        Row(
            "decision",
            shape.name,
            "us",
            [t.submit_us for t in ours],
            [t.submit_us for t in released],
            ratios=(FASTER,),
            targets=(Target(FASTER, at_least=faster),),
            details={f"held, {name}": _held(shape, found) for name, found in times.items()},
        ),
        Row(
            "decision",
            f"{shape.name}; with events and reply",
            "us",
            [t.whole_us for t in ours],
            [t.whole_us for t in released],
            ratios=(FASTER,),
        ),
    ]


def _held(shape: Shape, times: Sequence[Times]) -> float:
    """Share of the prompts' blocks that their ranks held already."""
    return 1 - sum(t.stored for t in times) / sum(t.requests * shape.blocks for t in times)
