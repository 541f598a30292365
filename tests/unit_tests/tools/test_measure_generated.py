"""tools/measure_generated.py on a tiny trace with exact numbers, and on the recorded ones."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

import measure_generated as tool

WORKLOADS = Path(__file__).parents[4] / "shared" / "workloads"

# B's blocks after the first are its own.
B = {
    "block_size": 4,
    "turns": [{"in": 8, "out": 4, "t": 1}, {"in": 12, "out": 1, "t": 3}],
    "h": [[0, 1], [100, 2]],
}
A = {
    "block_size": 4,
    "turns": [{"in": 10, "out": 7, "t": 0}, {"in": 20, "out": 1, "t": 2}],
    "h": [[0, 5]],
}


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "tiny.jsonl"
    path.write_text("\n".join(json.dumps(session) for session in (B, A)))
    return path


def test_requests_come_by_time(trace):
    requests = list(tool.requests(tool.read_sessions(trace), 4))
    assert [(prompt, answer) for prompt, answer, _ in requests] == [
        (10, 7),
        (8, 4),
        (20, 1),
        (12, 1),
    ]
    assert requests[0][2] == [0, 1, 2, 3, 4]
    assert requests[1][2] == [0, 100, 101]


@pytest.mark.parametrize(
    ("block_size", "prompts_only", "both"),
    [
        # A 10; B 8 - 4 that A has; A 20 - 8, or less its answer's blocks 20 - 16; B 12 - 8: the
        # last token of B's answer never went through the model, so its block is not full.
        (4, 10 + 4 + 12 + 4, 10 + 4 + 4 + 4),
        # In blocks of 8 tokens B shares nothing with A.
        (8, 10 + 8 + 12 + 4, 10 + 8 + 4 + 4),
    ],
)
def test_an_answer_is_computed_again_unless_its_blocks_are_cached(
    trace, block_size, prompts_only, both
):
    costs = tool.measure("tiny", tool.read_sessions(trace), block_size)
    assert (costs.requests, costs.prompt_tokens) == (4, 50)
    assert (costs.computed_prompts, costs.computed_both) == (prompts_only, both)
    assert costs.saved == prompts_only - both
    assert costs.skip_both == 1 - both / 50


def test_the_table_and_the_file_hold_the_figures(trace, tmp_path, capsys):
    tool.main([str(trace), "--block-sizes", "4", "--json", str(tmp_path / "costs.json")])
    assert "tiny" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "costs.json").read_text())
    assert (row["saved"], row["skip_prompts"], row["skip_both"]) == (8, 0.4, 0.56)


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ("{", "line 1 is no session"),
        (json.dumps(A) + "\n{}", "line 2 is no session"),
        (json.dumps(A | {"h": [[0, 4]]}), "h names 4 blocks, and a prompt has 5"),
        ("", "holds no session"),
    ],
)
def test_a_bad_trace_is_an_error_that_says_where(tmp_path, capsys, lines, error):
    path = tmp_path / "bad.jsonl"
    path.write_text(lines)
    with pytest.raises(SystemExit) as ended:
        tool.main([str(path)])
    assert ended.value.code == 2
    assert error in capsys.readouterr().err


def test_a_missing_trace_and_a_block_size_that_does_not_fit_are_errors(trace, tmp_path, capsys):
    for arguments in ([str(tmp_path / "none.jsonl")], [str(trace), "--block-sizes", "6"]):
        with pytest.raises(SystemExit):
            tool.main(arguments)
    errors = capsys.readouterr().err
    assert "cannot be read" in errors
    assert "blocks of 4 make none of 6" in errors


@pytest.mark.parametrize(
    ("name", "requests", "skip_prompts", "skip_both"),
    [("swebench_gemini3", 20_163, 0.9609, 0.9769), ("tau_airline_gpt4o", 2454, 0.9177, 0.9413)],
)
def test_the_recorded_sessions(name, requests, skip_prompts, skip_both):
    if not (WORKLOADS / name).is_dir():
        pytest.skip(f"the workload {name} is not beside the checkout")
    costs = tool.measure(name, tool.read_sessions(WORKLOADS / name), 64)
    assert costs.requests == requests
    assert costs.skip_prompts == pytest.approx(skip_prompts, abs=1e-4)
    assert costs.skip_both == pytest.approx(skip_both, abs=1e-4)
