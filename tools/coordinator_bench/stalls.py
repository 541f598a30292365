"""The longest stall of the loop while a lot changes at once.

Each message is handled as the loop would, with the collector on. What counts is the longest single
call, and the longest pause of the collector, in this thread's processor time: what other processes
of the machine take is no stall of the coordinator's.
"""

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from coordinator_bench import frames
from coordinator_bench.options import Options
from coordinator_bench.prompts import Conversation, random_chain
from coordinator_bench.rows import Row, Target
from coordinator_bench.traffic import CLIENT, Traffic, engine, make_side
from coordinator_bench.workers import alternate, workers

LONGEST_MS = 5.0
EVENTS = 100_000
_RANKS = 16
_PROMPT = 128
_TTL = 300.0
_STEPS = 200
"""Seconds of the coordinator's clock that are watched afterwards; what is put off comes then. In
the first half of them more messages are always waiting, in the second none are."""


class Watched:
    """A coordinator whose every call is timed; stands where a `Side` does.

    Args:
        side: The coordinator.

    Attributes:
        longest: Nanoseconds of its longest call.
        pause: Nanoseconds of the collector's longest pause.
        leisure: Whether there are times when nothing arrives.
    """

    leisure = True

    def __init__(self, side: Any):
        self._side = side
        self.longest = self.pause = self._began = 0
        gc.callbacks.append(self._collecting)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._side, name)

    def deliver(self, peer: bytes, received: frames.Frames) -> Any:
        """Handle a message."""
        return self._timed(self._side.deliver, peer, received)

    def tick(self) -> None:
        """Let a second pass."""
        self._side.answer_pings(self._timed(self._side.tick))

    def idle(self) -> None:
        """Let nothing arrive until nothing is left to do."""
        while self.leisure and self._side.backlog:
            self._timed(self._side.sweep)

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        began = time.thread_time_ns()
        result = call(*arguments)
        self.longest = max(self.longest, time.thread_time_ns() - began)
        return result

    def _collecting(self, phase: str, info: Any) -> None:
        # The collector may begin in this driver too; a coordinator would have met it just so.
        if phase == "start":
            self._began = time.thread_time_ns()
        else:
            self.pause = max(self.pause, time.thread_time_ns() - self._began)


class Stalls:
    """A fresh process with one coordinator, in which one thing happens.

    Args:
        name: "ours" or "released".
        block: Tokens in a block.
        blocks: Blocks of the index.
    """

    def __init__(self, name: str, block: int, blocks: int):
        self._name, self._block, self._blocks = name, block, blocks
        self._rng = np.random.default_rng(4)

    def removed(self) -> tuple[float, float]:
        """A rank that holds everything takes its leave."""
        watched = self._begin()
        self._fill_by_events()
        return self._watch(watched, lambda: watched.deliver(engine(0), frames.disconnect()))

    def epoch(self) -> tuple[float, float]:
        """The weights are updated: everything is void, and the engines say so too."""
        watched = self._begin()
        self._fill_by_events()

        def update() -> None:
            watched.deliver(CLIENT, frames.set_generation_epoch(1))
            for rank in range(_RANKS):
                watched.deliver(*self._side.batch(rank, np.zeros(1, dtype=np.int64), 1))

        return self._watch(watched, update)

    def expired(self) -> tuple[float, float]:
        """Everything is past its time at once, on engines that tell nothing."""
        watched = self._begin(events=False, ttl=_TTL)
        traffic = Traffic(self._side)
        for first in range(0, self._blocks // _PROMPT, 64):
            traffic.turn(
                [Conversation(first + n, _PROMPT, self._block) for n in range(64)], _PROMPT
            )
        for _ in range(int(_TTL) - 1):
            self._side.answer_pings(self._side.tick())
        return self._watch(watched, lambda: None)

    def events(self, at_once: int, kind: str) -> tuple[float, float]:
        """One engine tells a lot.

        Args:
            at_once: Events in a batch.
            kind: "stored", "removed", or "table": stored, and the first batch begins with a clear.
        """
        watched = self._begin()
        told = self._chains(EVENTS)
        if kind == "removed":
            for chain in told:
                self._side.hold(0, [chain])
            told = [-chain for chain in told]
        packed = frames.chains(*told)
        if kind == "table":
            packed = np.concatenate([np.zeros(1, dtype=np.int64), packed])
        batches = [packed[n : n + at_once] for n in range(0, len(packed), at_once)]
        messages = [self._side.batch(0, batch) for batch in batches]
        return self._watch(watched, lambda: [watched.deliver(*message) for message in messages])

    def _begin(self, **options: Any) -> Watched:
        self._side = make_side(self._name, _RANKS, self._block, **options)
        gc.collect()
        self._side.collect_as_in_its_process()
        return Watched(self._side)

    def _chains(self, blocks: int) -> list[np.ndarray]:
        return [random_chain(self._rng, _PROMPT) for _ in range(blocks // _PROMPT)]

    def _fill_by_events(self) -> None:
        for _ in range(0, self._blocks, 8 * _PROMPT):
            self._side.hold(0, self._chains(8 * _PROMPT))

    def _watch(self, watched: Watched, happen: Callable[[], Any]) -> tuple[float, float]:
        """Milliseconds of the longest call and of the collector's longest pause."""
        watched.pause = watched.longest = 0
        happen()
        if self._name == "ours":
            traffic = Traffic(watched)
            for step in range(_STEPS):
                # First everything is done between messages, as under full load.
                watched.leisure = step >= _STEPS // 2
                watched.tick()
                names = range(10**9 + 4 * step, 10**9 + 4 * step + 4)
                traffic.turn([Conversation(n, _PROMPT, self._block) for n in names], _PROMPT)
        return watched.longest / 1e6, watched.pause / 1e6


def measure(options: Options) -> list[Row]:
    """The rows of this part."""
    blocks = options.index_blocks
    cases: list[tuple[str, str, tuple[Any, ...]]] = [
        (f"a rank with {blocks:,} blocks is removed", "removed", ()),
        (f"{blocks:,} blocks pass their time to live", "expired", ()),
        (f"an epoch empties {blocks:,} blocks", "epoch", ()),
        (f"{EVENTS:,} blocks stored, 1,000 events a batch", "events", (1000, "stored")),
        (f"{EVENTS:,} blocks removed, 1,000 events a batch", "events", (1000, "removed")),
        (f"{EVENTS:,} blocks as one table", "events", (2 * EVENTS, "table")),
        (f"{EVENTS:,} blocks removed in one batch", "events", (2 * EVENTS, "removed")),
    ]
    return [_row(options, *case) for case in cases]


def _row(options: Options, variant: str, method: str, arguments: tuple[Any, ...]) -> Row:
    names = ("ours", "released") if method == "removed" else ("ours",)
    measures = {
        name: lambda _, name=name: _fresh(options, name, method, arguments) for name in names
    }
    found = alternate(options.rounds, measures, f"stalls, {variant}")
    return Row(
        "stalls",
        variant,
        "ms",
        [max(stall) for stall in found["ours"]],
        [max(stall) for stall in found.get("released", [])],
        targets=(Target("ours", at_most=LONGEST_MS, absolute=True),),
        details={
            "longest call, worst round": max(call for call, _ in found["ours"]),
            "longest collection, worst round": max(pause for _, pause in found["ours"]),
        },
    )


def _fresh(
    options: Options, name: str, method: str, arguments: tuple[Any, ...]
) -> tuple[float, float]:
    with workers(fresh=(Stalls, name, options.block, options.index_blocks)) as made:
        stall: tuple[float, float] = made["fresh"].call(method, *arguments)
        return stall
