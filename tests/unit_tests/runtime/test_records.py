"""What is written for those who study decisions."""

import errno
import io
import json
import os
import time

import msgpack
import pytest
from builders import BLOCK, make_settings

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.core import Coordinator
from megatron.core.inference.coordinator.ledger import REQUEST_IDS
from megatron.core.inference.coordinator.runtime import private_files
from megatron.core.inference.coordinator.runtime.records import Books, Record, Schedule, check_file
from megatron.core.inference.coordinator.settings import RecordSettings, SettingsError

HASHES = bytes(range(16))


def trace(outcome=m.Outcome.ANSWERED, **values):
    usual = {"request_id": 7, "client": b"\xa1b", "came": 12.0, "prompt_tokens": 9,
             "hashes": HASHES, "rank": 4}  # fmt: skip
    return m.Trace(outcome, **usual | values)


def reply(**values):
    return msgpack.packb({"request_id": 1, "prompt": [1, 2], **values, "status": "COMPLETED"})


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- the record --------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    return tmp_path / "record.jsonl"


def test_a_record_has_a_line_for_each_request(path):
    record = Record(path, make_settings(), clock=lambda: 14.5)
    before = time.time() - 14.5
    record.add(trace(cached_tokens=8, reply=reply(generated_tokens=[5] * 20)))
    record.close()
    opened, request = lines(path)
    assert opened == {
        "event": "open",
        "version": 1,
        "block_size": BLOCK,
        "ranks": 0,
        "policy": "longest_prefix",
        "cost_policy": "relative_load_weighted",
    }
    assert request.pop("time") == pytest.approx(before + 12.0, abs=5)
    assert request == {
        "event": "request",
        "seconds": 2.5,
        "client": "a162",
        "prompt_tokens": 9,
        "hashes": HASHES.hex(),
        "rank": 4,
        "outcome": "answered",
        "cached_tokens": 8,
        "output_tokens": 20,
    }


def test_what_is_not_known_is_told_so(path):
    record = Record(path, make_settings())
    record.add(trace(m.Outcome.NO_REPLICA, client=None, hashes=None, rank=None, prompt_tokens=-1))
    record.close()
    request = lines(path)[1]
    names = ("client", "hashes", "rank", "prompt_tokens", "cached_tokens", "output_tokens")
    assert [request[name] for name in names] == [None, None, None, -1, -1, -1]
    assert request["outcome"] == "no_replica"


@pytest.mark.parametrize(
    "answer",
    [
        *(reply(), reply(generated_tokens=None), reply(generated_tokens=3)),
        *(b"", b"\xc1", b"\x81", b"\x93"),
    ],
)
def test_a_reply_may_be_anything(path, answer):
    record = Record(path, make_settings())
    record.add(trace(reply=answer))
    record.close()
    assert lines(path)[1]["output_tokens"] == -1


def test_lines_are_added_to_those_of_an_earlier_coordinator(path):
    for _ in range(2):
        record = Record(path, make_settings())
        record.add(trace())
        record.close()
    assert [line["event"] for line in lines(path)] == ["open", "request"] * 2


def test_a_line_that_an_earlier_coordinator_did_not_end_is_ended(path):
    path.write_text('{"event": "requ')
    Record(path, make_settings()).close()
    cut, opened = path.read_text().splitlines()
    assert (cut, json.loads(opened)["event"]) == ('{"event": "requ', "open")


def test_others_see_what_is_written_at_each_tick(path):
    books = Books(make_settings(), None, RecordSettings(str(path)))
    books.add(trace())
    assert len(lines(path)) == 1
    books.flush(Coordinator(make_settings()))
    assert len(lines(path)) == 2
    books.close()


def test_a_full_disk_ends_the_record_and_nothing_else(caplog, path, monkeypatch):
    with open("/dev/full", "wb") as full:
        monkeypatch.setattr(private_files, "append", lambda path: full)
        record = Record(path, make_settings())
    for _ in range(3):
        record.add(trace())
        record.flush()
    record.close()
    (line,) = caplog.messages
    assert line == f"record_ended file='{path}' error='No space left on device'"


# --- whose the record is -----------------------------------------------------------------------


def mode(path):
    return path.stat().st_mode & 0o777


@pytest.fixture
def no_umask():
    mask = os.umask(0)
    yield
    os.umask(mask)


@pytest.mark.usefixtures("no_umask")
def test_nobody_else_may_read_it_also_where_it_is_an_older_one(path):
    Record(path, make_settings()).close()
    assert mode(path) == 0o600
    path.chmod(0o644)
    Record(path, make_settings()).close()
    assert (mode(path), len(lines(path))) == (0o600, 2)


def test_it_goes_into_no_file_of_anybody_else(path, tmp_path):
    others = tmp_path / "others"
    others.write_text("precious")
    path.symlink_to(others)
    with pytest.raises(PermissionError, match="is a symbolic link; name the file itself"):
        Record(path, make_settings())
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(PermissionError, match="is not a plain file"):
        Record(path, make_settings())
    path.unlink()
    path.touch()
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        with pytest.raises(PermissionError, match="belongs to user 12345; it must be a file of"):
            Record(path, make_settings())
    assert (others.read_text(), path.read_text()) == ("precious", "")


def test_a_folder_may_be_a_link(path, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "link").symlink_to("logs")
    Record(tmp_path / "link" / "record.jsonl", make_settings()).close()
    assert len(lines(tmp_path / "logs" / "record.jsonl")) == 1


# --- how large it grows ------------------------------------------------------------------------

LINE = 250
"""More bytes than a line of `trace()` has."""


def test_one_that_would_grow_too_large_begins_anew(path):
    older = path.with_name("record.jsonl.1")
    older.symlink_to(path.with_name("others"))
    record = Record(path, make_settings(), max_bytes=4 * LINE)
    for number in range(40):
        record.add(trace(rank=number))
        record.flush()
        assert path.stat().st_size <= 4 * LINE
    record.close()
    assert not older.is_symlink()
    assert not path.with_name("others").exists()
    assert (mode(older), mode(path)) == (0o600, 0o600)
    assert 3 * LINE < older.stat().st_size <= 4 * LINE
    first, *before = lines(older)
    second, *after = lines(path)
    assert first == second
    assert (first["event"], first["continues"], first["version"]) == ("open", True, 1)
    ranks = [line["rank"] for line in before + after]
    assert ranks == list(range(ranks[0], 40))


def test_a_line_that_no_file_has_room_for_is_left_out_and_told_once(path, caplog):
    record = Record(path, make_settings(), max_bytes=4 * LINE)
    record.add(trace())
    for _ in range(2):
        record.add(trace(hashes=bytes(2 * LINE)))
    record.add(trace())
    record.close()
    assert [line["event"] for line in lines(path)] == ["open", "request", "request"]
    (said,) = caplog.messages
    assert said.startswith(f"record_line_too_large file='{path}' bytes=")
    assert not path.with_name("record.jsonl.1").exists()


def test_a_record_whose_file_is_gone_goes_on_in_a_new_one(path):
    record = Record(path, make_settings(), max_bytes=2 * LINE)
    record.add(trace())
    path.unlink()
    record.add(trace())
    record.close()
    assert [line["event"] for line in lines(path)] == ["open", "request"]


def test_one_that_cannot_be_renamed_ends_and_nothing_else(path, caplog):
    (path.with_name("record.jsonl.1") / "x").mkdir(parents=True)
    record = Record(path, make_settings(), max_bytes=2 * LINE)
    for _ in range(3):
        record.add(trace())
    record.close()
    (said,) = caplog.messages
    assert said.startswith("record_ended")


def test_a_file_that_cannot_be_written_is_refused_by_name(tmp_path):
    check_file("--record", "")
    check_file("--record", tmp_path / "record.jsonl")
    with pytest.raises(SettingsError, match=f"^--record {tmp_path}: is a folder; name a file$"):
        check_file("--record", tmp_path)
    with pytest.raises(SettingsError, match=f"^--record {tmp_path}/x/y: there is no folder"):
        check_file("--record", tmp_path / "x" / "y")
    (tmp_path / "link").symlink_to("record.jsonl")
    with pytest.raises(SettingsError, match=r"link: is a link or a device; name a plain file$"):
        check_file("--record", tmp_path / "link")


# --- the schedule, and both --------------------------------------------------------------------


def test_a_schedule_has_what_was_answered(tmp_path):
    core = Coordinator(make_settings(expected_ranks=3, first_request_id=REQUEST_IDS - 1))
    schedule = Schedule(tmp_path / "schedule.json")
    schedule.add(trace(request_id=1))  # ids wrap
    schedule.add(trace(m.Outcome.REPLICA_LOST, request_id=REQUEST_IDS - 1))
    schedule.add(trace(request_id=0, hashes=None, predicted_tokens=4, cached_tokens=4))
    schedule.write(core)
    written = json.loads((tmp_path / "schedule.json").read_text())
    assert (written["num_requests"], written["data_parallel_size"]) == (2, 3)
    assert [(r["request_id"], r["num_hashes"]) for r in written["records"]] == [(2, 2), (1, 0)]


def test_a_schedule_is_whole_after_each_write(tmp_path):
    """Written at the end it was lost where the coordinator was killed, or had too little time."""
    core, path = Coordinator(make_settings()), tmp_path / "schedule.json"
    schedule, count = Schedule(path), 0
    for more in (0, 3, 0, 1, 6):
        for _ in range(more):
            schedule.add(trace())
        schedule.write(core)
        count += more
        written = json.loads(path.read_text())
        assert written["num_requests"] == len(written["records"]) == count


class Full(io.BytesIO):
    """A file on a full disk."""

    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_schedule_that_cannot_be_written_ends_and_nothing_else(tmp_path, caplog):
    core, schedule = Coordinator(make_settings()), Schedule(tmp_path / "schedule.json")
    schedule._file.close()
    schedule._file = Full()
    for _ in range(2):
        schedule.add(trace())
        schedule.write(core)
    schedule.close()
    (said,) = caplog.messages
    assert said.startswith("schedule_ended")
    assert "No space left" in said


@pytest.mark.usefixtures("no_umask")
def test_a_schedule_is_its_owners_alone_and_goes_into_no_file_of_anybody_else(tmp_path):
    path, others = tmp_path / "schedule.json", tmp_path / "others"
    others.write_text("precious")
    path.symlink_to(others)
    Schedule(path).write(Coordinator(make_settings()))
    assert not path.is_symlink()
    assert mode(path) == 0o600
    assert others.read_text() == "precious"
    assert {file.name for file in tmp_path.iterdir()} == {"schedule.json", "others"}


def test_where_nothing_is_asked_for_nothing_is_kept(tmp_path):
    books = Books(make_settings(), None, RecordSettings())
    books.add(trace())
    books.flush(Coordinator(make_settings()))
    books.close()
    assert not books.kept
    assert list(tmp_path.iterdir()) == []


def test_both_may_be_asked_for(tmp_path, path):
    schedule = tmp_path / "schedule.json"
    books = Books(make_settings(), str(schedule), RecordSettings(str(path)))
    assert books.kept
    books.add(trace())
    books.flush(Coordinator(make_settings()))
    books.close()
    assert (len(lines(path)), json.loads(schedule.read_text())["num_requests"]) == (2, 1)
