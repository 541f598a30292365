#!/usr/bin/env python3
r"""Measure how well the coordinator knows what engines cache, under pressure on the cache.

Real engines (the built-in model, on the CPU) run in this process under a real coordinator. Many
multi-turn sessions that share a system prompt are held, several requests in flight at once, with
room in the cache for a share of all that the sessions fill. For each reply the coordinator compares
the prefill that it predicted with what the engine really skipped.

    python tests/end_to_end/prediction.py                       all cases: 5 to 8 minutes
    python tests/end_to_end/prediction.py --only events/lru:10

Columns: wrong, mean and worst are of replies outside the window (errors in tokens of prefill); a
reply is in the window when its prompt's cached blocks changed between its routing and its
scheduling, which only events can show. `history` switches events off. docs/measurements.md has the
figures and what they mean.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from measure_engines import BLOCK, answer, engine_factory, served, tracking

_LETTERS = range(32, 127)
VARIANTS = ("events/lru", "events/ref_zero", "history/lru", "history/ref_zero")
CASES = [f"{variant}:{share}" for variant in VARIANTS for share in (100, 50, 10)]


@dataclass(frozen=True)
class Figures:
    """What one variant gave; errors in tokens, of replies outside the window."""

    variant: str
    share: int
    blocks: int
    replies: int
    skip_rate: float
    in_window: float
    wrong: int
    mean_error: float
    worst_error: int
    seconds: float


class Turn:
    """One turn of a session: what is said, how long the answer is, and when the next one comes."""

    def __init__(self, rng: random.Random, answer: int):
        self.words = rng.choices(_LETTERS, k=rng.randint(16, 56))
        self.answer = rng.randint(answer // 5, 2 * answer)
        self.pause = rng.expovariate(1)
        self.last_before_pause = rng.random() < 0.5


class Sessions:
    """Multi-turn sessions whose lengths and own words are fixed by a seed.

    As an agent does, a session sends a few turns one right after the other, then pauses; it queues
    for a place among those in flight when it comes back.

    Args:
        options: `sessions`, `turns`, `answer`, `in_flight`, `think` and `seed` of the flags.
    """

    SHARED = 64

    def __init__(self, options: argparse.Namespace):
        rng = random.Random(options.seed)
        self.in_flight, self.think = options.in_flight, options.think
        self.system = rng.choices(_LETTERS, k=self.SHARED)
        numbers = range(options.sessions), range(options.turns)
        self.turns = [[Turn(rng, options.answer) for _ in numbers[1]] for _ in numbers[0]]

    @property
    def blocks(self) -> list[int]:
        """Blocks that each of them fills at its end."""
        ends = [self.SHARED + sum(len(t.words) + t.answer for t in turns) for turns in self.turns]
        return [-(-end // BLOCK) for end in ends]

    @property
    def working_set(self) -> int:
        """Blocks that all of them fill, what they share counted once."""
        return sum(self.blocks) - (len(self.turns) - 1) * (self.SHARED // BLOCK)

    async def hold(self, client: Any) -> None:
        """Hold all of them at the same time, with `in_flight` requests at once."""
        places = asyncio.Semaphore(self.in_flight)
        await asyncio.gather(*(self._one(client, turns, places) for turns in self.turns))

    async def _one(self, client: Any, turns: list[Turn], places: asyncio.Semaphore) -> None:
        prompt, rest = list(self.system), list(turns)
        while rest:
            await asyncio.sleep(rest[0].pause * self.think)
            async with places:
                while rest:
                    turn = rest.pop(0)
                    prompt += turn.words
                    prompt += await answer(client, prompt, turn.answer)
                    if turn.last_before_pause:
                        break


def measure(make: Callable, options: argparse.Namespace, variant: str, share: int) -> Figures:
    """Hold the sessions once, on fresh engines."""
    sessions = Sessions(options)
    kind, eviction = variant.split("/")
    blocks = sessions.working_set * share // 100 // options.engines
    if blocks < max(sessions.blocks):
        needed = f"the longest session fills {max(sessions.blocks)}"
        raise SystemExit(f"{share} % leaves an engine {blocks} blocks, and {needed}")

    async def run(schedule: Path) -> None:
        engines = [make(blocks, eviction, options.in_flight) for _ in range(options.engines)]
        async with served(engines, schedule) as client:
            await sessions.hold(client)

    began = time.perf_counter()
    with tracking(kind), tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(schedule := Path(folder) / "schedule.json"))
        records = json.loads(schedule.read_text())["records"]
    seconds = round(time.perf_counter() - began, 1)
    return figures(records, variant=variant, share=share, blocks=blocks, seconds=seconds)


def figures(records: Sequence[dict], **case: Any) -> Figures:
    """The figures of one run, from the coordinator's schedule file."""
    outside = [r for r in records if not r["in_window"]]
    errors = [abs(r["predicted_tokens"] - r["cached_tokens"]) for r in outside]
    prompts = sum(r["prompt_tokens"] for r in records)
    return Figures(
        replies=len(records),
        skip_rate=round(sum(r["cached_tokens"] for r in records) / prompts, 4),
        in_window=round(1 - len(outside) / len(records), 4),
        wrong=sum(error > 0 for error in errors),
        mean_error=round(sum(errors) / max(1, len(errors)), 2),
        worst_error=max(errors, default=0),
        **case,
    )


def table(rows: Sequence[Figures]) -> str:
    """The figures for a terminal."""
    head = "tracking/eviction  cache  blocks  replies   skip  in window  wrong   mean  worst"
    lines = [
        f"{r.variant:<18} {r.share:>4} % {r.blocks:>7} {r.replies:>8} {r.skip_rate:>6.1%} "
        f"{r.in_window:>10.2%} {r.wrong:>6} {r.mean_error:>6.1f} {r.worst_error:>6}"
        for r in rows
    ]
    return "\n".join([head, *lines])


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument("--sessions", default=24, help="default %(default)s", **number)
    parser.add_argument("--turns", default=6, help="of each session; %(default)s", **number)
    parser.add_argument("--answer", default=32, help="mean tokens; default %(default)s", **number)
    parser.add_argument("--in-flight", default=4, help="requests at once; %(default)s", **number)
    parser.add_argument("--engines", default=1, help="they share the cache; %(default)s", **number)
    parser.add_argument(
        "--think", type=float, default=1.0, metavar="S", help="mean pause before a turn; 1 s"
    )
    cases = "tracking/eviction:cache in %% of the working set; default: " + " ".join(CASES)
    parser.add_argument(
        "--only", nargs="+", choices=CASES, default=CASES, metavar="CASE", help=cases
    )
    parser.add_argument("--seed", default=1, help="default %(default)s", **number)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse_args(argv)


def main() -> None:
    """Measure and show."""
    options = parse_args()
    make = engine_factory()
    rows = []
    for case in options.only:
        variant, _, share = case.partition(":")
        rows.append(measure(make, options, variant, int(share)))
        print(f"{case}: {rows[-1].seconds} s", file=sys.stderr)
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
