"""Readers of recorded workloads; each of them has a README beside its files."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from replay.trace_files import Record, records
from replay.workload import (
    ChainBuilder,
    InputError,
    Session,
    Turn,
    Workload,
    block_names,
    members,
)

_GLOBAL = 0
"""Scope of block ids that mean the same in the whole file."""


def read_swebench(folder: Path) -> Workload:
    """Agents at work on software issues: one session a line, growing along one chain."""
    path = folder / "sessions.jsonl.gz"
    sessions = [_one_chain(record) for record in records(path)]
    return Workload("swebench_gemini3", 16, sessions)


def read_tau(folder: Path) -> Workload:
    """Customer service with tools: groups of four sessions begin with the same prompt."""
    path = folder / "sessions.jsonl.gz"
    sessions = []
    for record in records(path):
        session = _one_chain(record)
        session.group = str(record.whole("group", 0))
        sessions.append(session)
    return Workload("tau_airline_gpt4o", 16, sessions)


def _one_chain(record: Record) -> Session:
    size = record.whole("block_size", 1)
    ids = record.ids("h")
    turns = []
    for turn in record.records("turns"):
        turns.append(Turn(turn.whole("in", 1), max(1, turn.whole("out", 0))))
        if turns[-1].prompt_tokens // size > len(ids):
            raise turn.wrong(f"its prompt needs more blocks than the {len(ids)} of h")
    return Session(record.text("id"), turns, [block_names(ids, _GLOBAL)])


def read_claude_code(folder: Path) -> Workload:
    """Coding agents; ids mean something within a session alone, subagents are sessions."""
    path = folder / "sessions.jsonl.gz"
    sessions: list[Session] = []
    for scope, record in enumerate(records(path), 1):
        size = record.whole("block_size", 1)
        _add_agent(record, record.text("id"), scope, size, sessions)
    return Workload("claude_code_weka", 64, sessions, timed=True)


def _add_agent(record: Record, name: str, scope: int, size: int, sessions: list[Session]) -> None:
    """Add a session of an agent, and after it those of its subagents."""
    chains = ChainBuilder()
    turns: list[Turn] = []
    subagents = []
    for request in record.records("requests"):
        if request.text("type") == "subagent":
            subagents.append(request)
            continue
        ids = request.ids("h")
        tokens = request.whole("in", 1)
        if len(ids) != tokens // size:
            raise request.wrong(f"h has {len(ids)} blocks; {tokens} tokens have {tokens // size}")
        gap = request.number("think_time", 0.0, 0.0) if turns else None
        output, at = max(1, request.whole("out", 0)), request.number("t", 0.0)
        turns.append(Turn(tokens, output, gap, at, chains.add(block_names(ids, scope))))
    if turns:
        sessions.append(Session(name, turns, chains.chains, name))
    for number, subagent in enumerate(subagents):
        _add_agent(subagent, f"{name}/{number}", scope, size, sessions)


def read_mooncake(folder: Path, trace: str = "conversation") -> Workload:
    """Chat traffic without session ids: every request is a session of its own."""
    path = folder / f"{trace}_trace.jsonl.gz"
    sessions = []
    for number, record in enumerate(records(path)):
        tokens = record.whole("input_length", 1)
        ids = record.values.get("hash_ids")
        if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
            raise record.wrong("hash_ids must be a list of whole numbers, 0 or more")
        if len(ids) < tokens // 512:
            raise record.wrong(f"hash_ids has {len(ids)} blocks; {tokens} tokens have more")
        at = record.number("timestamp", 0.0) / 1000
        turn = Turn(tokens, max(1, record.whole("output_length", 0)), at=at)
        chain = block_names(np.array(ids[: tokens // 512], np.int64), _GLOBAL)
        sessions.append(Session(str(number), [turn], [chain]))
    return Workload(f"mooncake_{trace}", 512, sessions, timed=True)


def read_reference(folder: Path, seed: int) -> Workload:
    """The rollouts of issue 6's reference points.

    Args:
        folder: With `reference_rollouts.json`, and `swebench_gemini3` beside it.
        seed: Which of the recorded orders of groups; 0, 1 or 2.
    """
    path = folder / "reference_rollouts.json"
    try:
        spec: dict[str, Any] = json.loads(path.read_text())
        order = spec["group_order"][str(seed)]
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); --path names its folder"
        ) from None
    except (ValueError, KeyError) as error:
        raise InputError(f"{path}: no group order for seed {seed} ({error!r})") from None
    known = {s.name: s for s in read_swebench(folder / "swebench_gemini3").sessions}
    sessions: list[Session] = []
    for name in order:
        if name not in known:
            raise InputError(f"{path}: there is no session {name!r}")
        sessions += group_of(known[name], len(sessions) + 1, 8, 16)
    return Workload("reference_rollouts", 16, sessions)


def group_of(session: Session, scope: int, size: int, block_size: int) -> list[Session]:
    """A group whose members share the session's first prompt."""
    shared = session.turns[0].prompt_tokens // block_size
    return list(members(session, size, shared, scope))


def grouped(workload: Workload, size: int, seed: int) -> Workload:
    """Make a group of each session, in an order drawn from a seed."""
    order = random.Random(seed).sample(workload.sessions, len(workload.sessions))
    sessions: list[Session] = []
    for session in order:
        if len(session.chains) > 1:
            raise InputError(f"{workload.name}: {session.name} does not grow along one chain")
        sessions += group_of(session, len(sessions) + 1, size, workload.block_size)
    return Workload(workload.name, workload.block_size, sessions, workload.timed)
