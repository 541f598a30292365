"""tools/replay: figures, tables, the page, the advice and the claims."""

import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from replay import claims, looks, plots
from replay.advice import DEFAULT, advice, recommended
from replay.command import main
from replay.experiment import Comparison, Run
from replay.figures import BY_KEY, FIGURES, bound, markdown_definitions, measure
from replay.pages import page
from replay.profiles import PROFILES
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
    return named({n.replace("__", "@").replace("_5", ":0.5"): runs for n, runs in policies.items()})


def named(policies):
    made = Comparison("w", 5_000, 0.9)
    for name, runs in policies.items():
        made.runs[name] = [
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
    assert "-0.0" not in summary(comparison(pinned=[{"load_saved": -0.001}]))


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


def test_seed_by_seed_the_same_rule_tells_who_is_ahead():
    runs = comparison(
        relative__events=[{"makespan": 1009, "ttft_p99": 1.9}] * 2,  # within 1 %, and lower
        prefill_work__events=[{"makespan": 1000, "ttft_p99": 2.0}] * 2,
    )
    assert advice(runs)[0].startswith("Use relative@events")
    assert "relative@events is ahead of it in 2 of 2;" in advice(runs)[-1]


def test_a_tie_is_no_win():
    runs = comparison(relative__events=[{}, {}, {}], prefill_work__events=[{}, {}, {}])
    runs.runs["prefill_work@events"][2].figures["makespan"] = 2.0
    assert "is ahead of it in 1 of 3 (equal in 2);" in advice(runs)[-1]
    even = comparison(pinned=[{}], relative__events=[{}], prefill_work__events=[{}])
    assert not any("did better" in text for text in advice(even))


def test_of_equal_policies_the_default_is_recommended_and_the_others_are_named():
    runs = comparison(prefill_work__events=[{}], added_delay__events=[{"makespan": 2.0}])
    runs.runs[DEFAULT] = runs.runs["prefill_work@events"]
    assert recommended(runs, list(runs.runs)) == DEFAULT
    assert "By this rule it is equal to prefill_work@events." in advice(runs)


def test_few_requests_are_said_to_say_little_of_the_slowest():
    runs = comparison(relative__events=[{}], load_balanced=[{}])
    assert not any("requests only" in text for text in advice(runs))
    runs.requests = 210
    assert advice(runs)[-1] == (
        "A run has 210 requests only: TTFT p99 is that of the slowest 3. Judge on more of them."
    )


def test_differences_say_which_way_is_better():
    runs = comparison(
        load_balanced=[{"makespan": 2.0, "skip": 0.5, "busy_cv": 0.0}],
        relative__events=[{"skip": 0.9, "busy_cv": 0.3}],
    )
    assert (
        "Against load_balanced: makespan -50.0% (better), TTFT p99 +0.0% (equal), "
        "busy CV from 0 to 0.30 (worse), skip rate +40.0 points (better)."
    ) in advice(runs)


def test_of_one_policy_it_is_said_that_nothing_was_compared():
    assert advice(comparison(relative__events=[{}])) == [
        "Only relative@events was run: nothing was compared."
    ]
    text = page(comparison(relative__events=[{}]), {}, "")
    assert "class=best" not in text
    assert "class=recommended" not in text


# --- the page ----------------------------------------------------------------------------------


def test_pictures_of_some_policies_have_the_recommended_and_the_default_and_say_how_many():
    slow, kinds = [{"makespan": 9.0}], ("random", "pinned", "round_robin", "load_balanced")
    others = ["consistent_hash", *(f"capacity:0.{n}@events" for n in range(5))]
    names = [*kinds, *others, "relative:0@events", "relative:2@events", "relative:1@events"]
    runs = named({name: [{}] if name == "relative:2@events" else slow for name in names})
    shown = looks.shown_policies(runs, 8)
    assert len(shown) == 8
    assert shown[-2:] == ["relative:2@events", "relative:1@events"]
    assert "8 of 13 policies, first seed" in page(runs, {}, "")


def test_the_imbalance_is_said_to_be_what_it_is():
    (axes,) = plots.skip_against_imbalance(comparison(pinned=[{}])).axes
    assert "highest load / max(1, median load)" in axes.get_xlabel()
    assert "highest load / max(1, median load)" in BY_KEY["max_median"].meaning


def test_ttft_is_shown_by_who_still_waits():
    runs = comparison(relative__events=[{}], relative__history=[{}])
    (axes,) = plots.ttft_distributions(runs, list(runs.runs)).axes
    told, guessed = axes.lines
    assert (told.get_ydata()[0], told.get_ydata()[-1]) == (1, pytest.approx(0.01))
    assert (told.get_linestyle(), guessed.get_linestyle()) == ("-", "--")
    assert told.get_color() == guessed.get_color()
    assert axes.get_yscale() == "log"


def test_loads_of_all_policies_share_one_axis_and_rare_peaks_do_not_set_the_colours():
    runs = comparison(pinned=[{}], load_balanced=[{}])
    runs.runs["pinned"][0].times = [0.0, 9.0]
    runs.runs["load_balanced"][0].loads = [[4, 4]] * 500 + [[400, 400]]
    first, second, _ = plots.loads_over_time(runs, list(runs.runs)).axes
    assert first.get_xlim() == second.get_xlim() == (0, 9)
    assert first.images[0].norm.vmax == 4


def test_labels_of_points_on_each_other_are_joined_and_lines_to_labels_do_not_cross():
    assert looks.coinciding(np.array([[0, 0], [0.5, 0.5], [0.002, 0.001]])) == [[0, 2], [1]]
    names = ["relative:1@events", "relative:1@history", "pinned", "relative:2@history"]
    assert looks.joined(names) == "relative:1@events, @history, pinned,\nrelative:2@history"
    higher_and_left_of_another = np.array([[0.1, 0.91], [0.9, 0.9], [0.0, 0.0], [0.1, 0.1]])
    assert looks.without_crossings(higher_and_left_of_another, 1.0) == [2, 3, 0, 1]


def test_labels_stand_by_where_points_are_on_the_picture():
    points = {"random": (1.1, 0.6), "pinned": (1.4, 0.96), "relative:1@events": (1.2, 0.93),
              "relative:2@events": (1.6, 0.96)}  # fmt: skip
    (axes,) = plots.skip_against_imbalance(
        named({name: [{"max_median": x, "skip": y}] for name, (x, y) in points.items()})
    ).axes
    labels = [(text.xyann[1], text.get_text()) for text in axes.texts]
    assert [name for _, name in sorted(labels)] == [
        "random", "relative:1@events", "pinned", "relative:2@events",
    ]  # fmt: skip


def test_equal_runs_have_equal_pages():
    names = [f"relative:{beta}@{way}" for beta in (0.5, 1, 2) for way in ("events", "history")]
    one, other = (page(named({name: [{}] for name in names}), {}, "x") for _ in range(2))
    assert one == other
    assert one.count('<svg role="img" aria-label="') == 4


def test_the_table_marks_what_is_best_and_what_is_recommended():
    runs = comparison(
        relative__events=[{"skip": 0.9001}], relative_5__events=[{"skip": 0.9002, "makespan": 2.0}],
        load_balanced=[{"skip": 0.5, "makespan": 3.0}],
    )  # fmt: skip
    text = page(runs, {}, "python tools/replay --seeds '0,1'")
    assert text.count("class=best") == 3  # two skips that look the same, and a makespan
    assert "<tr class=recommended><th scope=row>relative@events <small>recommended" in text
    assert "<thead><tr><th scope=col>policy</th><th scope=col>skip</th>" in text
    assert "<th scope=col>makespan, s</th>" in text
    assert "python tools/replay --seeds &#x27;0,1&#x27;" in text


def test_the_page_holds_everything_and_fetches_nothing():
    runs = comparison(relative_5__events=[{}], relative__events=[{}], load_balanced=[{}])
    text = page(runs, {"seeds": [0]}, "python tools/replay")
    assert text.count("<svg") == 3
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", re.sub(r"xlink:href=\"#", "", text))
    assert "<script" not in text
    assert text.index("Recommendation</h2>") < text.index("Results</h2>")


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
    files += ["--pictures", str(tmp_path / "pictures")]
    policies = ["--policies", "pinned,relative:0.5,load_balanced", "--seeds", "0,1"]
    assert main("", [*SMALL, *policies, *files]) == 0
    printed = capsys.readouterr().out
    assert "relative:0.5@history" in printed
    assert "\nUse relative:0.5@" in printed
    assert "\nHow sure: " in printed
    written = json.loads((tmp_path / "a.json").read_text())
    assert set(written["policies"]) == {
        "pinned", "relative:0.5@events", "relative:0.5@history", "load_balanced",
    }  # fmt: skip
    assert set(written["policies"]["pinned"]["seeds"]) == {"0", "1"}
    assert written["policies"]["pinned"]["figures"]["skip"]["mean"] <= written["bound"]
    made = (tmp_path / "a.html").read_text()
    assert made.startswith("<!DOCTYPE html>")
    pictures = {path.name: path.read_text() for path in (tmp_path / "pictures").iterdir()}
    assert {"skip-rate-against-imbalance.svg", "load-over-time.svg"} <= pictures.keys()
    assert all("<svg" in text for text in pictures.values())
    assert f"<pre class=line>python tools/replay {' '.join([*SMALL, *policies, *files])}" in made


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
        (["--workload", "sessions", "--path", "nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
        (["--path", "nowhere.jsonl"], "say which with --workload"),
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


def test_a_profile_whose_check_did_not_agree_is_called_so(tmp_path, capsys):
    file = tmp_path / "cpu.json"
    for agrees in (True, False):
        profile = asdict(replace(PROFILES["strict"], name="cpu", agrees=agrees))
        file.write_text(json.dumps({"profile": profile}))
        assert main("", [*SMALL, "--policies", "pinned", "--profile", str(file)]) == 0
        doubt = "profile cpu (its check did NOT agree with the engine)" in capsys.readouterr().out
        assert doubt != agrees


def test_who_has_read_enough_ends_it_without_a_traceback_and_has_the_files(tmp_path):
    command = [sys.executable, "-W", "ignore", str(TOOL), *SMALL, "--policies", "pinned"]
    command += ["--json", str(tmp_path / "a.json")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1
    assert "pinned" in json.loads((tmp_path / "a.json").read_text())["policies"]


def test_it_runs_as_a_folder():
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", str(TOOL), "--help"],
        capture_output=True, text=True, check=True, timeout=200,
    )  # fmt: skip
    assert "--max-rank-requests" in shown.stdout
