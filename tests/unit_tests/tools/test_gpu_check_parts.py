"""gpu_check.py without engines: its prompts, figures and verdict, and processes that play replicas.

A real run is in tests/end_to_end/test_gpu_check.py.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

import gpu_check
import gpu_check_fleet
from gpu_check_fleet import Budget, Fleet, FleetFailed, OutOfTime, Sessions
from gpu_check_parts import (
    CPU_SIZES,
    Outcome,
    Sizes,
    first_token_seconds,
    make_prompts,
    skip_bound,
)
from gpu_check_report import comparison, distinct_answers, exit_code, failures, summary, table

TOOLS = Path(gpu_check.__file__).parent
SMALL = replace(CPU_SIZES, sessions=3, turns=3, first_tokens=80, last_tokens=160, replicas=2)


# --- sizes and prompts --------------------------------------------------------------------------


def test_prompts_have_the_lengths_asked_for_and_each_turn_begins_with_the_one_before():
    prompts = make_prompts(Sizes())
    assert [len(session) for session in prompts] == [4] * 8
    for session in prompts:
        assert [len(prompt) for prompt in session] == [4000, 4666, 5333, 6000]
        assert all(b[: len(a)] == a for a, b in pairwise(session))


def test_sessions_share_a_beginning_and_nothing_else():
    one, two, _ = (session[0] for session in make_prompts(SMALL))
    assert one[:10] == two[:10]
    assert one[10:] != two[10:]


def test_prompts_are_the_same_every_time():
    assert make_prompts(SMALL) == make_prompts(SMALL)


def test_one_turn_has_the_first_length():
    (session,) = make_prompts(replace(SMALL, sessions=1, turns=1))
    assert [len(prompt) for prompt in session] == [80]


def test_the_bound_counts_whole_blocks_of_what_was_sent_before():
    history = list(range(40, 90)) * 4
    # Of 200 tokens 3 blocks of 64 are whole; the engine computes the rest, and all of the first.
    assert skip_bound([[history[:128], history]], 64) == 128 / 328
    # Another session's equal prompt counts too, but never the last two tokens.
    assert skip_bound([[history[:128]], [history[:128]]], 64) == 64 / 256


@pytest.mark.parametrize("sizes", [Sizes(), CPU_SIZES, SMALL, replace(SMALL, sessions=100)])
def test_a_cache_holds_twice_what_all_sessions_fill(sizes):
    blocks = -(-(sizes.last_tokens + sizes.new_tokens) // sizes.block_size)
    assert sizes.cache_blocks >= 2 * sizes.sessions * blocks
    values = 2 * sizes.layers * sizes.kv_groups * sizes.hidden // sizes.heads * sizes.block_size
    block_bytes = values * {"bf16": 2, "float32": 4}[sizes.dtype]
    assert int(sizes.cache_gb * 2**30) // block_bytes == sizes.cache_blocks
    assert sizes.max_requests >= sizes.sessions


def test_four_replicas_fit_on_a_small_gpu():
    assert 4 * Sizes().cache_gb < 10


# --- figures ------------------------------------------------------------------------------------


def replica(steps=(), computed=0, skipped=0, requests=0):
    counted = {"computed": computed, "skipped": skipped, "requests": requests, "evicted": 0}
    return counted | {"steps": list(steps), "peak_gib": 0.5}


def outcome(answers=None, **fields):
    answers = {(0, 0): [1, 2], (0, 1): [3, 4]} if answers is None else answers
    return Outcome(answers, **({"seconds": 2.0, "first_token": [0.1, 0.3]} | fields))


def test_time_to_first_token_includes_the_way_to_the_engine():
    events = [{"type": "ADD_ENGINE", "timestamp": 100.5}, {"type": "FINISH", "timestamp": 103.0}]
    assert first_token_seconds({"events": events, "ttft": 0.25}, sent=100.0) == 0.75
    assert first_token_seconds({"events": events, "ttft": None}, sent=100.0) is None
    assert first_token_seconds({"events": [], "ttft": 0.25}, sent=100.0) is None


def test_a_summary_adds_replicas_up_and_tells_kinds_of_steps_apart():
    one = replica([(0.3, False), (0.01, True)], computed=300, skipped=100, requests=3)
    two = replica([(0.1, False), (0.03, True)], computed=100, skipped=500, requests=1)
    figures = summary(outcome(replicas=[one, two]))
    assert figures["skip_rate"] == 0.6
    assert figures["prefill_step_ms"] == {"median": 200.0, "p90": 280.0, "count": 2}
    assert figures["decode_step_ms"]["median"] == 20.0
    assert figures["prefill_share_of_steps"] == round(0.4 / 0.44, 4)
    assert figures["requests_per_replica"] == [3, 1]
    assert (figures["answered"], figures["ttft_ms"]["median"]) == (2, 200.0)


def test_a_run_without_figures_says_none():
    figures = summary(Outcome())
    assert figures["skip_rate"] is None
    assert figures["ttft_ms"] == {"median": None, "p90": None, "count": 0}
    json.dumps(figures, allow_nan=False)


def test_a_ratio_below_one_says_that_ours_is_faster():
    slow = outcome(first_token=[0.4], seconds=4.0, replicas=[replica([(0.2, True)])])
    fast = outcome(first_token=[0.1], seconds=1.0, replicas=[replica([(0.1, True)])])
    ratios = comparison(fast, slow)["ratios"]
    assert ratios == {"ttft": 0.25, "prefill_step": None, "decode_step": 0.5, "seconds": 0.25}


def test_answers_are_compared_where_both_have_them():
    other = outcome({(0, 0): [1, 2], (0, 1): [3, 9], (5, 5): [7]})
    found = comparison(outcome(), other)
    assert (found["compared"], found["outputs_equal"]) == (2, False)
    assert (found["equal_share"], found["first_token_share"]) == (0.5, 1.0)
    assert comparison(outcome(), outcome())["outputs_equal"]
    assert not comparison(outcome(), Outcome())["outputs_equal"]


def test_equal_answers_to_everything_are_counted_once():
    assert distinct_answers(outcome()) == 2
    assert distinct_answers(outcome({(0, 0): [1], (0, 1): [1]})) == 1


# --- the verdict --------------------------------------------------------------------------------

DIFFERENT = {"released": {"compared": 4, "outputs_equal": False, "equal_share": 0.75}}
WELL = {"ours": {"lost": 0}, "released": {"lost": 0}}


@pytest.mark.parametrize(
    ("device", "dtype", "fails"),
    [("cpu", "float32", True), ("cpu", "bf16", False), ("cuda", "float32", False)],
)
def test_outputs_must_be_equal_in_float32_on_a_cpu(device, dtype, fails):
    sizes = Sizes(device=device, dtype=dtype)
    found = failures(sizes, WELL, DIFFERENT)
    assert found == ["released: outputs differ from ours (75% are equal)"] * fails


@pytest.mark.parametrize("run", ["ours", "released"])
def test_a_lost_request_fails_everywhere(run):
    found = failures(Sizes(), WELL | {run: {"lost": 2}}, {})
    assert found == [f"{run}: 2 request(s) lost"]


def test_the_exit_code_tells_a_failure_from_a_lack_of_time():
    assert exit_code({"failures": [], "not_measured": []}) == 0
    assert exit_code({"failures": [], "not_measured": ["ours"]}) == 3
    assert exit_code({"failures": ["bad"], "not_measured": ["ours"]}) == 1


# --- flags and the report -----------------------------------------------------------------------


def test_a_cpu_scales_down_and_flags_win():
    assert gpu_check.parse_args([]).sizes == Sizes()
    assert gpu_check.parse_args(["--device=cpu"]).sizes == CPU_SIZES
    flags = ["--device=cpu", "--replicas=2", "--tokens=100:300", "--dtype=bf16", "--new-tokens=3"]
    expected = replace(CPU_SIZES, replicas=2, first_tokens=100, last_tokens=300, dtype="bf16")
    assert gpu_check.parse_args(flags).sizes == replace(expected, new_tokens=3)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--tokens=4000", "FIRST:LAST"),
        ("--tokens=900:100", "FIRST <= LAST"),
        ("--replicas=0", "--replicas must be 1 or more"),
        ("--new-tokens=-1", "--new-tokens must be 1 or more"),
        ("--budget-seconds=0", "above 0"),
        ("--released-policies=best", "invalid choice"),
    ],
)
def test_a_wrong_flag_is_said(flag, message, capsys):
    with pytest.raises(SystemExit) as ended:
        gpu_check.parse_args([flag])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_help_names_every_exit_code_and_both_commands(capsys):
    with pytest.raises(SystemExit):
        gpu_check.parse_args(["--help"])
    text = capsys.readouterr().out
    for part in ("--device cpu", "0 passed", "1 failed", "3 not all", "docs/gpu.md"):
        assert part in text


def test_without_a_gpu_it_says_what_to_do():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", TOOLS / "gpu_check.py"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.endswith("torch finds no GPU; --device cpu tests the logic\n")


@pytest.fixture
def check():
    return gpu_check.Check(gpu_check.parse_args(["--device=cpu"]), Budget(100))


def test_the_report_is_one_line_of_json_and_a_table(check):
    check.outcomes |= {"ours": outcome(replicas=[replica()]), "released x": outcome()}
    report = check.report()
    assert report["passed"]
    assert report["against"]["released x"]["outputs_equal"]
    assert report["sizes"]["block_size"] == 64
    assert "\n" not in json.dumps(report, allow_nan=False)
    lines = table(report).splitlines()
    assert lines[0].split() == ["ours", "released", "x"]
    assert lines[-1].startswith("ours / released x: outputs equal (100.0 % of 2")


def test_the_report_of_a_check_that_measured_nothing(check):
    check.not_measured.append("ours")
    report = check.report()
    assert not report["passed"]
    assert exit_code(report) == 3
    assert "skip" in table(report)


def test_without_time_no_run_begins(check, capsys):
    check.budget = Budget(0)
    check.run_all()
    names = ["ours", "released longest_prefix", "released load_balanced"]
    assert check.not_measured == names
    assert capsys.readouterr().out.count("no time left to begin") == 3


# --- processes that play replicas ---------------------------------------------------------------


def plays_along(settings, rank, pipe):
    os.setsid()
    pipe.send(("ready", {"rank": rank, "world": settings.environment["WORLD_SIZE"]}))
    assert pipe.recv() == "stop"
    pipe.send(("stats", {"rank": rank}))
    time.sleep(60)


def fails(settings, rank, pipe):
    Path(settings.log).write_text("line 1\nthe reason\n")
    pipe.send(("failed", f"replica {rank}: ValueError: no"))
    time.sleep(60)


def dies(settings, rank, pipe):
    os.kill(os.getpid(), signal.SIGKILL)


def says_nothing(settings, rank, pipe):
    os.setsid()
    child = subprocess.Popen(["sleep", "60"])
    Path(settings.log).write_text(str(child.pid))
    time.sleep(60)


def fleet(tmp_path, body):
    return Fleet(SMALL, "ours", tmp_path, body)


def is_running(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_replicas_tell_what_they_are_and_what_they_did(tmp_path):
    with fleet(tmp_path, plays_along) as replicas:
        processes = replicas._processes
        ready = replicas.ready(Budget(30))
        assert ready == [{"rank": 0, "world": "2"}, {"rank": 1, "world": "2"}]
        assert replicas.stop(Budget(30)) == [{"rank": 0}, {"rank": 1}]
    assert not any(process.is_alive() for process in processes)


def test_a_replica_that_fails_shows_the_end_of_its_log(tmp_path):
    reason = r"ValueError: no\n.*\n    the reason"
    with fleet(tmp_path, fails) as replicas, pytest.raises(FleetFailed, match=reason):
        replicas.ready(Budget(30))


def test_a_replica_that_dies_is_noticed_at_once(tmp_path):
    ended = "its process ended"
    with fleet(tmp_path, dies) as replicas, pytest.raises(FleetFailed, match=ended):
        replicas.ready(Budget(30))


def test_nothing_stays_when_time_is_over(tmp_path):
    logs = [tmp_path / f"ours_{rank}.log" for rank in range(2)]
    with fleet(tmp_path, says_nothing) as replicas:
        deadline = time.monotonic() + 20
        while not all(log.exists() and log.read_text() for log in logs):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = [int(log.read_text()) for log in logs]
        assert all(map(is_running, children))
        with pytest.raises(OutOfTime, match="ready"):
            replicas.ready(Budget(0.2))
    deadline = time.monotonic() + 20
    while any(map(is_running, children)):  # killed; the system collects them when it has time
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- sessions with a client that answers by rote ------------------------------------------------


class Client:
    """Answers every prompt with its length, `late` ones never, `failed` ones with a status."""

    late: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()

    def __init__(self, address):
        self.open: list[int] = []
        Client.last = self

    def start(self, loop):
        self.loop = loop
        self.most = 0

    def add_request(self, prompt, sampling):
        future = self.loop.create_future()
        length = len(prompt)
        self.open.append(length)
        self.most = max(self.most, len(self.open))
        status = "FAILED" if length in self.failed else "COMPLETED"
        events = [{"type": "ADD_ENGINE", "timestamp": time.time()}]
        reply = {"status": status, "generated_tokens": [length], "events": events, "ttft": 0.01}
        if length not in self.late:
            self.loop.call_later(0.01, self._answer, future, length, reply)
        return future

    def _answer(self, future, length, reply):
        self.open.remove(length)
        future.set_result(reply)

    def stop(self):
        self.stopped = True


@pytest.fixture
def hold(monkeypatch):
    def run(budget=10.0, request_seconds=5.0, **behaviour):
        client = type("Behaves", (Client,), behaviour)
        monkeypatch.setattr(gpu_check_fleet, "_client_of", lambda *_: (client, SimpleNamespace()))
        lines = []
        sessions = Sessions("ours", SMALL, Budget(budget), request_seconds, lines.append)
        return sessions.hold("tcp://nowhere"), lines

    return run


def test_sessions_run_at_once_and_their_turns_one_by_one(hold):
    done, lines = hold()
    lengths = [80, 120, 160]
    assert done.answers == {(s, t): [lengths[t]] for s in range(3) for t in range(3)}
    assert len(done.first_token) == 9
    assert all(0 < seconds < 60 for seconds in done.first_token)
    assert (done.lost, done.unsent, Client.last.most) == ([], 0, 3)
    assert Client.last.stopped
    assert lines[-1] == "8 requests answered"


def test_a_request_without_an_answer_is_lost_with_the_turns_after_it(hold):
    done, _ = hold(request_seconds=0.1, late=(120,))
    assert len(done.answers) == 3
    assert len(done.lost) == 6
    assert "session 0, turn 1: no answer within 0.1 s" in done.lost


def test_a_failed_request_is_lost(hold):
    done, _ = hold(failed=(160,))
    assert len(done.answers) == 6
    assert done.lost[0].endswith("turn 2: answered with status FAILED")


def test_what_the_budget_cuts_is_not_lost(hold):
    done, _ = hold(budget=0.3, late=(120,))
    assert (len(done.answers), done.lost, done.unsent) == (3, [], 6)


def test_a_client_that_never_connects_does_not_hold_the_check_up(hold, monkeypatch):
    monkeypatch.setattr(gpu_check_fleet, "_GRACE_SECONDS", 0.1)
    with pytest.raises(OutOfTime, match="did not answer the client"):
        hold(budget=0.1, start=lambda self, loop: time.sleep(20))
