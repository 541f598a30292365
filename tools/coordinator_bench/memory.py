"""Memory of the index: how much a process grows for each block that a rank is known to hold."""

import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coordinator_bench.decision import SYSTEM_BLOCKS
from coordinator_bench.options import Options
from coordinator_bench.prompts import Conversation, random_chain, system_hashes
from coordinator_bench.rows import MORE, Row, Target
from coordinator_bench.traffic import Placement, Traffic, make_side
from coordinator_bench.workers import say, workers

RANKS = 16
_PROMPT = 128
_AT_ONCE = 64
_WARM = 1_000_000_000
"""Names of the conversations that warm a process up begin here."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What the index is filled with.

    Attributes:
        name: What it is called.
        fill: Method of `Memory` that fills it.
        at_most: What its target asks for, against the released coordinator.
        share: Share of the blocks that are filled in; short prompts take long.
        history: Whether it can be measured with engines that tell nothing of their caches.
    """

    name: str
    fill: str
    at_most: float = 1 / 3
    share: float = 1.0
    history: bool = True


VARIANTS = (
    Variant("unrelated prompts of 128 blocks", "unrelated", 1 / 10),
    Variant("a system prompt of 16 blocks everywhere, 112 of one's own", "system", 1 / 10),
    Variant("prompts of one block", "single", share=0.125),
    Variant("conversations stored in turns, a block each", "interleaved", history=False),
    Variant("each rank holds one block more than the one before", "stairs", history=False),
)


class Memory:
    """A fresh process with one coordinator in it.

    Args:
        name: "ours" or "released".
        block: Tokens in a block.
        events: Whether our engines tell what their caches hold.
    """

    def __init__(self, name: str, block: int, events: bool):
        self._block, self._tells = block, events
        options = {"events": events} if name == "ours" else {}
        self._side = make_side(name, RANKS, block, **options)
        self._traffic = Traffic(self._side)

    def measure(self, fill: str, blocks: int) -> float:
        """Bytes for each (block, rank) pair.

        Args:
            fill: Name of the method that fills the index.
            blocks: About how many pairs to fill in.
        """
        self._side.collect_as_in_its_process()
        self._prompts(_WARM, _AT_ONCE, _PROMPT, 0)
        before = resident()
        pairs = getattr(self, fill)(blocks)
        self._side.idle()
        return (resident() - before) / pairs

    def unrelated(self, blocks: int) -> int:
        """Fill with prompts that have nothing in common."""
        return self._prompts(0, blocks // _PROMPT, _PROMPT, 0)

    def system(self, blocks: int) -> int:
        """Fill with prompts that have their beginning in common, which every rank holds."""
        if self._tells:
            for rank in range(RANKS):
                self._side.hold(rank, [system_hashes(SYSTEM_BLOCKS, self._block)])
        else:
            self._spread(Conversation(0, SYSTEM_BLOCKS, self._block, SYSTEM_BLOCKS))
        own = self._prompts(0, blocks // (_PROMPT - SYSTEM_BLOCKS), _PROMPT, SYSTEM_BLOCKS)
        return own + RANKS * SYSTEM_BLOCKS

    def single(self, blocks: int) -> int:
        """Fill with prompts of one block."""
        return self._prompts(0, blocks, 1, 0)

    def interleaved(self, blocks: int) -> int:
        """Fill with conversations that are stored side by side, so that no run is told as one."""
        rng = np.random.default_rng(2)
        columns = blocks // (RANKS * _PROMPT)
        for rank in range(RANKS):
            for _ in range(columns // 2):
                pair = [random_chain(rng, _PROMPT), random_chain(rng, _PROMPT)]
                apart = [c[n : n + 1] for n in range(_PROMPT) for c in pair]
                self._side.hold(rank, apart)
        return RANKS * (columns // 2) * 2 * _PROMPT

    def stairs(self, blocks: int) -> int:
        """Fill with chains of which no two neighbours are held by the same ranks."""
        rng = np.random.default_rng(3)
        steps = RANKS * (RANKS + 1) // 2
        for _ in range(blocks // steps):
            chain = random_chain(rng, RANKS)
            for rank in range(RANKS):
                self._side.hold(rank, [chain[: rank + 1]])
        return blocks // steps * steps

    def _spread(self, prompt: Conversation) -> None:
        """Send a prompt until load has driven it to every rank."""
        placed: list[Placement] = []
        while len({rank for rank, _ in placed}) < RANKS:
            placed += self._traffic.submit([prompt], SYSTEM_BLOCKS)
        self._traffic.answer(placed)

    def _prompts(self, first: int, count: int, blocks: int, system: int) -> int:
        """Let new conversations have one turn each, all of it answered; returns pairs stored."""
        stored = 0
        for batch in _batches(range(first, first + count)):
            conversations = [Conversation(n, blocks, self._block, system) for n in batch]
            stored += self._traffic.turn(conversations, blocks).stored
        return stored


def _batches(names: range) -> Iterator[range]:
    for start in range(0, len(names), _AT_ONCE):
        yield names[start : start + _AT_ONCE]


def resident() -> int:
    """Bytes of memory that this process really has, without what it could give back."""
    gc.collect()
    trim: Callable[[int], int] = ctypes.CDLL("libc.so.6").malloc_trim
    trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(options: Options) -> list[Row]:
    """The rows of this part: once each, since a fresh process that does the same grows the same."""
    rows = []
    for variant in VARIANTS[:2] if options.quick else VARIANTS:
        blocks = int(options.index_blocks * variant.share)
        released = _grown("released", variant, blocks, options.block, True)
        ours = _grown("ours", variant, blocks, options.block, True)
        target = (Target(MORE, at_most=variant.at_most),)
        rows.append(_row(variant.name, ours, released, target))
        if variant.history and not options.quick:
            ours = _grown("ours", variant, blocks, options.block, False)
            rows.append(_row(f"{variant.name}; history", ours, released, ()))
    return rows


def _row(name: str, ours: float, released: float, targets: tuple[Target, ...]) -> Row:
    unit = "bytes/(block, rank)"
    return Row("memory", name, unit, [ours], [released], ratios=(MORE,), targets=targets)


def _grown(side: str, variant: Variant, blocks: int, block: int, events: bool) -> float:
    told = "" if events else ", history"
    say(f"memory, {variant.name}, {blocks:,} blocks: {side}{told}")
    with workers(fresh=(Memory, side, block, events)) as made:
        grown: float = made["fresh"].call("measure", variant.fill, blocks)
        return grown
