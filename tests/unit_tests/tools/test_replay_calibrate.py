"""tools/replay/calibrate.py: profiles from step times that are known; and the check of a run."""

import asyncio
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from calibrate_replay import Checked, verdict
from measure_steps import StepWatch
from replay.calibrate import FEWEST_STEPS, CalibrationError, StepTime, fit, grouped, predicted
from replay.profiles import PROFILES, Profile, find_profile
from replay.workload import InputError

TRUE = Profile("true", 8e-3, 0.14e-3, 1.2e-3, 2e-6)
TIMES = ("step", "prefill", "decode", "context")


def steps_of(profile, count=200, seed=0, noise=0.0):
    """Steps of random loads, timed by a profile; noise is a share of each time."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        decoding = int(rng.integers(0, 9))
        prefill = int(rng.integers(2, 400)) if rng.random() < 0.3 or not decoding else 0
        context = int(rng.integers(64, 600, decoding).sum())
        seconds = predicted(profile, StepTime(prefill, decoding, context, 0.0))
        made.append(StepTime(prefill, decoding, context, seconds * (1 + noise * rng.normal())))
    return made


def times(profile):
    return [getattr(profile, name) for name in TIMES]


@pytest.mark.parametrize("profile", [TRUE, PROFILES["reference"]], ids=lambda p: p.name)
def test_known_coefficients_are_found(profile):
    assert times(fit(steps_of(profile), "cpu")) == pytest.approx(times(profile), rel=1e-6)


def test_the_fewest_steps_are_enough():
    found = fit(steps_of(TRUE, FEWEST_STEPS), "cpu")
    assert times(found) == pytest.approx(times(TRUE), rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_noise_changes_coefficients_a_little_and_the_sum_of_all_steps_not_at_all(seed):
    steps = steps_of(TRUE, 2000, seed, noise=0.1)
    found = fit(steps, "cpu")
    assert times(found)[:3] == pytest.approx(times(TRUE)[:3], rel=0.1)
    total = sum(step.seconds for step in steps)
    assert sum(predicted(found, step) for step in steps) == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("name", TIMES)
def test_what_costs_nothing_gets_no_negative_cost(name):
    for seed in range(10):
        free = replace(TRUE, **{name: 0.0})
        found = fit(steps_of(free, seed=seed, noise=0.3), "cpu")
        assert min(times(found)) >= 0


def test_what_would_be_negative_is_zero_and_the_rest_is_fitted_without_it():
    faster_with_context = replace(TRUE, context=-1e-6)
    steps = steps_of(faster_with_context)
    found = fit(steps, "cpu")
    assert found.context == 0
    rows = np.array([(1, s.prefill, s.decoding) for s in steps], float)
    without = np.linalg.lstsq(rows, np.array([s.seconds for s in steps]))[0]
    assert times(found)[:3] == pytest.approx(without.tolist())


def test_the_name_and_the_limits_are_kept():
    found = fit(steps_of(TRUE), "cpu", block_size=64, cache_tokens=6400, max_requests=7)
    assert (found.name, found.block_size, found.total_blocks, found.max_requests) == (
        *("cpu", 64, 100, 7),
    )
    assert found.strict


def test_too_few_steps_are_refused():
    with pytest.raises(CalibrationError, match=f"19 steps were measured; .* {FEWEST_STEPS}"):
        fit(steps_of(TRUE, FEWEST_STEPS - 1), "cpu")


def test_a_run_without_prefill_is_refused():
    steps = [replace(step, prefill=0) for step in steps_of(TRUE)]
    with pytest.raises(CalibrationError, match="all steps have 0 of prefill: its cost is unknown"):
        fit(steps, "cpu")


def test_steps_that_do_not_tell_costs_apart_are_refused():
    steps = [replace(step, context=100 * step.decoding) for step in steps_of(TRUE)]
    with pytest.raises(CalibrationError, match="measure more loads and lengths"):
        fit(steps, "cpu")


def test_the_table_has_every_step_once_and_shows_means():
    steps = [
        *(StepTime(0, 1, 100, 0.01), StepTime(0, 1, 100, 0.03)),
        *(StepTime(33, 4, 900, 0.05), StepTime(60, 7, 900, 0.07)),
    ]
    free = Profile("free", 0.02, 0.0, 0.0, 0.0)
    decodes, prefills = grouped(steps, free)
    assert (decodes.prefill, decodes.decoding, decodes.steps) == ((0, 0), (1, 1), 2)
    assert (prefills.prefill, prefills.decoding, prefills.steps) == ((33, 60), (4, 7), 2)
    assert (decodes.measured, prefills.measured) == pytest.approx((0.02, 0.06))
    assert (decodes.fitted, prefills.fitted) == pytest.approx((0.02, 0.02))


CHECKED = Checked(1, 32, 1000, 640, 640, 2.0, 2.2)


@pytest.mark.parametrize(
    ("changes", "agrees"),
    [
        ({}, True),
        ({"predicted_skip": 639}, False),
        ({"predicted_seconds": 2.31}, False),
        ({"predicted_seconds": 1.69}, False),
        ({"predicted_seconds": 4.0, "replicas": 2}, True),  # engines that take turns are not timed
        ({"predicted_skip": 656, "replicas": 2}, False),
    ],
)
def test_a_check_agrees_in_skipped_tokens_and_in_time(changes, agrees):
    checked = replace(CHECKED, **changes)
    assert checked.agrees(0.15) is agrees
    shown = verdict([checked], 0.15)
    assert ("NOT EQUAL" in shown or "OFF BY OVER 15%" in shown) is not agrees


class FakeEngine:
    """Prefills 30 tokens beside 2 requests of 100 and 50 tokens, then is idle."""

    def __init__(self):
        self.waiting_request_ids = [7]
        self.context = SimpleNamespace(
            paused_request_count=0,
            total_request_count=2,
            active_token_count=2,
            request_kv_length_offsets=np.array([99, 49, 0]),
            get_active_request_count=lambda: 0,
        )

    def schedule_waiting_requests(self):
        self.waiting_request_ids.clear()
        self.context.total_request_count += 1
        self.context.active_token_count += 30

    async def async_step(self):
        self.schedule_waiting_requests()
        await asyncio.sleep(0.01)
        return "stepped"


def test_a_step_is_timed_with_what_it_computed():
    engine = FakeEngine()
    watch = StepWatch(engine)
    assert asyncio.run(engine.async_step()) == "stepped"
    (step,) = watch.steps
    assert (step.prefill, step.decoding, step.context) == (30, 2, 150)
    assert step.seconds >= 0.009  # timers may be early by a tick


# --- profiles by name ----------------------------------------------------------------------------


def test_a_profile_is_found_by_name_or_in_the_file_of_a_calibration(tmp_path):
    file = tmp_path / "cpu.json"
    file.write_text(json.dumps({"profile": asdict(TRUE), "checks": []}))
    assert find_profile(str(file)) == TRUE
    assert find_profile("strict") is PROFILES["strict"]
    file.write_text(
        json.dumps({"profile": {"name": "cpu", **dict.fromkeys(TIMES, 1e-3)}, "agrees": False})
    )
    assert not find_profile(str(file)).agrees  # as earlier calibrations wrote it


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"profile": {"name": "cpu", "steps": 1}}'])
def test_what_is_no_profile_is_said_in_a_line(tmp_path, content):
    file = tmp_path / "cpu.json"
    file.write_text(content)
    with pytest.raises(InputError, match=f"--profile {file} is none of reference, strict, and no"):
        find_profile(str(file))
