"""The coordinator without its sockets: clients, what each peer may say, control signals."""

from typing import get_args

import pytest
from builders import (
    BLOCK,
    CLIENT,
    OTHER,
    Fleet,
    engine_request,
    make_connect,
    make_register,
    make_settings,
    none_left,
    replies,
    sends,
    submission,
    tokens,
)

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.core import Coordinator
from megatron.core.inference.coordinator.lifecycle import FleetState, Signal
from megatron.core.inference.coordinator.settings import PROTOCOL_VERSION

RUNNING, PAUSED, SUSPENDED = FleetState.RUNNING, FleetState.PAUSED, FleetState.SUSPENDED


# --- connecting ----------------------------------------------------------------------------------


def test_a_client_of_ours_learns_policy_block_size_and_epoch():
    core = Coordinator(make_settings())
    ack = m.ConnectAck(PROTOCOL_VERSION, "longest_prefix", BLOCK, 0)
    told = [m.Send(CLIENT, ack), m.Send(CLIENT, m.Serving(False))]
    assert core.handle(m.Incoming(CLIENT, make_connect()), 0.0) == told


def test_a_released_client_is_acknowledged_too():
    fleet = Fleet()
    ack = m.ConnectAck(PROTOCOL_VERSION, "longest_prefix", BLOCK, 0)
    assert fleet.tell(OTHER, m.Connect(None)) == [m.Send(OTHER, ack)]


def test_without_prefix_caching_a_client_is_told_not_to_hash():
    fleet = Fleet(1, prefix_caching=False, block_size_tokens=None)
    ack = m.ConnectAck(PROTOCOL_VERSION, "load_balanced", 0, 0)
    assert fleet.tell(OTHER, make_connect()) == [m.Send(OTHER, ack)]
    fleet = Fleet(1, prefix_caching=False, block_size_tokens=64)
    assert fleet.tell(OTHER, make_connect()) == [m.Send(OTHER, ack)]


def test_connecting_again_is_acknowledged_again():
    fleet = Fleet()
    first = fleet.tell(OTHER, make_connect())
    assert fleet.tell(OTHER, make_connect()) == first


def test_the_acknowledgement_tells_the_present_epoch():
    fleet = Fleet(1)
    fleet.tell(CLIENT, m.Control(Signal.SET_GENERATION_EPOCH, (5,)))
    (ack,) = sends(fleet.tell(OTHER, make_connect()))
    assert ack.message.weight_epoch == 1


def test_clients_are_told_whether_there_is_a_replica():
    fleet = Fleet(expected_ranks=2)
    released = b"released"
    fleet.tell(released, m.Connect(None))

    def told():
        sent = sends(fleet.tell(b"", m.Tick()))
        return {(s.peer, s.message.serving) for s in sent if isinstance(s.message, m.Serving)}

    assert told() == set()  # nothing new since they connected
    fleet.join()
    assert told() == set()  # requests wait for the second one
    fleet.join()
    assert told() == {(CLIENT, True)}
    (ack,) = sends(fleet.tell(OTHER, make_connect()))
    assert isinstance(ack.message, m.ConnectAck)
    fleet.tell(b"0", m.Disconnect())
    assert told() == set()
    fleet.tell(b"1", m.Drain())  # it answers what it has, and gets nothing more
    assert told() == {(CLIENT, False), (OTHER, False)}
    assert told() == set()
    fleet.join()
    assert told() == {(CLIENT, True), (OTHER, True)}


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


# --- rights --------------------------------------------------------------------------------------

RIGHTS = [m.Right(number) for number in range(8)]
ANY, CLIENTS_OWN = m.Right.ALL, m.Right.SUBMIT | m.Right.CONTROL
NEEDED = [
    (make_connect(), CLIENTS_OWN),
    (submission("r", [7]), m.Right.SUBMIT),
    (m.Control(Signal.PAUSE), m.Right.CONTROL),
    (m.Shutdown(), m.Right.CONTROL),
    (make_register(1), m.Right.ENGINE),
    (replies(0), m.Right.ENGINE),
    (m.KvEvents(0, 0, 0, b""), m.Right.ENGINE),
    (m.Drain(), m.Right.ENGINE),
    (m.Pong(1), ANY),
    (m.Disconnect(), ANY),
    (m.Malformed("no frame"), ANY),
    (m.PeerLost(), ANY),
    (m.Tick(), ANY),
    (m.Sweep(), ANY),
]
"""Every message, and what its sender needs one of."""


def test_the_table_of_rights_knows_every_message():
    assert {type(message) for message, _ in NEEDED} == set(get_args(m.ToCoordinator))


@pytest.mark.parametrize("rights", RIGHTS, ids=str)
@pytest.mark.parametrize(("message", "needed"), NEEDED, ids=lambda value: type(value).__name__)
def test_what_a_peer_may_say_depends_on_its_rights_alone(message, needed, rights):
    for peer in (CLIENT, OTHER, b"0"):
        fleet, unchecked = Fleet(1), Fleet(1)
        effects = fleet.tell(peer, message, rights)
        if rights & needed:
            assert effects == unchecked.tell(peer, message)
            continue
        refusal = m.Log("message_forbidden", {"needed": needed.name}, warning=True, peer=peer)
        name = getattr(message, "client_request_id", None)
        text = f"the key of this peer does not give it the right {needed.name}"
        error = m.Send(peer, m.RequestError(name, "forbidden", text))
        waits_for_an_answer = isinstance(message, m.Connect | m.SubmitRequest | m.Register)
        assert effects == ([error, refusal] if waits_for_an_answer else [refusal])
        # Nothing has come of it.
        assert fleet.core.fleet.state is RUNNING
        assert len(fleet.core.fleet.ledger) == 0
        assert [rank.peer for rank in fleet.core.fleet.ranks] == [b"0"]


def test_a_refusal_names_the_rights_of_which_one_is_needed():
    effects = Fleet().tell(OTHER, make_connect(), m.Right.ENGINE)
    text = "the key of this peer does not give it the right SUBMIT|CONTROL"
    assert effects == [
        m.Send(OTHER, m.RequestError(None, "forbidden", text)),
        m.Log("message_forbidden", {"needed": "SUBMIT|CONTROL"}, warning=True, peer=OTHER),
    ]


def test_a_front_end_submits_and_cannot_stop_the_fleet():
    fleet = Fleet(1)
    assert len(sends(fleet.tell(OTHER, make_connect(), m.Right.SUBMIT))) == 1
    assert fleet.tell(OTHER, submission("r", [7]), m.Right.SUBMIT) == [
        m.Send(b"0", engine_request(0))
    ]
    for message in (m.Control(Signal.PAUSE), m.Shutdown()):
        assert fleet.tell(OTHER, message, m.Right.SUBMIT) == [
            m.Log("message_forbidden", {"needed": "CONTROL"}, warning=True, peer=OTHER)
        ]
    assert fleet.core.fleet.state is RUNNING


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
        ended = [none_left(waiting=0, orderly=True)] if signal is Signal.STOP else []
        told = [m.Send(peer, m.Control(signal, args)) for peer in (b"0", b"1")]
        assert effects == told + ended
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


# --- sweeping ------------------------------------------------------------------------------------


def test_sweeping_where_nothing_was_forgotten_finds_nothing():
    fleet = Fleet(1)
    fleet.ask(tokens(3))
    assert fleet.core.backlog is False
    assert fleet.tell(b"", m.Sweep()) == []
    assert len(fleet.core.fleet.index) == 3


def test_what_a_lost_rank_held_counts_no_more_at_once_and_is_swept_out_piece_by_piece():
    fleet = Fleet(2)
    for name in range(6000):
        fleet.core.handle(m.Incoming(CLIENT, submission(name, tokens(1, name))), 0.0)
        fleet.core.handle(m.Incoming(b"%d" % (name % 2), replies(name)), 0.0)
    index = fleet.core.fleet.index
    assert len(index) == 6000
    assert fleet.core.backlog is False
    fleet.tell(b"0", m.PeerLost())
    assert len(index) == 3000
    pieces = 0
    while fleet.core.backlog:
        assert fleet.tell(b"", m.Sweep()) == []
        assert len(index) == 3000
        pieces += 1
    assert pieces > 1
    fleet.tell(b"1", m.PeerLost())
    while fleet.core.backlog:
        fleet.tell(b"", m.Sweep())
    assert list(index._runs) == []


def test_what_a_weight_update_forgot_is_swept_out_too():
    fleet = Fleet(1)
    fleet.ask(tokens(3))
    fleet.tell(CLIENT, m.Control(Signal.SET_GENERATION_EPOCH, (1,)))
    assert fleet.core.backlog is True
    fleet.tell(b"", m.Sweep())
    assert fleet.core.backlog is False
    # So does a tick, where nobody sweeps.
    fleet.tell(CLIENT, m.Control(Signal.SET_GENERATION_EPOCH, (2,)))
    assert fleet.core.backlog is True
    fleet.tick()
    assert fleet.core.backlog is False
