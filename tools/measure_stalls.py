#!/usr/bin/env python3
r"""Measure how long requests that decode stand still while a burst of long prompts arrives.

A real engine (the built-in model, on the CPU) decodes for as many requests as it has places. Then
many long prompts come at once. None of them finds a place, so what they cost is the work of the
host: reading, checking and hashing them. The columns are the longest gap between two steps in the
burst, the median step before it, the host's work in all and in the step with most of it (processor
time of the engine's thread), and the seconds until the engine has all of them.

    python tools/measure_stalls.py                       a minute or so
    python tools/measure_stalls.py --burst 100 --rounds 1

Rows: prompts packed as our client and as other clients pack them (ids of equal or of mixed width),
taken as the engine's end takes them, or all in one step.
"""

import argparse
import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
from measure_bursts import table
from measure_engines import engine_factory, served

PLACES, BLOCK = 4, 256
VOCABULARY = 151_936
"""Of a model that people serve: most ids take 5 bytes, some 3. No prompt of the burst is run."""


def measure(
    make: Callable[..., Any], options: argparse.Namespace, ours: bool, bounded: bool
) -> Any:
    """One burst on a fresh engine; returns the figures of a row."""
    from megatron.core.inference.coordinator import patch
    from megatron.core.inference.coordinator.runtime import engine_step

    patch()
    engine = make(
        options.prompt // BLOCK + 100,
        "lru",
        PLACES,
        block_size_tokens=BLOCK,
        max_sequence_length=options.prompt + 8192,
        enable_chunked_prefill=True,
    )
    engine.controller.vocab_size = VOCABULARY
    steps, host = [], []
    step, schedule = engine.async_step, engine.schedule_requests

    async def timed_step() -> Any:
        result = await step()
        steps.append(time.perf_counter())
        return result

    def timed_schedule() -> int:
        began = time.thread_time()
        count = schedule()
        host.append((time.thread_time() - began) * 1000)
        return count

    engine.async_step, engine.schedule_requests = timed_step, timed_schedule
    limit = contextlib.nullcontext() if bounded else _unlimited(engine_step)
    with limit:
        came, seconds = asyncio.run(_run(engine, options, ours, steps, host))
    gaps = np.diff(steps) * 1000
    burst = came[0] - 1
    return {
        "longest gap, ms": float(gaps[burst:].max()),
        "step before, ms": float(np.median(gaps[burst - 20 : burst])),
        "host, ms": sum(host[came[1] :]),
        "most in a step, ms": max(host[came[1] :]),
        "all taken, s": seconds,
    }


def _unlimited(engine_step: Any) -> Any:
    return mock.patch.object(engine_step, "_TOKENS_A_STEP", 1 << 62)


async def _run(
    engine: Any, options: argparse.Namespace, ours: bool, steps: list, host: list
) -> tuple[tuple[int, int], float]:
    """Let the burst come; returns how many steps and drains there were before, and its seconds."""
    from dataclasses import replace

    from megatron.core.inference.sampling_params import SamplingParams

    from megatron.core.inference.coordinator.runtime import wire

    rng = np.random.default_rng(options.burst)
    long = SamplingParams(num_tokens_to_generate=8000, top_k=1, termination_id=-1)
    async with served([engine]) as client:
        futures = [client.add_request([65 + n] * 100, long) for n in range(PLACES)]
        prompts = []
        for _ in range(options.burst):
            ids = rng.integers(0, VOCABULARY, options.prompt)
            prompt = client.prepare(ids)
            prompts.append(prompt if ours else replace(prompt, packed=wire.pack(ids.tolist())))
            await asyncio.sleep(0)
        enough = len(steps) + 40
        while len(steps) < enough:
            await asyncio.sleep(0.01)
        came, began = (len(steps), len(host)), time.perf_counter()
        futures += [client.add_request(prompt, long) for prompt in prompts]
        while len(engine.requests) < PLACES + options.burst:
            await asyncio.sleep(0.001)
        seconds, enough = time.perf_counter() - began, len(steps) + 2
        while len(steps) < enough:
            await asyncio.sleep(0.01)
        for future in futures:
            future.cancel()
    return came, seconds


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument("--burst", default=500, help="prompts; default 500", **number)
    parser.add_argument("--prompt", default=32_768, help="tokens of each; default 32768", **number)
    parser.add_argument("--rounds", default=3, help="rows are medians of so many", **number)
    options = parser.parse_args(argv)
    make = engine_factory()
    kinds = [(ours, bounded) for ours in (True, False) for bounded in (True, False)]
    found: dict[tuple[bool, bool], list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind in kinds:
            found[kind].append(measure(make, options, *kind))
    rows = []
    for (ours, bounded), rounds in found.items():
        figures = {name: f"{median(one[name] for one in rounds):.1f}" for name in rounds[0]}
        width, taken = "equal" if ours else "mixed", "by steps" if bounded else "at once"
        rows.append({"ids": width, "taken": taken} | figures)
    print(table(rows))


if __name__ == "__main__":
    main()
