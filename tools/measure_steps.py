"""Sessions on real engines, recorded, and how long each step takes: for calibrate_replay.py."""

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from measure_engines import BLOCK, answer, served
from replay.calibrate import StepTime
from replay.decision_log import read_decisions
from replay.workload import Workload

_LETTERS = range(32, 127)
_SHARED = 64
"""Tokens of what a session begins with."""

_LOADS = (1, 2, 4, 8)
"""Sessions at once in the runs that are fitted to."""

ROUTING: dict[str, Any] = {"load_beta": 0.01}
"""How checked runs are routed, fields of `RoutingSettings`: sessions stay where their blocks are.
At a higher beta some move, and which ones is a matter of milliseconds."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What is said, how many tokens are answered, and the seconds that are paused before."""

    words: list[int]
    answer: int
    pause: float


class Sessions:
    """Sessions that begin at once; lengths are drawn from a seed.

    Args:
        count: How many.
        options: `turns`, `answer` and `think` of the flags.
        seed: Of what is said, the lengths and the pauses.
        alike: Whether they share their first tokens, and every second says what the one before it
            does, so that it is to wait for blocks that are being computed.
    """

    def __init__(self, count: int, options: argparse.Namespace, seed: int, alike: bool = True):
        rng = random.Random(seed)
        systems = [rng.choices(_LETTERS, k=_SHARED) for _ in range(count)]
        self._systems = [systems[0] if alike else system for system in systems]
        self._sessions = [
            [_turn(rng, options, first=not number) for number in range(options.turns)]
            for _ in range(count)
        ]
        if alike:
            self._sessions[1::2] = self._sessions[: count - 1 : 2]

    @property
    def blocks(self) -> int:
        """Blocks that all of them fill, as if they shared nothing."""
        turns = [turn for session in self._sessions for turn in session]
        tokens = sum(len(turn.words) + turn.answer for turn in turns)
        return (tokens + len(self._sessions) * (_SHARED + BLOCK)) // BLOCK

    async def hold(self, client: Any) -> float:
        """Hold them all; returns the seconds from the first request to the last answer."""
        began = time.perf_counter()
        await asyncio.gather(
            *(self._one(client, *both) for both in zip(self._systems, self._sessions, strict=True))
        )
        return time.perf_counter() - began

    async def _one(self, client: Any, system: list[int], turns: Sequence[Turn]) -> None:
        prompt = list(system)
        for turn in turns:
            if turn.pause:
                await asyncio.sleep(turn.pause)
            prompt += turn.words
            prompt += await answer(client, prompt, turn.answer)


def _turn(rng: random.Random, options: argparse.Namespace, first: bool) -> Turn:
    words = rng.choices(_LETTERS, k=rng.randint(16, 160))
    length = rng.randint(options.answer // 2, options.answer * 3 // 2)
    return Turn(words, length, 0.0 if first else rng.expovariate(1) * options.think)


class StepWatch:
    """Times the steps of an engine, from outside.

    Args:
        engine: The engine, before it runs.

    Attributes:
        steps: The steps so far.
    """

    def __init__(self, engine: Any):
        self.steps: list[StepTime] = []
        self._engine, self._context = engine, engine.context
        self._step, self._schedule = engine.async_step, engine.schedule_waiting_requests
        self._began = 0.0
        self._load: tuple[int, int, int] | None = None  # of the step under way
        engine.async_step = self._timed_step
        engine.schedule_waiting_requests = self._watched_schedule

    async def _timed_step(self) -> Any:
        self._end()
        self._began = time.perf_counter()
        result = await self._step()
        if not (self._context.get_active_request_count() or self._engine.waiting_request_ids):
            self._end()  # what follows is no work
        return result

    def _watched_schedule(self) -> None:
        context = self._context
        running = slice(context.paused_request_count, context.total_request_count)
        decoding = running.stop - running.start
        held = int(context.request_kv_length_offsets[running].sum())
        self._schedule()
        self._load = context.active_token_count - decoding, decoding, held + decoding

    def _end(self) -> None:
        if self._load is not None:
            self.steps.append(StepTime(*self._load, time.perf_counter() - self._began))
            self._load = None


def measure_steps(
    make: Callable[..., Any], options: argparse.Namespace, seed: int
) -> Sequence[StepTime]:
    """Hold sessions on one engine at several loads; returns the steps that it took."""
    runs = [Sessions(count, options, seed + count) for count in _LOADS]
    engine = make(sum(sessions.blocks for sessions in runs), "lru", max(_LOADS))
    watch = StepWatch(engine)

    async def run() -> None:
        async with served([engine]) as client:
            await Sessions(2, options, seed).hold(client)
            watch.steps.clear()  # the first of all are slow
            for sessions in runs:
                await sessions.hold(client)

    asyncio.run(run())
    return watch.steps


@dataclass(frozen=True, slots=True)
class Run:
    """A run as it was recorded.

    Attributes:
        workload: What was asked, as sessions.
        replicas: Engines that answered.
        seconds: From the first request to the last answer.
        prompt_tokens: Tokens of all prompts.
        skipped: Tokens of prefill that the engines skipped.
        limits: What a profile says of one engine beside its times.
    """

    workload: Workload
    replicas: int
    seconds: float
    prompt_tokens: int
    skipped: int
    limits: dict[str, Any]


def hold_recorded(make: Callable[..., Any], options: argparse.Namespace, replicas: int) -> Run:
    """Hold sessions on fresh engines, and have the coordinator record them.

    On several engines they share nothing: at so low a beta all would follow the first.
    """
    sessions = Sessions(options.sessions, options, options.seed, alike=replicas == 1)
    engines = [make(sessions.blocks, "lru", options.sessions) for _ in range(replicas)]

    async def run() -> float:
        async with served(engines, **ROUTING) as client:
            return await sessions.hold(client)

    with tempfile.TemporaryDirectory() as folder, recording(Path(folder) / "run.jsonl") as path:
        seconds = asyncio.run(run())
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        workload = read_decisions(path)
    asked = [line for line in lines if line["event"] == "request"]
    prompts, skipped = (sum(r[key] for r in asked) for key in ("prompt_tokens", "cached_tokens"))
    return Run(workload, replicas, seconds, prompts, skipped, limits_of(engines[0]))


def limits_of(engine: Any) -> dict[str, Any]:
    """The fields of an engine's profile that need no measuring."""
    context = engine.context
    return {
        "step_tokens": context.max_tokens,
        "max_requests": context.max_requests,
        "block_size": context.block_size_tokens,
        "cache_tokens": context.kv_block_allocator.active_count * context.block_size_tokens,
    }


@contextlib.contextmanager
def recording(path: Path) -> Iterator[Path]:
    """Coordinators that start meanwhile record their requests."""
    from megatron.training.global_vars import get_args

    with mock.patch.object(get_args(), "inference_coordinator_record", str(path), create=True):
        yield path
