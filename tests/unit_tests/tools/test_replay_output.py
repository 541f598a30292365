"""tools/replay: figures, tables, the page, the advice and the claims."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from replay import claims
from replay.advice import advice, recommended
from replay.command import main
from replay.experiment import Comparison, Run
from replay.figures import FIGURES, bound, markdown_definitions, measure
from replay.pages import page
from replay.simulation import Outcome
from replay.table import summary
from replay.workload import Request, Session, Turn, Workload, block_names

TOOL = Path(__file__).parents[3] / "tools/replay"
SMALL = ["--groups", "4", "--group-size", "2", "--concurrency", "6", "--replicas", "2",
         "--turns", "10", "--cache", "60000", "--quiet"]  # fmt: skip


def ended(arrival, first, last, prompt=100, cached=0):
    request = Request(0, 0, "s", prompt, 5, b"", b"", arrival)
    request.first_token, request.finished, request.cached_tokens = first, last, cached
    return request


def replica(prefilled):
    return SimpleNamespace(prefilled=prefilled, prefill_time=prefilled / 100, busy_time=4.0)


def figures(**values):
    return {figure.key: 1.0 for figure in FIGURES} | values


def comparison(**policies):
    """Policies by name, with figures of each seed."""
    made = Comparison("w", 100, 0.9)
    for name, runs in policies.items():
        made.runs[name.replace("__", "@").replace("_5", ":0.5")] = [
            Run(name, seed, figures(**run), [0.1] * 101, [0.0, 1.0], [[1, 2], [2, 1]])
            for seed, run in enumerate(runs)
        ]
    return made


# --- figures -----------------------------------------------------------------------------------


def test_figures_of_a_run_made_by_hand():
    loads = np.array([[2, 2], [4, 0], [3, 1], [1, 0], [0, 0]], np.int32)
    live = np.array([10, 9, 6, 4, 0], np.int32)
    requests = [ended(0, 1, 4, cached=80), ended(1, 1.5, 2)]
    outcome = Outcome(requests, loads, live, 10, 4.0, [replica(100), replica(20)], 7)
    found = measure(outcome)
    assert found["skip"] == 0.4
    assert found["t90"] == 0.5
    assert found["busy_cv"] == pytest.approx(0.5)  # 0 and 1
    assert found["tail_cv"] == pytest.approx(1.0)
    assert found["max_median"] == pytest.approx((1 + 2) / 2)
    assert found["idle"] == pytest.approx(1 / 10)
    assert found["missed"] == pytest.approx(100 / 60)
    assert found["prefill_share"] == pytest.approx(1.2 / 8)
    assert (found["ttft_p50"], found["request_p50"]) == (0.75, 2.5)


def test_the_bound_is_what_one_infinite_cache_would_skip():
    chain = block_names(np.arange(10), 1)
    turns = [Turn(40, 20), Turn(100, 5)]
    workload = Workload("w", 10, [Session("a", turns, [chain]), Session("b", turns, [chain])])
    assert bound(workload) == pytest.approx((40 + 30 + 90) / 280)  # 2 tokens are always computed
    assert bound(workload, generated=True) == pytest.approx((60 + 30 + 90) / 280)


def test_the_docs_define_the_figures_as_the_code_does():
    page = TOOL.parents[1] / "docs/choosing-a-policy.md"
    assert markdown_definitions() in page.read_text()


# --- what is said of them ----------------------------------------------------------------------


def test_the_table_shows_the_spread_of_several_seeds():
    text = summary(comparison(pinned=[{"skip": 0.5}, {"skip": 0.7}], load_balanced=[{}, {}]))
    (row,) = [line for line in text.splitlines() if line.startswith("pinned")]
    assert "0.600 ±0.100" in row


def test_of_policies_that_are_about_as_fast_the_one_with_the_lowest_tail_is_recommended():
    runs = comparison(
        relative__events=[{"makespan": 1005, "ttft_p99": 1.0}],
        prefill_work__events=[{"makespan": 1000, "ttft_p99": 2.0}],
        pinned=[{"makespan": 900, "ttft_p99": 0.5}],
        load_balanced=[{"makespan": 2000, "ttft_p99": 0.1}],
    )
    own = [name for name in runs.runs if name != "pinned"]
    assert recommended(runs, own) == "relative@events"
    words = advice(runs)
    assert words[0].startswith("Use relative@events")
    assert any("Against load_balanced: makespan -49.8%" in text for text in words)
    assert any(text.startswith("pinned, which is not one of") for text in words)
    assert "one seed was run" in words[-1]


def test_the_page_holds_everything_and_fetches_nothing():
    runs = comparison(relative_5__events=[{}], relative__events=[{}], load_balanced=[{}])
    text = page(runs, {"seeds": [0]})
    assert text.count("<svg") == 3
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", re.sub(r"xlink:href=\"#", "", text))
    assert "<script" not in text
    assert text.index("Figures</h2>") < text.index("Recommendation</h2>")


def test_a_claim_holds_only_if_it_does_with_every_seed():
    before = [{"skip": 0.2, "busy_cv": 0.5}] * 2
    after = [{"skip": 0.9, "busy_cv": 0.3}, {"skip": 0.9, "busy_cv": 0.6}]
    runs = comparison(load_balanced=before, prefill_work__events=before)
    runs.runs[claims.AFFINITY] = comparison(x=after).runs["x"]
    found = {claim.reported.figure: claim for claim in claims.judged(runs)}
    assert found["skip"].holds
    assert not found["busy_cv"].holds
    assert found["skip"].ratios == pytest.approx((0.977 / 0.61, 4.5))
    assert "NO" in claims.claims_table(list(found.values()))


# --- the command -------------------------------------------------------------------------------


def test_the_command_writes_what_it_was_asked_for(tmp_path, capsys):
    files = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    policies = ["--policies", "pinned,relative:0.5,load_balanced", "--seeds", "0,1"]
    assert main("", [*SMALL, *policies, *files]) == 0
    assert "relative:0.5@history" in capsys.readouterr().out
    written = json.loads((tmp_path / "a.json").read_text())
    assert set(written["policies"]) == {
        "pinned", "relative:0.5@events", "relative:0.5@history", "load_balanced",
    }  # fmt: skip
    assert set(written["policies"]["pinned"]["seeds"]) == {"0", "1"}
    assert written["policies"]["pinned"]["figures"]["skip"]["mean"] <= written["bound"]
    assert (tmp_path / "a.html").read_text().startswith("<!DOCTYPE html>")


def test_claims_are_written_with_what_was_reported_and_what_we_found(tmp_path, capsys):
    assert main("", [*SMALL, "--claims", str(tmp_path / "claims.json")]) == 0
    written = json.loads((tmp_path / "claims.json").read_text())
    assert len(written) == len(claims.REPORTED)
    assert all({"claim", "reported", "ours", "direction_holds"} <= set(one) for one in written)
    assert "direction holds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "sessions"], "needs --path"),
        (["--workload", "sessions", "--path", "nowhere.jsonl"], "nowhere.jsonl:1: cannot be read"),
        (["--policies", "best"], "there is no policy 'best'"),
        (["--speedup", "2"], "rollouts has no timestamps"),
        (["--profile", "strict", "--cache", "320"], "a request needs"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_line(arguments, message, capsys):
    assert main("", [*SMALL, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("replay: ")
    assert message in error


def test_it_runs_as_a_folder():
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", str(TOOL), "--help"],
        capture_output=True, text=True, check=True, timeout=200,
    )  # fmt: skip
    assert "--max-rank-requests" in shown.stdout
