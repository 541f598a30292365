"""Sessions from what a live server recorded with `--inference-coordinator-record FILE`.

The format is described where it is written: `Record` of
megatron/core/inference/coordinator/runtime/records.py.

A request whose prompt goes on from the prompt of an earlier one that was answered is taken as the
next turn of that session, after the pause between the two, unless another coordinator began
meanwhile: for how long there was none says nothing of the session. Requests whose replicas were
lost are taken as if they had been answered; those that the engine could not take (`failed`) are
left out.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path

import numpy as np

from megatron.core.inference.coordinator.hashing import HASH_BYTES, checked_hashes
from megatron.core.inference.coordinator.runtime.records import RECORD_VERSION
from replay.trace_files import Record, records
from replay.workload import ChainBuilder, InputError, Session, Turn, Workload, block_names

_OUTPUT_TOKENS = 100
"""Of an answer whose length is not known."""

_UNHASHED = 2**40
"""Scope of the blocks of requests that were not hashed: they have nothing in common."""


@dataclass(slots=True)
class _Session:
    """A session as far as it is read.

    Attributes:
        name: What to call it.
        chains: Its chains.
        turns: Its turns.
        answered: When its last turn was.
        life: Of the coordinators, the number of the one that had its last turn.
    """

    name: str
    chains: ChainBuilder = field(default_factory=ChainBuilder)
    turns: list[Turn] = field(default_factory=list)
    answered: float = 0.0
    life: int = 0


@dataclass(slots=True, order=True)
class _Asked:
    """A request, by when it came.

    Attributes:
        time: When it came.
        number: Its place in the file.
        ended: When it ended.
        prompt_tokens: Tokens of its prompt.
        output_tokens: Tokens of its answer.
        hashes: Its packed hashes.
        life: The number of the coordinator, of those that wrote into the file.
    """

    time: float
    number: int
    ended: float
    prompt_tokens: int
    output_tokens: int
    hashes: bytes
    life: int


class _Log:
    """A record as far as it is read."""

    def __init__(self):
        self.block_size = self.replicas = 0
        self.sessions: list[_Session] = []
        self._asked: list[_Asked] = []  # in the order in which they ended
        self._by_end: dict[bytes, list[_Session]] = {}  # by the last block of their latest prompt
        self._hashed = False
        self._life = 0

    def opened(self, record: Record) -> None:
        """A coordinator began."""
        if record.whole("version", 1) != RECORD_VERSION:
            raise record.wrong(f"version must be {RECORD_VERSION}")
        size = record.whole("block_size", 1)
        if self.block_size not in (0, size):
            raise record.wrong(f"block_size is {size}; it was {self.block_size} before")
        self.block_size = size
        self.replicas = max(self.replicas, record.whole("ranks", 0, default=0))
        if not (self._life and record.values.get("continues")):
            self._life += 1

    def asked(self, record: Record) -> None:
        """A request ended."""
        if record.text("outcome", "answered") == "failed":
            return
        self._hashed |= record.values.get("hashes") is not None
        hashes, tokens = self._hashes(record)
        output = record.whole("output_tokens", -1)
        output = max(1, output) if output >= 0 else _OUTPUT_TOKENS
        if record.values.get("rank") is not None:
            self.replicas = max(self.replicas, record.whole("rank", 0) + 1)
        time = record.number("time", 0.0)
        ended = time + record.number("seconds", 0.0)
        number = len(self._asked)
        self._asked.append(_Asked(time, number, ended, tokens, output, hashes, self._life))

    def connect(self, path: Path) -> None:
        """Make sessions of what was read, in the order in which requests came.

        Raises:
            InputError: None of them can be told from another.
        """
        if self._asked and not self._hashed:
            raise InputError(
                f"{path}: no request in it is hashed, so nothing is known of what they share; "
                "record them under a policy that reads hashes, e.g. longest_prefix"
            )
        self._asked.sort()
        running: list[tuple[float, int, bytes, _Session]] = []  # by when they end
        for request in self._asked:
            while running and running[0][0] <= request.time:
                ended, _, last, session = heappop(running)
                session.answered = ended
                if last:
                    self._by_end.setdefault(last, []).append(session)
            session = self._add(request, request.time - self._asked[0].time)
            last = request.hashes[-HASH_BYTES:]
            heappush(running, (request.ended, request.number, last, session))

    def _add(self, request: _Asked, at: float) -> _Session:
        session = self._session_of(request.hashes)
        gap = None
        if session is None:
            session = _Session(f"session {len(self.sessions)}")
            self.sessions.append(session)
        elif session.life == request.life:
            gap = request.time - session.answered
        session.life = request.life
        chain = session.chains.add(request.hashes)
        turn = Turn(request.prompt_tokens, request.output_tokens, gap, at, chain)
        session.turns.append(turn)
        return session

    def _hashes(self, record: Record) -> tuple[bytes, int]:
        tokens = record.whole("prompt_tokens", -1)
        if record.values.get("hashes") is None:
            tokens = max(1, tokens)
            blocks = np.arange(tokens // self.block_size)
            return block_names(blocks, _UNHASHED + len(self._asked)), tokens
        try:
            packed = bytes.fromhex(record.text("hashes"))
        except ValueError:
            raise record.wrong("hashes must be hexadecimal") from None
        if tokens < 0:
            tokens = max(1, len(packed) // HASH_BYTES * self.block_size)
        hashes = checked_hashes(packed, tokens // self.block_size)
        if hashes is None:
            raise record.wrong(f"hashes are not those of a prompt of {tokens} tokens")
        return hashes, tokens

    def _session_of(self, hashes: bytes) -> _Session | None:
        """The session whose latest prompt this one goes on from; of several, whose turn it is."""
        for end in range(len(hashes), 0, -HASH_BYTES):
            last = hashes[end - HASH_BYTES : end]
            waiting = self._by_end.get(last)
            if waiting:
                session = waiting.pop(0)
                if not waiting:
                    del self._by_end[last]
                return session
        return None


def _files(path: Path) -> list[Path]:
    older = path.with_name(f"{path.name}.1")
    if not older.exists():
        return [path]
    return [older, path] if path.exists() else [older]  # ended between one file and the next


def read_decisions(path: Path) -> Workload:
    """Read a record, with what was there before it became too large (`FILE.1`).

    Raises:
        InputError: It is none, or something in it is wrong.
    """
    log = _Log()
    events = {"open": log.opened, "request": log.asked}
    for record in (each for file in _files(path) for each in records(file)):
        event = record.text("event")
        if event not in events:
            raise record.wrong(f"event is {event!r}; it must be one of {', '.join(events)}")
        if not log.block_size and event != "open":
            raise record.wrong("the first event must be open")
        events[event](record)
    log.connect(path)
    if not log.sessions:
        raise InputError(f"{path}: there is no request in it")
    sessions = [Session(s.name, s.turns, s.chains.chains) for s in log.sessions]
    replicas = log.replicas or None
    return Workload(path.stem, log.block_size, sessions, timed=True, replicas=replicas)
