"""tools/measure_bursts.py without engines: where equal prompts go, and the replica model."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

import measure_bursts as tool
from measure_replica import Replica

from megatron.core.inference.coordinator.policies import PrefixCachingCostPolicy

RELATIVE = PrefixCachingCostPolicy.RELATIVE_LOAD_WEIGHTED
DELAY = PrefixCachingCostPolicy.ADDED_DELAY
PROMPT = 2048


@pytest.mark.parametrize(("cap", "used"), [(0, 8), (4, 2), (8, 1)])
def test_idle_ranks_scatter_a_group_as_far_as_the_cap_lets_them(cap, used):
    ((members,), loads) = tool.place(RELATIVE, cap, 0, 1, PROMPT)
    assert len(set(members)) == used
    assert sorted(loads, reverse=True)[:used] == {8: [1] * 8, 2: [5, 3], 1: [8]}[used]


@pytest.mark.parametrize("policy", PrefixCachingCostPolicy)
@pytest.mark.parametrize("state", ["half", "full"])
def test_under_load_a_group_stays_together_without_a_cap(policy, state):
    ((members,), loads) = tool.place(policy, 0, tool.LOADS[state], 1, PROMPT)
    assert len(set(members)) == 1
    assert max(loads) == tool.LOADS[state] + 8


@pytest.mark.parametrize(
    "policy", [p for p in PrefixCachingCostPolicy if p not in (RELATIVE, DELAY)]
)
def test_costs_that_count_blocks_keep_a_group_together_on_idle_ranks_too(policy):
    assert tool.modelled(policy, 0, "idle", 1, PROMPT)["ranks"] == 1


def test_to_wait_for_a_prompt_that_is_being_computed_takes_as_long_as_to_compute_it():
    assert tool.modelled(DELAY, 0, "idle", 1, PROMPT)["ranks"] == 8


def test_groups_that_arrive_together_fill_the_ranks_evenly_at_cap_8():
    row = tool.modelled(RELATIVE, 8, "idle", 16, PROMPT)
    assert (row["ranks"], row["cold"], row["spread"]) == (1, 1, 1)


def test_equal_prompts_wait_for_the_first_and_then_compute_one_block():
    times, cold = Replica().first_tokens([7] * 8, 0, PROMPT)
    first = 8 + 0.0667 * PROMPT
    second = first + 8 + 0.0667 * 7 * 16 + 0.12 + 0.03 * 2
    assert cold == 1
    assert times == pytest.approx([first] + [second] * 7)


def test_different_prompts_are_computed_in_the_same_step_up_to_its_budget():
    times, cold = Replica().first_tokens([0, 1, 2, 3, 4], 0, PROMPT)
    assert cold == 5
    assert times[:4] == pytest.approx([8 + 0.0667 * 4 * PROMPT] * 4)
    assert times[4] > times[3]


def test_on_a_full_replica_requests_wait_for_places():
    times, _ = Replica().first_tokens([7] * 8, 64, PROMPT)
    assert times == sorted(set(times))


def test_the_table_and_the_file_hold_every_case(tmp_path, capsys):
    tool.main(["--engines", "0", "--json", str(tmp_path / "bursts.json")])
    lines = capsys.readouterr().out.strip().splitlines()
    report = json.loads((tmp_path / "bursts.json").read_text())
    cases = {(row["state"], row["cost_policy"], row["cap"]) for row in report["modelled"]}
    assert (
        len(lines)
        == 1 + len(report["modelled"])
        == 1 + len(cases)
        == 1 + len(PrefixCachingCostPolicy) * 3 * 3
    )
    assert report["real"] == []
