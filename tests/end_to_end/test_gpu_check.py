"""tools/gpu_check.py at a small size on the CPU: two real replicas, both coordinators."""

import json
import os
import sys

import pytest
from listening import beyond_loopback, run_and_look
from serving import ROOT

NOT_NEEDED = ("hypercorn", "jinja2", "openai", "psutil", "quart", "uvicorn")
REQUESTS = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The check where the packages that only a server needs are missing; and its JSON file."""
    folder = tmp_path_factory.mktemp("gpu_check")
    absent = folder / "absent"
    absent.mkdir()
    for name in NOT_NEEDED:
        (absent / f"{name}.py").write_text("raise ImportError('taken away by the test')\n")
    command = [
        *(sys.executable, ROOT / "tools" / "gpu_check.py", "--device=cpu", "--replicas=2"),
        *("--sessions=3", "--turns=2", "--tokens=200:400", "--new-tokens=4"),
        *("--released-policies=longest_prefix", f"--json={folder / 'report.json'}"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(absent), "OMP_NUM_THREADS": "1"}
    done, listening = run_and_look(command, folder, 240, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert beyond_loopback(listening) == []
    return done, json.loads((folder / "report.json").read_text())


def test_both_coordinators_answer_all_requests_alike(run):
    _, report = run
    assert report["passed"]
    assert list(report["runs"]) == ["ours", "released longest_prefix"]
    for figures in report["runs"].values():
        assert (figures["answered"], figures["lost"]) == (REQUESTS, 0)
        assert sum(figures["requests_per_replica"]) == REQUESTS
    assert report["against"]["released longest_prefix"]["outputs_equal"]
    assert report["distinct_answers"] == REQUESTS


def test_prefill_is_skipped_and_every_figure_is_there(run):
    _, report = run
    for figures in report["runs"].values():
        assert 0 < figures["skip_rate"] <= report["skip_bound"]
        for name in ("ttft_ms", "prefill_step_ms", "decode_step_ms"):
            assert 0 < figures[name]["median"] <= figures[name]["p90"]
        assert figures["ttft_ms"]["count"] == REQUESTS
    ratios = report["against"]["released longest_prefix"]["ratios"]
    assert all(value > 0 for value in ratios.values())


def test_it_tells_of_progress_and_ends_with_the_json_line(run):
    done, report = run
    lines = done.stdout.splitlines()
    assert json.loads(lines[-1]) == report
    assert any("ours: ready after" in line for line in lines)
    assert any(line.startswith("prefill skip rate") for line in lines)
    assert "Traceback" not in done.stdout + done.stderr
