"""Requests admitted, given to ranks and answered: exact effects of every message."""

from dataclasses import replace

import pytest
from builders import (
    BLOCK,
    BODY,
    CLIENT,
    OTHER,
    SAMPLING,
    Fleet,
    answer,
    engine_request,
    logs,
    lost,
    make_connect,
    make_register,
    registered,
    replies,
    sends,
    submission,
    tokens,
)

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.hashing import block_hashes, pack_hashes
from megatron.core.inference.coordinator.lifecycle import FleetState

RUNNING = FleetState.RUNNING


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
    (first,) = fleet.answer(0)[1:]
    assert (first.predicted_tokens, first.cached_tokens) == (0, 0)
    fleet.tick(2.0)
    fleet.ask(prompt)
    fleet.tick(3.0)
    effects = fleet.tell(b"0", m.EngineReply((answer(1, cached_tokens=8),)))
    assert effects[1:] == [
        m.Trace(
            m.Outcome.ANSWERED,
            request_id=1,
            client=CLIENT,
            came=2.0,
            prompt_tokens=13,
            hashes=pack_hashes(block_hashes(prompt, BLOCK)),
            rank=0,
            predicted_tokens=8,  # 12 would leave 1 token to compute
            cached_tokens=8,
            in_window=False,
            reply=BODY,
        )
    ]


def test_a_trace_of_an_unhashed_request_predicts_nothing():
    fleet = Fleet(1, trace=True)
    fleet.ask()
    (trace,) = fleet.answer(0)[1:]
    assert (trace.hashes, trace.prompt_tokens, trace.predicted_tokens) == (None, -1, 0)


def test_a_trace_tells_what_the_engine_could_not_take():
    fleet = Fleet(1, trace=True)
    fleet.ask()
    failed = m.Answer(0, "FAILED", 0, 0, BODY)
    (trace,) = fleet.tell(b"0", m.EngineReply((failed,)))[1:]
    assert trace.outcome is m.Outcome.FAILED


def test_where_nobody_reads_hashes_a_trace_has_none():
    fleet = Fleet(1, trace=True, coordinator_policy="load_balanced")
    fleet.ask(tokens(2))
    (trace,) = fleet.answer(0)[1:]
    assert trace.hashes is None


def test_a_trace_tells_of_a_client_that_is_gone_only_that_it_is():
    fleet = Fleet(1, trace=True)
    fleet.ask()
    fleet.tell(CLIENT, m.PeerLost())
    (trace,) = fleet.answer(0)
    assert (trace.outcome, trace.client, trace.rank) == (m.Outcome.ANSWERED, None, 0)


# --- clients that leave --------------------------------------------------------------------------


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


@pytest.mark.parametrize("message", [m.Disconnect(), m.PeerLost(), m.PeerLost((0,))])
def test_a_stranger_that_leaves_is_no_event(message):
    assert Fleet(1).tell(OTHER, message) == []


# --- admission -----------------------------------------------------------------------------------


def overloaded(name, what):
    text = f"the fleet has {what} waiting or in flight; send it again later"
    return [
        m.Send(CLIENT, m.RequestError(name, "overloaded", text)),
        m.Log("request_refused", warning=True, peer=CLIENT),
    ]


def test_no_more_requests_are_taken_than_the_fleet_may_have():
    fleet = Fleet(1, max_inflight_requests=3)
    assert len(fleet.submit("a", "b", "c")) == 3
    assert fleet.submit("d") == overloaded("d", "3 requests")
    assert fleet.submit("d") == overloaded("d", "3 requests")
    assert fleet.loads == [3]
    assert fleet.tell(b"0", replies(1)) == [m.Send(CLIENT, m.Reply("b", BODY))]
    assert fleet.submit("d") == [m.Send(b"0", engine_request(3))]
    assert fleet.submit("e") == overloaded("e", "3 requests")


def test_no_more_bytes_are_taken_than_the_fleet_may_have():
    fleet = Fleet(1, max_inflight_bytes=42)  # 3 requests of 14 bytes
    assert len(fleet.submit("a", "b", "c")) == 3
    assert fleet.core.fleet.ledger.size == 42
    assert fleet.submit("d") == overloaded("d", "42 bytes in 3 requests")
    fleet.tell(b"0", replies(0))
    over = m.SubmitRequest("e", 1, SAMPLING, bytes(7), b"")
    assert fleet.tell(CLIENT, over) == overloaded("e", "28 bytes in 2 requests")
    assert fleet.submit("d") == [m.Send(b"0", engine_request(3))]
    assert fleet.core.fleet.ledger.size == 42


def test_hashes_count_as_bytes_too():
    fleet = Fleet(1, max_inflight_bytes=44)
    assert len(fleet.tell(CLIENT, submission("a", tokens(2)))) == 1  # 14 + 16
    assert len(fleet.submit("b")) == 1
    assert fleet.core.fleet.ledger.size == 44
    fleet.answer_all()
    fleet.submit("c", "d")
    refused = fleet.tell(CLIENT, submission("e", tokens(3)))
    assert refused == overloaded("e", "28 bytes in 2 requests")


def test_a_request_larger_than_the_limit_is_taken_where_it_is_the_only_one():
    fleet = Fleet(1, max_inflight_bytes=42)
    huge = m.SubmitRequest("huge", 1, SAMPLING, bytes(1000), b"")
    assert len(fleet.tell(CLIENT, huge)) == 1
    assert fleet.submit("a") == overloaded("a", "1008 bytes in 1 requests")
    fleet.answer_all()
    assert len(fleet.submit("a")) == 1
    assert fleet.tell(CLIENT, huge) == overloaded("huge", "14 bytes in 1 requests")


def test_what_waits_counts_too():
    fleet = Fleet(max_inflight_requests=2)
    assert fleet.submit("a", "b") == []
    assert fleet.submit("c") == overloaded("c", "2 requests")
    fleet = Fleet(expected_ranks=1, max_inflight_bytes=28)
    assert fleet.submit("a", "b") == []
    assert fleet.submit("c") == overloaded("c", "28 bytes in 2 requests")


@pytest.mark.parametrize("limit", [{"max_inflight_requests": 1}, {"max_inflight_bytes": 14}])
def test_a_place_is_free_again_however_its_request_ended(limit):
    fleet = Fleet(1, max_retries=1, **limit)
    fleet.submit("answered")
    fleet.answer(0)
    assert len(fleet.submit("with a client that goes")) == 1
    fleet.tell(CLIENT, m.PeerLost())
    fleet.tell(CLIENT, make_connect())
    assert len(fleet.submit("too early")) == 2  # it is still running
    fleet.answer(1)
    fleet.submit("lost with its rank")
    fleet.tell(b"0", m.PeerLost())
    assert len(fleet.submit("too early")) == 2  # it waits for another
    fleet.join()
    fleet.tell(b"0", m.PeerLost())  # the second time
    assert fleet.submit("waits") == []
    answers = [effect.message for effect in fleet.tick(60.0)]
    assert [a.code for a in answers if not isinstance(a, m.Ping)] == ["no_replica"]
    assert fleet.submit("waits with a client that goes") == []
    fleet.tell(CLIENT, m.PeerLost())
    fleet.tell(CLIENT, make_connect())
    fleet.join()
    assert len(fleet.submit("the last")) == 1
    fleet.answer_all()
    assert (len(fleet.core.fleet.ledger), fleet.core.fleet.ledger.size) == (0, 0)


def test_a_retry_needs_no_second_admission():
    fleet = Fleet(2, max_inflight_requests=1, max_inflight_bytes=14)
    fleet.submit("a")
    assert sends(fleet.tell(b"0", m.PeerLost())) == [m.Send(b"1", engine_request(1))]
    assert fleet.core.fleet.ledger.size == 14


def test_a_stranger_is_told_to_connect_before_it_is_told_of_the_load():
    fleet = Fleet(1, max_inflight_requests=1)
    fleet.submit("a")
    assert sends(fleet.tell(OTHER, submission("b")))[0].message.code == "not_connected"


# --- places are shared between users --------------------------------------------------------------


def take_all(fleet, owner, most=1000):
    """How many requests a user gets in who sends as many as are taken."""
    for number in range(most):
        message = replace(submission(f"{owner} {number}"), owner=owner)
        if any(isinstance(e.message, m.RequestError) for e in sends(fleet.tell(CLIENT, message))):
            return number
    return most


def test_who_takes_all_that_he_gets_leaves_a_tenth_to_others():
    fleet = Fleet(1, max_inflight_requests=100)
    assert take_all(fleet, "greedy") == 90
    (refused, _) = fleet.tell(CLIENT, replace(submission("more"), owner="greedy"))
    assert refused.message.text == (
        "the fleet has 1260 bytes in 90 requests, 1260 bytes in 90 requests of this user's, who "
        "may have no more, waiting or in flight; send it again later"
    )
    assert take_all(fleet, "modest", most=5) == 5
    assert take_all(fleet, "greedy") == 0


def test_two_who_take_all_that_they_get_end_with_as_much_each():
    fleet = Fleet(1, max_inflight_requests=400)
    take_all(fleet, "first")
    take_all(fleet, "second")
    ledger = fleet.core.fleet.ledger
    for _ in range(600):  # the eldest is answered, and both want the place
        eldest = next(iter(ledger))
        fleet.tell(b"0", replies(eldest.request_id))
        take_all(fleet, "first")
        take_all(fleet, "second")
    first, second = (ledger.share(owner).requests for owner in ("first", "second"))
    assert abs(first - second) <= 18  # what one place that gets free or is taken makes
    assert first + second >= 360


def test_bytes_are_shared_as_well():
    fleet = Fleet(1, max_inflight_bytes=1400)  # 100 requests of 14 bytes
    assert take_all(fleet, "greedy") == 90
    assert take_all(fleet, "modest", most=5) == 5
    assert take_all(fleet, "greedy") == 0


def test_without_a_name_the_client_is_the_user():
    fleet = Fleet(1, max_inflight_requests=100)
    assert take_all(fleet, "") == 90
    fleet.tell(OTHER, make_connect())
    assert len(sends(fleet.tell(OTHER, submission("mine")))) == 1
    assert fleet.core.fleet.ledger.share(OTHER).requests == 1
    fleet.core.check_integrity()


# --- a limit for each rank -----------------------------------------------------------------------


def test_beyond_the_limit_of_each_rank_requests_wait_in_the_order_of_their_arrival():
    fleet = Fleet(2, max_rank_requests=2)
    assert [e.peer for e in fleet.submit("a", "b", "c", "d")] == [b"0", b"1", b"0", b"1"]
    assert fleet.submit("e", "f", "g") == []
    assert fleet.loads == [2, 2]
    assert fleet.tell(b"1", replies(3)) == [
        m.Send(CLIENT, m.Reply("d", BODY)),
        m.Send(b"1", engine_request(4)),
    ]
    # Two answers in one step free two places.
    assert fleet.tell(b"0", replies(2, 0)) == [
        m.Send(CLIENT, m.Reply("c", BODY)),
        m.Send(CLIENT, m.Reply("a", BODY)),
        m.Send(b"0", engine_request(5)),
        m.Send(b"0", engine_request(6)),
    ]
    assert fleet.loads == [2, 2]


def test_a_rank_that_joins_gets_what_waits_up_to_its_limit():
    fleet = Fleet(1, max_rank_requests=2)
    fleet.submit(*"abcdef")
    assert fleet.tell(b"1", make_register(1)) == [
        m.Send(b"1", m.RegisterAck(1, 1, 0, RUNNING)),
        registered(2),
        m.Send(b"1", engine_request(2)),
        m.Send(b"1", engine_request(3)),
    ]
    assert len(fleet.core.fleet.ledger.waiting) == 2


def test_when_the_fleet_has_assembled_no_rank_gets_more_than_its_limit():
    fleet = Fleet(expected_ranks=2, max_rank_requests=1)
    fleet.submit("a", "b", "c")
    fleet.tell(b"0", make_register(0))
    assert fleet.tell(b"1", make_register(1))[2:] == [
        m.Send(b"0", engine_request(0)),
        m.Send(b"1", engine_request(1)),
    ]
    assert fleet.loads == [1, 1]


def test_a_dropped_reply_frees_no_place():
    fleet = Fleet(2, max_rank_requests=1)
    fleet.submit("a", "b", "waits")
    assert logs(fleet.tell(b"0", replies(1, 99))) == ["reply_dropped", "reply_dropped"]
    assert fleet.loads == [1, 1]


def test_a_holder_that_is_full_is_no_choice():
    fleet = Fleet(2, max_rank_requests=2, load_beta=0.0)
    assert [fleet.route(tokens(4)), fleet.route(tokens(4))] == [0, 0]
    assert [fleet.route(tokens(4)), fleet.route(tokens(4))] == [1, 1]
    assert fleet.tell(CLIENT, submission("waits", tokens(4))) == []
    assert fleet.loads == [2, 2]


def test_whoever_is_free_serves_what_waits_longest_wherever_its_history_is():
    fleet = Fleet(2, max_rank_requests=1)
    for name in range(2):
        assert fleet.route(tokens(4, name)) == name
    fleet.tell(CLIENT, submission("of rank 0", tokens(4, 0)))
    fleet.tell(CLIENT, submission("of rank 1", tokens(4, 1)))
    assert fleet.tell(b"1", replies(1))[1:] == [m.Send(b"1", engine_request(2))]
    assert fleet.tell(b"0", replies(0))[1:] == [m.Send(b"0", engine_request(3))]


def test_equal_requests_follow_one_another_up_to_the_limit():
    fleet = Fleet(2, max_rank_requests=3, burst_cap=8)
    assert [fleet.route(tokens(4)) for _ in range(6)] == [0, 0, 0, 1, 1, 1]
    assert fleet.tell(CLIENT, submission("waits", tokens(4))) == []
    assert fleet.loads == [3, 3]
    assert fleet.tell(b"0", replies(0))[1:] == [m.Send(b"0", engine_request(6))]


def test_the_requests_of_a_lost_rank_wait_before_those_that_came_later():
    fleet = Fleet(2, max_rank_requests=1)
    fleet.submit("a", "b", "c")
    assert fleet.tell(b"0", m.PeerLost()) == [lost(0, "its connection broke", 1)]
    assert fleet.tell(b"1", replies(1)) == [
        m.Send(CLIENT, m.Reply("b", BODY)),
        m.Send(b"1", engine_request(3)),
    ]
    assert fleet.tell(b"1", replies(3)) == [
        m.Send(CLIENT, m.Reply("a", BODY)),
        m.Send(b"1", engine_request(2)),
    ]
    assert fleet.tell(b"1", replies(2)) == [m.Send(CLIENT, m.Reply("c", BODY))]


def test_the_requests_of_several_lost_ranks_wait_in_the_order_in_which_they_came():
    fleet = Fleet(3, max_rank_requests=2)
    fleet.submit("a", "b", "c", "d", "e", "f", "g")
    assert fleet.tell(b"1", m.PeerLost()) == [lost(1, "its connection broke", 2)]  # b, e
    assert fleet.tell(b"0", m.PeerLost()) == [lost(0, "its connection broke", 2)]  # a, d
    given: list[int] = []
    for answered in ([2, 5], [9, 7], [10, 8]):
        effects = sends(fleet.tell(b"2", replies(*answered)))
        given += [e.message.request_id for e in effects if e.peer == b"2"]
    assert given == [9, 7, 10, 8, 6]  # a, b, d, e, g


def test_who_waits_for_a_place_waits_without_end_while_there_is_a_rank():
    fleet = Fleet(1, max_rank_requests=1, replica_wait=10.0, hung_timeout=1e6)
    fleet.submit("a", "b")
    assert fleet.tick(1e5) == [m.Send(b"0", m.Ping(1))]
    assert fleet.tell(b"0", replies(0)) == [
        m.Send(CLIENT, m.Reply("a", BODY)),
        m.Send(b"0", engine_request(1)),
    ]


def test_a_draining_ranks_answer_gives_no_place_to_what_waits():
    fleet = Fleet(2, max_rank_requests=1)
    fleet.submit("a", "b", "c")
    fleet.tell(b"0", m.Drain())
    assert fleet.tell(b"0", replies(0)) == [m.Send(CLIENT, m.Reply("a", BODY))]
    assert fleet.tell(b"1", replies(1))[1:] == [m.Send(b"1", engine_request(2))]


def test_a_client_that_leaves_gives_its_turn_to_the_next():
    fleet = Fleet(1, max_rank_requests=1)
    fleet.tell(OTHER, make_connect())
    fleet.submit("a")
    fleet.submit("b", peer=OTHER)
    fleet.submit("c")
    fleet.tell(OTHER, m.Disconnect())
    assert fleet.tell(b"0", replies(0)) == [
        m.Send(CLIENT, m.Reply("a", BODY)),
        m.Send(b"0", engine_request(2)),
    ]
