"""A pause and its owner: what becomes of requests when nobody is left to end it."""

import pytest
from builders import (
    BODY,
    CLIENT,
    LRU,
    OTHER,
    Fleet,
    engine_request,
    logs,
    make_connect,
    make_register,
    registered,
    replies,
    sends,
    stock_register,
    submission,
)

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.lifecycle import FleetState, Signal

RUNNING, PAUSED, SUSPENDED = FleetState.RUNNING, FleetState.PAUSED, FleetState.SUSPENDED
PAUSE, UNPAUSE = m.Control(Signal.PAUSE), m.Control(Signal.UNPAUSE)
SUSPEND, RESUME = m.Control(Signal.SUSPEND), m.Control(Signal.RESUME)
TRAINER, TRAINER_AGAIN = b"client-\x00-\xff-1", b"client-\x00-\xff-2"
"""Two connections of one client; its name may hold dashes, too."""


def error(name, state="paused", wait=60, client=CLIENT):
    text = (
        f"the fleet is {state}, and the client that {state} it has been gone for {wait} s; "
        "send the request again once the fleet runs"
    )
    return m.Send(client, m.RequestError(name, "fleet_paused", text))


def abandoned(requests, state="paused", wait=60):
    out = "send UNPAUSE" if state == "paused" else "send RESUME and UNPAUSE"
    fields = {
        "state": state,
        "owner_gone_for": f"{wait} s",
        "requests": requests,
        "advice": f"make sure that the weights are whole, then {out}",
    }
    return m.Log("pause_abandoned", fields, warning=True)


def withdrawn(rank, requests):
    return m.Log("requests_withdrawn", {"rank": rank, "requests": requests})


def tick(fleet, at=None):
    """What comes of looking at the clock, without the pings."""
    effects = fleet.tick(at)
    return [e for e in effects if not (isinstance(e, m.Send) and isinstance(e.message, m.Ping))]


def held_fleet(*signals, ranks=1, names=("a",), **settings):
    """A fleet with requests in flight that the trainer has just sent these signals to."""
    fleet = Fleet(ranks, **{"pause_wait": 60.0} | settings)
    fleet.submit(*names)
    fleet.tell(TRAINER, make_connect())
    for signal in signals or (PAUSE,):
        fleet.tell(TRAINER, signal)
    return fleet


# --- nobody is left ------------------------------------------------------------------------------


def test_a_pause_whose_owner_is_gone_is_told_to_all_who_wait_and_stays():
    fleet = held_fleet(ranks=2, names=("a", "b", "c"), max_rank_requests=1)
    fleet.tell(OTHER, make_connect())
    fleet.tell(OTHER, submission("d", [7]))
    fleet.now = 10.0
    assert logs(fleet.tell(TRAINER, m.PeerLost())) == ["client_lost"]
    assert tick(fleet, 69.9) == []
    assert tick(fleet, 70.0) == [
        abandoned(4),
        error("c"),
        error("d", client=OTHER),
        withdrawn(0, 1),
        error("a"),
        m.Send(b"0", m.RegisterAgain()),
        withdrawn(1, 1),
        error("b"),
        m.Send(b"1", m.RegisterAgain()),
    ]
    assert len(fleet.core.fleet.ledger) == 0
    assert fleet.loads == [0, 0]
    assert tick(fleet, 1000.0) == []  # said once
    assert fleet.core.fleet.state is PAUSED


def test_new_requests_are_refused_at_once_until_somebody_ends_the_pause():
    fleet = held_fleet()
    fleet.tell(TRAINER, m.Disconnect())
    tick(fleet, 60.0)
    for name in ("b", "c"):
        assert fleet.submit(name) == [
            error(name),
            m.Log("request_refused", warning=True, peer=CLIENT),
        ]
    assert fleet.tell(OTHER, make_connect())[0].peer == OTHER
    assert fleet.tell(OTHER, UNPAUSE) == [m.Send(b"0", UNPAUSE)]
    assert fleet.submit("d") == [m.Send(b"0", engine_request(1))]
    assert fleet.answer(1) == [m.Send(CLIENT, m.Reply("d", BODY))]


def test_a_suspended_fleet_is_never_resumed_by_itself():
    fleet = held_fleet(PAUSE, SUSPEND)
    fleet.tell(TRAINER, m.PeerLost())
    told = [e for now in range(1, 10_000, 50) for e in tick(fleet, float(now))]
    assert not any(isinstance(send.message, m.Control) for send in sends(told))
    assert fleet.core.fleet.state is SUSPENDED
    assert abandoned(1, "suspended") in told
    assert error("a", "suspended") in told
    fleet.tell(OTHER, make_connect())
    resumed = m.Control(Signal.RESUME, (1,))
    assert fleet.tell(OTHER, RESUME) == [m.Send(b"0", resumed)]
    assert fleet.submit("b") == [m.Send(b"0", engine_request(1, epoch=1))]  # waits in the engine
    assert fleet.tell(OTHER, UNPAUSE) == [m.Send(b"0", UNPAUSE)]
    assert fleet.answer(1) == [m.Send(CLIENT, m.Reply("b", BODY))]


def test_late_answers_are_dropped():
    fleet = held_fleet(names=("a", "b"))
    fleet.tell(TRAINER, m.PeerLost())
    tick(fleet, 60.0)
    dropped = m.Log("reply_dropped", warning=True, peer=b"0")
    assert fleet.tell(b"0", replies(0)) == [dropped]  # its last step was not through
    fleet.signal(Signal.UNPAUSE)
    assert fleet.submit("a") == [m.Send(b"0", engine_request(2))]
    assert fleet.tell(b"0", replies(1, 2)) == [dropped, m.Send(CLIENT, m.Reply("a", BODY))]


def test_an_engine_that_registers_again_is_told_that_nothing_is_kept():
    fleet = held_fleet(names=("a", "b"))
    fleet.tell(TRAINER, m.PeerLost())
    tick(fleet, 60.0)
    back = m.Log("rank_back", {"rank": 0, "requests": 0, "lost": 0})
    assert fleet.tell(b"0", make_register(0, generation=1, requests=[0, 1])) == [
        m.Send(b"0", m.RegisterAck(0, 1, 0, PAUSED)),
        back,
    ]


def test_a_request_that_crosses_the_registration_is_sent_once_more_and_answered_once():
    fleet = held_fleet()
    fleet.tell(TRAINER, m.PeerLost())
    tick(fleet, 60.0)
    fleet.signal(Signal.PAUSE)  # another client takes over
    assert fleet.submit("b") == [m.Send(b"0", engine_request(1))]
    assert sends(fleet.tell(b"0", make_register(0, generation=1, requests=[0]))) == [
        m.Send(b"0", m.RegisterAck(0, 1, 0, PAUSED)),
        m.Send(b"0", engine_request(2)),
    ]
    assert sends(fleet.tell(b"0", replies(1, 2))) == [m.Send(CLIENT, m.Reply("b", BODY))]


def test_released_engines_are_not_asked_and_what_they_answer_is_dropped():
    fleet = Fleet(eviction=LRU, pause_wait=60.0, trace=True)
    fleet.tell(b"mp-coord-0", stock_register())
    fleet.submit("a")
    fleet.signal(Signal.PAUSE)
    fleet.tell(OTHER, make_connect())
    fleet.tell(OTHER, submission("b", [7]))
    fleet.tell(CLIENT, m.Disconnect())
    told = tick(fleet, 60.0)
    assert [type(effect) for effect in told] == [m.Log, m.Log, m.Trace, m.Trace, m.Send]
    assert [(t.outcome, t.client, t.rank) for t in told[2:4]] == [
        ("fleet_paused", None, 0),
        ("fleet_paused", OTHER, 0),
    ]
    assert told[4] == error("b", client=OTHER)
    dropped = m.Log("reply_dropped", warning=True, peer=b"mp-coord-0")
    assert fleet.tell(b"mp-coord-0", replies(0, 1)) == [dropped, dropped]


def test_with_a_limit_of_0_nobody_waits():
    fleet = held_fleet(pause_wait=0.0)
    assert tick(fleet, 5.0) == []
    fleet.tell(TRAINER, m.Disconnect())
    assert error("a", wait=0) in tick(fleet, 5.0)


# --- somebody is there ---------------------------------------------------------------------------


def test_while_its_owner_is_there_a_pause_may_take_as_long_as_it_likes():
    fleet = held_fleet()
    assert tick(fleet, 1e6) == []
    fleet.tell(TRAINER, UNPAUSE)
    fleet.tell(TRAINER, m.PeerLost())
    assert tick(fleet, 1e6 + 100) == []  # nor does it matter, once the fleet runs


@pytest.mark.parametrize("noticed_first", [True, False])
def test_a_client_that_reconnects_is_not_gone(noticed_first):
    """It comes under the next number, maybe before its old connection is found to be broken."""
    fleet = held_fleet()
    told = [(TRAINER, m.PeerLost()), (TRAINER_AGAIN, make_connect())]
    for peer, message in told if noticed_first else told[::-1]:
        fleet.tell(peer, message)
    assert tick(fleet, 1e6) == []
    fleet.tell(TRAINER_AGAIN, m.PeerLost())
    assert logs(tick(fleet, 1e6 + 59.9)) == []
    assert "pause_abandoned" in logs(tick(fleet, 1e6 + 60.0))


def test_another_client_is_no_reconnection():
    fleet = held_fleet()
    fleet.tell(TRAINER, m.PeerLost())
    for name in (b"client-\x00-\xff", b"client-\x00-1", b"client-\x00-\xff-x", b"client-1"):
        fleet.tell(b"other-" + name, make_connect())
    fleet.tell(b"client-\x00-\xff-2-1", make_connect())
    assert "pause_abandoned" in logs(tick(fleet, 60.0))


def test_an_owner_that_comes_back_late_has_its_pause_again():
    fleet = held_fleet()
    fleet.tell(TRAINER, m.PeerLost())
    tick(fleet, 60.0)
    fleet.tell(TRAINER_AGAIN, make_connect())
    assert fleet.submit("b") == [m.Send(b"0", engine_request(1))]
    assert tick(fleet, 1e6) == []
    assert fleet.tell(TRAINER_AGAIN, UNPAUSE) == [m.Send(b"0", UNPAUSE)]


@pytest.mark.parametrize(
    ("before", "signal", "late"),
    [
        ([PAUSE], PAUSE, True),  # redundant: a trainer that was started again
        ([PAUSE], SUSPEND, False),
        ([PAUSE, SUSPEND], RESUME, True),
        ([PAUSE, SUSPEND], PAUSE, False),
        ([PAUSE, SUSPEND], SUSPEND, True),
        ([PAUSE, SUSPEND], m.Control(Signal.SET_GENERATION_EPOCH, (5,)), True),
    ],
)
def test_who_signals_next_owns_the_pause(before, signal, late):
    fleet = held_fleet(*before)
    fleet.tell(TRAINER, m.PeerLost())
    tick(fleet, 60.0 if late else 30.0)
    fleet.tell(OTHER, make_connect())
    fleet.tell(OTHER, signal)
    state = fleet.core.fleet.state
    assert [type(e.message) for e in fleet.submit("b")] == [m.EngineRequest]
    assert logs(tick(fleet, 1e6)) == []
    fleet.tell(TRAINER_AGAIN, make_connect())  # it is this one's no more
    fleet.tell(TRAINER_AGAIN, m.PeerLost())
    assert logs(tick(fleet, 2e6)) == []
    fleet.tell(OTHER, m.PeerLost())
    assert abandoned(1 if late else 2, state.value) in tick(fleet, 2e6 + 60.0)


@pytest.mark.parametrize(
    ("signal", "connected"),
    [(Signal.START_CUDA_PROFILER, True), (Signal.RESUME, True), (Signal.PAUSE, False)],
)
def test_who_only_profiles_or_is_refused_does_not(signal, connected):
    fleet = held_fleet()
    if connected:
        fleet.tell(OTHER, make_connect())
    fleet.tell(OTHER, m.Control(signal))
    fleet.tell(OTHER, m.PeerLost())
    assert logs(tick(fleet, 1e6)) == []
    fleet.tell(TRAINER, m.PeerLost())
    fleet.tell(OTHER, make_connect())
    fleet.tell(OTHER, m.Control(signal if connected else Signal.STOP_CUDA_PROFILER))
    assert "pause_abandoned" in logs(tick(fleet, 1e6 + 60.0))


def test_a_standstill_of_the_coordinator_itself_does_not_count():
    fleet = held_fleet()
    fleet.tell(TRAINER, m.PeerLost())
    fleet.now = 300.0
    assert logs(fleet.tell(b"", m.Tick(stood_still=299.0))) == []
    assert logs(tick(fleet, 358.9)) == []
    assert "pause_abandoned" in logs(tick(fleet, 359.0))


def test_engines_that_are_stopped_in_a_pause_leave_none_behind():
    fleet = held_fleet(PAUSE, m.Control(Signal.STOP))
    fleet.tell(TRAINER, m.Disconnect())
    assert "pause_abandoned" not in logs(tick(fleet, 1e6))


def test_where_no_replica_is_left_either_requests_wait_for_the_shorter_time():
    fleet = held_fleet(replica_wait=20.0)
    fleet.tell(b"0", m.PeerLost())
    fleet.tell(TRAINER, m.PeerLost())
    (no_replica,) = sends(tick(fleet, 20.0))
    assert no_replica.message.code == "no_replica"
    assert tick(fleet, 60.0) == [abandoned(0)]
    assert fleet.submit("b")[0] == error("b")
    assert fleet.tell(b"0", make_register(0)) == [
        m.Send(b"0", m.RegisterAck(0, 2, 0, PAUSED)),
        registered(1),
    ]


def test_clients_are_told_why_the_fleet_would_not_serve_them():
    fleet = held_fleet()

    def told():
        sent = sends(fleet.tell(b"", m.Tick()))
        return [(s.peer, s.message) for s in sent if isinstance(s.message, m.Serving)]

    told()
    fleet.tell(TRAINER, m.PeerLost())
    fleet.now = 59.0
    assert told() == []
    fleet.now = 60.0
    why = m.Serving(False, "has a paused fleet, and the client that paused it is gone")
    assert told() == [(CLIENT, why)]
    assert fleet.tell(OTHER, make_connect())[1:] == [m.Send(OTHER, why)]
    fleet.tell(OTHER, UNPAUSE)
    assert told() == [(CLIENT, m.Serving(True)), (OTHER, m.Serving(True))]
    assert told() == []


# --- a coordinator that is started again ---------------------------------------------------------


def found(state):
    return m.Log("pause_found", {"state": state}, warning=True)


@pytest.mark.parametrize("state", [PAUSED, SUSPENDED])
def test_the_fleet_stays_what_its_first_engine_was_told(state):
    fleet = Fleet(pause_wait=60.0)
    fleet.now = 5.0
    back = make_register(0, generation=3, requests=[9], state=state.value)
    assert fleet.tell(b"0", back) == [
        found(state.value),
        m.Send(b"0", m.RegisterAck(0, 1, 0, state)),
        registered(1),
    ]
    assert fleet.submit("a") == [m.Send(b"0", engine_request(0))]
    other = make_register(1, generation=3, state="running")
    assert m.Send(b"1", m.RegisterAck(1, 1, 0, state)) in fleet.tell(b"1", other)
    assert logs(tick(fleet, 64.9)) == []  # its owner may send a signal until then
    assert abandoned(1, state.value) in tick(fleet, 65.0)
    fleet.signal(*[Signal.RESUME] * (state is SUSPENDED), Signal.UNPAUSE)
    assert fleet.core.fleet.state is RUNNING


@pytest.mark.parametrize("state", ["", "running"])
def test_an_engine_that_is_new_or_runs_pauses_nobody(state):
    fleet = Fleet()
    assert "pause_found" not in logs(fleet.tell(b"0", make_register(0, state=state)))
    fleet.tell(b"0", m.Disconnect())
    later = make_register(1, generation=1, state="suspended")  # not where it belonged
    assert "pause_found" not in logs(fleet.tell(b"1", later))
    assert fleet.core.fleet.state is RUNNING


@pytest.mark.parametrize("signals", [[PAUSE, UNPAUSE], [RESUME, UNPAUSE]])
def test_what_a_client_said_first_counts(signals):
    """Also where the fleet is that already, or it ends a suspend that nobody has told of yet."""
    fleet = Fleet()
    for signal in signals:
        fleet.tell(CLIENT, signal)
    back = make_register(0, generation=1, state="suspended")
    # The weights are others now, although nobody has passed a RESUME on.
    assert m.Send(b"0", m.RegisterAck(0, 1, 1, RUNNING)) in fleet.tell(b"0", back)


# --- what nobody waits for -----------------------------------------------------------------------


def test_a_suspended_engine_does_not_keep_what_nobody_waits_for():
    fleet = held_fleet(PAUSE, SUSPEND, ranks=2, names=("a", "b", "c"))
    fleet.tell(OTHER, make_connect())
    fleet.tell(OTHER, submission("d", [7]))
    fleet.tell(CLIENT, m.PeerLost())
    # Rank 0 has a and c, rank 1 has b and d, for which somebody waits: it drops all or nothing.
    assert tick(fleet) == [
        withdrawn(0, 2),
        m.Send(b"0", m.RegisterAgain()),
    ]
    assert fleet.loads == [0, 2]
    assert tick(fleet) == []
    fleet.tell(OTHER, m.PeerLost())
    assert tick(fleet)[:2] == [withdrawn(1, 2), m.Send(b"1", m.RegisterAgain())]
    assert len(fleet.core.fleet.ledger) == 0


@pytest.mark.parametrize(
    ("signals", "settings"),
    [([PAUSE], {}), ([PAUSE, SUSPEND], {"max_retries": 0}), ([PAUSE, SUSPEND, RESUME], {})],
)
def test_an_engine_whose_cache_is_of_use_or_without_copies_of_prompts_goes_on(signals, settings):
    fleet = held_fleet(*signals, **settings)
    fleet.tell(CLIENT, m.PeerLost())
    assert tick(fleet) == []
    assert fleet.loads == [1]


def test_released_engines_keep_what_nobody_waits_for():
    fleet = Fleet(eviction=LRU)
    fleet.tell(b"mp-coord-0", stock_register())
    fleet.submit("a")
    fleet.tell(TRAINER, make_connect())
    for signal in (PAUSE, SUSPEND):
        fleet.tell(TRAINER, signal)
    fleet.tell(CLIENT, m.PeerLost())
    assert tick(fleet) == []
    assert fleet.loads == [1]


def test_a_place_that_gets_free_so_goes_to_who_waits():
    fleet = held_fleet(PAUSE, SUSPEND, max_rank_requests=1)
    fleet.tell(OTHER, make_connect())
    assert fleet.tell(OTHER, submission("b", [7])) == []
    fleet.tell(CLIENT, m.PeerLost())
    assert tick(fleet) == [
        withdrawn(0, 1),
        m.Send(b"0", m.RegisterAgain()),
        m.Send(b"0", engine_request(1)),
    ]
