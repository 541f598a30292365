"""Replicas register and assemble: exact effects of every message."""

import pytest
from builders import (
    BODY,
    CLIENT,
    LRU,
    REF_ZERO,
    Fleet,
    engine_request,
    logs,
    lost,
    make_connect,
    make_register,
    none_left,
    registered,
    replies,
    sends,
    stock_register,
    submission,
    tokens,
)

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator import ranks
from megatron.core.inference.coordinator.lifecycle import FleetState, Signal

RUNNING, SUSPENDED = FleetState.RUNNING, FleetState.SUSPENDED


# --- registering ---------------------------------------------------------------------------------


def test_an_engine_is_told_its_number_generation_epoch_and_the_state():
    fleet = Fleet(expected_ranks=2)
    assert fleet.tell(b"a", make_register(3)) == [
        m.Send(b"a", m.RegisterAck(0, 1, 0, RUNNING)),
        registered(1, 2, rank=0, generation=1, replica="job", dp_rank=3),
    ]
    assert fleet.tell(b"b", make_register(1)) == [
        m.Send(b"b", m.RegisterAck(1, 1, 0, RUNNING)),
        registered(2, rank=1, generation=1, replica="job", dp_rank=1),
    ]
    assert registered(2, rank=0, generation=2) in fleet.tell(b"a", make_register(3))


def test_an_engine_that_joins_later_learns_what_happened_before():
    fleet = Fleet(1)
    fleet.tell(CLIENT, m.Control(Signal.SET_GENERATION_EPOCH, (9,)))
    fleet.signal(Signal.PAUSE, Signal.SUSPEND)
    effects = fleet.tell(b"late", make_register(1))
    assert effects == [
        m.Send(b"late", m.RegisterAck(1, 1, 1, SUSPENDED)),
        m.Send(b"late", m.Control(Signal.SET_GENERATION_EPOCH, (9, 1))),
        registered(2),
    ]


def test_a_released_engine_gets_no_acknowledgement():
    effects = Fleet(eviction=LRU).tell(b"mp-coord-0", stock_register())
    assert effects == [registered(1)]


def test_a_released_engine_that_joins_later_learns_the_generation_epoch():
    fleet = Fleet(1, eviction=LRU)
    fleet.tell(CLIENT, m.Control(Signal.SET_GENERATION_EPOCH, (0,)))
    effects = fleet.tell(b"mp-coord-0", stock_register())
    signal = m.Control(Signal.SET_GENERATION_EPOCH, (0, 1))
    assert effects == [m.Send(b"mp-coord-0", signal), registered(2)]


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


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (
            16,
            "its cache blocks hold 16 tokens, and the coordinator's 4; start both with the same "
            "--inference-dynamic-batching-block-size",
        ),
        (
            0,
            "it caches no prefixes, and the coordinator routes by them; start both with "
            "--inference-dynamic-batching-prefix-caching, or both without",
        ),
    ],
)
def test_an_engine_whose_blocks_are_not_what_clients_hash_is_not_taken(size, reason):
    fleet = Fleet()
    assert fleet.tell(b"e", make_register(block_size=size)) == refusal(reason)
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


def test_a_rank_that_registers_again_is_the_same_number_and_computes_its_requests_anew():
    fleet = Fleet(1)
    fleet.submit("a")
    assert fleet.tell(b"0", make_register(0)) == [
        lost(0, "it registered again", 1),
        none_left(waiting=1),
        m.Send(b"0", m.RegisterAck(0, 2, 0, RUNNING)),
        registered(1),
        m.Send(b"0", engine_request(1)),
    ]
    assert fleet.loads == [1]
    # What it says of the request's first attempt counts no more.
    assert fleet.tell(b"0", replies(0, 1)) == [
        m.Log("reply_dropped", warning=True, peer=b"0"),
        m.Send(CLIENT, m.Reply("a", BODY)),
    ]


def test_the_requests_of_a_rank_that_registers_again_go_to_others_where_there_are_any():
    fleet = Fleet(2)
    fleet.submit("a")
    assert fleet.tell(b"0", make_register(0)) == [
        lost(0, "it registered again", 1),
        m.Send(b"1", engine_request(1)),
        m.Send(b"0", m.RegisterAck(0, 2, 0, RUNNING)),
        registered(2),
    ]


def test_the_same_replica_on_another_connection_takes_the_old_ones_place():
    fleet = Fleet(2)
    fleet.submit("a")
    assert fleet.tell(b"new", make_register(0)) == [
        lost(0, "it registered again", 1),
        m.Send(b"1", engine_request(1)),
        m.Send(b"new", m.RegisterAck(0, 2, 0, RUNNING)),
        registered(2),
    ]
    assert sorted(rank.peer for rank in fleet.core.fleet.ranks) == [b"1", b"new"]
    # The old connection is a stranger from here on.
    assert fleet.tell(b"0", replies(0)) == [
        m.Send(b"0", m.RegisterAgain()),
        m.Log("reply_from_stranger", warning=True, peer=b"0"),
    ]


def test_a_connection_that_registers_as_another_live_replica_replaces_both():
    fleet = Fleet(2)
    assert fleet.tell(b"0", make_register(1)) == [
        lost(0, "it registered again", 0),
        lost(1, "it registered again", 0),
        none_left(waiting=0),
        m.Send(b"0", m.RegisterAck(1, 2, 0, RUNNING)),
        registered(1),
    ]
    assert [(rank.number, rank.peer) for rank in fleet.core.fleet.ranks] == [(1, b"0")]


def test_of_two_ranks_that_are_replaced_at_once_neither_gets_what_the_other_had():
    fleet = Fleet(3)
    fleet.submit("a", "b")
    assert fleet.tell(b"0", make_register(1)) == [
        lost(0, "it registered again", 1),
        m.Send(b"2", engine_request(2)),
        lost(1, "it registered again", 1),
        m.Send(b"2", engine_request(3)),
        m.Send(b"0", m.RegisterAck(1, 2, 0, RUNNING)),
        registered(2),
    ]


def test_what_a_rank_held_before_it_registered_again_is_forgotten():
    fleet = Fleet(1)
    fleet.ask(tokens(3))
    fleet.answer_all()
    assert len(fleet.core.fleet.index) == 3
    fleet.tell(b"0", make_register(0))
    assert len(fleet.core.fleet.index) == 0


def test_a_released_engine_that_registers_again_has_restarted():
    fleet = Fleet()
    fleet.tell(b"mp-coord-0", stock_register())
    fleet.ask()
    fleet.submit("b")
    assert fleet.tell(b"mp-coord-0", stock_register()) == [
        lost(0, "it registered again", 2),
        none_left(waiting=2),
        registered(1),
        m.Log("request_not_hashed", peer=CLIENT),
        m.Send(b"mp-coord-0", engine_request(2)),
        m.Send(b"mp-coord-0", engine_request(3)),
    ]
    assert fleet.loads == [2]


def test_a_lost_rank_that_registers_anew_is_used_again():
    fleet = Fleet(1)
    fleet.tell(b"0", m.PeerLost())
    assert sends(fleet.tell(b"0", make_register(0)))[0].message.generation == 2
    assert fleet.route() == 0


def test_more_replicas_may_come_and_go_than_there_are_numbers():
    fleet = Fleet(1)
    core = fleet.core
    for job in range(ranks.REMEMBERED - 1):
        core.handle(m.Incoming(b"e", make_register(0, f"job {job}")), 0.0)
    (ack,) = sends(fleet.tell(b"e", make_register(0, "job 9")))
    assert (ack.message.rank, ack.message.generation) == (10, 2)
    # All numbers that are kept are given away: the replica that registered longest ago, and is
    # not here, is forgotten. The first of all is still here.
    (ack,) = sends(fleet.tell(b"e", make_register(0, "another")))
    assert (ack.message.rank, ack.message.generation) == (1, 1)
    (ack,) = sends(fleet.tell(b"f", make_register(0, "job 0")))
    assert (ack.message.rank, ack.message.generation) == (2, 1)
    (ack,) = sends(fleet.tell(b"e", make_register(0, "job 9")))
    assert (ack.message.rank, ack.message.generation) == (10, 3)
    assert sorted(rank.number for rank in core.fleet.ranks) == [0, 2, 10]


def test_how_well_a_forgotten_replica_was_predicted_is_not_the_next_ones_figure():
    fleet = Fleet(1)
    fleet.ask(tokens(2))
    fleet.answer(0)
    assert fleet.core.fleet.router.accuracy[0].replies == 1
    fleet.tell(b"0", make_register(0))
    assert fleet.core.fleet.router.accuracy[0].replies == 1
    for job in range(ranks.REMEMBERED):
        fleet.core.handle(m.Incoming(b"0", make_register(0, f"job {job}")), 0.0)
    assert [rank.number for rank in fleet.core.fleet.ranks] == [0]
    assert 0 not in fleet.core.fleet.router.accuracy


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
