#!/usr/bin/env python3
r"""Measure what becomes of a group of equal prompts that arrive together, as RL rollouts send them.

Until its first member's prefill is through, an equal prompt finds nothing in any cache. On another
rank it computes everything again; on the same rank it waits, and skips. The burst cap says how many
may follow the first whatever the load. The coordinator's core places groups on ranks that are idle,
half loaded and full, for every cost policy and cap; a model of a replica says when first tokens
come. Then real engines (the built-in model, on the CPU) get such groups.

    python tools/measure_bursts.py                   both parts: 2 minutes or so
    python tools/measure_bursts.py --engines 0       the core alone: seconds
    python tools/measure_bursts.py --groups 16       16 groups at once

Columns: ranks and cold are per group (ranks used; prompts computed from the start); spread is the
largest load of a rank over the mean; TTFT is of the groups' requests. docs/measurements.md has the
figures and the model.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from measure_engines import BLOCK, answer, engine_factory, served
from measure_replica import PLACES, Replica

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.core import Coordinator
from megatron.core.inference.coordinator.hashing import block_hashes, pack_hashes
from megatron.core.inference.coordinator.policies import PrefixCachingCostPolicy
from megatron.core.inference.coordinator.settings import (
    PROTOCOL_VERSION,
    CoordinatorSettings,
    RoutingSettings,
)

MEMBERS, RANKS = 8, 16
CAPS = (0, 4, 8)
LOADS = {"idle": 0, "half": PLACES // 2, "full": PLACES}


def place(
    policy: PrefixCachingCostPolicy, cap: int, load: int, groups: int, prompt: int
) -> tuple[list[list[int]], list[int]]:
    """Let the core place groups, one after the other, on equally loaded ranks.

    Returns:
        For each group the numbers of its members' ranks, and the load of every rank then.
    """
    routing = RoutingSettings(cost_policy=policy, burst_cap=cap)
    core = Coordinator(CoordinatorSettings(routing=routing, block_size_tokens=BLOCK))
    core.handle(m.Incoming(b"client", m.Connect(PROTOCOL_VERSION, False)), 0.0)
    for rank in range(RANKS):
        joining = m.Register(PROTOCOL_VERSION, "job", rank, 0, PLACES, BLOCK, 100_000, "lru")
        core.handle(m.Incoming(b"%d" % rank, joining), 0.0)

    def submit(length: int, hashes: bytes | None) -> int:
        message = m.SubmitRequest(0, length, b"", b"", hashes)
        effects = core.handle(m.Incoming(b"client", message), 0.0)
        return next(int(effect.peer) for effect in effects if isinstance(effect, m.Send))

    for _ in range(load * RANKS):  # of unknown prompts: they go to the least loaded
        submit(-1, None)
    chains = [pack_hashes(block_hashes([group] * prompt, BLOCK)) for group in range(groups)]
    ranks = [[submit(prompt, chain) for _ in range(MEMBERS)] for chain in chains]
    core.check_integrity()
    return ranks, [core.fleet.ledger.load(rank) for rank in range(RANKS)]


def modelled(
    policy: PrefixCachingCostPolicy, cap: int, state: str, groups: int, prompt: int
) -> dict[str, Any]:
    """One row of the first table."""
    ranks, loads = place(policy, cap, LOADS[state], groups, prompt)
    queues: dict[int, list[int]] = {}
    for name, members in enumerate(ranks):
        for rank in members:
            queues.setdefault(rank, []).append(name)
    runs = [Replica().first_tokens(queue, LOADS[state], prompt) for queue in queues.values()]
    times = [ms for run, _ in runs for ms in run]
    return {
        "state": state,
        "cost_policy": policy.value,
        "cap": cap,
        "ranks": sum(len(set(members)) for members in ranks) / groups,
        "cold": sum(cold for _, cold in runs) / groups,
        "spread": round(max(loads) * RANKS / sum(loads), 3),
        "ttft_mean_ms": round(sum(times) / len(times), 1),
        "ttft_worst_ms": round(max(times), 1),
    }


def real(make: Callable, engines: int, cap: int, groups: int, prompt: int) -> dict[str, Any]:
    """One row of the second table: groups one after the other, on idle real engines."""
    rng = random.Random(cap)
    times: list[float] = []

    async def member(client: Any, tokens: list[int]) -> None:
        began = time.perf_counter()
        await answer(client, tokens, 1)
        times.append((time.perf_counter() - began) * 1000)

    async def run(schedule: Path) -> None:
        fleet = [make(4 * groups * prompt // BLOCK, "lru", PLACES) for _ in range(engines)]
        async with served(fleet, schedule, burst_cap=cap) as client:
            for _ in range(groups):
                tokens = rng.choices(range(32, 127), k=prompt)
                await asyncio.gather(*(member(client, tokens) for _ in range(MEMBERS)))

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(schedule := Path(folder) / "schedule.json"))
        records = json.loads(schedule.read_text())["records"]
    used = {(n // MEMBERS, record["rank_index"]) for n, record in enumerate(records)}
    return {
        "engines": engines,
        "cap": cap,
        "groups": groups,
        "ranks": len(used) / groups,
        "cold": sum(record["cached_tokens"] == 0 for record in records) / groups,
        "ttft_mean_ms": round(sum(times) / len(times), 1),
        "ttft_worst_ms": round(max(times), 1),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of one kind for a terminal."""
    lines = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument("--groups", default=1, help="at once; default 1", **number)
    parser.add_argument("--prompt", default=2048, help="tokens; default 2048", **number)
    parser.add_argument("--engines", default=2, help="real ones; 0: none; default 2", **number)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args(argv)
    rows = [
        modelled(policy, cap, state, options.groups, options.prompt)
        for state in LOADS
        for policy in PrefixCachingCostPolicy
        for cap in CAPS
    ]
    print(table(rows))
    measured = []
    if options.engines:
        make = engine_factory()
        measured = [real(make, options.engines, cap, 6, 512) for cap in CAPS]
        print(f"\n{table(measured)}")
    if options.json:
        report = {"modelled": rows, "real": measured}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
