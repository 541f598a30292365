"""Where requests go in bursts, with hash lists that cannot be right, and as time passes."""

import pytest
from builders import (
    BLOCK,
    CLIENT,
    PROMPT,
    SAMPLING,
    Fleet,
    engine_request,
    hashes,
    logs,
    make_register,
    sends,
    tokens,
)

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.hashing import pack_hashes
from megatron.core.inference.coordinator.lifecycle import Signal

# --- hash lists that cannot be right -------------------------------------------------------------

GOOD = hashes(tokens(3))


@pytest.mark.parametrize(
    "packed",
    [
        pack_hashes(GOOD[:2]),
        pack_hashes([*GOOD, 77]),
        b"",
        pack_hashes([GOOD[0], GOOD[1], GOOD[0]]),
        pack_hashes([GOOD[0], 0, GOOD[2]]),
        pack_hashes([GOOD[0], GOOD[1], -5]),
        pack_hashes(GOOD)[:-1],
        pack_hashes(GOOD) + b"\0",
        b"\0" * 24,
    ],
    ids=["short", "long", "empty", "twice", "zero", "negative", "23", "25", "zeros"],
)
def test_a_bad_hash_list_makes_the_request_not_hashed(packed):
    fleet = Fleet(2)
    fleet.ask(tokens(3))
    before = len(fleet.core.fleet.index)
    message = m.SubmitRequest("bad", 3 * BLOCK, SAMPLING, PROMPT, packed)
    assert fleet.tell(CLIENT, message) == [
        m.Log("hashes_refused", warning=True, peer=CLIENT),
        m.Send(b"1", engine_request(1)),  # the least loaded rank
    ]
    assert len(fleet.core.fleet.index) == before


def test_of_a_prompt_of_unknown_length_only_impossible_lists_are_refused():
    fleet = Fleet(1)
    message = m.SubmitRequest(1, -1, SAMPLING, PROMPT, pack_hashes(GOOD))
    assert logs(fleet.tell(CLIENT, message)) == []
    assert len(fleet.core.fleet.index) == 3
    message = m.SubmitRequest(1, -1, SAMPLING, PROMPT, pack_hashes([4, 4]))
    assert logs(fleet.tell(CLIENT, message)) == ["hashes_refused"]


def test_an_empty_list_for_a_short_prompt_is_right():
    fleet = Fleet(1)
    message = m.SubmitRequest(1, BLOCK - 1, SAMPLING, PROMPT, b"")
    assert fleet.tell(CLIENT, message) == [m.Send(b"0", engine_request(0))]


def test_the_largest_hash_is_a_hash():
    fleet = Fleet(1)
    message = m.SubmitRequest(1, BLOCK, SAMPLING, PROMPT, pack_hashes([2**63 - 1]))
    assert logs(fleet.tell(CLIENT, message)) == []


@pytest.mark.parametrize("prompt_tokens", [2**63, 2**64 - 1, -(2**63)])
def test_absurd_prompt_lengths_do_no_harm(prompt_tokens):
    fleet = Fleet(1)
    message = m.SubmitRequest(1, prompt_tokens, SAMPLING, PROMPT, pack_hashes(GOOD))
    assert sends(fleet.tell(CLIENT, message)) == [m.Send(b"0", engine_request(0))]


# --- bursts --------------------------------------------------------------------------------------


def burst(fleet, count, name=0):
    return [fleet.route(tokens(4, name)) for _ in range(count)]


def test_without_a_cap_the_formula_scatters_a_burst_over_an_idle_fleet():
    assert len(set(burst(Fleet(16), 8))) == 8
    assert burst(Fleet(16), 8) == list(range(8))


def test_cap_n_lets_n_requests_follow_the_first():
    assert burst(Fleet(16, burst_cap=3), 4) == [0, 0, 0, 0]
    # The fifth goes where the formula says, and three follow it there.
    assert burst(Fleet(16, burst_cap=3), 9) == [0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_with_the_cap_used_up_the_formula_may_still_choose_the_same_rank():
    fleet = Fleet(2, burst_cap=1)
    for _ in range(22):
        fleet.ask()
    assert fleet.loads == [11, 11]
    assert burst(fleet, 4) == [0, 0, 0, 0]


def test_only_an_equal_whole_chain_is_followed():
    fleet = Fleet(2, burst_cap=8)
    assert fleet.route(tokens(4)) == 0
    assert fleet.route(tokens(3)) == 1  # a prefix; [1, 0] ties and goes to the less loaded
    assert fleet.route([*tokens(4), 7]) == 0  # equal full blocks
    assert fleet.loads == [2, 1]


def test_a_burst_ends_with_the_answer_of_its_first_request():
    fleet = Fleet(2, burst_cap=8)
    _, first = fleet.ask(tokens(4))
    assert burst(fleet, 2) == [0, 0]
    fleet.answer(first)
    assert fleet.loads == [2, 0]
    assert burst(fleet, 1) == [1]  # mean 1: 1 - 1 against 1


def test_the_answer_of_a_follower_does_not_end_the_burst():
    fleet = Fleet(2, burst_cap=8)
    fleet.ask(tokens(4))
    _, follower = fleet.ask(tokens(4))
    fleet.answer(follower)
    assert burst(fleet, 2) == [0, 0]


def test_a_follower_stays_with_its_leader_whatever_the_load():
    fleet = Fleet(2, burst_cap=100)
    assert burst(fleet, 101) == [0] * 101
    assert burst(fleet, 1) == [1]


def test_a_burst_on_a_lost_rank_is_not_followed():
    fleet = Fleet(2, burst_cap=8)
    assert burst(fleet, 2) == [0, 0]
    fleet.tell(b"0", m.PeerLost())
    assert burst(fleet, 2) == [1, 1]
    fleet.tell(b"0", make_register(0))
    assert burst(fleet, 1) == [1]


def test_a_burst_ends_with_a_leader_that_is_lost_and_not_tried_again():
    fleet = Fleet(2, burst_cap=8, max_retries=0)
    assert burst(fleet, 1) == [0]
    fleet.tell(b"0", m.PeerLost())
    fleet.tell(b"0", make_register(0))
    fleet.load_up(0, 1)
    assert burst(fleet, 2) == [1, 1]


def test_nobody_follows_a_request_of_an_older_weight_epoch():
    fleet = Fleet(2, burst_cap=8)
    assert burst(fleet, 2) == [0, 0]
    fleet.tell(CLIENT, m.Control(Signal.SET_GENERATION_EPOCH, (1,)))
    assert burst(fleet, 2) == [1, 1]


def test_the_least_loaded_policy_has_no_bursts():
    fleet = Fleet(4, burst_cap=8, coordinator_policy="load_balanced")
    assert burst(fleet, 4) == [0, 1, 2, 3]


def test_under_first_prefix_block_the_whole_chain_decides_who_follows():
    fleet = Fleet(2, burst_cap=8, coordinator_policy="first_prefix_block")
    assert burst(fleet, 2) == [0, 0]
    assert fleet.route([*tokens(1), *tokens(3, name=5)]) == 1


# --- time ----------------------------------------------------------------------------------------


def test_under_lru_a_prompt_is_held_for_the_ttl_after_its_answer():
    fleet = Fleet(1, ttl_seconds=300.0, hung_timeout=1e6)
    fleet.ask(tokens(3))
    fleet.now = 500.0
    fleet.tick()
    assert len(fleet.core.fleet.index) == 3  # in flight
    fleet.answer_all()
    fleet.now = 799.9
    fleet.tick()
    assert len(fleet.core.fleet.index) == 3
    fleet.now = 800.0
    fleet.tick()
    assert len(fleet.core.fleet.index) == 0


def test_under_ref_zero_a_prompt_is_held_until_its_last_answer():
    fleet = Fleet(register={"eviction": "ref_zero"})
    fleet.join()
    _, first = fleet.ask(tokens(3))
    _, second = fleet.ask(tokens(2))
    fleet.answer(first)
    assert len(fleet.core.fleet.index) == 2
    fleet.answer(second)
    assert len(fleet.core.fleet.index) == 0


def test_a_rank_is_believed_to_hold_no_more_than_it_has_room_for():
    fleet = Fleet(register={"total_blocks": 5})
    fleet.join()
    for name in range(4):
        fleet.ask(tokens(3, name))
        fleet.answer_all()
    assert len(fleet.core.fleet.index) == 5
    assert fleet.holders(tokens(3, 3)) == {0: 3}
    assert fleet.holders(tokens(3, 2)) == {0: 2}
