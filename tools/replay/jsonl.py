"""Our own format of sessions: JSON Lines, packed by gzip if the name ends in .gz.

The first line is the header, every other one a session:

    {"format": "replay-sessions", "version": 1, "name": "my traffic", "block_size": 64}
    {"id": "s1", "group": "g1", "h": [[0, 40], [512, 9]], "turns": [
        {"in": 2600, "out": 120},
        {"in": 3180, "out": 45, "gap": 2.5, "at": 14.0}]}

(a session stands on one line). `in` and `out` are tokens of prompt and answer. `h` numbers the full
blocks of the session's longest prompt, run-length coded as [start, count]; equal numbers are equal
blocks after an equal history, in the whole file. A turn's prompt is the first `in // block_size` of
them; a turn that goes another way has an `h` of its own. The rest is optional: `group`; `gap`, the
seconds between the answer before and this turn; and `at`, its time in seconds from the start of the
trace, which a replay in open loop needs of every turn.
"""

import gzip
import json
from pathlib import Path
from typing import Any

from replay.trace_files import Record, records
from replay.workload import InputError, Session, Turn, Workload, block_names

FORMAT, VERSION = "replay-sessions", 1


def read_sessions(path: Path) -> Workload:
    """Read a file of this format.

    Raises:
        InputError: It is none, or something in it is wrong.
    """
    lines = records(path)
    header = next(lines, None)
    if header is None or header.values.get("format") != FORMAT:
        raise InputError(f'{path}:1: the first line must be {{"format": "{FORMAT}", …}}')
    if header.whole("version", 1) != VERSION:
        raise header.wrong(f"version must be {VERSION}")
    size = header.whole("block_size", 1)
    sessions = [_session(record, size) for record in lines]
    timed = all(turn.at is not None for session in sessions for turn in session.turns)
    return Workload(header.text("name", path.stem), size, sessions, timed)


def _session(record: Record, size: int) -> Session:
    common = record.ids("h")
    chains = [block_names(common, 0)]
    turns = []
    for turn in record.records("turns"):
        chain, blocks = 0, len(common)
        if "h" in turn.values:
            ids = turn.ids("h")
            chains.append(block_names(ids, 0))
            chain, blocks = len(chains) - 1, len(ids)
        tokens = turn.whole("in", 1)
        if tokens // size > blocks:
            raise turn.wrong(
                f"a prompt of {tokens} tokens needs more blocks than the {blocks} of h"
            )
        turns.append(
            Turn(tokens, turn.whole("out", 1), _seconds(turn, "gap"), _seconds(turn, "at"), chain)
        )
    return Session(record.text("id"), turns, chains, record.text("group", ""))


def _seconds(record: Record, key: str) -> float | None:
    return record.number(key, 0.0) if key in record.values else None


def write_sessions(workload: Workload, path: Path) -> None:
    """Write sessions of one chain each; blocks are numbered by their hashes as they come.

    Raises:
        InputError: A session has more chains than one.
    """
    opener: Any = gzip.open if path.suffix == ".gz" else open
    numbers: dict[bytes, int] = {}
    with opener(path, "wt", encoding="utf-8") as file:
        header = {"format": FORMAT, "version": VERSION, "name": workload.name}
        file.write(json.dumps({**header, "block_size": workload.block_size}) + "\n")
        for session in workload.sessions:
            if len(session.chains) > 1:
                raise InputError(f"{workload.name}: {session.name} has more chains than one")
            file.write(json.dumps(_written(session, numbers)) + "\n")


def _written(session: Session, numbers: dict[bytes, int]) -> dict[str, Any]:
    (chain,) = session.chains
    runs: list[list[int]] = []
    for at in range(0, len(chain), 8):
        number = numbers.setdefault(chain[at : at + 8], len(numbers))
        if runs and runs[-1][0] + runs[-1][1] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    turns = []
    for turn in session.turns:
        written: dict[str, float] = {"in": turn.prompt_tokens, "out": turn.output_tokens}
        written |= {k: v for k, v in (("gap", turn.gap), ("at", turn.at)) if v is not None}
        turns.append(written)
    return {"id": session.name, "group": session.group, "h": runs, "turns": turns}
