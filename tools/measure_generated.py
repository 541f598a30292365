#!/usr/bin/env python3
r"""Measure what it costs that engines cache prompts and not the answers they generate.

The released engine caches a prompt's full blocks only, so the turn after computes the answer's
tokens once more, as part of its prompt. This counts, on recorded sessions and one cache that never
forgets, the prefill that is skipped when prompt blocks are cached, and when the blocks of prompt
and answer are.

    python tools/measure_generated.py FOLDER_OF_A_WORKLOAD
    python tools/measure_generated.py sessions.jsonl.gz --block-sizes 16 64 --json generated.json

A workload is a file of JSON lines (also .gz), or a folder with sessions.jsonl.gz: one session a
line, with block_size (tokens), turns ([{in, out}] in tokens; t, the second it was sent, where
known) and h ([[first, count], ...]: runs of ids of the whole session's blocks, where an equal id
means an equal prefix up to there). Requests are taken by t, or session after session without it.
docs/measurements.md has the figures.
"""

import argparse
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.core.inference.coordinator.hashing import expected_skip


class BadTrace(ValueError):
    """A workload cannot be read; the text says where, and what is wrong."""


@dataclass(frozen=True)
class Session:
    """A recorded session: (prompt tokens, answer tokens, time) a turn, and its blocks' ids."""

    turns: list[tuple[int, int, float]]
    ids: list[int]
    block_size: int


@dataclass(frozen=True)
class Costs:
    """What caching answers as well would save; all but sizes and rates are tokens of prefill."""

    workload: str
    block_size: int
    requests: int
    prompt_tokens: int
    computed_prompts: int
    computed_both: int
    saved: int
    skip_prompts: float
    skip_both: float


def read_sessions(path: Path) -> list[Session]:
    """Read a workload.

    Raises:
        BadTrace: It is missing, or a line is none of a session.
    """
    if path.is_dir():
        path /= "sessions.jsonl.gz"
    sessions = []
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    sessions.append(_session(json.loads(line)))
                except (ValueError, KeyError, TypeError) as error:
                    what = f"{type(error).__name__}: {error}"
                    raise BadTrace(f"{path}, line {number} is no session ({what})") from None
    except OSError as error:
        raise BadTrace(f"{path} cannot be read ({error})") from None
    if not sessions:
        raise BadTrace(f"{path} holds no session")
    return sessions


def _session(fields: dict[str, Any]) -> Session:
    turns = [(turn["in"], turn["out"], turn.get("t", 0)) for turn in fields["turns"]]
    ids = [first + i for first, count in fields["h"] for i in range(count)]
    size = fields["block_size"]
    longest = max((prompt for prompt, _, _ in turns), default=0)
    if len(ids) < longest // size:
        raise ValueError(f"h names {len(ids)} blocks, and a prompt has {longest // size}")
    return Session(turns, ids, size)


def requests(sessions: Sequence[Session], block_size: int) -> Iterator[tuple[int, int, list[int]]]:
    """Prompt tokens, answer tokens and the session's block ids of every request, in order.

    Raises:
        BadTrace: Blocks of this size are not whole blocks of the trace.
    """
    order = []
    for number, session in enumerate(sessions):
        every, rest = divmod(block_size, session.block_size)
        if rest or not every:
            raise BadTrace(f"the trace's blocks of {session.block_size} make none of {block_size}")
        ids = session.ids[every - 1 :: every]  # ids are chained: the last stands for all before
        order += [(t, number, n, a, b, ids) for n, (a, b, t) in enumerate(session.turns)]
    for _, _, _, prompt, answer, ids in sorted(order, key=lambda request: request[:3]):
        yield prompt, answer, ids


def computed(sessions: Sequence[Session], block_size: int, *, answers: bool) -> int:
    """Tokens of prefill that one infinite cache leaves to compute.

    An answer's last token never goes through the model, so its KV is not there to be cached.
    """
    cache: set[int] = set()
    total = 0
    for prompt, answer, ids in requests(sessions, block_size):
        blocks = prompt // block_size
        depth = _depth(cache, ids[:blocks])
        total += prompt - expected_skip(prompt, depth, block_size)
        end = max(blocks, (prompt + answer - 1) // block_size) if answers else blocks
        cache.update(ids[depth:end])
    return total


def _depth(cache: set[int], ids: Sequence[int]) -> int:
    """How many of a prompt's blocks are cached: presence is monotone along it."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high + 1) // 2
        if ids[middle - 1] in cache:
            low = middle
        else:
            high = middle - 1
    return low


def measure(name: str, sessions: Sequence[Session], block_size: int) -> Costs:
    """The costs of one workload at one block size."""
    prompts = [prompt for session in sessions for prompt, _, _ in session.turns]
    prompts_only = computed(sessions, block_size, answers=False)
    both = computed(sessions, block_size, answers=True)
    return Costs(
        workload=name,
        block_size=block_size,
        requests=len(prompts),
        prompt_tokens=sum(prompts),
        computed_prompts=prompts_only,
        computed_both=both,
        saved=prompts_only - both,
        skip_prompts=round(1 - prompts_only / sum(prompts), 5),
        skip_both=round(1 - both / sum(prompts), 5),
    )


def table(rows: Sequence[Costs]) -> str:
    """The costs for a terminal."""
    head = (
        f"{'workload':<20} block  requests  prompt tokens  skip: prompts   + answers  "
        "prefill saved  of prefill  a request"
    )
    lines = [
        f"{r.workload:<20} {r.block_size:>5} {r.requests:>9,} {r.prompt_tokens:>14,} "
        f"{r.skip_prompts:>14.2%} {r.skip_both:>11.2%} {r.saved:>14,} "
        f"{r.saved / r.computed_prompts:>11.1%} {r.saved / r.requests:>6.0f} tok"
        for r in rows
    ]
    return "\n".join([head, *lines])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", type=Path, nargs="+", help="files, or folders that hold one")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 64, 256], metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args(argv)
    try:
        rows = [
            measure(path.stem.split(".")[0] or str(path), sessions, size)
            for path in options.workloads
            for sessions in [read_sessions(path)]
            for size in options.block_sizes
        ]
    except BadTrace as error:
        parser.error(str(error))
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
