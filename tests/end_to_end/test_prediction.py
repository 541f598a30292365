"""prediction.py at a small size: real engines whose cache is much too small."""

import json
import os
import subprocess
import sys

import pytest
from serving import ROOT

SMALL = ["--sessions=20", "--turns=2", "--answer=24", "--in-flight=3", "--think=0.1"]
REPLIES = 40


def run(folder, *flags: str) -> tuple[str, dict]:
    """What the tool prints, and its figures by (variant, share)."""
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "tests" / "end_to_end" / "prediction.py", *SMALL, *flags),
            f"--json={folder / 'figures.json'}",
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((folder / "figures.json").read_text())
    return done.stdout, {(row["variant"], row["share"]): row for row in rows}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prediction")
    return run(folder, "--only", "events/lru:100", "events/lru:10", "history/lru:10")


def test_with_events_no_prediction_is_wrong_outside_the_window(measured):
    _, rows = measured
    for share in (100, 10):
        figures = rows["events/lru", share]
        assert figures["replies"] == REPLIES
        assert (figures["wrong"], figures["worst_error"]) == (0, 0)


def test_the_small_cache_is_under_pressure_and_the_large_one_is_not(measured):
    _, rows = measured
    large, small = rows["events/lru", 100], rows["events/lru", 10]
    assert 0.4 < small["skip_rate"] + 0.05 < large["skip_rate"]
    assert large["in_window"] < small["in_window"]


def test_history_alone_is_wrong_of_a_cache_that_is_too_small(measured):
    """The control: without events the same sessions show that there was something to know."""
    _, rows = measured
    figures = rows["history/lru", 10]
    assert figures["replies"] == REPLIES
    assert figures["wrong"] >= 3
    assert figures["worst_error"] >= 32


def test_the_table_has_a_line_for_each_variant(measured):
    table, rows = measured
    lines = [line.split() for line in table.splitlines()]
    assert [(line[0], int(line[1])) for line in lines[1:]] == list(rows)
