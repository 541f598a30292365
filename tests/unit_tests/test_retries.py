"""Requests of lost ranks, tried again or waiting for a rank: exact effects of every message."""

import pytest
from builders import (
    BODY,
    CLIENT,
    OTHER,
    Fleet,
    engine_request,
    lost,
    make_connect,
    make_register,
    none_left,
    registered,
    replies,
    sends,
    submission,
    tokens,
)

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.lifecycle import FleetState, Signal

RUNNING = FleetState.RUNNING


# --- ranks that are lost -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "cause"), [(m.Disconnect(), "it left"), (m.PeerLost(), "its connection broke")]
)
def test_the_requests_of_a_lost_rank_go_to_another_under_new_ids(message, cause):
    fleet = Fleet(2)
    fleet.tell(OTHER, make_connect())
    fleet.submit("a", "b")
    fleet.submit("c", peer=OTHER)
    assert fleet.loads == [2, 1]
    assert fleet.tell(b"0", message) == [
        lost(0, cause, 2),
        m.Send(b"1", engine_request(3)),
        m.Send(b"1", engine_request(4)),
    ]
    assert fleet.loads == [3]
    # Each is answered once.
    assert fleet.tell(b"1", replies(4, 1, 3, 3, 0, 2)) == [
        m.Send(OTHER, m.Reply("c", BODY)),
        m.Send(CLIENT, m.Reply("b", BODY)),
        m.Send(CLIENT, m.Reply("a", BODY)),
        *[m.Log("reply_dropped", warning=True, peer=b"1")] * 3,
    ]
    assert len(fleet.core.fleet.ledger) == 0


def test_a_retried_request_is_sent_as_the_client_sent_it_and_under_the_present_epoch():
    fleet = Fleet(2)
    message = m.SubmitRequest("a", 1, bytes(7), bytes(8), b"")
    fleet.tell(CLIENT, message)
    fleet.tell(CLIENT, m.Control(Signal.SET_GENERATION_EPOCH, (1,)))
    (sent,) = sends(fleet.tell(b"0", m.PeerLost()))
    assert sent == m.Send(b"1", m.EngineRequest(1, 1, message.sampling, message.prompt))
    assert sent.message.prompt is message.prompt
    assert sent.message.sampling is message.sampling


def test_retried_requests_spread_over_the_ranks_that_are_left():
    fleet = Fleet(3)
    fleet.submit(*"abcdef")
    assert fleet.loads == [2, 2, 2]
    assert sends(fleet.tell(b"1", m.PeerLost())) == [
        m.Send(b"0", engine_request(6)),
        m.Send(b"2", engine_request(7)),
    ]


def test_a_retried_request_goes_to_who_holds_its_prompt():
    fleet = Fleet(3)
    assert [fleet.route(tokens(4)), fleet.route(tokens(4))] == [0, 1]
    fleet.answer_all()
    assert fleet.route(tokens(4)) == 0
    fleet.tell(b"2", m.Pong(0))
    assert fleet.tell(b"0", m.PeerLost()) == [
        lost(0, "its connection broke", 1),
        m.Send(b"1", engine_request(3)),
    ]
    assert fleet.holders(tokens(4)) == {1: 4}


def test_what_a_lost_rank_held_attracts_nothing_and_the_retry_counts_as_held_where_it_goes():
    fleet = Fleet(2)
    assert fleet.route(tokens(4)) == 0
    assert fleet.holders(tokens(4)) == {0: 4}
    fleet.tell(b"0", m.PeerLost())
    assert fleet.holders(tokens(4)) == {1: 4}
    fleet.answer(1)
    fleet.tell(b"1", m.PeerLost())
    assert len(fleet.core.fleet.index) == 0


def test_a_retry_is_told_of_like_any_request():
    fleet = Fleet(2, trace=True)
    fleet.tell(CLIENT, submission("text"))
    assert fleet.tell(b"0", m.PeerLost()) == [
        lost(0, "its connection broke", 1),
        m.Log("request_not_hashed", peer=CLIENT),
        m.Send(b"1", engine_request(1)),
    ]
    sent, trace = fleet.answer(1)
    assert sent == m.Send(CLIENT, m.Reply("text", BODY))
    assert (trace.outcome, trace.request_id, trace.rank) == (m.Outcome.ANSWERED, 1, 1)


def test_what_is_given_up_is_traced_as_well():
    fleet = Fleet(1, trace=True, max_retries=0, replica_wait=30)
    fleet.ask(tokens(2))
    trace, error = [e for e in fleet.tell(b"0", m.PeerLost()) if not isinstance(e, m.Log)]
    assert (trace.outcome, trace.rank, trace.reply) == (m.Outcome.REPLICA_LOST, 0, None)
    assert error.message.code == "replica_lost"
    fleet.tick(10.0)
    fleet.tell(CLIENT, submission("b", tokens(2)))
    trace, error = fleet.tick(40.0)
    assert (trace.outcome, trace.rank, trace.came) == (m.Outcome.NO_REPLICA, None, 10.0)
    assert trace.hashes == submission("b", tokens(2)).hashes
    assert error.message.code == "no_replica"


def test_equal_requests_that_followed_one_another_do_so_again():
    fleet = Fleet(2, burst_cap=8)
    for _ in range(3):
        assert fleet.route(tokens(4)) == 0
    assert [e.message.request_id for e in sends(fleet.tell(b"0", m.PeerLost()))] == [3, 4, 5]
    assert fleet.route(tokens(4)) == 1


def test_the_late_reply_of_a_lost_rank_is_dropped():
    fleet = Fleet(2)
    fleet.submit("a")
    fleet.tell(b"0", m.PeerLost())
    assert fleet.tell(b"0", replies(0, 1)) == [
        m.Send(b"0", m.RegisterAgain()),
        m.Log("reply_from_stranger", warning=True, peer=b"0"),
    ]
    fleet.tell(b"0", make_register(0))
    dropped = m.Log("reply_dropped", warning=True, peer=b"0")
    assert fleet.tell(b"0", replies(0, 1)) == [dropped, dropped]
    assert fleet.tell(b"1", replies(1)) == [m.Send(CLIENT, m.Reply("a", BODY))]


def lost_error(name, rank, cause, attempt, tries):
    text = f"replica {rank} was lost while it had the request ({cause}, try {attempt} of {tries})"
    return m.RequestError(name, "replica_lost", f"{text}; send it again")


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_past_the_tries_the_client_gets_an_error_that_names_the_cause(retries):
    fleet = Fleet(5, max_retries=retries)
    fleet.submit("a")
    for attempt in range(retries):
        assert fleet.tell(b"%d" % attempt, m.PeerLost()) == [
            lost(attempt, "its connection broke", 1),
            m.Send(b"%d" % (attempt + 1), engine_request(attempt + 1)),
        ]
    tries = retries + 1
    assert fleet.tell(b"%d" % retries, m.Disconnect()) == [
        lost(retries, "it left", 1),
        m.Send(CLIENT, lost_error("a", retries, "it left", attempt=tries, tries=tries)),
    ]
    assert len(fleet.core.fleet.ledger) == 0


def test_bodies_are_kept_for_retries_alone_and_until_the_answer():
    fleet = Fleet(2, max_retries=1)
    fleet.submit("a")
    (record,) = fleet.core.fleet.ledger
    assert record.message is not None
    fleet.tell(CLIENT, m.Disconnect())
    assert record.message is None
    fleet = Fleet(expected_ranks=1, max_retries=0)
    fleet.submit("a")
    (record,) = fleet.core.fleet.ledger
    assert record.message is not None  # it has not been sent even once
    fleet.join()
    assert record.message is None


def test_one_rank_can_lose_requests_of_different_tries():
    fleet = Fleet(2)
    fleet.submit("a", "b")
    fleet.tell(b"0", m.PeerLost())
    fleet.tell(b"0", make_register(0))
    assert fleet.tell(b"1", m.PeerLost()) == [
        lost(1, "its connection broke", 2),
        m.Send(CLIENT, lost_error("a", 1, "its connection broke", 2, 2)),
        m.Send(b"0", engine_request(3)),
    ]
    assert fleet.tell(b"0", replies(3)) == [m.Send(CLIENT, m.Reply("b", BODY))]


def test_the_request_of_a_client_that_is_gone_is_not_tried_again():
    fleet = Fleet(2)
    fleet.submit("a")
    fleet.tell(CLIENT, m.PeerLost())
    assert fleet.tell(b"0", m.PeerLost()) == [lost(0, "its connection broke", 1)]
    assert len(fleet.core.fleet.ledger) == 0


def test_a_client_that_goes_while_its_request_is_tried_again_ends_it_there():
    fleet = Fleet(3, max_retries=2)
    fleet.submit("a")
    fleet.tell(b"0", m.PeerLost())
    assert fleet.tell(CLIENT, m.Disconnect()) == [
        m.Log("client_lost", {"cause": "it left", "requests_running": 1}, peer=CLIENT)
    ]
    assert fleet.tell(b"1", m.PeerLost()) == [lost(1, "its connection broke", 1)]
    assert len(fleet.core.fleet.ledger) == 0


# --- requests that never reached their rank ------------------------------------------------------


def test_what_never_reached_a_rank_was_not_tried():
    fleet = Fleet(4)
    fleet.submit("a")
    for rank in range(3):  # more often than it may be tried
        assert fleet.tell(b"%d" % rank, m.PeerLost((rank,))) == [
            lost(rank, "its connection broke", 1),
            m.Send(b"%d" % (rank + 1), engine_request(rank + 1)),
        ]
    (record,) = fleet.core.fleet.ledger
    assert record.attempts == 0
    assert fleet.tell(b"3", replies(3)) == [m.Send(CLIENT, m.Reply("a", BODY))]


def test_only_what_was_not_delivered_counts_as_no_try():
    fleet = Fleet(2)
    fleet.submit("a", "b", "c")
    assert fleet.loads == [2, 1]
    assert fleet.tell(b"0", m.PeerLost((2,))) == [
        lost(0, "its connection broke", 2),
        m.Send(b"1", engine_request(3)),
        m.Send(b"1", engine_request(4)),
    ]
    assert [(r.client_request_id, r.attempts) for r in fleet.core.fleet.ledger] == [
        ("b", 0),
        ("a", 1),
        ("c", 0),
    ]


def test_undelivered_requests_of_other_ranks_and_unknown_ones_are_nothing():
    fleet = Fleet(2)
    fleet.submit("a", "b")
    assert fleet.tell(b"1", m.PeerLost((0, 77))) == [
        lost(1, "its connection broke", 1),
        m.Send(b"0", engine_request(2)),
    ]
    assert [(r.client_request_id, r.attempts) for r in fleet.core.fleet.ledger] == [
        ("a", 0),
        ("b", 1),
    ]


def test_an_undelivered_request_of_a_client_that_is_gone_ends_there():
    fleet = Fleet(2)
    fleet.submit("a")
    fleet.tell(CLIENT, m.PeerLost())
    assert fleet.tell(b"0", m.PeerLost((0,))) == [lost(0, "its connection broke", 1)]
    assert len(fleet.core.fleet.ledger) == 0


def test_where_no_bodies_are_kept_an_undelivered_request_ends_too():
    fleet = Fleet(2, max_retries=0)
    fleet.submit("a")
    text = "replica 0 was lost before it got the request (its connection broke); send it again"
    assert fleet.tell(b"0", m.PeerLost((0,))) == [
        lost(0, "its connection broke", 1),
        m.Send(CLIENT, m.RequestError("a", "replica_lost", text)),
    ]


# --- no rank left --------------------------------------------------------------------------------


def no_replica(name, waited=60):
    text = f"no replica is registered, nor was for {waited:g} s; send it again later"
    return m.Send(CLIENT, m.RequestError(name, "no_replica", text))


def test_the_requests_of_the_last_rank_wait_for_a_new_one():
    fleet = Fleet(1)
    fleet.submit("a", "b")
    assert fleet.tell(b"0", m.PeerLost()) == [
        lost(0, "its connection broke", 2),
        none_left(waiting=2),
    ]
    assert fleet.submit("c") == []
    assert fleet.tick(59.9) == []
    assert fleet.tell(b"new", make_register(7)) == [
        m.Send(b"new", m.RegisterAck(1, 1, 0, RUNNING)),
        registered(1),
        m.Send(b"new", engine_request(2)),
        m.Send(b"new", engine_request(3)),
        m.Send(b"new", engine_request(4)),
    ]
    assert fleet.tell(b"new", replies(4, 2, 3)) == [
        m.Send(CLIENT, m.Reply("c", BODY)),
        m.Send(CLIENT, m.Reply("a", BODY)),
        m.Send(CLIENT, m.Reply("b", BODY)),
    ]


def test_each_waits_as_long_as_it_may_from_its_own_loss_or_arrival():
    fleet = Fleet(1, replica_wait=30.0)
    fleet.submit("a")
    fleet.now = 10.0
    fleet.tell(b"0", m.PeerLost())
    fleet.now = 15.0
    assert fleet.submit("b") == []
    assert fleet.tick(39.9) == []
    assert fleet.tick(40.0) == [no_replica("a", 30)]
    assert fleet.tick(44.9) == []
    assert fleet.tick(45.0) == [no_replica("b", 30)]
    assert len(fleet.core.fleet.ledger) == 0


def test_before_any_rank_has_come_a_request_waits_the_same_time():
    fleet = Fleet(replica_wait=30.0)
    fleet.now = 10.0
    assert fleet.submit("a") == []
    assert fleet.tick(39.9) == []
    assert fleet.tick(40.0) == [no_replica("a", 30)]


def test_no_rank_is_missing_before_those_that_are_expected_have_come():
    fleet = Fleet(expected_ranks=1, replica_wait=30.0)
    assert fleet.submit("a") == []
    assert fleet.tick(1e6) == []
    assert fleet.tell(b"0", make_register(0))[-1] == m.Send(b"0", engine_request(0))


def test_who_need_not_wait_gets_an_error_at_once():
    fleet = Fleet(1, replica_wait=0.0)
    fleet.submit("a")
    text = "no replica is registered; send it again later"
    errors = [m.Send(CLIENT, m.RequestError(name, "no_replica", text)) for name in "ab"]
    assert fleet.tell(b"0", m.PeerLost()) == [
        lost(0, "its connection broke", 1),
        errors[0],
        none_left(waiting=0),
    ]
    assert fleet.submit("b") == [errors[1]]
    assert len(fleet.core.fleet.ledger) == 0


def test_who_waited_for_a_place_and_need_not_wait_for_a_rank_gets_an_error_too():
    fleet = Fleet(1, replica_wait=0.0, max_rank_requests=1)
    fleet.submit("a", "b")
    fleet.answer(0)
    fleet.submit("c")
    fleet.tell(b"0", m.PeerLost())
    assert [effect.message.client_request_id for effect in fleet.tick()] == ["c"]
    assert len(fleet.core.fleet.ledger) == 0


def test_a_client_that_leaves_while_its_request_waits_gets_no_error():
    fleet = Fleet(1)
    fleet.submit("a")
    fleet.tell(b"0", m.PeerLost())
    assert fleet.tell(CLIENT, m.PeerLost()) == [
        m.Log("client_lost", {"cause": "its connection broke", "requests_running": 0}, peer=CLIENT)
    ]
    assert fleet.tick(1e6) == []
    assert len(fleet.core.fleet.ledger) == 0


def test_that_a_rank_was_missing_in_between_counts_no_more_once_one_came():
    fleet = Fleet(1, max_rank_requests=1, replica_wait=10.0)
    fleet.submit("a", "b")
    fleet.tell(b"0", m.PeerLost())
    fleet.now = 9.0
    fleet.tell(b"0", make_register(0))  # gets "a", which came first
    assert fleet.tick(20.0) == [m.Send(b"0", m.Ping(1))]
    assert fleet.tell(b"0", replies(2)) == [
        m.Send(CLIENT, m.Reply("a", BODY)),
        m.Send(b"0", engine_request(1)),
    ]


def test_waiting_for_a_rank_ends_in_a_pause_too():
    """Whoever paused the fleet may be gone, and nobody would ever be told."""
    fleet = Fleet(1, replica_wait=10.0)
    fleet.submit("a")
    fleet.signal(Signal.PAUSE, Signal.SUSPEND)
    fleet.now = 50.0
    fleet.tell(b"0", m.PeerLost())
    fleet.now = 55.0
    fleet.submit("b")
    assert fleet.tick(59.9) == []
    assert fleet.tick(60.0) == [no_replica("a", 10)]
    assert fleet.tick(65.0) == [no_replica("b", 10)]


@pytest.mark.parametrize("suspended", [False, True])
def test_after_stop_requests_wait_for_the_engines_that_come_next(suspended):
    fleet = Fleet(2)
    fleet.submit("a")
    fleet.signal(Signal.PAUSE, *[Signal.SUSPEND] * suspended)
    stop = m.Control(Signal.STOP)
    assert fleet.tell(CLIENT, stop) == [
        m.Send(b"0", stop),
        m.Send(b"1", stop),
        none_left(waiting=0, orderly=True),
    ]
    assert fleet.submit("b") == []
    assert fleet.tell(b"1", m.Disconnect()) == [
        m.Log("rank_left", {"rank": 1, "cause": "it left", "requests": 0})
    ]
    assert fleet.tell(b"0", m.Disconnect()) == [lost(0, "it left", 1)]
    assert [s.message for s in sends(fleet.tell(b"new", make_register(0, replica="next")))] == [
        m.RegisterAck(2, 1, 0, RUNNING),
        engine_request(2),
        engine_request(1),
    ]
