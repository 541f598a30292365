"""tools/replay: sessions from files and from a seed."""

import gzip
import json
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from replay import shared_traces
from replay.decision_log import read_decisions
from replay.figures import bound
from replay.generator import Shape, rollouts
from replay.jsonl import read_sessions, write_sessions
from replay.options import SHARED, parser, setting_of
from replay.workload import ChainBuilder, InputError, block_names, request_of

HEADER = {"format": "replay-sessions", "version": 1, "name": "mine", "block_size": 4}


def written(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def session(**values):
    return {"id": "s", "h": [[0, 5]], "turns": [{"in": 9, "out": 3}, {"in": 20, "out": 1}]} | values


def blocks(chain):
    return [chain[at : at + 8] for at in range(0, len(chain), 8)]


# --- our own format ----------------------------------------------------------------------------


def test_sessions_are_read_as_they_are_meant(tmp_path):
    other = session(id="t", group="g", h=[[0, 2], [9, 1]], turns=[{"in": 12, "out": 2}])
    own = {"in": 11, "out": 1, "gap": 0.5, "h": [[0, 1], [40, 1]]}
    third = session(id="u", turns=[{"in": 20, "out": 3}, own])
    read = read_sessions(written(tmp_path / "a.jsonl", HEADER, session(), other, third))
    first, second, branched = read.sessions
    assert (read.name, read.block_size, read.requests, read.timed) == ("mine", 4, 5, False)
    assert blocks(first.chains[0])[:2] == blocks(second.chains[0])[:2]
    assert blocks(first.chains[0])[2] != blocks(second.chains[0])[2]
    assert len(request_of(read, 0, 0, 0.0).hashes) == 2 * 8
    assert request_of(read, 2, 1, 0.0).hashes[:8] == first.chains[0][:8]
    assert request_of(read, 2, 1, 0.0).hashes[8:] != first.chains[0][8:16]
    assert (branched.turns[1].gap, second.group) == (0.5, "g")


def test_what_is_written_is_read_again(tmp_path):
    made = rollouts(Shape(groups=2, group_size=3, turns=12), 1)
    write_sessions(made, tmp_path / "made.jsonl.gz")
    read = read_sessions(tmp_path / "made.jsonl.gz")
    assert [s.turns for s in read.sessions] == [s.turns for s in made.sessions]
    assert bound(read) == pytest.approx(bound(made))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([session()], "a.jsonl:1: the first line must be"),
        ([HEADER | {"version": 2}, session()], "a.jsonl:1: version must be 1"),
        ([HEADER | {"block_size": 0}, session()], "a.jsonl:1: block_size is 0; it must be"),
        ([HEADER], "there are no sessions"),
        ([HEADER, session(), session(h=[[0, 3]])], r"a.jsonl:3, turns\[1\]: a prompt of 20 tokens"),
        ([HEADER, session(h=[[0]])], r"a.jsonl:2: h must be a list of \[start, count\]"),
        ([HEADER, session(turns=[])], "a.jsonl:2: turns must be a list of one object or more"),
        ([HEADER, session(turns=[{"in": 4.5, "out": 1}])], "in is 4.5; it must be a whole number"),
        ([HEADER, session(turns=[{"in": 4}])], "out is None; it must be a number, 1 or more"),
        ([HEADER, session(id=7)], "a.jsonl:2: id is 7; it must be a string"),
        ([HEADER, [1]], "a.jsonl:2: is no JSON object"),
    ],
)
def test_a_bad_file_is_refused_with_line_and_reason(tmp_path, lines, message):
    with pytest.raises(InputError, match=message):
        read_sessions(written(tmp_path / "a.jsonl", *lines))


def test_what_is_no_json_no_text_or_not_there_is_refused(tmp_path):
    path = written(tmp_path / "a.jsonl", HEADER)
    with path.open("a") as file:
        file.write('{"id": \n')
    with pytest.raises(InputError, match=r"a.jsonl:2: is no JSON \(Expecting value: column"):
        read_sessions(path)
    with pytest.raises(InputError, match=r"b.jsonl: cannot be read \(No such file"):
        read_sessions(tmp_path / "b.jsonl")
    cut = tmp_path / "c.jsonl.gz"
    cut.write_bytes(gzip.compress(json.dumps(HEADER).encode() * 50)[:-9])
    with pytest.raises(InputError, match=r"c.jsonl.gz(:1)?: (cannot be read|is no JSON)"):
        read_sessions(cut)


# --- decision logs -----------------------------------------------------------------------------

OPEN = {"event": "open", "version": 1, "block_size": 4, "policy": "longest_prefix"}


def ended(time, seconds, names, tokens=None, **values):
    about = {"prompt_tokens": 4 * len(names) if tokens is None else tokens, "output_tokens": 10}
    hashes = b"".join(names).hex()
    return {"event": "request", "time": time, "seconds": seconds, "hashes": hashes, **about,
            **values}  # fmt: skip


def test_requests_that_go_on_from_each_other_become_a_session(tmp_path):
    names = blocks(block_names(np.arange(6), 1))
    path = written(
        tmp_path / "log.jsonl",
        OPEN,
        ended(100.0, 1.0, names[:2]),
        ended(100.5, 1.0, names[4:6]),
        ended(103.0, 1.0, names[:4], tokens=18, output_tokens=7, outcome="replica_lost"),
        ended(105.0, 1.0, [], hashes=None, tokens=9, output_tokens=-1),
    )
    read = read_decisions(path)
    first, second, third = read.sessions
    assert [(t.prompt_tokens, t.output_tokens, t.at, t.gap) for t in first.turns] == [
        (8, 10, 0.0, None),
        (18, 7, 3.0, 2.0),
    ]
    assert first.chains == [b"".join(names[:4])]
    assert (len(second.turns), second.turns[0].at) == (1, 0.5)
    assert (third.turns[0].prompt_tokens, len(third.chains[0])) == (9, 16)
    assert read.timed


def test_while_there_was_no_coordinator_no_session_paused(tmp_path):
    names = blocks(block_names(np.arange(6), 1))
    path = written(
        tmp_path / "log.jsonl",
        OPEN,
        ended(100.0, 1.0, names[:2]),
        OPEN,
        ended(9000.0, 1.0, names[:4]),
        ended(9003.0, 1.0, names),
    )
    (session,) = read_decisions(path).sessions
    assert [turn.gap for turn in session.turns] == [None, None, 2.0]


def test_a_record_that_grew_too_large_is_read_from_the_older_file_on(tmp_path):
    names = blocks(block_names(np.arange(6), 1))
    path = written(tmp_path / "log.jsonl", OPEN | {"continues": True}, ended(103.0, 1.0, names[:4]))
    older = written(tmp_path / "log.jsonl.1", OPEN, ended(100.0, 1.0, names[:2]))
    read = read_decisions(path)
    (session,) = read.sessions
    assert (read.name, [turn.gap for turn in session.turns]) == ("log", [None, 2.0])
    written(path, OPEN, ended(103.0, 1.0, names[:4]))  # of a coordinator that was started again
    (session,) = read_decisions(path).sessions
    assert [turn.gap for turn in session.turns] == [None, None]
    path.unlink()  # the coordinator ended between the two files
    assert [len(s.turns) for s in read_decisions(path).sessions] == [1]
    older.unlink()
    with pytest.raises(InputError, match=r"log\.jsonl: cannot be read"):
        read_decisions(path)


def test_it_is_replayed_on_as_many_replicas_as_it_was_recorded_on(tmp_path):
    names = blocks(block_names(np.arange(2), 1))

    def replicas(*lines, flags=()):
        path = written(tmp_path / "log.jsonl", *lines)
        words = ["--workload", "decisions", "--path", str(path), *flags]
        return setting_of(parser(None).parse_args(words)).fleet.replicas

    request = ended(1.0, 1.0, names)
    assert replicas(OPEN, request) == 16  # nothing is known
    assert replicas(OPEN | {"ranks": 4}, request | {"rank": 2}) == 4
    assert replicas(OPEN | {"ranks": 0}, request | {"rank": 6}, request | {"rank": None}) == 7
    assert replicas(OPEN | {"ranks": 4}, request, flags=["--replicas", "3"]) == 3


def test_what_the_engine_could_not_take_and_a_line_that_was_cut_are_left_out(tmp_path):
    names = blocks(block_names(np.arange(2), 1))
    failed = ended(2.0, 0.1, names, outcome="failed")
    path = written(tmp_path / "log.jsonl", OPEN, failed, ended(1.0, 1.0, names))
    with path.open("a") as file:
        file.write(json.dumps(ended(3.0, 1.0, names))[:40])
    (session,) = read_decisions(path).sessions
    assert [turn.at for turn in session.turns] == [0.0]


def test_what_came_counts_and_not_what_ended_first(tmp_path):
    names = blocks(block_names(np.arange(6), 1))
    path = written(
        tmp_path / "log.jsonl",
        OPEN,
        ended(102.0, 0.5, names[:1]),
        ended(100.0, 9.0, names[2:4]),
        ended(104.0, 9.0, names[2:5]),  # sent before the one it goes on from was answered
    )
    read = read_decisions(path)
    assert [[turn.at for turn in session.turns] for session in read.sessions] == [[0], [2], [4]]


def test_of_members_of_a_group_each_goes_on_in_its_own_session(tmp_path):
    names = blocks(block_names(np.arange(6), 1))
    path = written(
        tmp_path / "log.jsonl",
        OPEN,
        *(ended(100.0 + n, 5.0, names[:2]) for n in range(3)),
        *(ended(110.0 + n, 5.0, [*names[:2], names[3 + n]]) for n in range(3)),
    )
    read = read_decisions(path)
    assert [[turn.at for turn in session.turns] for session in read.sessions] == [
        [0, 10],
        [1, 11],
        [2, 12],
    ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([ended(1, 1, [])], "log.jsonl:1: the first event must be open"),
        ([OPEN, {"event": "x"}], "log.jsonl:2: event is 'x'; it must be one of open, request"),
        ([OPEN, ended(1, -1, [])], "log.jsonl:2: seconds is -1; it must be a number, 0 or more"),
        ([OPEN, ended(1, 1, [], hashes="zz")], "log.jsonl:2: hashes must be hexadecimal"),
        ([OPEN, ended(1, 1, [b"12345678"], tokens=9)], "log.jsonl:2: hashes are not those of"),
        ([OPEN, OPEN | {"block_size": 8}], "log.jsonl:2: block_size is 8; it was 4 before"),
        ([OPEN, OPEN | {"version": 2}], "log.jsonl:2: version must be 1"),
        ([OPEN], "there is no request in it"),
        ([OPEN, ended(1, 1, [], outcome="failed")], "there is no request in it"),
        ([OPEN, ended(1, 1, [], hashes=None, tokens=9)], "no request in it is hashed, so nothing"),
    ],
)
def test_a_bad_log_is_refused_with_line_and_reason(tmp_path, lines, message):
    with pytest.raises(InputError, match=message):
        read_decisions(written(tmp_path / "log.jsonl", *lines))


# --- generated ---------------------------------------------------------------------------------


def test_generated_rollouts_have_the_shape_they_should_have():
    made = rollouts(Shape(group_size=1), 5)
    turns = [turn for s in made.sessions for turn in s.turns]
    outputs = [turn.output_tokens for turn in turns]
    added = [
        b.prompt_tokens - a.prompt_tokens
        for s in made.sessions
        for a, b in zip(s.turns, s.turns[1:], strict=False)
    ]
    assert 31 <= statistics.median(len(s.turns) for s in made.sessions) <= 41
    assert 1400 <= statistics.median(s.turns[0].prompt_tokens for s in made.sessions) <= 1800
    assert 80 <= statistics.median(outputs) <= 98
    assert 600 <= np.percentile(outputs, 90) <= 760
    assert 280 <= statistics.median(added) <= 350


def test_members_share_their_first_prompt_and_all_share_the_system_blocks():
    made = rollouts(Shape(groups=2, group_size=2), 0)
    one, two, other, _ = (session.chains[0] for session in made.sessions)
    shared = made.sessions[0].turns[0].prompt_tokens // 16 * 8
    assert one[:shared] == two[:shared]
    assert not set(blocks(one[shared:])) & set(blocks(two[shared:]))
    assert one[:64] == other[:64]
    assert one[64:72] != other[64:72]
    assert rollouts(Shape(groups=2, group_size=2), 0) == made
    assert rollouts(Shape(groups=2, group_size=2), 1) != made


def test_a_session_that_goes_back_gets_another_chain():
    chains = ChainBuilder()
    assert [chains.add(prompt) for prompt in (b"ab", b"abcd", b"abc", b"abx", b"abxy")] == [
        0, 0, 0, 1, 1,
    ]  # fmt: skip
    assert chains.chains == [b"abcd", b"abxy"]


# --- recorded workloads ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "read", "sessions", "requests"),
    [
        ("swebench_gemini3", shared_traces.read_swebench, 500, 20_163),
        ("claude_code_weka", shared_traces.read_claude_code, 357, 20_804),
        ("tau_airline_gpt4o", shared_traces.read_tau, 200, 2_454),
        ("mooncake", shared_traces.read_mooncake, 12_031, 12_031),
    ],
)
def test_a_recorded_workload_is_read_as_a_whole(folder, read, sessions, requests):
    if not (SHARED / folder).exists():
        pytest.skip(f"the workload {folder} is not at hand")
    workload = read(SHARED / folder)
    assert (len(workload.sessions), workload.requests) == (sessions, requests)


def test_the_reference_rollouts_are_128_groups_in_the_order_of_the_seed():
    if not (SHARED / "reference_rollouts.json").exists():
        pytest.skip("the reference rollouts are not at hand")
    first, second = (shared_traces.read_reference(SHARED, seed) for seed in (0, 1))
    assert len(first.sessions) == 1024
    assert first.requests == second.requests == 40_072
    assert [s.group for s in first.sessions] != [s.group for s in second.sessions]
    assert bound(first) == pytest.approx(0.963, abs=0.002)
    with pytest.raises(InputError, match="no group order for seed 3"):
        shared_traces.read_reference(SHARED, 3)
