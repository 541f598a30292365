"""The RL loop of examples/rl_rollouts, small: its promise, and the control that can fail."""

import json
import sys
from pathlib import Path
from typing import Any

import main_thread_only
import pytest
from listening import beyond_loopback, run_and_look
from serving import ROOT

SCRIPT = ROOT / "examples" / "rl_rollouts" / "rollouts.py"
RECORDED = ROOT.parent / "shared" / "workloads" / "tau_airline_gpt4o" / "messages.jsonl.gz"
SMALL = ("--iterations=2", "--groups=2", "--turns=3")


def _totals(folder: Path, *flags: str) -> dict[str, Any]:
    """Run the loop on two replicas; what its one line on standard output says."""
    launcher = [sys.executable, ROOT / "tools" / "launch.py", "--processes=2"]
    done, listening = run_and_look(
        [*launcher, main_thread_only.__file__, SCRIPT, *flags], folder, seconds=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert beyond_loopback(listening) == []
    (line,) = done.stdout.splitlines()
    return json.loads(line)


def test_after_an_update_the_engines_answer_like_a_fresh_one(tmp_path):
    totals = _totals(tmp_path, *SMALL)
    assert list(totals) == ["outputs_equal", "skip_rate", "prediction_error", "in_window", "lost"]
    assert totals["outputs_equal"] is True
    assert totals["lost"] == 0
    assert totals["prediction_error"] == 0
    # Each replica computes the system prompt once an iteration; all else that is new is short.
    assert totals["skip_rate"] > 0.7


def test_control_the_released_engine_answers_from_the_cache_of_old_weights(tmp_path):
    totals = _totals(tmp_path, *SMALL, "--released", "--kv-cache-management-mode=persist")
    assert totals["outputs_equal"] is False
    assert totals["lost"] == 0
    assert totals["prediction_error"] is None


@pytest.mark.skipif(not RECORDED.exists(), reason=f"{RECORDED.parent.name} is not at hand")
def test_recorded_sessions_are_replayed(tmp_path):
    flags = ("--iterations=1", "--groups=1", "--turns=2")
    totals = _totals(tmp_path, *flags, f"--sessions={RECORDED}")
    assert totals["outputs_equal"] is True
    assert totals["lost"] == 0
    assert totals["skip_rate"] > 0.5
