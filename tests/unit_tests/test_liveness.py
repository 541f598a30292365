"""Replicas that fall silent, or drain and leave: exact effects of every message."""

import pytest
from builders import (
    BODY,
    CLIENT,
    LRU,
    OTHER,
    PROTOCOL_VERSION,
    Fleet,
    engine_request,
    logs,
    lost,
    make_register,
    none_left,
    registered,
    replies,
    sends,
    stock_register,
    tokens,
)

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.fleet import FleetClock
from megatron.core.inference.coordinator.kv_events import CLEARED, pack_events
from megatron.core.inference.coordinator.lifecycle import FleetState, Signal

RUNNING, PAUSED = FleetState.RUNNING, FleetState.PAUSED


# --- silence -------------------------------------------------------------------------------------


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


def test_clients_are_pinged_in_turns_each_once_in_ten_ticks():
    fleet = Fleet(0)
    peers = [b"client-%d" % n for n in range(34)]
    for peer in peers:
        fleet.tell(peer, m.Connect(PROTOCOL_VERSION))
    fleet.tell(peers[0], m.Disconnect())
    fleet.tell(peers[1], m.Connect(PROTOCOL_VERSION))  # again, and pinged once all the same
    pinged = [[effect.peer for effect in fleet.tick()] for _ in range(20)]
    assert pinged[:10] == pinged[10:]
    assert {len(each) for each in pinged} == {3, 4}
    assert sorted(peer for each in pinged[:10] for peer in each) == sorted({*peers[1:], CLIENT})


def test_turns_stay_even_when_those_of_one_turn_leave():
    fleet = Fleet(0)
    peers = [b"client-%d" % n for n in range(29)]
    for peer in peers:
        fleet.tell(peer, m.Connect(PROTOCOL_VERSION))
    for send in fleet.tick():
        fleet.tell(send.peer, m.PeerLost())
    for peer in peers[:3]:
        fleet.tell(b"new-" + peer, m.Connect(PROTOCOL_VERSION))
    assert {len(fleet.tick()) for _ in range(10)} == {3}
    fleet.core.check_integrity()


def test_a_rank_that_says_nothing_for_too_long_is_lost_and_its_requests_go_to_others():
    fleet = Fleet(2, hung_timeout=10.0)
    fleet.submit("a")
    fleet.now = 5.0
    assert fleet.tell(b"1", m.Pong(1)) == []
    assert fleet.tick(10.0) == [m.Send(b"0", m.Ping(1)), m.Send(b"1", m.Ping(1))]
    assert fleet.tick(10.1) == [
        lost(0, "no sign of life for 10 s", 1),
        m.Send(b"1", engine_request(1)),
        m.Send(b"1", m.Ping(2)),
    ]
    assert fleet.tell(b"1", replies(1)) == [m.Send(CLIENT, m.Reply("a", BODY))]


def test_until_a_rank_has_completed_a_request_it_may_say_nothing_for_longer():
    """Its first steps compile kernels and capture graphs. What it refuses shows nothing of it."""
    fleet = Fleet(2, hung_timeout=10.0, first_answer_timeout=100.0)
    fleet.submit("a", "b", "c", "d")
    assert fleet.loads == [2, 2]
    fleet.now = 4.0
    fleet.tell(b"0", replies(0))
    fleet.tell(b"1", m.EngineReply((m.Answer(1, "FAILED", 0, 0, BODY),)))
    assert logs(fleet.tick(14.0)) == []
    assert lost(0, "no sign of life for 10 s", 1) in fleet.tick(14.1)
    assert logs(fleet.tick(104.0)) == []
    assert lost(1, "no sign of life for 100 s", 2) in fleet.tick(104.1)


def test_who_registers_again_has_to_complete_a_request_anew():
    fleet = Fleet(1, hung_timeout=10.0, first_answer_timeout=100.0)
    fleet.submit("a")
    fleet.tell(b"0", replies(0))
    assert "rank_lost" in logs(fleet.tick(10.1))
    fleet.tell(b"0", make_register(0))
    assert logs(fleet.tick(110.0)) == []
    assert "rank_lost" in logs(fleet.tick(110.2))


def test_a_rank_that_comes_back_over_another_connection_needs_not():
    fleet = Fleet(1, hung_timeout=10.0, first_answer_timeout=100.0, return_wait=3.0)
    fleet.submit("a", "b")
    fleet.tell(b"0", replies(0))
    fleet.tell(b"0", m.PeerLost())
    again = make_register(0, generation=1, requests=[1])
    fleet.tell(b"0 again", again)
    assert logs(fleet.tick(10.0)) == []
    assert "rank_lost" in logs(fleet.tick(10.1))


def test_the_hung_timeout_counts_from_the_beginning_where_it_is_longer():
    fleet = Fleet(1, hung_timeout=10.0, first_answer_timeout=5.0)
    assert logs(fleet.tick(10.0)) == []
    assert "rank_lost" in logs(fleet.tick(10.1))


def test_of_ranks_with_different_patience_none_gets_what_another_had():
    fleet = Fleet(2, hung_timeout=10.0, first_answer_timeout=12.0)
    fleet.submit("a", "b", "c")
    fleet.tell(b"0", replies(0))
    effects = fleet.tick(50.0)
    assert effects == [
        lost(0, "no sign of life for 10 s", 1),
        lost(1, "no sign of life for 10 s", 1),
        none_left(waiting=2),
    ]


@pytest.mark.parametrize(
    "message",
    [m.Pong(1), replies(0), replies(99), m.EngineReply(()), m.KvEvents(0, 5, 9, b""), m.Drain()],
    ids=["pong", "answer", "wrong answer", "no answer", "events", "drain"],
)
def test_whatever_a_rank_says_is_a_sign_of_life(message):
    fleet = Fleet(1, hung_timeout=10.0)
    fleet.submit("a")
    fleet.now = 9.0
    fleet.tell(b"0", message)
    assert "rank_lost" not in logs(fleet.tick(19.0))
    assert "rank_lost" in logs(fleet.tick(19.1))


def test_what_others_say_is_no_sign_of_a_ranks_life():
    fleet = Fleet(2, hung_timeout=10.0)
    fleet.now = 9.0
    fleet.tell(b"1", replies(0))
    fleet.tell(OTHER, m.Pong(0))
    fleet.submit("to rank 0")
    assert logs(fleet.tick(10.1)) == ["rank_lost"]
    assert [rank.number for rank in fleet.core.fleet.ranks] == [1]


def test_silence_counts_from_the_registration_on():
    fleet = Fleet(hung_timeout=10.0)
    fleet.now = 50.0
    fleet.join()
    assert fleet.tick(60.0) == [m.Send(b"0", m.Ping(1))]
    assert fleet.tick(60.1) == [lost(0, "no sign of life for 10 s", 0), none_left(waiting=0)]


def test_released_engines_may_be_silent():
    fleet = Fleet(hung_timeout=10.0, eviction=LRU)
    fleet.tell(b"mp-coord-0", stock_register())
    fleet.ask()
    assert fleet.tick(1e6) == []
    assert fleet.loads == [1]


def test_of_ranks_that_fell_silent_together_none_gets_what_another_had():
    fleet = Fleet(3, hung_timeout=10.0)
    fleet.submit("a", "b")
    fleet.now = 5.0
    fleet.tell(b"2", m.Pong(1))
    assert fleet.tick(10.1) == [
        lost(0, "no sign of life for 10 s", 1),
        m.Send(b"2", engine_request(2)),
        lost(1, "no sign of life for 10 s", 1),
        m.Send(b"2", engine_request(3)),
        m.Send(b"2", m.Ping(1)),
    ]


def test_where_all_fell_silent_requests_wait_for_one_to_come_back():
    fleet = Fleet(2, hung_timeout=10.0)
    fleet.submit("a", "b")
    assert fleet.tick(10.1) == [
        lost(0, "no sign of life for 10 s", 1),
        lost(1, "no sign of life for 10 s", 1),
        none_left(waiting=2),
    ]
    assert fleet.tick() == []
    assert fleet.tell(b"1", make_register(1)) == [
        m.Send(b"1", m.RegisterAck(1, 2, 0, RUNNING)),
        registered(1),
        m.Send(b"1", engine_request(2)),
        m.Send(b"1", engine_request(3)),
    ]


def test_a_silent_rank_that_speaks_again_registers_as_a_new_generation():
    fleet = Fleet(2, hung_timeout=10.0)
    fleet.submit("a")
    fleet.now = 5.0
    fleet.tell(b"1", m.Pong(1))
    fleet.tick(10.1)
    for message, event in [
        (m.Pong(1), "pong_from_stranger"),
        (replies(0), "reply_from_stranger"),
        (m.KvEvents(0, 0, 0, b""), "events_from_stranger"),
    ]:
        assert fleet.tell(b"0", message) == [
            m.Send(b"0", m.RegisterAgain()),
            m.Log(event, warning=True, peer=b"0"),
        ]
    assert fleet.tell(b"0", make_register(0)) == [
        m.Send(b"0", m.RegisterAck(0, 2, 0, RUNNING)),
        registered(2),
    ]
    assert fleet.tell(b"0", replies(0)) == [m.Log("reply_dropped", warning=True, peer=b"0")]
    assert fleet.tell(b"1", replies(1)) == [m.Send(CLIENT, m.Reply("a", BODY))]
    assert fleet.tick(15.0) == [m.Send(b"1", m.Ping(2)), m.Send(b"0", m.Ping(2))]


def test_silence_does_not_count_while_the_fleet_is_paused_or_suspended():
    fleet = Fleet(1, hung_timeout=10.0)
    for now, signal in [(4.0, Signal.PAUSE), (600.0, Signal.SUSPEND)]:
        fleet.now = now
        fleet.signal(signal)
        assert logs(fleet.tick(now + 500.0)) == []
    for now, signal in [(1500.0, Signal.RESUME), (2000.0, Signal.UNPAUSE)]:
        assert logs(fleet.tick(now)) == []
        fleet.signal(signal)
    assert logs(fleet.tick(2006.0)) == []  # 4 s before the pause and 6 s after it
    assert logs(fleet.tick(2006.1)) == ["rank_lost", "no_rank_left"]


def test_a_sign_of_life_in_a_pause_counts_as_of_its_beginning():
    fleet = Fleet(1, hung_timeout=10.0)
    fleet.now = 4.0
    fleet.signal(Signal.PAUSE)
    fleet.now = 100.0
    fleet.tell(b"0", m.Pong(1))
    fleet.now = 200.0
    fleet.signal(Signal.UNPAUSE)
    assert logs(fleet.tick(210.0)) == []
    assert logs(fleet.tick(210.1)) == ["rank_lost", "no_rank_left"]


def test_a_rank_that_joins_in_a_pause_is_told_so_and_gets_requests():
    fleet = Fleet(hung_timeout=10.0)
    fleet.submit("early")
    fleet.now = 4.0
    fleet.signal(Signal.PAUSE)
    fleet.now = 100.0
    assert fleet.tell(b"0", make_register(0)) == [
        m.Send(b"0", m.RegisterAck(0, 1, 0, PAUSED)),
        registered(1),
        m.Send(b"0", engine_request(0)),
    ]
    fleet.now = 200.0
    fleet.signal(Signal.UNPAUSE)
    assert logs(fleet.tick(210.0)) == []
    assert logs(fleet.tick(210.1)) == ["rank_lost", "no_rank_left"]


def test_the_fleets_clock_goes_on_after_a_stop():
    fleet = Fleet(1, hung_timeout=10.0)
    fleet.signal(Signal.PAUSE)
    fleet.now = 100.0
    fleet.signal(Signal.STOP)
    assert logs(fleet.tick(110.0)) == []
    assert logs(fleet.tick(110.1)) == ["rank_lost"]


def test_signals_that_change_nothing_leave_the_clock_alone():
    fleet = Fleet(1, hung_timeout=10.0)
    for now in (2.0, 4.0, 6.0):
        fleet.now = now
        fleet.signal(Signal.START_CUDA_PROFILER, Signal.UNPAUSE, Signal.SUSPEND)
    fleet.signal(Signal.PAUSE)
    for now in (20.0, 40.0, 60.0):
        fleet.now = now
        fleet.signal(Signal.STOP_CUDA_PROFILER, Signal.PAUSE, Signal.RESUME)
    fleet.signal(Signal.UNPAUSE)
    assert logs(fleet.tick(64.0)) == []
    assert logs(fleet.tick(64.1)) == ["rank_lost", "no_rank_left"]


def test_silence_does_not_count_while_the_coordinator_itself_stood_still():
    fleet = Fleet(1, hung_timeout=10.0)
    fleet.tick(4.0)
    fleet.now = 304.0
    assert logs(fleet.tell(b"", m.Tick(stood_still=299.0))) == []
    assert logs(fleet.tick(309.0)) == []  # 5 s before it and 5 s after
    assert logs(fleet.tick(309.1)) == ["rank_lost", "no_rank_left"]


def test_a_pause_takes_the_standstill_in():
    fleet = Fleet(1, hung_timeout=10.0)
    fleet.signal(Signal.PAUSE)
    fleet.now = 300.0
    fleet.tell(b"", m.Tick(stood_still=299.0))
    fleet.signal(Signal.UNPAUSE)
    assert logs(fleet.tick(310.0)) == []
    assert logs(fleet.tick(310.1)) == ["rank_lost", "no_rank_left"]


def test_the_fleets_clock_by_itself():
    clock = FleetClock()
    assert clock.read(5.0) == 5.0
    for running, now in [(True, 6.0), (False, 10.0), (False, 12.0)]:
        clock.run(running, now)
    assert (clock.read(10.0), clock.read(99.0)) == (10.0, 10.0)
    for running, now in [(True, 100.0), (True, 200.0)]:
        clock.run(running, now)
    assert (clock.read(100.0), clock.read(103.0)) == (10.0, 13.0)
    clock.run(False, 104.0)
    clock.run(True, 105.0)
    assert clock.read(106.0) == 15.0


# --- draining ------------------------------------------------------------------------------------


def draining(rank, requests):
    return m.Log("rank_draining", {"rank": rank, "requests": requests})


def left(rank):
    return m.Log("rank_left", {"rank": rank, "cause": "it left", "requests": 0})


def test_a_rank_that_drains_answers_what_it_has_gets_no_more_and_leaves():
    fleet = Fleet(2)
    fleet.submit("a", "b")
    assert fleet.tell(b"0", m.Drain()) == [m.Send(b"0", m.DrainAck()), draining(0, 1)]
    assert fleet.submit("c", "d") == [
        m.Send(b"1", engine_request(2)),
        m.Send(b"1", engine_request(3)),
    ]
    assert fleet.tell(b"0", replies(0)) == [m.Send(CLIENT, m.Reply("a", BODY))]
    assert fleet.tell(b"0", m.Disconnect()) == [left(0)]  # nothing is retried
    assert fleet.loads == [3]
    assert fleet.tell(b"0", m.Pong(1)) == [
        m.Send(b"0", m.RegisterAgain()),
        m.Log("pong_from_stranger", warning=True, peer=b"0"),
    ]


def test_a_fleet_that_ends_in_order_is_warned_of_only_where_somebody_waits():
    fleet = Fleet(2)
    assert fleet.tell(b"0", m.Disconnect()) == [left(0)]
    assert fleet.tell(b"1", m.Disconnect()) == [left(1), none_left(waiting=0, orderly=True)]
    fleet = Fleet(1)
    fleet.submit("a")
    assert none_left(waiting=1) in fleet.tell(b"0", m.Disconnect())


def test_who_asks_twice_is_acknowledged_twice():
    fleet = Fleet(2)
    fleet.tell(b"0", m.Drain())
    assert fleet.tell(b"0", m.Drain()) == [m.Send(b"0", m.DrainAck())]
    assert [rank.number for rank in fleet.core.fleet.ranks] == [1]


def test_only_engines_drain():
    fleet = Fleet(1)
    assert fleet.tell(CLIENT, m.Drain()) == [m.Log("drain_from_client", warning=True, peer=CLIENT)]
    assert fleet.tell(OTHER, m.Drain()) == [
        m.Send(OTHER, m.RegisterAgain()),
        m.Log("drain_from_stranger", warning=True, peer=OTHER),
    ]
    assert fleet.route() == 0


def test_what_a_draining_rank_holds_attracts_no_request():
    fleet = Fleet(2)
    assert fleet.route(tokens(4)) == 0
    fleet.answer_all()
    assert fleet.holders(tokens(4)) == {0: 4}
    fleet.tell(b"0", m.Drain())
    assert fleet.holders(tokens(4)) == {}
    assert fleet.route(tokens(4)) == 1
    # What it stores from now on is of no use either.
    assert fleet.tell(b"0", m.KvEvents(0, 0, 1, pack_events([CLEARED]))) == []
    assert fleet.holders(tokens(4)) == {1: 4}


def test_equal_requests_do_not_follow_one_to_a_draining_rank():
    fleet = Fleet(2, burst_cap=8)
    assert [fleet.route(tokens(4)), fleet.route(tokens(4))] == [0, 0]
    fleet.tell(b"0", m.Drain())
    assert [fleet.route(tokens(4)), fleet.route(tokens(4))] == [1, 1]
    fleet.tell(b"0", replies(0, 1))
    assert fleet.route(tokens(4)) == 1


def test_a_draining_ranks_places_are_counted_no_more():
    fleet = Fleet(1)
    fleet.join(max_requests=8)
    assert fleet.core.fleet.ranks.smallest_max_requests == 8
    fleet.tell(b"1", m.Drain())
    assert fleet.core.fleet.ranks.smallest_max_requests == 64


@pytest.mark.parametrize(
    ("message", "cause"), [(m.Disconnect(), "it left"), (m.PeerLost(), "its connection broke")]
)
def test_a_draining_rank_that_goes_before_it_has_answered_all_is_lost(message, cause):
    fleet = Fleet(2)
    fleet.submit("a", "b", "c")
    fleet.tell(b"0", m.Drain())
    fleet.tell(b"0", replies(0))
    assert fleet.tell(b"0", message) == [lost(0, cause, 1), m.Send(b"1", engine_request(3))]
    assert fleet.tell(b"1", replies(1, 3)) == [
        m.Send(CLIENT, m.Reply("b", BODY)),
        m.Send(CLIENT, m.Reply("c", BODY)),
    ]


def test_a_draining_rank_may_fall_silent():
    fleet = Fleet(2, hung_timeout=10.0)
    fleet.submit("a")
    fleet.tell(b"0", m.Drain())
    fleet.now = 5.0
    fleet.tell(b"1", m.Pong(0))
    assert fleet.tick(10.1) == [
        lost(0, "no sign of life for 10 s", 1),
        m.Send(b"1", engine_request(1)),
        m.Send(b"1", m.Ping(1)),
    ]


def test_a_draining_rank_that_registers_again_is_live_again():
    fleet = Fleet(2)
    fleet.submit("a")
    fleet.tell(b"0", m.Drain())
    assert fleet.tell(b"0", make_register(0)) == [
        lost(0, "it registered again", 1),
        m.Send(b"1", engine_request(1)),
        m.Send(b"0", m.RegisterAck(0, 2, 0, RUNNING)),
        registered(2),
    ]
    assert fleet.submit("b") == [m.Send(b"0", engine_request(2))]


def test_signals_and_pings_still_reach_a_draining_rank():
    fleet = Fleet(2)
    fleet.tell(b"0", m.Drain())
    for signal, args in [
        (Signal.PAUSE, ()),
        (Signal.SUSPEND, ()),
        (Signal.RESUME, (1,)),
        (Signal.UNPAUSE, ()),
    ]:
        expected = m.Control(signal, args)
        assert fleet.tell(CLIENT, m.Control(signal)) == [
            m.Send(b"0", expected),
            m.Send(b"1", expected),
        ]
    assert fleet.tick() == [m.Send(b"0", m.Ping(1)), m.Send(b"1", m.Ping(1))]


def test_a_draining_rank_is_not_asked_for_its_table_any_more():
    fleet = Fleet(1)
    gap = m.KvEvents(0, 7, 1, pack_events([5]))
    assert sends(fleet.tell(b"0", gap)) == [m.Send(b"0", m.Resync())]
    assert fleet.tick() == [m.Send(b"0", m.Ping(1)), m.Send(b"0", m.Resync())]
    fleet.tell(b"0", m.Drain())
    assert fleet.tick() == [m.Send(b"0", m.Ping(2))]
    assert fleet.tell(b"0", gap) == []


def test_where_the_last_live_rank_drains_requests_wait_for_another():
    fleet = Fleet(1)
    fleet.submit("a")
    assert fleet.tell(b"0", m.Drain()) == [
        m.Send(b"0", m.DrainAck()),
        draining(0, 1),
        none_left(waiting=0, orderly=True),
    ]
    assert fleet.submit("b") == []
    assert fleet.tell(b"0", replies(0)) == [m.Send(CLIENT, m.Reply("a", BODY))]
    assert fleet.tell(b"0", m.Disconnect()) == [left(0)]
    assert fleet.tell(b"1", make_register(1)) == [
        m.Send(b"1", m.RegisterAck(1, 1, 0, RUNNING)),
        registered(1),
        m.Send(b"1", engine_request(1)),
    ]


def test_what_waited_for_a_place_waits_its_full_time_for_a_rank_and_no_longer():
    fleet = Fleet(1, max_rank_requests=1, replica_wait=10.0)
    fleet.submit("a", "waits")
    fleet.now = 100.0
    assert fleet.tell(b"0", m.Drain()) == [
        m.Send(b"0", m.DrainAck()),
        draining(0, 1),
        none_left(waiting=1),
    ]
    assert fleet.tick(109.9) == [m.Send(b"0", m.Ping(1))]
    # That the drained rank is lost is nothing new to who waits for a live one.
    assert fleet.tell(b"0", m.PeerLost()) == [lost(0, "its connection broke", 1)]
    text = "no replica is registered, nor was for 10 s; send it again later"
    assert fleet.tick(110.0) == [m.Send(CLIENT, m.RequestError("waits", "no_replica", text))]
    assert fleet.tick(119.8) == []
    assert fleet.tick(119.9) == [m.Send(CLIENT, m.RequestError("a", "no_replica", text))]
    assert len(fleet.core.fleet.ledger) == 0
