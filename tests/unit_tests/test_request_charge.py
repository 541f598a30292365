"""What one more request costs, as prompts teach it."""

from itertools import pairwise

import pytest

from megatron.core.inference.coordinator.request_charge import LEAST, SHARE, RequestCharge


def learned(*lengths):
    charge = RequestCharge()
    for length in lengths:
        charge.learn(length)
    return charge.tokens


def test_it_is_a_share_of_the_usual_prompt_and_never_nothing():
    assert SHARE == 0.22
    assert learned() == learned(5) == LEAST == 100
    assert learned(16_000) == 3_520
    assert learned(8_000, 16_000) == 2_640


def test_it_follows_the_latest_prompts():
    few, many = [1_000] * 500, [40_000] * 2_000
    assert learned(*few, *many) == pytest.approx(8_800, rel=1 / 8)
    assert learned(*many, *few * 4) == pytest.approx(223, rel=1 / 8)


def test_it_changes_in_steps_which_are_told():
    charge = RequestCharge()
    assert charge.learn(16_000)
    assert not any(charge.learn(17_000) for _ in range(50))
    assert charge.tokens == 3_520
    told = [charge.tokens for _ in range(1_000) if charge.learn(32_000)]
    assert told == sorted(set(told))
    assert all(b >= a * 1.1 for a, b in pairwise(told))
    assert told[-1] == pytest.approx(7_040, rel=1 / 8)


@pytest.mark.parametrize("unknown", [-1, 0])
def test_a_length_that_nobody_knows_teaches_nothing(unknown):
    assert learned(16_000, *[unknown] * 500) == 3_520


def test_one_who_lies_about_lengths_does_not_upset_it():
    honest = [16_000] * 300
    assert learned(*honest, *[2**60] * 5) == pytest.approx(3_520, rel=1 / 8)
    assert learned(2**64 - 1, *[16_000] * 2_000) == pytest.approx(3_520, rel=1 / 8)
    assert learned(*[2**64 - 1] * 300, *[16_000] * 20_000) == pytest.approx(3_520, rel=1 / 8)
    assert learned(*[2**64 - 1] * 20_000) < 2**30  # and what ranks are ordered by stays in its bits
