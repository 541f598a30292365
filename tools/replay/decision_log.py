"""Sessions from what a live server recorded with `--inference-coordinator-record FILE`.

One JSON object a line, written as things happen; no prompt text, and no token of it:

    {"event": "open", "version": 1, "block_size": 256, "ranks": 16}
    {"event": "request", "time": 12.031, "id": 7, "client": "a1b2", "prompt_tokens": 900,
     "blocks": 3, "hashes": "9f3c…", "rank": 4}
    {"event": "answer", "time": 13.250, "id": 7, "status": "COMPLETED", "cached_tokens": 768,
     "output_bytes": 412}

(each on one line). `open` comes first, and again when the coordinator starts again. `time` is
seconds of the coordinator's clock, `id` its number of the request, `client` the hexadecimal
identity of whoever asked. `hashes` are the packed block hashes (little-endian int64) in
hexadecimal; null where the client did not hash. `rank` is where the request went, null while it
waits. When one that waited, or whose rank was lost, is given to a rank, a line tells its present id
and the one before:

    {"event": "placed", "time": 12.5, "id": 9, "was": 7, "rank": 5}

`cached_tokens` is -1 where the engine does not tell. `output_bytes` is the length of the reply's
body; where there is `output_tokens`, that counts. A request that nobody answers has no answer line.

A request whose prompt goes on from the prompt of an earlier one that was answered is taken as the
next turn of that session.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron.core.inference.coordinator.hashing import HASH_BYTES, checked_hashes
from replay.trace_files import Record, records
from replay.workload import ChainBuilder, InputError, Session, Turn, Workload, block_names

VERSION = 1
BYTES_A_TOKEN = 4
"""Of a reply's body, where only its length is known."""

_UNHASHED = 2**40
"""Scope of the blocks of requests that were not hashed: they have nothing in common."""


@dataclass(slots=True)
class _Recorded:
    """A session as far as it is read.

    Attributes:
        name: What to call it.
        chains: Its chains.
        turns: Its turns.
        answered: When its last turn was answered; None while it was not.
    """

    name: str
    chains: ChainBuilder = field(default_factory=ChainBuilder)
    turns: list[Turn] = field(default_factory=list)
    answered: float | None = None


class _Log:
    """A log as far as it is read."""

    def __init__(self, path: Path):
        self.path = path
        self.block_size = 0
        self.began: float | None = None
        self.sessions: list[_Recorded] = []
        self._open: dict[int, _Recorded] = {}  # by id of the request that is not answered
        self._by_end: dict[bytes, _Recorded] = {}  # by the last block of their latest prompt

    def opened(self, record: Record) -> None:
        """A coordinator began."""
        if record.whole("version", 1) != VERSION:
            raise record.wrong(f"version must be {VERSION}")
        size = record.whole("block_size", 1)
        if self.block_size not in (0, size):
            raise record.wrong(f"block_size is {size}; it was {self.block_size} before")
        self.block_size = size
        self._open.clear()

    def asked(self, record: Record) -> None:
        """A request came."""
        time = record.number("time", 0.0)
        if self.began is None:
            self.began = time
        hashes, tokens = self._hashes(record)
        session = self._session_of(hashes)
        gap = None
        if session is None:
            session = _Recorded(f"session {len(self.sessions)}")
            self.sessions.append(session)
        elif session.answered is not None:
            gap = max(0.0, time - session.answered)
        at = max(0.0, time - self.began)
        session.turns.append(Turn(tokens, 1, gap, at, session.chains.add(hashes)))
        session.answered = None
        self._open[record.whole("id", 0)] = session

    def placed(self, record: Record) -> None:
        """A request got a rank, and maybe another id."""
        session = self._open.pop(record.whole("was", 0), None)
        if session is None:
            raise record.wrong("it places no request that is recorded")
        self._open[record.whole("id", 0)] = session

    def answered(self, record: Record) -> None:
        """A request was answered."""
        session = self._open.pop(record.whole("id", 0), None)
        if session is None:
            raise record.wrong("it answers no request that is recorded")
        size = record.whole("output_bytes", 0, 0) // BYTES_A_TOKEN
        turn = session.turns[-1]
        turn.output_tokens = max(1, record.whole("output_tokens", 0, size))
        session.answered = record.number("time", 0.0)
        hashes = session.chains.chains[turn.chain]
        end = turn.prompt_tokens // self.block_size * HASH_BYTES
        if end:
            self._by_end[hashes[end - HASH_BYTES : end]] = session

    def _hashes(self, record: Record) -> tuple[bytes, int]:
        tokens = record.whole("prompt_tokens", -1)
        if record.values.get("hashes") is None:
            tokens = max(1, tokens)
            blocks = np.arange(tokens // self.block_size)
            return block_names(blocks, _UNHASHED + len(self.sessions)), tokens
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

    def _session_of(self, hashes: bytes) -> _Recorded | None:
        """The session whose latest prompt this one goes on from."""
        for end in range(len(hashes), 0, -HASH_BYTES):
            found = self._by_end.pop(hashes[end - HASH_BYTES : end], None)
            if found is not None:
                return found
        return None


def read_decisions(path: Path) -> Workload:
    """Read a decision log.

    Raises:
        InputError: It is none, or something in it is wrong.
    """
    log = _Log(path)
    events = {
        "open": log.opened,
        "request": log.asked,
        "placed": log.placed,
        "answer": log.answered,
    }
    for record in records(path):
        event = record.text("event")
        if event not in events:
            raise record.wrong(f"event is {event!r}; it must be one of {', '.join(events)}")
        if not log.block_size and event != "open":
            raise record.wrong("the first event must be open")
        events[event](record)
    if not log.sessions:
        raise InputError(f"{path}: there is no request in it")
    sessions = [Session(s.name, s.turns, s.chains.chains) for s in log.sessions]
    return Workload(path.stem, log.block_size, sessions, timed=True)
