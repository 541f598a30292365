"""The coordinator without its sockets: exact effects of every message, and a random campaign."""

import random

import pytest
from builders import (
    BLOCK,
    BODY,
    CLIENT,
    LRU,
    PROMPT,
    REF_ZERO,
    SAMPLING,
    Fleet,
    answer,
    hashes,
    logs,
    make_connect,
    make_register,
    make_settings,
    replies,
    sends,
    stock_register,
    submission,
    tokens,
)

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.core import Coordinator
from megatron.core.inference.coordinator.hashing import pack_hashes
from megatron.core.inference.coordinator.lifecycle import FleetState, Signal
from megatron.core.inference.coordinator.settings import PROTOCOL_VERSION

OTHER = b"other"
RUNNING, PAUSED, SUSPENDED = FleetState.RUNNING, FleetState.PAUSED, FleetState.SUSPENDED


def engine_request(request_id, epoch=0):
    return m.EngineRequest(request_id, epoch, SAMPLING, PROMPT)


def registered(count, expected=None):
    return m.Log("ranks_registered", {"registered": count, "expected": expected or count})


# --- connecting ----------------------------------------------------------------------------------


def test_a_client_of_ours_learns_policy_block_size_and_epoch():
    core = Coordinator(make_settings())
    ack = m.ConnectAck(PROTOCOL_VERSION, "longest_prefix", BLOCK, 0)
    assert core.handle(m.Incoming(CLIENT, make_connect()), 0.0) == [m.Send(CLIENT, ack)]


def test_a_released_client_is_acknowledged_too():
    fleet = Fleet()
    ack = m.ConnectAck(PROTOCOL_VERSION, "longest_prefix", BLOCK, 0)
    assert fleet.tell(OTHER, m.Connect(None)) == [m.Send(OTHER, ack)]


def test_without_prefix_caching_a_client_is_told_not_to_hash():
    fleet = Fleet(prefix_caching=False, block_size_tokens=None)
    ack = m.ConnectAck(PROTOCOL_VERSION, "load_balanced", 0, 0)
    assert fleet.tell(OTHER, make_connect()) == [m.Send(OTHER, ack)]
    fleet = Fleet(prefix_caching=False, block_size_tokens=64)
    assert fleet.tell(OTHER, make_connect()) == [m.Send(OTHER, ack)]


def test_connecting_again_is_acknowledged_again():
    fleet = Fleet()
    first = fleet.tell(OTHER, make_connect())
    assert fleet.tell(OTHER, make_connect()) == first


def test_the_acknowledgement_tells_the_present_epoch():
    fleet = Fleet()
    fleet.tell(CLIENT, m.Control(Signal.SET_GENERATION_EPOCH, (5,)))
    (ack,) = sends(fleet.tell(OTHER, make_connect()))
    assert ack.message.weight_epoch == 1


def test_a_client_of_another_protocol_version_is_told_which_one_is_spoken():
    fleet = Fleet()
    text = "the coordinator speaks protocol 1, not 2"
    assert fleet.tell(OTHER, m.Connect(2)) == [
        m.Send(OTHER, m.RequestError(None, "not_connected", text)),
        m.Log("wrong_protocol", {"version": 2}, warning=True, peer=OTHER),
    ]
    assert sends(fleet.tell(OTHER, submission("r")))[0].message.code == "not_connected"


def test_an_engine_cannot_connect_as_a_client():
    fleet = Fleet(1)
    assert fleet.tell(b"0", make_connect()) == [
        m.Log("connect_from_engine", warning=True, peer=b"0")
    ]


def test_a_request_before_connect_is_answered_with_an_error():
    fleet = Fleet(1)
    error = m.RequestError("r", "not_connected", "send CONNECT before any request")
    assert fleet.tell(OTHER, submission("r")) == [
        m.Send(OTHER, error),
        m.Log("request_before_connect", warning=True, peer=OTHER),
    ]
    assert len(fleet.core.fleet.ledger) == 0


@pytest.mark.parametrize("message", [m.Control(Signal.PAUSE), m.Shutdown()])
def test_a_stranger_controls_nothing(message):
    fleet = Fleet(1)
    assert fleet.tell(OTHER, message) == [m.Log("control_before_connect", warning=True, peer=OTHER)]
    assert fleet.core.fleet.state is RUNNING


def test_a_client_ends_the_coordinator():
    assert Fleet(1).tell(CLIENT, m.Shutdown()) == [m.Log("shutdown_asked_for"), m.Stop()]


def test_what_is_no_message_is_logged():
    assert Fleet().tell(OTHER, m.Malformed("no frame")) == [
        m.Log("message_refused", {"reason": "no frame"}, warning=True, peer=OTHER)
    ]


# --- registering ---------------------------------------------------------------------------------


def test_an_engine_is_told_its_number_generation_epoch_and_the_state():
    fleet = Fleet(expected_ranks=2)
    assert fleet.tell(b"a", make_register(3)) == [
        m.Send(b"a", m.RegisterAck(0, 1, 0, RUNNING)),
        registered(1, 2),
    ]
    assert fleet.tell(b"b", make_register(1)) == [
        m.Send(b"b", m.RegisterAck(1, 1, 0, RUNNING)),
        registered(2),
    ]


def test_an_engine_that_joins_later_learns_what_happened_before():
    fleet = Fleet(1)
    fleet.tell(CLIENT, m.Control(Signal.SET_GENERATION_EPOCH, (9,)))
    fleet.signal(Signal.PAUSE, Signal.SUSPEND)
    effects = fleet.tell(b"late", make_register(1))
    assert effects == [m.Send(b"late", m.RegisterAck(1, 1, 1, SUSPENDED)), registered(2)]


def test_a_released_engine_gets_no_acknowledgement():
    effects = Fleet(eviction=LRU).tell(b"mp-coord-0", stock_register())
    assert effects == [registered(1)]


def test_a_released_engine_has_the_settings_places_and_eviction():
    fleet = Fleet(max_requests=48, eviction=LRU)
    fleet.tell(b"mp-coord-3", stock_register())
    (rank,) = fleet.core.fleet.ranks
    assert (rank.max_requests, rank.retains, rank.total_blocks) == (48, True, None)
    fleet = Fleet(max_requests=48, eviction=REF_ZERO)
    fleet.tell(b"mp-coord-3", stock_register())
    (rank,) = fleet.core.fleet.ranks
    assert rank.retains is False


def test_a_client_cannot_register_as_an_engine():
    fleet = Fleet()
    assert fleet.tell(CLIENT, make_register()) == [
        m.Log("register_from_client", warning=True, peer=CLIENT)
    ]
    assert len(fleet.core.fleet.ranks) == 0


def test_an_engine_of_another_protocol_version_is_not_taken():
    fleet = Fleet()
    assert fleet.tell(b"e", make_register(version=2)) == refusal("protocol 2 is not 1")
    assert len(fleet.core.fleet.ranks) == 0


@pytest.mark.parametrize("places", [0, -1])
def test_an_engine_without_any_place_is_not_taken(places):
    fleet = Fleet(cost_policy="free_capacity_weighted")
    assert fleet.tell(b"e", make_register(max_requests=places)) == refusal(
        f"max_requests is {places}"
    )
    assert len(fleet.core.fleet.ranks) == 0


def test_an_engine_whose_blocks_are_not_what_clients_hash_is_not_taken():
    fleet = Fleet()
    reason = "its cache blocks hold 16 tokens, and clients hash 4"
    assert fleet.tell(b"e", make_register(block_size=16)) == refusal(reason)
    assert len(fleet.core.fleet.ranks) == 0


def test_block_sizes_do_not_matter_where_nobody_hashes():
    fleet = Fleet(coordinator_policy="load_balanced")
    fleet.tell(b"e", make_register(block_size=16))
    assert len(fleet.core.fleet.ranks) == 1


def refusal(reason: str) -> list[m.Effect]:
    return [
        m.Send(b"e", m.RequestError(None, "registration_refused", reason)),
        m.Log("registration_refused", {"reason": reason}, warning=True, peer=b"e"),
    ]


def test_a_rank_that_registers_again_loses_its_requests_and_is_the_same_number_again():
    fleet = Fleet(1)
    assert fleet.route() == 0
    effects = fleet.tell(b"0", make_register(0))
    text = "replica 0 was lost while it had the request (it registered again); send it again"
    assert effects == [
        m.Log("rank_lost", {"rank": 0, "cause": "it registered again", "requests": 1}, True),
        m.Send(CLIENT, m.RequestError(1, "replica_lost", text)),
        m.Send(b"0", m.RegisterAck(0, 2, 0, RUNNING)),
        registered(1),
    ]
    assert fleet.loads == [0]


def test_the_same_replica_on_another_connection_takes_the_old_ones_place():
    fleet = Fleet(2)
    fleet.ask()
    effects = fleet.tell(b"new", make_register(0))
    assert logs(effects) == ["rank_lost", "ranks_registered"]
    assert m.Send(b"new", m.RegisterAck(0, 2, 0, RUNNING)) in effects
    assert sorted(rank.peer for rank in fleet.core.fleet.ranks) == [b"1", b"new"]
    # The old connection is a stranger from here on.
    assert fleet.tell(b"0", replies(0)) == [
        m.Send(b"0", m.RegisterAgain()),
        m.Log("reply_from_stranger", warning=True, peer=b"0"),
    ]


def test_a_connection_that_registers_as_another_live_replica_replaces_both():
    fleet = Fleet(2)
    effects = fleet.tell(b"0", make_register(1))
    assert logs(effects) == ["rank_lost", "rank_lost", "ranks_registered"]
    assert [(rank.number, rank.peer) for rank in fleet.core.fleet.ranks] == [(1, b"0")]


def test_what_a_rank_held_before_it_registered_again_is_forgotten():
    fleet = Fleet(1)
    fleet.ask(tokens(3))
    assert len(fleet.core.fleet.index) == 3
    fleet.tell(b"0", make_register(0))
    assert len(fleet.core.fleet.index) == 0


def test_a_released_engine_that_registers_again_has_restarted():
    fleet = Fleet()
    fleet.tell(b"mp-coord-0", stock_register())
    fleet.ask()
    effects = fleet.tell(b"mp-coord-0", stock_register())
    assert logs(effects) == ["rank_lost", "ranks_registered"]
    assert [e.message.code for e in sends(effects)] == ["replica_lost"]
    assert fleet.loads == [0]


# --- joining -------------------------------------------------------------------------------------


def test_requests_wait_until_the_expected_ranks_have_registered_and_go_in_order():
    fleet = Fleet(expected_ranks=2)
    assert fleet.tell(CLIENT, submission("a")) == []
    assert fleet.tell(b"e0", make_register(0)) == [
        m.Send(b"e0", m.RegisterAck(0, 1, 0, RUNNING)),
        registered(1, 2),
    ]
    assert fleet.tell(CLIENT, submission("b")) == []
    assert fleet.tell(CLIENT, submission("c", tokens(1))) == []
    effects = fleet.tell(b"e1", make_register(1))
    assert effects == [
        m.Send(b"e1", m.RegisterAck(1, 1, 0, RUNNING)),
        registered(2),
        m.Log("request_not_hashed", peer=CLIENT),
        m.Send(b"e0", engine_request(0)),
        m.Log("request_not_hashed", peer=CLIENT),
        m.Send(b"e1", engine_request(1)),
        m.Send(b"e0", engine_request(2)),
    ]


def test_a_request_of_a_client_that_left_while_it_waited_is_not_routed():
    fleet = Fleet(expected_ranks=1)
    fleet.tell(CLIENT, submission("a"))
    assert fleet.tell(CLIENT, m.Disconnect()) == [
        m.Log("client_lost", {"cause": "it left", "requests_running": 0}, peer=CLIENT)
    ]
    assert len(sends(fleet.tell(b"e", make_register()))) == 1  # the acknowledgement


def test_once_assembled_a_smaller_fleet_serves_on():
    fleet = Fleet(2, expected_ranks=2)
    fleet.tell(b"0", m.Disconnect())
    assert fleet.route() == 1


def test_without_any_rank_a_request_fails_with_an_error():
    fleet = Fleet()
    error = m.RequestError("r", "no_replica", "no replica is registered")
    assert fleet.tell(CLIENT, submission("r")) == [m.Send(CLIENT, error)]
    assert len(fleet.core.fleet.ledger) == 0


def test_deterministic_ranks_are_acknowledged_together_and_in_order():
    fleet = Fleet(expected_ranks=3, deterministic=True)
    fleet.tell(CLIENT, submission("early"))
    assert fleet.tell(b"y", make_register(10)) == [registered(1, 3)]
    assert fleet.tell(b"z", make_register(2)) == [registered(2, 3)]
    assert fleet.tell(b"x", make_register(0)) == [
        m.Send(b"x", m.RegisterAck(0, 1, 0, RUNNING)),
        registered(1, 3),
        m.Send(b"z", m.RegisterAck(1, 1, 0, RUNNING)),
        registered(2, 3),
        m.Send(b"y", m.RegisterAck(2, 1, 0, RUNNING)),
        registered(3),
        m.Log("request_not_hashed", peer=CLIENT),
        m.Send(b"x", engine_request(0)),
    ]


def test_deterministic_joining_survives_a_rank_that_restarts_before_the_others_came():
    fleet = Fleet(expected_ranks=2, deterministic=True)
    fleet.tell(b"first", make_register(0))
    assert fleet.tell(b"again", make_register(0)) == [registered(1, 2)]
    fleet.tell(b"again", make_register(0))  # the same connection, once more
    effects = fleet.tell(b"e1", make_register(1))
    assert [send.peer for send in sends(effects)] == [b"again", b"e1"]
    assert [fleet.route(), fleet.route()] == [0, 1]


def test_deterministic_joining_forgets_a_rank_that_left_before_the_others_came():
    fleet = Fleet(expected_ranks=2, deterministic=True)
    fleet.tell(b"e0", make_register(0))
    assert fleet.tell(b"e0", m.PeerLost()) == []
    assert fleet.tell(b"e1", make_register(1)) == [registered(1, 2)]
    assert len(sends(fleet.tell(b"e0", make_register(0)))) == 2


def test_a_rank_that_waits_to_join_cannot_connect_as_a_client():
    fleet = Fleet(expected_ranks=2, deterministic=True)
    fleet.tell(b"e0", make_register(0))
    assert logs(fleet.tell(b"e0", make_connect())) == ["connect_from_engine"]


# --- requests and answers ------------------------------------------------------------------------


def test_a_request_goes_out_and_its_answer_comes_back_under_the_clients_own_name():
    fleet = Fleet(1)
    assert fleet.tell(CLIENT, submission("mine", tokens(2))) == [m.Send(b"0", engine_request(0))]
    reply = m.EngineReply((answer(0, b"the answer"),))
    assert fleet.tell(b"0", reply) == [m.Send(CLIENT, m.Reply("mine", b"the answer"))]
    assert fleet.loads == [0]


def test_the_bodies_are_passed_on_as_the_same_objects():
    fleet = Fleet(1)
    body, prompt, sampling = bytes(9), bytes(8), bytes(7)
    (sent,) = sends(fleet.tell(CLIENT, m.SubmitRequest(1, -1, sampling, prompt)))
    assert sent.message.prompt is prompt
    assert sent.message.sampling is sampling
    (sent,) = sends(fleet.tell(b"0", m.EngineReply((answer(0, body),))))
    assert sent.message.body is body


def test_one_step_answers_several_requests_of_several_clients():
    fleet = Fleet(1)
    fleet.tell(OTHER, make_connect())
    for peer, name in [(CLIENT, 1), (OTHER, 1), (CLIENT, 2)]:
        fleet.tell(peer, submission(name))
    assert fleet.tell(b"0", replies(2, 0, 1)) == [
        m.Send(CLIENT, m.Reply(2, BODY)),
        m.Send(CLIENT, m.Reply(1, BODY)),
        m.Send(OTHER, m.Reply(1, BODY)),
    ]


def test_text_without_hashes_is_said_once_per_client_and_routed():
    fleet = Fleet(1)
    assert fleet.tell(CLIENT, submission("text")) == [
        m.Log("request_not_hashed", peer=CLIENT),
        m.Send(b"0", engine_request(0)),
    ]


def test_a_second_reply_and_one_to_an_unknown_request_are_dropped():
    fleet = Fleet(1)
    fleet.ask()
    fleet.answer(0)
    dropped = m.Log("reply_dropped", warning=True, peer=b"0")
    assert fleet.tell(b"0", replies(0)) == [dropped]
    assert fleet.tell(b"0", replies(12345, -1)) == [dropped, dropped]
    assert fleet.loads == [0]


def test_a_good_answer_beside_a_bad_one_still_arrives():
    fleet = Fleet(1)
    fleet.ask()
    assert fleet.tell(b"0", replies(7, 0, 0)) == [
        m.Log("reply_dropped", warning=True, peer=b"0"),
        m.Send(CLIENT, m.Reply(1, BODY)),
        m.Log("reply_dropped", warning=True, peer=b"0"),
    ]


def test_a_rank_cannot_answer_what_another_rank_has():
    fleet = Fleet(2)
    assert fleet.ask() == (0, 0)
    assert logs(fleet.tell(b"1", replies(0))) == ["reply_dropped"]
    assert fleet.loads == [1, 0]


def test_nobody_can_answer_a_request_that_waits():
    fleet = Fleet(1, expected_ranks=2)
    fleet.tell(CLIENT, submission("waits"))
    assert logs(fleet.tell(b"0", replies(0))) == ["reply_dropped"]


@pytest.mark.parametrize(
    ("message", "event"),
    [(replies(0), "reply_from_stranger"), (m.Pong(3), "pong_from_stranger")],
)
def test_a_stranger_that_speaks_as_an_engine_is_told_to_register_again(message, event):
    fleet = Fleet(1)
    fleet.ask()
    assert fleet.tell(OTHER, message) == [
        m.Send(OTHER, m.RegisterAgain()),
        m.Log(event, warning=True, peer=OTHER),
    ]
    assert fleet.loads == [1]


def test_a_client_that_speaks_as_an_engine_is_only_logged():
    fleet = Fleet(1)
    assert fleet.tell(CLIENT, replies(0)) == [m.Log("reply_from_client", warning=True, peer=CLIENT)]
    assert fleet.tell(CLIENT, m.Pong(1)) == []
    assert fleet.tell(b"0", m.Pong(1)) == []


def test_a_trace_tells_what_was_predicted_and_what_the_engine_skipped():
    fleet = Fleet(1, trace=True)
    prompt = [*tokens(3), 5]
    fleet.ask(prompt)
    assert fleet.answer(0)[1:] == [m.Trace(0, 0, 3, 13, 0, 0, False)]
    fleet.ask(prompt)
    effects = fleet.tell(b"0", m.EngineReply((answer(1, cached_tokens=8),)))
    assert effects[1:] == [
        m.Trace(
            request_id=1,
            rank=0,
            blocks=3,
            prompt_tokens=13,
            predicted_tokens=8,  # 12 would leave 1 token to compute
            cached_tokens=8,
            in_window=False,
        )
    ]


def test_a_trace_of_an_unhashed_request_predicts_nothing():
    fleet = Fleet(1, trace=True)
    fleet.ask()
    assert fleet.answer(0)[1:] == [m.Trace(0, 0, 0, -1, 0, 0, False)]


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


# --- leaving -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "cause"), [(m.Disconnect(), "it left"), (m.PeerLost(), "its connection broke")]
)
def test_the_answers_of_a_lost_client_are_dropped_and_free_the_load_once(message, cause):
    fleet = Fleet(1)
    fleet.tell(OTHER, make_connect())
    fleet.tell(OTHER, submission("a"))
    fleet.tell(OTHER, submission("b", tokens(2)))
    fleet.ask()
    assert fleet.tell(OTHER, message) == [
        m.Log("client_lost", {"cause": cause, "requests_running": 2}, peer=OTHER)
    ]
    assert fleet.loads == [3]  # they run on
    assert fleet.tell(b"0", replies(0, 1)) == []
    assert fleet.loads == [1]
    assert logs(fleet.tell(b"0", replies(0))) == ["reply_dropped"]
    assert fleet.loads == [1]
    assert len(fleet.core.fleet.index) == 2  # what it computed is cached all the same
    assert sends(fleet.tell(OTHER, submission("c")))[0].message.code == "not_connected"


def test_a_client_that_comes_back_gets_no_old_answers():
    fleet = Fleet(1)
    fleet.ask()
    fleet.tell(CLIENT, m.PeerLost())
    fleet.tell(CLIENT, make_connect())
    assert fleet.tell(b"0", replies(0)) == []


@pytest.mark.parametrize(
    ("message", "cause", "event"),
    [
        (m.Disconnect(), "it left", "rank_left"),
        (m.PeerLost(), "its connection broke", "rank_lost"),
    ],
)
def test_the_requests_of_a_lost_rank_fail_with_the_cause(message, cause, event):
    fleet = Fleet(2)
    fleet.tell(OTHER, make_connect())
    fleet.tell(CLIENT, submission("a", tokens(2)))
    fleet.tell(CLIENT, submission("b"))
    fleet.tell(OTHER, submission("c"))
    assert fleet.loads == [2, 1]
    text = f"replica 0 was lost while it had the request ({cause}); send it again"
    assert fleet.tell(b"0", message) == [
        m.Log(event, {"rank": 0, "cause": cause, "requests": 2}, warning=event == "rank_lost"),
        m.Send(CLIENT, m.RequestError("a", "replica_lost", text)),
        m.Send(OTHER, m.RequestError("c", "replica_lost", text)),
    ]
    assert fleet.loads == [1]
    assert len(fleet.core.fleet.index) == 0
    assert logs(fleet.tell(b"0", replies(0))) == ["reply_from_stranger"]


def test_a_request_that_never_reached_the_lost_rank_goes_to_another_under_a_new_id():
    fleet = Fleet(2)
    fleet.tell(CLIENT, submission("a", tokens(2)))
    fleet.tell(CLIENT, submission("b", tokens(2, name=1)))
    fleet.tell(CLIENT, submission("c", tokens(2)))
    assert fleet.loads == [2, 1]
    text = "replica 0 was lost while it had the request (its connection broke); send it again"
    assert fleet.tell(b"0", m.PeerLost((2,))) == [
        m.Log("rank_lost", {"rank": 0, "cause": "its connection broke", "requests": 1}, True),
        m.Send(CLIENT, m.RequestError("a", "replica_lost", text)),
        m.Send(b"1", engine_request(3)),
    ]
    assert fleet.answer(3) == [m.Send(CLIENT, m.Reply("c", BODY))]


def test_all_requests_that_never_reached_the_lost_rank_go_to_another():
    fleet = Fleet(expected_ranks=2)
    for name in "abc":
        fleet.tell(CLIENT, submission(name))
    for number in range(2):
        fleet.tell(b"%d" % number, make_register(number))
    assert fleet.loads == [2, 1]
    effects = fleet.tell(b"0", m.PeerLost((0, 2)))
    assert [e.message.request_id for e in sends(effects)] == [3, 4]
    assert {e.peer for e in sends(effects)} == {b"1"}


def test_an_undelivered_request_fails_when_there_is_no_other_rank():
    fleet = Fleet(1)
    fleet.ask()
    effects = fleet.tell(b"0", m.PeerLost((0,)))
    error = m.RequestError(1, "no_replica", "no replica is registered")
    assert effects[-1] == m.Send(CLIENT, error)
    assert logs(effects) == ["rank_lost"]
    assert len(fleet.core.fleet.ledger) == 0


def test_an_undelivered_request_of_a_client_that_is_gone_ends_there():
    fleet = Fleet(2)
    fleet.ask()
    fleet.tell(CLIENT, m.PeerLost())
    assert sends(fleet.tell(b"0", m.PeerLost((0,)))) == []
    assert len(fleet.core.fleet.ledger) == 0


def test_an_undelivered_request_of_another_rank_is_left_alone():
    fleet = Fleet(2)
    fleet.ask()
    fleet.ask()
    assert sends(fleet.tell(b"1", m.PeerLost((0,))))[0].message.client_request_id == 2
    assert fleet.loads == [1]


@pytest.mark.parametrize("message", [m.Disconnect(), m.PeerLost(), m.PeerLost((0,))])
def test_a_stranger_that_leaves_is_no_event(message):
    assert Fleet(1).tell(OTHER, message) == []


def test_a_lost_rank_that_registers_anew_is_used_again():
    fleet = Fleet(1)
    fleet.tell(b"0", m.PeerLost())
    assert sends(fleet.tell(b"0", make_register(0)))[0].message.generation == 2
    assert fleet.route() == 0


# --- control signals -----------------------------------------------------------------------------

REACH = {
    RUNNING: (),
    PAUSED: (Signal.PAUSE,),
    SUSPENDED: (Signal.PAUSE, Signal.SUSPEND),
}
PASSED_ON = {
    (RUNNING, Signal.PAUSE): PAUSED,
    (PAUSED, Signal.UNPAUSE): RUNNING,
    (PAUSED, Signal.SUSPEND): SUSPENDED,
    (PAUSED, Signal.STOP): RUNNING,
    (SUSPENDED, Signal.RESUME): PAUSED,
    (SUSPENDED, Signal.STOP): RUNNING,
    **{
        (state, signal): state
        for state in FleetState
        for signal in (
            Signal.SET_GENERATION_EPOCH,
            Signal.START_CUDA_PROFILER,
            Signal.STOP_CUDA_PROFILER,
        )
    },
}
IGNORED = {
    (RUNNING, Signal.UNPAUSE),
    (PAUSED, Signal.PAUSE),
    (SUSPENDED, Signal.PAUSE),
    (SUSPENDED, Signal.SUSPEND),
}


@pytest.mark.parametrize("signal", Signal)
@pytest.mark.parametrize("state", FleetState)
def test_each_signal_in_each_state(state, signal):
    fleet = Fleet(2)
    fleet.signal(*REACH[state])
    assert fleet.core.fleet.state is state
    epoch = signal is Signal.SET_GENERATION_EPOCH
    effects = fleet.tell(CLIENT, m.Control(signal, (31,) if epoch else ()))
    if (state, signal) in PASSED_ON:
        args = (31, 1) if epoch else (1,) if signal is Signal.RESUME else ()
        assert effects == [m.Send(peer, m.Control(signal, args)) for peer in (b"0", b"1")]
        assert fleet.core.fleet.state is PASSED_ON[state, signal]
    else:
        refused = m.Log(
            "signal_refused", {"signal": signal.name, "state": state.value}, True, peer=CLIENT
        )
        assert effects == ([] if (state, signal) in IGNORED else [refused])
        assert fleet.core.fleet.state is state


def test_requests_are_passed_on_while_the_fleet_is_paused():
    fleet = Fleet(1)
    fleet.signal(Signal.PAUSE)
    assert fleet.route() == 0


# --- weight epochs -------------------------------------------------------------------------------


def test_a_new_generation_epoch_begins_the_next_weight_epoch():
    fleet = Fleet(2)
    fleet.ask(tokens(3))
    fleet.answer_all()
    assert len(fleet.core.fleet.index) == 3
    signal = m.Control(Signal.SET_GENERATION_EPOCH, (100,))
    expected = m.Control(Signal.SET_GENERATION_EPOCH, (100, 1))
    assert fleet.tell(CLIENT, signal) == [m.Send(b"0", expected), m.Send(b"1", expected)]
    assert fleet.core.fleet.weight_epoch == 1
    assert len(fleet.core.fleet.index) == 0
    assert sends(fleet.tell(CLIENT, submission("r"))) == [m.Send(b"1", engine_request(1, epoch=1))]


def test_the_same_generation_epoch_again_changes_nothing():
    fleet = Fleet(1)
    fleet.tell(CLIENT, m.Control(Signal.SET_GENERATION_EPOCH, (100,)))
    fleet.ask(tokens(3))
    effects = fleet.tell(CLIENT, m.Control(Signal.SET_GENERATION_EPOCH, (100,)))
    assert effects == [m.Send(b"0", m.Control(Signal.SET_GENERATION_EPOCH, (100, 1)))]
    assert (fleet.core.fleet.weight_epoch, len(fleet.core.fleet.index)) == (1, 3)
    fleet.tell(CLIENT, m.Control(Signal.SET_GENERATION_EPOCH, (99,)))  # lower, but new
    assert (fleet.core.fleet.weight_epoch, len(fleet.core.fleet.index)) == (2, 0)


def test_the_first_generation_epoch_is_a_new_one_even_if_it_is_0():
    fleet = Fleet(1)
    fleet.tell(CLIENT, m.Control(Signal.SET_GENERATION_EPOCH, (0,)))
    assert fleet.core.fleet.weight_epoch == 1


def test_every_resume_begins_the_next_weight_epoch():
    fleet = Fleet(1)
    fleet.ask(tokens(2))
    for epoch in (1, 2):
        fleet.signal(Signal.PAUSE, Signal.SUSPEND)
        assert fleet.tell(CLIENT, m.Control(Signal.RESUME)) == [
            m.Send(b"0", m.Control(Signal.RESUME, (epoch,)))
        ]
        assert (fleet.core.fleet.weight_epoch, len(fleet.core.fleet.index)) == (epoch, 0)
        fleet.signal(Signal.UNPAUSE)


def test_a_refused_resume_begins_no_epoch():
    fleet = Fleet(1)
    fleet.ask(tokens(2))
    fleet.signal(Signal.RESUME, Signal.PAUSE, Signal.RESUME)
    assert (fleet.core.fleet.weight_epoch, len(fleet.core.fleet.index)) == (0, 2)


def test_pausing_and_suspending_alone_forget_nothing():
    fleet = Fleet(1)
    fleet.ask(tokens(2))
    fleet.signal(Signal.PAUSE, Signal.SUSPEND)
    assert (fleet.core.fleet.weight_epoch, len(fleet.core.fleet.index)) == (0, 2)


def test_an_answer_from_before_the_update_leaves_nothing_held():
    fleet = Fleet(1)
    fleet.ask(tokens(2))
    fleet.tell(CLIENT, m.Control(Signal.SET_GENERATION_EPOCH, (1,)))
    fleet.answer(0)
    assert len(fleet.core.fleet.index) == 0
    assert fleet.loads == [0]


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
    fleet = Fleet(1, ttl_seconds=300.0)
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
    assert fleet.core.fleet.index.holders(hashes(tokens(3, 3))) == {0: 3}
    assert fleet.core.fleet.index.holders(hashes(tokens(3, 2))) == {0: 2}


def test_a_tick_pings_our_engines_and_no_stock_peer():
    fleet = Fleet(2)
    fleet.tell(b"mp-coord-2", stock_register())
    fleet.tell(OTHER, m.Connect(None))
    for number in range(1, 10):
        assert fleet.tick() == [m.Send(b"0", m.Ping(number)), m.Send(b"1", m.Ping(number))]
    # Every tenth time also our clients, to find those that vanished.
    assert [effect.peer for effect in fleet.tick()] == [b"0", b"1", CLIENT]
    fleet.tell(b"0", m.PeerLost())
    assert fleet.tick() == [m.Send(b"1", m.Ping(11))]


# --- a random campaign ---------------------------------------------------------------------------

ENGINES = [b"e0", b"e1", b"e2", b"e3", b"mp-coord-4", b"mp-coord-5"]
CLIENTS = [b"c0", b"c1", b"c2"]
ANYBODY = [*ENGINES, *CLIENTS, b"x", b""]


class Campaign:
    """Random messages, sane ones and nonsense, to one coordinator; every effect is accounted for.

    Attributes:
        open: Requests of living clients that have got neither answer nor error, by client and
            name.
        given: Requests that an engine has: the id it knows, by peer.
    """

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.core = Coordinator(
            make_settings(
                expected_ranks=rng.choice([0, 2, 3]),
                deterministic=rng.random() < 0.5,
                burst_cap=rng.choice([0, 2]),
                ttl_seconds=20.0,
                coordinator_policy=rng.choice(["longest_prefix", "first_prefix_block"]),
                cost_policy=rng.choice(
                    ["relative_load_weighted", "free_capacity_weighted", "prefill_work"]
                ),
                eviction=rng.choice([LRU, REF_ZERO]),
                trace=rng.random() < 0.5,
            )
        )
        self.now = 0.0
        self.asked = 0
        self.open = set()
        self.connected = set()
        self.given = {}
        self.ids = set()  # all that engines were ever given
        self.kinds = {}  # how often each effect or message was seen

    def count(self, thing):
        self.kinds[thing] = self.kinds.get(thing, 0) + 1

    def tell(self, peer, message):
        if isinstance(message, m.SubmitRequest):
            self.open.add((peer, message.client_request_id))
        for effect in self.core.handle(m.Incoming(peer, message), self.now):
            self.account(effect)
        if isinstance(message, m.Disconnect | m.PeerLost):
            self.connected.discard(peer)
            self.given.pop(peer, None)
            self.open = {(client, name) for client, name in self.open if client != peer}
        self.core.check_integrity()

    def account(self, effect):
        if not isinstance(effect, m.Send):
            self.count(effect.event if isinstance(effect, m.Log) else type(effect).__name__)
            return
        message = effect.message
        self.count(type(message).__name__)
        match message:
            case m.Reply(client_request_id=name):
                assert effect.peer in self.connected
                self.open.remove((effect.peer, name))  # at most one answer or error
            case m.RequestError(client_request_id=name) if name is not None:
                self.open.remove((effect.peer, name))
            case m.EngineRequest(request_id=request_id):
                assert self.core.fleet.ranks.of_peer(effect.peer) is not None
                assert request_id not in self.ids
                self.ids.add(request_id)
                self.given.setdefault(effect.peer, []).append(request_id)
            case m.ConnectAck():
                self.connected.add(effect.peer)
            case m.RegisterAck() | m.Ping() | m.Control():
                rank = self.core.fleet.ranks.of_peer(effect.peer)
                assert rank is None or not rank.released or isinstance(message, m.Control)

    def step(self):
        rng = self.rng
        self.now += rng.random()
        kind = rng.choices(
            ["submit", "answer", "nonsense", "connect", "register", "leave", "control", "tick"],
            [40, 30, 8, 4, 2, 1, 3, 6],
        )[0]
        getattr(self, kind)()

    def submit(self):
        rng = self.rng
        self.asked += 1
        peer = rng.choice(CLIENTS if rng.random() < 0.95 else ANYBODY)
        prompt = [t for _ in range(rng.randrange(5)) for t in [rng.randrange(2)] * BLOCK]
        message = submission(self.asked, prompt)
        if rng.random() < 0.2:
            message = submission(self.asked)
        elif rng.random() < 0.25:  # a list that no prompt has
            listed = [rng.randrange(-1, 9) for _ in range(rng.randrange(5))]
            if rng.random() < 0.7:
                listed = list(dict.fromkeys(abs(number) + 1 for number in listed))
            packed = pack_hashes(listed)[: rng.choice([None, None, None, -3])]
            length = rng.choice([-1, len(listed) * BLOCK, rng.randrange(30), 2**64 - 1])
            message = m.SubmitRequest(self.asked, length, SAMPLING, PROMPT, packed)
        self.tell(peer, message)

    def answer(self):
        peers = [peer for peer, ids in self.given.items() if ids]
        if not peers:
            return
        peer = self.rng.choice(peers)
        ids = self.given[peer]
        self.rng.shuffle(ids)
        done = [ids.pop() for _ in range(self.rng.randint(1, min(3, len(ids))))]
        again = self.rng.choices(done, k=self.rng.choice([0, 0, 1]))
        self.tell(peer, replies(*done, *again))

    def nonsense(self):
        rng = self.rng
        message = rng.choice(
            [
                replies(*(rng.randrange(-2, 50) + self.asked - 25 for _ in range(2))),
                m.EngineReply(()),
                m.Pong(rng.randrange(9)),
                m.Malformed("garbage"),
                m.Shutdown(),
                make_connect(),
                m.Connect(rng.choice([0, 2, -1])),
                make_register(version=7),
                make_register(rng.randrange(3), max_requests=rng.choice([-3, 0])),
            ]
        )
        peer = rng.choice(ANYBODY)
        if isinstance(message, m.EngineReply):
            for answered in message.answers:
                if answered.request_id in self.given.get(peer, ()):
                    self.given[peer].remove(answered.request_id)
        self.tell(peer, message)

    def connect(self):
        self.tell(self.rng.choice(CLIENTS), self.rng.choice([make_connect(), m.Connect(None)]))

    def register(self):
        rng = self.rng
        peer = rng.choice(ENGINES)
        if peer.startswith(b"mp"):
            self.tell(peer, stock_register())
            return
        message = make_register(
            rng.randrange(4),
            max_requests=rng.choice([1, 8, 64]),
            total_blocks=rng.choice([-1, 0, 3, 40]),
            eviction=rng.choice(["lru", "ref_zero", "?"]),
            weight_epoch=rng.randrange(3),
        )
        self.tell(peer, message)
        self.given = {  # of what a replaced rank had, its engine speaks no more
            who: [i for i in ids if self.core.fleet.ledger.held_by(i, rank.number)]
            for who, ids in self.given.items()
            if (rank := self.core.fleet.ranks.of_peer(who)) is not None
        }

    def leave(self):
        rng = self.rng
        peer = rng.choice(ANYBODY)
        ids = [*self.given.get(peer, []), 0]
        undelivered = rng.choice([(), (ids[-1],), (ids[0],), tuple(ids)])
        self.tell(peer, rng.choice([m.Disconnect(), m.PeerLost(), m.PeerLost(undelivered)]))

    def control(self):
        signal = self.rng.choice(list(Signal))
        args = (self.rng.randrange(3),) if signal is Signal.SET_GENERATION_EPOCH else ()
        peer = self.rng.choice(CLIENTS if self.rng.random() < 0.8 else ANYBODY)
        self.tell(peer, m.Control(signal, args))

    def tick(self):
        self.tell(b"", m.Tick())

    def finish(self):
        """Let the fleet assemble, half of the ranks answer all they have and the others die."""
        for dp_rank in range(4):
            self.tell(b"fresh-%d" % dp_rank, make_register(dp_rank))
        for rank in list(self.core.fleet.ranks):
            ids = [r.request_id for r in self.core.fleet.ledger if r.rank == rank.number]
            if self.rng.random() < 0.5:
                self.tell(rank.peer, replies(*ids))
            else:
                self.tell(rank.peer, m.PeerLost())
        assert self.open == set()
        assert len(self.core.fleet.ledger) == 0
        assert self.core.fleet.index.holders([1]).keys() <= {
            rank.number for rank in self.core.fleet.ranks
        }


@pytest.mark.parametrize("seed", range(24))
def test_a_random_campaign_loses_no_request_and_corrupts_nothing(seed):
    campaign = Campaign(seed)
    for _ in range(2000):
        campaign.step()
    campaign.finish()
    often = ["Reply", "RequestError", "EngineRequest", "rank_lost", "client_lost", "reply_dropped"]
    assert min(campaign.kinds.get(kind, 0) for kind in often) >= 3, campaign.kinds
