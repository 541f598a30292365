"""Files for those who study decisions: the schedule and the record."""

import json
import logging
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import msgpack

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.core import Coordinator
from megatron.core.inference.coordinator.hashing import HASH_BYTES
from megatron.core.inference.coordinator.ledger import REQUEST_IDS
from megatron.core.inference.coordinator.runtime import private_files
from megatron.core.inference.coordinator.runtime.eventlog import render
from megatron.core.inference.coordinator.settings import (
    CoordinatorSettings,
    RecordSettings,
    SettingsError,
)

logger = logging.getLogger(__name__)

RECORD_VERSION = 1


class _Output:
    """A file of the coordinator's. Requests matter more than it: an error ends it alone.

    Attributes:
        ENDED: The event that says so.
    """

    ENDED: ClassVar[str]

    def __init__(self, path: str | Path):
        self._path = path
        self._failed = False
        self._file = private_files.append(path)

    def close(self) -> None:
        """Write no more."""
        self._attempt(self._file.close)

    def _attempt(self, action: Callable[[], Any]) -> None:
        if self._failed:
            return
        try:
            action()
        except OSError as error:
            self._failed = True
            with suppress(OSError):
                self._file.close()
            fields = {"file": str(self._path), "error": error.strerror}
            logger.warning("%s", render(self.ENDED, fields))


class Schedule(_Output):
    """Where every answered request went, as JSON, in the order in which they ended.

    The keys of the released coordinator's schedule file are kept: `policy`,
    `data_parallel_size`, `num_requests` and `records` with `request_id`, `rank_index` and
    `num_hashes`; each record also has `prompt_tokens`, `predicted_tokens`, `cached_tokens` and
    `in_window`, and `accuracy` has each rank's figures (`accuracy.Accuracy`).

    The file is a whole JSON document after each `write`, so a coordinator that is killed loses what
    came since the last one. When it cannot be written any more, the log says so.

    Args:
        path: The file, mode 0600. What was there is replaced.

    Raises:
        OSError: It cannot be written.
    """

    ENDED = "schedule_ended"

    def __init__(self, path: str | Path):
        private_files.write(path, "")
        super().__init__(path)
        self._new: list[m.Trace] = []
        self._count = self._size = 0  # of the records that are written, the second in bytes

    def __len__(self) -> int:
        return self._count + len(self._new)

    def add(self, trace: m.Trace) -> None:
        """A request is over."""
        if trace.outcome in (m.Outcome.ANSWERED, m.Outcome.FAILED):
            self._new.append(trace)

    def write(self, core: Coordinator) -> None:
        """Write what was added, and the figures of now."""
        settings, fleet = core.settings, core.fleet
        lines = [_line(**_decision(trace, settings.first_request_id))[:-1] for trace in self._new]
        self._new.clear()
        records = b"".join(
            (b",\n" if number else b'{"records": [\n') + line
            for number, line in enumerate(lines, self._count)
        )
        self._count += len(lines)
        totals = {
            "policy": settings.signal.value,
            "cost_policy": settings.routing.cost_policy.value,
            "data_parallel_size": settings.expected_ranks,
            "num_requests": self._count,
            "accuracy": {number: a.fields() for number, a in fleet.router.accuracy.items()},
            "weight_epoch": fleet.weight_epoch,
        }
        end = (b"\n], " if self._count else b'{"records": [], ') + json.dumps(totals)[1:].encode()
        self._attempt(lambda: self._replace_end(records, end + b"\n"))

    def _replace_end(self, records: bytes, end: bytes) -> None:
        self._file.truncate(self._size)
        self._file.write(records + end)
        self._file.flush()
        self._size += len(records)


def _decision(trace: m.Trace, first_request_id: int) -> dict[str, Any]:
    """What a schedule says of a request; ids count from 0."""
    return {
        "request_id": (trace.request_id - first_request_id) % REQUEST_IDS,
        "rank_index": trace.rank,
        "num_hashes": len(trace.hashes or b"") // HASH_BYTES,
        "prompt_tokens": trace.prompt_tokens,
        "predicted_tokens": trace.predicted_tokens,
        "cached_tokens": trace.cached_tokens,
        "in_window": trace.in_window,
    }


class Record(_Output):
    """Every request as it ends, a line of JSON each: what tools/replay reads. No prompt text.

    The first line, and another for each start of a coordinator with the same file, is

        {"event": "open", "version": 1, "block_size": 256, "ranks": 2, "policy": …,
         "cost_policy": …}

    and all others, in the order in which requests end, are

        {"event": "request", "time": 1764490012.031, "seconds": 1.219, "client": "a1b2",
         "prompt_tokens": 900, "hashes": "9f3c…", "rank": 4, "outcome": "answered",
         "cached_tokens": 768, "output_tokens": 89}

    (on one line). `ranks` are the replicas that the coordinator was told to expect, 0 where it was
    not told. `time` is when the request came, Unix seconds; `seconds` how long it took in all;
    `client` the hexadecimal identity of the coordinator's client, an HTTP front end as a rule; null
    once it was gone. `hashes` are the packed block hashes (little-endian int64) in hexadecimal,
    null where the client did not hash or the policy reads none. `rank` had it last, null where none
    did. `outcome` is `answered`, `failed` (the engine could not take it), `replica_lost`,
    `no_replica` or `fleet_paused` (given up in a pause). `cached_tokens` and `output_tokens` are -1
    where the engine does not tell.

    Lines are added to what the file holds, and are there after a second. Requests that were
    refused, or whose client was gone before a rank had them, or that were in flight when the
    coordinator ended, are not in it. When the file cannot be written any more, e.g. because the
    disk is full, the log says so and the coordinator goes on.

    Nobody but its owner may read the file. Before a line would make it too large, it is renamed to
    `FILE.1`, the older `FILE.1` is lost, and a new one begins with an `open` line of the same
    coordinator, in which `"continues"` is true. A line that no file has room for is left out.

    Args:
        path: The file; lines are added to it.
        settings: What the coordinator is started with.
        max_bytes: The file's largest size.
        clock: The coordinator's clock, seconds.

    Raises:
        OSError: The file cannot be written, or is not a plain file of this user.
    """

    ENDED = "record_ended"

    def __init__(
        self,
        path: str | Path,
        settings: CoordinatorSettings,
        max_bytes: int = RecordSettings().record_max_bytes,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(path)
        self._settings = settings
        self._max_bytes = max_bytes
        self._room = max_bytes - len(self._opening(continues=True))
        self._left_out = False
        self._clock = clock
        self._epoch = time.time() - clock()
        self._size = _end_line(self._file)
        self._write(self._opening())
        self.flush()

    def add(self, trace: m.Trace) -> None:
        """A request is over."""
        line = _line(
            event="request",
            time=round(self._epoch + trace.came, 6),
            seconds=round(self._clock() - trace.came, 6),
            client=None if trace.client is None else trace.client.hex(),
            prompt_tokens=trace.prompt_tokens,
            hashes=None if trace.hashes is None else trace.hashes.hex(),
            rank=trace.rank,
            outcome=trace.outcome.value,
            cached_tokens=trace.cached_tokens,
            output_tokens=_output_tokens(trace.reply),
        )
        if len(line) <= self._room:
            self._write(line)
        else:
            self._leave_out(line)

    def flush(self) -> None:
        """Let others see what is written."""
        self._attempt(self._file.flush)

    def _opening(self, **values: bool) -> bytes:
        settings = self._settings
        return _line(
            event="open",
            version=RECORD_VERSION,
            block_size=settings.block_size_tokens,
            ranks=settings.expected_ranks,
            policy=settings.signal.value,
            cost_policy=settings.routing.cost_policy.value,
            **values,
        )

    def _write(self, line: bytes) -> None:
        if self._size and self._size + len(line) > self._max_bytes:
            self._attempt(self._rotate)
        self._attempt(lambda: self._file.write(line))
        self._size += len(line)

    def _rotate(self) -> None:
        self._file.close()
        with suppress(FileNotFoundError):  # somebody took it away
            os.replace(self._path, f"{self._path}.1")
        self._file = private_files.append(self._path)
        self._size = self._file.write(self._opening(continues=True))

    def _leave_out(self, line: bytes) -> None:
        if not self._left_out:
            fields = {"file": str(self._path), "bytes": len(line), "max_bytes": self._max_bytes}
            logger.warning("%s", render("record_line_too_large", fields))
        self._left_out = True


def _line(**values: Any) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def _end_line(file: BinaryIO) -> int:
    """The size of a file, once its last line has an end: its writer may have been killed."""
    size = os.fstat(file.fileno()).st_size
    if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
        size += file.write(b"\n")
    return size


def _output_tokens(reply: m.Body | None) -> int:
    """How many tokens a packed reply holds, the rest of it skipped; -1 if that is unknown."""
    if reply is None:
        return -1
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(bytes(reply))
    try:
        for _ in range(unpacker.read_map_header()):
            if unpacker.unpack() == "generated_tokens":
                return int(unpacker.read_array_header())
            unpacker.skip()
    except (ValueError, msgpack.exceptions.UnpackException):
        pass  # it is an engine's own affair what it answers
    return -1


def check_file(flag: str, path: str | Path | None) -> None:
    """Refuse a file that is to be written and cannot be.

    Raises:
        SettingsError: Its folder is missing, or something else than a plain file is in its place.
    """
    if not path:
        return
    if not Path(path).parent.is_dir():
        raise SettingsError(f"{flag} {path}: there is no folder {Path(path).parent}")
    if Path(path).is_dir():
        raise SettingsError(f"{flag} {path}: is a folder; name a file")
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise SettingsError(f"{flag} {path}: is a link or a device; name a plain file")


class Books:
    """The files that a coordinator was asked to write.

    Args:
        settings: What it is started with.
        schedule_path: Of the schedule; None for none.
        recording: Of the record.

    Raises:
        OSError: One cannot be written.
    """

    def __init__(
        self, settings: CoordinatorSettings, schedule_path: str | None, recording: RecordSettings
    ):
        self._schedule = Schedule(schedule_path) if schedule_path else None
        path, max_bytes = recording.record, recording.record_max_bytes
        self._record = Record(path, settings, max_bytes) if path else None

    @property
    def kept(self) -> bool:
        """Whether there are any."""
        return self._schedule is not None or self._record is not None

    def add(self, trace: m.Trace) -> None:
        """A request is over."""
        if self._schedule is not None:
            self._schedule.add(trace)
        if self._record is not None:
            self._record.add(trace)

    def flush(self, core: Coordinator) -> None:
        """Let others see what was added."""
        if self._schedule is not None:
            self._schedule.write(core)
        if self._record is not None:
            self._record.flush()

    def close(self) -> None:
        """Write no more."""
        for output in (self._schedule, self._record):
            if output is not None:
                output.close()
