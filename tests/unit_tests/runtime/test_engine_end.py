"""The engine's end without an engine: a dummy, and a link that is no socket.

How ranks start, meet and end is in test_engine_start.py; a real engine is in test_engine.py.
"""

import asyncio
import logging
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dummy_engine import DummyContext, DummyEngine, released_bookkeep, released_reset
from megatron.core.inference.engines.dynamic_engine import EngineState
from megatron.core.inference.inference_request import DynamicInferenceRequest, Status
from megatron.core.inference.sampling_params import SamplingParams

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.core import Coordinator
from megatron.core.inference.coordinator.lifecycle import FleetState, Signal
from megatron.core.inference.coordinator.runtime import (
    engine_end,
    engine_endings,
    engine_step,
    wire,
)
from megatron.core.inference.coordinator.runtime.byte_tokenizer import ByteTokenizer
from megatron.core.inference.coordinator.runtime.engine_cache import EngineCache
from megatron.core.inference.coordinator.runtime.engine_end import EngineEnd
from megatron.core.inference.coordinator.runtime.engine_signals import signals_towards, told_to_be
from megatron.core.inference.coordinator.settings import CoordinatorSettings


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch) -> None:
    monkeypatch.setattr(engine_step, "_released_bookkeep", released_bookkeep)
    monkeypatch.setattr(engine_endings, "_released_reset", released_reset)


@dataclass
class DummyLink:
    """What an engine's socket would bring and take."""

    waiting: list[list[bytes]] = field(default_factory=list)
    sent: list[m.ToCoordinator] = field(default_factory=list)
    checks: int = 0
    broke: bool = False
    broken: bool = False

    def check(self) -> bool:
        self.checks += 1
        broke, self.broke = self.broke, False
        return broke

    def drain(self) -> list[list[bytes]]:
        taken, self.waiting = self.waiting, []
        return taken

    def send(self, message: m.ToCoordinator) -> None:
        if isinstance(message, m.KvEvents):  # test_engine_cache.py looks at these
            return
        self.sent.append(message)

    def say(self, *messages: m.FromCoordinator | list[bytes]) -> None:
        """What the next drain brings: messages, or frames as they are."""
        self.waiting += [
            message if isinstance(message, list) else wire.encode(message) for message in messages
        ]

    def answers(self) -> list[m.Answer]:
        """What was answered since it was last asked."""
        taken, self.sent = self.sent, []
        return [a for message in taken for a in message.answers]


def make_engine(linked: bool = True, **context: Any) -> tuple[DummyEngine, DummyLink]:
    """An engine that has started, on a rank with or without a link."""
    engine, link = DummyEngine(context=DummyContext(**context)), DummyLink()
    engine._prefix_routing = EngineEnd(EngineCache(engine.context))
    if linked:
        engine.end.link = link
    engine.is_mp_coordinator = linked
    engine.end.cache.events()  # the clear at the beginning
    return engine, link


def submit(request_id: int, prompt: Any = None, **sampling: Any) -> m.EngineRequest:
    prompt = [1, 2, 3, 4, 5] if prompt is None else prompt
    return m.EngineRequest(request_id, 0, wire.pack(sampling), wire.pack(prompt))


def control(signal: Signal, *args: int) -> m.Control:
    return m.Control(signal, args)


PAUSE, UNPAUSE = control(Signal.PAUSE), control(Signal.UNPAUSE)
SUSPEND, RESUME = control(Signal.SUSPEND), control(Signal.RESUME, 1)


def step(engine: DummyEngine, *finished: int) -> dict:
    return asyncio.run(engine.step(*finished))


def body(answer: m.Answer) -> dict:
    return wire.unpack(answer.body)


# --- a drain, in order ---------------------------------------------------------------------------


def test_a_drain_is_handled_strictly_in_order():
    engine, link = make_engine()
    link.say(
        submit(1),
        control(Signal.SET_GENERATION_EPOCH, 70, 1),
        submit(2),
        m.Ping(9),
        submit(3),
        PAUSE,
    )
    assert engine.schedule_requests() == 6
    assert engine.did == ["add 1", "add 2", "add 3"]
    assert link.sent == [m.Pong(9)]
    assert engine.state is EngineState.PAUSING
    # 1 came before the epoch and was stamped by it; 2 and 3 were born under it.
    assert [engine.get_request(n).policy_epoch for n in (1, 2, 3)] == [[(0, 70)]] * 3
    assert engine.end.cache.epoch == 1


def test_each_drain_looks_after_the_coordinator_first():
    engine, link = make_engine()
    assert [engine.schedule_requests() for _ in range(3)] == [0, 0, 0]
    assert link.checks == 3
    engine.end.ending = True  # the job ends: who is gone then is no error
    engine.schedule_requests()
    assert link.checks == 3


def test_a_signal_that_must_wait_holds_back_everything_behind_it():
    engine, link = make_engine()
    link.say(PAUSE, SUSPEND, submit(7), RESUME)
    assert engine.schedule_requests() == 4
    assert (engine.state, engine.did) == (EngineState.PAUSING, [])

    link.say(submit(8), m.Ping(1), control(Signal.SET_GENERATION_EPOCH, 5, 2))
    assert engine.schedule_requests() == 3  # later drains queue up behind it
    assert (engine.state, engine.did) == (EngineState.PAUSING, [])
    assert link.sent == [m.Pong(1)]  # all but a ping, which asks whether somebody reads
    assert engine._generation_epoch is None

    engine.state = EngineState.PAUSED  # as the engine's loop does once all ranks agree
    assert engine.schedule_requests() == 0
    assert (engine.state, engine.did) == (EngineState.SUSPENDING, ["suspend", "add 7"])
    assert engine.end.cache.epoch == 0

    engine.schedule_requests()
    assert engine.state is EngineState.SUSPENDING
    engine.state = EngineState.SUSPENDED
    engine.schedule_requests()
    assert engine.state is EngineState.RESUMING
    assert engine.did == ["suspend", "add 7", "resume", "add 8"]
    assert link.sent == [m.Pong(1)]
    assert (engine._generation_epoch, engine.end.cache.epoch) == (5, 2)
    assert not engine.end.inbox


def test_a_state_that_is_left_is_not_confirmed_any_more():
    engine, link = make_engine()
    events = engine._state_events
    events[EngineState.RESUMED].set()
    link.say(PAUSE)
    engine.schedule_requests()
    assert not events[EngineState.RUNNING].is_set()
    engine.state = EngineState.PAUSED
    link.say(SUSPEND)
    engine.schedule_requests()
    assert not events[EngineState.RESUMED].is_set()
    engine.state = EngineState.SUSPENDED
    events[EngineState.SUSPENDED].set()
    link.say(control(Signal.STOP))
    engine.schedule_requests()
    assert not events[EngineState.SUSPENDED].is_set()
    assert engine.state is EngineState.STOPPING


NO_PLACE = [
    (EngineState.RUNNING, UNPAUSE),
    (EngineState.RUNNING, SUSPEND),
    (EngineState.RUNNING, RESUME),
    (EngineState.RUNNING, control(Signal.STOP)),
    (EngineState.PAUSED, PAUSE),
    (EngineState.PAUSED, RESUME),
    (EngineState.SUSPENDED, PAUSE),
    (EngineState.SUSPENDED, UNPAUSE),
    (EngineState.SUSPENDED, SUSPEND),
    (EngineState.STOPPING, UNPAUSE),
]


@pytest.mark.parametrize(("state", "signal"), NO_PLACE)
def test_a_signal_without_a_place_is_ignored_and_logged(state, signal, caplog):
    engine, link = make_engine()
    engine.state = state
    confirmed = {k for k, event in engine._state_events.items() if event.is_set()}
    link.say(signal, submit(1))
    with caplog.at_level(logging.WARNING):
        engine.schedule_requests()
    assert engine.state is state
    assert engine.did == ["add 1"]
    assert {k for k, event in engine._state_events.items() if event.is_set()} == confirmed
    assert caplog.messages == [f"signal_ignored signal={signal.signal.name!r} state={state.name!r}"]


@pytest.mark.parametrize("signal", [Signal.START_CUDA_PROFILER, Signal.STOP_CUDA_PROFILER])
@pytest.mark.parametrize("gpu", [True, False])
def test_the_profiler_is_started_where_there_is_a_gpu_and_elsewhere_nothing_ends(
    signal, gpu, monkeypatch, caplog
):
    calls = []
    cudart = SimpleNamespace(
        cudaProfilerStart=lambda: calls.append(Signal.START_CUDA_PROFILER),
        cudaProfilerStop=lambda: calls.append(Signal.STOP_CUDA_PROFILER),
    )
    if gpu:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    engine, link = make_engine()
    link.say(control(signal), submit(1))
    engine.schedule_requests()
    assert engine.did == ["add 1"]
    assert calls == ([signal] if gpu else [])
    assert ("there is no GPU" in caplog.text) is not gpu


def test_a_new_generation_epoch_is_stamped_where_each_request_is():
    engine, link = make_engine()
    link.say(submit(1), submit(2, [1] * 8))
    engine.schedule_requests()
    link.say(control(Signal.SET_GENERATION_EPOCH, 70, 1))
    engine.schedule_requests()
    engine.get_request(2).generated_tokens = [7, 7, 7]
    engine.get_request(2).kv_cache_epoch = None  # as after a recompute
    link.say(control(Signal.SET_GENERATION_EPOCH, 71, 2), submit(3))
    engine.schedule_requests()
    stamps = {
        n: (engine.get_request(n).policy_epoch, engine.get_request(n).kv_cache_epoch)
        for n in (1, 2, 3)
    }
    assert stamps == {
        1: ([(0, 70), (4, 71)], [(0, 70), (4, 71)]),
        2: ([(0, 70), (10, 71)], [(0, 71)]),
        3: ([(0, 71)], [(0, 71)]),
    }
    assert (engine._generation_epoch, engine.end.cache.epoch) == (71, 2)


MALFORMED = {
    "no msgpack": [b"\xc1"],
    "an unknown header": [wire.pack([99])],
    "a request without its prompt": wire.encode(submit(1))[:2],
    "a request with too much": [*wire.encode(submit(1)), b"more"],
    "a generation epoch without the weight epoch": [wire.pack([44, 7])],
    "a generation epoch that is text": [wire.pack([44, "seven", 1])],
    "RESUME without the weight epoch": [wire.pack([43])],
    "RESUME with too much": [wire.pack([43, 1, 2])],
    "PAUSE with an argument": [wire.pack([40, 1])],
    "PAUSE with a body": [wire.pack([40]), b"body"],
    "an empty frame": [b""],
}


@pytest.mark.parametrize("frames", MALFORMED.values(), ids=MALFORMED.keys())
def test_what_is_no_message_is_logged_and_hurts_nobody(frames, caplog):
    engine, link = make_engine()
    link.say(submit(1), frames, submit(2))
    with caplog.at_level(logging.WARNING):
        assert engine.schedule_requests() == 3
    assert engine.did == ["add 1", "add 2"]
    assert (engine.state, engine.end.cache.epoch) == (EngineState.RUNNING, 0)
    (line,) = caplog.messages
    assert line.startswith("message_refused reason=")


# --- given up, and taken again -----------------------------------------------------------------

REGISTRATION = m.Register(1, "job", 1, 0, 8, 4, 100, "lru")
ACK = m.RegisterAck(1, 2, 5, FleetState.RUNNING)


def registered_as(
    epoch: int, *requests: int, generation: int = 0, state: str = "running"
) -> m.Register:
    return replace(
        REGISTRATION,
        weight_epoch=epoch,
        generation=generation,
        requests=list(requests),
        state=state if generation else "",
    )


def acknowledged(*kept: int) -> m.RegisterAck:
    return replace(ACK, kept=list(kept))


def make_registered(linked: bool = True) -> tuple[DummyEngine, DummyLink]:
    engine, link = make_engine(linked)
    if linked:
        engine.end.registration = REGISTRATION
    else:
        engine.end.member = SimpleNamespace(receive=lambda give_up: link.drain())
    return engine, link


def test_a_rank_that_is_told_to_register_again_does_so_once_under_its_present_epoch():
    engine, link = make_registered()
    engine.end.cache.begin_epoch(engine, 3)
    link.say(m.RegisterAgain(), m.RegisterAgain())
    engine.schedule_requests()
    # A second registration would cost the requests that were routed after the first.
    assert link.sent == [registered_as(3)]
    link.say(ACK)
    engine.schedule_requests()
    assert engine.end.cache.epoch == 5
    link.say(m.RegisterAgain())
    engine.schedule_requests()
    assert link.sent[1:] == [registered_as(5, generation=2)]


def test_a_registration_that_got_lost_is_repeated(monkeypatch):
    engine, link = make_registered()
    clock = [100.0]
    monkeypatch.setattr(engine_end.time, "monotonic", lambda: clock[0])
    for later in (0.0, 1.9, 2.1, 0.1):
        clock[0] += later
        link.say(m.RegisterAgain())
        engine.schedule_requests()
    assert link.sent == [REGISTRATION] * 2


def test_ranks_without_a_link_do_not_register():
    engine, link = make_registered(linked=False)
    link.say(m.RegisterAgain(), ACK)
    engine.schedule_requests()
    assert link.sent == []
    assert engine.end.cache.epoch == 5  # the same on all ranks of a group


@pytest.mark.parametrize("linked", [True, False])
def test_it_tells_what_it_has_and_goes_on_with_what_nobody_else_was_given(linked):
    engine, link = make_registered(linked)
    link.say(submit(1), submit(2), submit(3), m.RegisterAgain())
    engine.schedule_requests()
    assert link.sent == ([registered_as(0, 1, 2, 3)] if linked else [])
    link.say(acknowledged(1, 3), submit(4))
    engine.schedule_requests()
    assert engine.did == ["add 1", "add 2", "add 3", "add 4"]
    assert engine.end.cache.epoch == 5


@pytest.mark.parametrize("linked", [True, False])
def test_what_others_compute_now_is_dropped_without_an_answer_on_all_ranks(linked, caplog):
    engine, link = make_registered(linked)
    engine.end.cache.begin_epoch(engine, 4)
    link.say(submit(1), submit(2), m.RegisterAgain(), m.RegisterAgain(), ACK)
    with caplog.at_level(logging.WARNING):
        engine.schedule_requests()
    assert engine.did == ["add 1", "add 2", "reset"]
    assert (engine.requests, engine.end.cache.found) == ({}, {})
    assert "requests_dropped requests=2" in caplog.messages
    assert link.sent == ([registered_as(4, 1, 2)] if linked else [])
    # What the released reset forgets of the coordinator is kept.
    assert (engine.use_coordinator, engine.end.cache.epoch) == (True, 5)


def test_answers_that_a_broken_connection_may_have_lost_are_sent_again(monkeypatch):
    engine, link = make_registered()
    clock = [100.0]
    monkeypatch.setattr(engine_end.time, "monotonic", lambda: clock[0])
    early, late = (m.Answer(n, "COMPLETED", 0, 0, b"body") for n in (7, 8))
    engine.end.reply([early])
    clock[0] += 20.0
    engine.end.reply([late])
    link.say(submit(1), m.RegisterAgain())
    engine.schedule_requests()
    assert link.sent[2:] == [registered_as(0, 1, 8)]  # nobody waits so long for the early one
    link.say(acknowledged(1, 8))
    engine.schedule_requests()
    assert link.sent[3:] == [m.EngineReply((late,))]
    link.say(m.RegisterAgain(), acknowledged(1))
    clock[0] += 5.0
    engine.schedule_requests()
    assert link.sent[4:] == [registered_as(5, 1, 8, generation=2)]


def test_old_demands_to_register_cost_nothing_that_came_after_the_acknowledgement():
    engine, link = make_registered()
    link.say(submit(1), m.RegisterAgain(), m.RegisterAgain(), acknowledged(1), submit(3))
    engine.schedule_requests()
    link.say(m.RegisterAgain())
    engine.schedule_requests()
    assert engine.did == ["add 1", "add 3"]
    assert link.sent == [registered_as(0, 1), registered_as(5, 1, 3, generation=2)]


def test_an_engine_without_requests_keeps_its_cache_when_it_registers_again():
    engine, link = make_registered()
    link.say(m.RegisterAgain(), ACK)
    engine.schedule_requests()
    assert engine.did == []


SUSPENDED_ACK = replace(ACK, state=FleetState.SUSPENDED)


def make_suspended(linked: bool = True) -> tuple[DummyEngine, DummyLink]:
    """An engine that was suspended with requests 1 and 2, of which none was kept."""
    engine, link = make_registered(linked)
    link.say(submit(1, detokenize=True), submit(2))
    engine.schedule_requests()
    engine.state = EngineState.SUSPENDED
    link.say(m.RegisterAgain(), SUSPENDED_ACK)
    engine.schedule_requests()
    return engine, link


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("state", [EngineState.SUSPENDING, EngineState.SUSPENDED])
def test_an_engine_that_gave_its_memory_back_drops_its_requests_at_the_resume(
    state, linked, caplog
):
    engine, link = make_suspended(linked)
    engine.state = state
    assert engine.did == ["add 1", "add 2"]
    assert list(engine.requests) == [1, 2]
    link.say(RESUME)
    engine.schedule_requests()
    assert (engine.did == ["add 1", "add 2"]) is (state is EngineState.SUSPENDING)
    engine.state = EngineState.SUSPENDED if state is EngineState.SUSPENDING else engine.state
    with caplog.at_level(logging.WARNING):
        engine.schedule_requests()
    assert engine.did == ["add 1", "add 2", "resume", "reset"]
    assert (engine.requests, engine.end.cache.found, engine.end.wants_text) == ({}, {}, set())
    assert (engine.state, engine.end.cache.epoch) == (EngineState.RESUMING, 1)
    assert link.sent == ([registered_as(0, 1, 2)] if linked else [])  # and no answers
    assert not engine.end.forsaken
    link.say(UNPAUSE, submit(1))
    engine.state = EngineState.PAUSED
    engine.schedule_requests()
    assert engine.did[4:] == ["add 1"]


def test_what_comes_to_a_suspended_engine_is_not_dropped_with_what_it_had():
    engine, link = make_suspended()
    link.say(submit(3), m.Ping(1), submit(4, [9]))
    engine.schedule_requests()
    assert engine.did == ["add 1", "add 2"]
    link.say(RESUME, submit(5), UNPAUSE)
    engine.schedule_requests()
    assert engine.did[2:] == ["resume", "reset", "add 3", "add 4", "add 5"]
    assert engine.get_request(4).prompt_tokens.tolist() == [9]
    assert {found.key_epoch for found in engine.end.cache.found.values()} == {1}
    assert link.sent[1:] == [m.Pong(1)]


def test_a_suspended_engine_that_registers_once_more_has_what_came_since():
    engine, link = make_suspended()
    link.say(submit(3), submit(4), m.RegisterAgain(), submit(5))
    engine.schedule_requests()
    assert link.sent[1:] == [registered_as(5, 3, 4, generation=2, state="suspended")]
    link.say(replace(SUSPENDED_ACK, kept=[4]), submit(6), RESUME)
    engine.schedule_requests()
    assert engine.did[2:] == ["resume", "reset", "add 4", "add 6"]


def test_a_coordinator_that_runs_lets_a_suspended_engine_run_without_what_it_had():
    engine, link = make_registered()
    link.say(submit(1))
    engine.schedule_requests()
    engine.state = EngineState.SUSPENDED
    link.say(m.RegisterAgain(), ACK, submit(1, [9]))
    for _ in range(3):
        engine.schedule_requests()
        engine.state = SETTLED.get(engine.state, engine.state)
    assert engine.did == ["add 1", "resume", "reset", "add 1"]
    assert engine.get_request(1).prompt_tokens.tolist() == [9]
    assert engine.state is EngineState.RUNNING


def test_a_coordinator_that_is_started_again_does_not_resume_a_suspended_engine():
    """Its weights may be half written; the trainer goes on with another connection."""
    engine, link = make_registered()
    engine.end.generation = 1
    link.say(submit(1))
    engine.schedule_requests()
    link.say(PAUSE, SUSPEND, m.RegisterAgain())
    core = Coordinator(CoordinatorSettings(block_size_tokens=4))

    def tell(peer: bytes, message: m.ToCoordinator) -> None:
        effects = core.handle(m.Incoming(peer, message), 0.0)
        link.say(*(e.message for e in effects if isinstance(e, m.Send) and e.peer == b"engine"))

    def go_on() -> None:
        for _ in range(4):
            engine.schedule_requests()
            for message in link.sent:
                tell(b"engine", message)
            link.sent.clear()
            engine.state = SETTLED.get(engine.state, engine.state)

    tell(b"trainer-2", m.Connect(1, False))
    go_on()
    assert (engine.state, core.fleet.state) == (EngineState.SUSPENDED, FleetState.SUSPENDED)
    assert engine.did == ["add 1", "suspend"]
    for signal in (Signal.RESUME, Signal.UNPAUSE):
        tell(b"trainer-2", m.Control(signal))
    go_on()
    assert (engine.state, core.fleet.state) == (EngineState.RUNNING, FleetState.RUNNING)
    assert engine.did == ["add 1", "suspend", "resume", "reset"]
    assert engine.end.cache.epoch == 1  # KV of the old weights is not found any more


@pytest.mark.parametrize(
    ("state", "signals", "told"),
    [
        (EngineState.RUNNING, [], "running"),
        (EngineState.UNPAUSING, [], "running"),
        (EngineState.RESUMING, [], "paused"),
        (EngineState.PAUSING, [Signal.SUSPEND], "suspended"),
        (EngineState.SUSPENDING, [Signal.RESUME, Signal.UNPAUSE], "running"),
        (EngineState.PAUSED, [Signal.RESUME, Signal.START_CUDA_PROFILER], "paused"),
    ],
)
def test_an_engine_tells_what_the_fleet_was_when_it_last_heard_of_it(state, signals, told):
    assert told_to_be(state, signals) == told


def test_a_suspended_engine_of_which_some_is_kept_goes_on_with_all():
    engine, link = make_registered()
    link.say(submit(1), submit(2))
    engine.schedule_requests()
    engine.state = EngineState.SUSPENDED
    link.say(m.RegisterAgain(), replace(SUSPENDED_ACK, kept=[2]), submit(3), RESUME)
    engine.schedule_requests()
    assert engine.did == ["add 1", "add 2", "add 3", "resume"]


def test_a_suspended_engine_leaves_once_it_has_nothing_that_somebody_waits_for():
    engine, link = make_suspended()
    link.say(submit(3), m.DrainAck())
    assert not left(engine)
    link.say(m.RegisterAgain(), SUSPENDED_ACK)
    assert left(engine)


@pytest.mark.parametrize(
    "state", [EngineState.PAUSING, EngineState.PAUSED, EngineState.UNPAUSING, EngineState.RESUMING]
)
def test_a_reset_leaves_the_engine_in_the_state_that_it_was_told(state):
    engine, link = make_registered()
    link.say(submit(1))
    engine.schedule_requests()
    engine.state, events = state, engine._state_events
    engine_endings.drop_requests(engine, engine.end)
    assert engine.did == ["add 1", "reset"]
    assert (engine.state, engine._state_events) == (state, events)


def test_a_connection_that_broke_is_registered_on_anew_with_what_is_running():
    """What was on its way is lost, whether or not the coordinator has noticed."""
    engine, link = make_registered()
    published: list[list[list[bytes]]] = []
    engine.end.leader = SimpleNamespace(publish=lambda told, give_up: published.append(told))
    link.say(submit(1), submit(2))
    engine.schedule_requests()
    for _ in range(2):  # at once again: the first registration may be lost as well
        link.broke = True
        engine.schedule_requests()
    assert link.sent == [registered_as(0, 1, 2)] * 2
    assert engine.did == ["add 1", "add 2"]
    again = wire.encode(m.RegisterAgain())
    assert published[1:] == [[again], [again]]  # the other ranks of the group do the same


# --- more requests than a step takes -------------------------------------------------------------


@pytest.fixture
def two_a_step(monkeypatch) -> None:
    """A step takes prompts of ten tokens, which are two of the usual ones."""
    monkeypatch.setattr(engine_step, "_TOKENS_A_STEP", 10)
    monkeypatch.setattr(engine_step, "_TOKENS_A_REQUEST", 0)


def added(engine: DummyEngine) -> list[str]:
    """What was done to it since this was last asked."""
    did, engine.did = engine.did, []
    return did


def test_a_burst_is_taken_in_order_and_step_by_step_on_all_ranks_alike(two_a_step):
    engine, link = make_engine()
    other, channel = make_engine(linked=False)
    other.end.member = SimpleNamespace(receive=lambda give_up: channel.drain())
    engine.end.leader = SimpleNamespace(publish=lambda told, give_up: channel.say(*told))
    link.say(*map(submit, range(5)), submit(5, [1] * 100), submit(6, "four"), submit(7), submit(8))
    steps = [
        ["add 0", "add 1"],
        ["add 2", "add 3"],
        ["add 4", "add 5"],  # there is room for a part of it
        ["add 6", "add 7"],
        ["add 8", "add 9"],
        ["add 10"],
        [],
    ]
    for number, expected in enumerate(steps):
        if number == 3:  # who comes later waits behind the others
            link.say(submit(9), submit(10))
        for each in (engine, other):
            each.schedule_requests()
            assert added(each) == expected
    assert (engine.end.queue, other.end.queue) == ({}, {})


def test_each_request_counts_beside_its_tokens(monkeypatch):
    monkeypatch.setattr(engine_step, "_TOKENS_A_STEP", 3 * engine_step._TOKENS_A_REQUEST)
    engine, link = make_engine()
    link.say(*(submit(number, [1]) for number in range(4)))
    engine.schedule_requests()
    assert added(engine) == ["add 0", "add 1", "add 2"]


def test_what_is_refused_counts_as_well(two_a_step):
    engine, link = make_engine()
    link.say(submit(0, [1000] * 5), submit(1, [1000] * 5), submit(2))
    engine.schedule_requests()
    assert (added(engine), [answer.request_id for answer in link.answers()]) == ([], [0, 1])
    engine.schedule_requests()
    assert added(engine) == ["add 2"]


def test_signals_and_pings_pass_requests_that_wait_in_the_queue(two_a_step):
    engine, link = make_engine()
    engine._generation_epoch = 60
    link.say(*map(submit, range(4)), control(Signal.SET_GENERATION_EPOCH, 70, 3), PAUSE, m.Ping(1))
    engine.schedule_requests()
    assert (added(engine), engine.state) == (["add 0", "add 1"], EngineState.PAUSING)
    assert link.sent == [m.Pong(1)]
    engine.state = EngineState.PAUSED
    engine.schedule_requests()
    assert (added(engine), engine.state) == (["add 2", "add 3"], EngineState.PAUSED)
    # Those taken before the update have tokens of both; all that the others have comes after it.
    stamps = [engine.get_request(number).policy_epoch for number in range(4)]
    assert stamps == [[(0, 60), (4, 70)]] * 2 + [[(0, 70)]] * 2
    assert [engine.end.cache.found[number].key_epoch for number in (2, 3)] == [3, 3]


def test_a_suspended_engine_takes_what_waits_in_the_queue_as_it_takes_what_comes(two_a_step):
    engine, link = make_engine()
    link.say(*map(submit, range(3)), PAUSE)
    engine.schedule_requests()
    engine.state = EngineState.PAUSED
    link.say(SUSPEND)
    engine.schedule_requests()
    assert added(engine) == ["add 0", "add 1", "add 2", "suspend"]


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("state", [EngineState.RUNNING, EngineState.SUSPENDED])
def test_those_in_the_queue_are_told_kept_and_dropped_one_by_one(linked, state, two_a_step):
    engine, link = make_registered(linked)
    link.say(*map(submit, range(6)), m.RegisterAgain())
    engine.schedule_requests()
    assert added(engine) == ["add 0", "add 1"]
    assert link.sent == ([registered_as(0, *range(6))] if linked else [])
    engine.state = state
    fleet = FleetState.RUNNING if state is EngineState.RUNNING else FleetState.SUSPENDED
    link.say(replace(acknowledged(1, 4), state=fleet))  # 2 and 3 are taken first
    engine.schedule_requests()
    engine.schedule_requests()
    assert added(engine) == ["add 2", "add 3", "add 4"]


def test_a_reset_leaves_what_is_kept_in_the_queue(two_a_step):
    engine, link = make_registered()
    link.say(*map(submit, range(6)), m.RegisterAgain(), acknowledged(5))
    engine.schedule_requests()
    assert added(engine) == ["add 0", "add 1", "reset"]
    assert not engine.requests
    engine.reset()
    engine.schedule_requests()
    assert added(engine) == ["reset", "add 5"]
    assert all(isinstance(message, m.Register) for message in link.sent)  # and no answer


def test_a_duplicate_of_what_waits_in_the_queue_is_refused(two_a_step):
    engine, link = make_engine()
    link.say(submit(0), submit(1), submit(2), submit(2))
    for _ in range(2):
        engine.schedule_requests()
    assert added(engine) == ["add 0", "add 1", "add 2"]
    assert [answer.request_id for answer in link.answers()] == [2]


def test_who_leaves_answers_what_waits_in_the_queue(two_a_step):
    engine, link = make_registered()
    engine.end.leaving = True
    link.say(*map(submit, range(3)), m.DrainAck())
    assert not left(engine)
    step(engine, 0, 1)
    assert not left(engine)
    assert added(engine) == ["add 0", "add 1", "add 2"]
    step(engine, 2)
    assert left(engine)


def test_who_leaves_and_is_given_up_drops_what_waits_in_the_queue(two_a_step):
    engine, link = make_registered()
    link.say(*map(submit, range(5)))
    engine.schedule_requests()
    engine.end.leaving = link.broke = True
    assert left(engine)
    assert engine.end.queue == {}


S, F = EngineState, FleetState
PAUSED, SUSPENDED = [Signal.PAUSE], [Signal.PAUSE, Signal.SUSPEND]
CATCHING_UP = {
    S.RUNNING: {F.RUNNING: [], F.PAUSED: PAUSED, F.SUSPENDED: SUSPENDED},
    S.UNPAUSING: {F.RUNNING: [], F.PAUSED: PAUSED, F.SUSPENDED: SUSPENDED},
    S.PAUSING: {F.RUNNING: [Signal.UNPAUSE], F.PAUSED: [], F.SUSPENDED: [Signal.SUSPEND]},
    S.PAUSED: {F.RUNNING: [Signal.UNPAUSE], F.PAUSED: [], F.SUSPENDED: [Signal.SUSPEND]},
    S.RESUMING: {F.RUNNING: [Signal.UNPAUSE], F.PAUSED: [], F.SUSPENDED: [Signal.SUSPEND]},
    S.SUSPENDING: {
        F.RUNNING: [Signal.RESUME, Signal.UNPAUSE],
        F.PAUSED: [Signal.RESUME],
        F.SUSPENDED: [],
    },
    S.SUSPENDED: {
        F.RUNNING: [Signal.RESUME, Signal.UNPAUSE],
        F.PAUSED: [Signal.RESUME],
        F.SUSPENDED: [],
    },
}
SETTLED = {
    S.PAUSING: S.PAUSED,
    S.UNPAUSING: S.RUNNING,
    S.SUSPENDING: S.SUSPENDED,
    S.RESUMING: S.PAUSED,
}
SAME = {F.RUNNING: S.RUNNING, F.PAUSED: S.PAUSED, F.SUSPENDED: S.SUSPENDED}
PAIRS = [(state, fleet) for state, row in CATCHING_UP.items() for fleet in row]


def test_every_state_of_engine_and_fleet_is_in_the_table():
    assert {fleet for _, fleet in PAIRS} == set(FleetState)
    # Where an engine is created, or has ended, it registers with nobody.
    created = {"STOPPING", "STOPPED", "RESUMED"}
    assert {state.name for state in EngineState} - created == {s.name for s in CATCHING_UP}


@pytest.mark.parametrize(("state", "fleet"), PAIRS)
def test_an_engine_is_brought_to_the_fleet_s_state_before_anything_else(state, fleet):
    assert list(signals_towards(state, fleet)) == CATCHING_UP[state][fleet]
    engine, link = make_registered()
    engine.state = state
    link.say(m.RegisterAck(1, 2, 5, fleet), submit(1))
    for _ in range(6):  # as the engine's loop does
        engine.schedule_requests()
        waits = bool(engine.end.inbox)
        assert waits is ("add 1" not in engine.did)
        engine.state = SETTLED.get(engine.state, engine.state)
    assert engine.state is SAME[fleet]
    assert [did for did in engine.did if did != "add 1"] == [
        signal.name.lower()
        for signal in CATCHING_UP[state][fleet]
        if signal in (Signal.SUSPEND, Signal.RESUME)
    ]
    assert engine.end.cache.epoch == 5  # the acknowledgement's; no signal counts it on


def test_what_the_fleet_is_told_after_the_acknowledgement_comes_after_it():
    engine, link = make_registered()
    link.say(m.RegisterAck(1, 2, 0, FleetState.SUSPENDED), RESUME, submit(1), UNPAUSE)
    for _ in range(8):
        engine.schedule_requests()
        engine.state = SETTLED.get(engine.state, engine.state)
    assert engine.did == ["suspend", "resume", "add 1"]
    assert (engine.state, engine.end.cache.epoch) == (EngineState.RUNNING, 1)


# --- leaving -------------------------------------------------------------------------------------


def left(engine: DummyEngine) -> bool:
    """Whether the next step ends the engine's loop."""
    try:
        engine.schedule_requests()
    except asyncio.CancelledError:
        return True
    return False


@pytest.mark.parametrize("linked", [True, False])
def test_an_engine_leaves_when_it_has_answered_everything_and_nothing_more_comes(linked):
    engine, link = make_registered(linked)
    engine.end.leaving = linked  # the signal may come to any rank at any time
    link.say(submit(1), submit(2))
    assert not left(engine)
    step(engine, 1)
    link.say(submit(3), m.DrainAck())
    assert not left(engine)
    step(engine, 2)
    assert not left(engine)
    step(engine, 3)
    assert left(engine)
    if linked:
        drain, *replies = link.sent
        assert drain == m.Drain()
        assert [a.request_id for reply in replies for a in reply.answers] == [1, 2, 3]
    else:
        assert link.sent == []


def test_an_idle_engine_that_wants_to_leave_waits_for_the_coordinator_s_word():
    engine, link = make_registered()
    engine.end.leaving = True
    assert not left(engine)  # a request may be on its way
    link.say(submit(1))
    assert not left(engine)
    link.say(m.DrainAck())
    assert not left(engine)
    step(engine, 1)
    assert left(engine)


def test_the_wish_to_leave_is_repeated_until_it_is_heard(monkeypatch):
    engine, link = make_registered()
    clock = [100.0]
    monkeypatch.setattr(engine_end.time, "monotonic", lambda: clock[0])
    link.say(submit(1))
    engine.end.leaving = True
    for later in (0.0, 1.9, 0.2, 1.9, 0.2):
        clock[0] += later
        assert not left(engine)
    assert link.sent == [m.Drain()] * 3
    link.say(m.DrainAck())
    assert not left(engine)
    clock[0] += 10
    assert not left(engine)
    assert link.sent == [m.Drain()] * 3


@pytest.mark.parametrize("broke", [True, False])
def test_who_wants_to_leave_and_is_no_part_of_the_fleet_just_leaves(broke):
    """Its connection broke, or the coordinator knows it no more; others have its requests."""
    engine, link = make_registered()
    published: list[list[list[bytes]]] = []
    engine.end.leader = SimpleNamespace(publish=lambda told, give_up: published.append(told))
    link.say(submit(1))
    engine.end.leaving = True
    assert not left(engine)
    link.broke = broke
    if not broke:
        link.say(m.RegisterAgain())
    assert left(engine)
    assert link.sent == [m.Drain()]  # and no registration
    assert engine.did == ["add 1", "reset"]
    expected = [wire.encode(m.RegisterAgain()), wire.encode(m.DrainAck())]
    assert published[-1] == expected  # so that the other ranks leave at the same step
    other, channel = make_registered(linked=False)
    channel.say(submit(1), *expected)
    assert left(other)


def test_who_wants_to_leave_does_not_wait_for_a_coordinator_that_is_gone():
    engine, link = make_registered()
    link.broke = link.broken = True
    assert not left(engine)
    engine.end.leaving = True
    assert left(engine)


def test_a_paused_engine_leaves_as_well_once_nothing_is_left():
    engine, link = make_registered()
    engine.state = EngineState.PAUSED
    engine.end.leaving = True
    link.say(m.DrainAck())
    assert left(engine)


def test_requests_behind_a_signal_that_waits_are_answered_first():
    engine, link = make_registered()
    engine.end.leaving = True
    link.say(PAUSE, UNPAUSE, submit(1), m.DrainAck())
    assert not left(engine)
    assert engine.did == []
    engine.state = EngineState.PAUSED
    assert not left(engine)
    engine.state = EngineState.RUNNING
    assert not left(engine)
    step(engine, 1)
    assert left(engine)


def test_expert_parallel_ranks_leave_together():
    """A rank with nothing left takes part in the steps of the others until all are through."""
    engine, link = make_registered()
    engine.ep_world_size = 2
    link.say(m.DrainAck())
    assert not left(engine)
    for _ in range(3):
        assert not left(engine)
        assert engine.state is EngineState.PAUSING  # until they all are
    assert [message.signal for message in engine.end.inbox] == [Signal.STOP]
    engine.state = EngineState.PAUSED
    assert not left(engine)
    assert engine.state is EngineState.STOPPING


# --- requests ------------------------------------------------------------------------------------


def test_a_duplicate_request_id_is_refused_and_the_first_one_lives():
    engine, link = make_engine()
    link.say(submit(7), submit(7, [9]), submit(8))
    engine.schedule_requests()
    assert engine.did == ["add 7", "add 8"]
    assert engine.get_request(7).prompt_tokens.tolist() == [1, 2, 3, 4, 5]
    (refused,) = link.answers()
    assert (refused.request_id, refused.status, refused.cached_tokens) == (7, "FAILED", 0)
    assert "request 7 is already running" in str(body(refused)["events"])


REFUSED = {
    "a prompt that is no msgpack": m.EngineRequest(1, 0, wire.pack({}), b"\xc1"),
    "sampling parameters that are no msgpack": m.EngineRequest(1, 0, b"\xc1", wire.pack([1])),
    "an empty prompt": submit(1, []),
    "a token outside the vocabulary": submit(1, [260]),
    "a wrong sampling parameter": submit(1, top_k="many"),
    "log probabilities of the prompt": submit(1, return_log_probs=True),
    "a BOS token where the tokenizer has none": submit(1, "hi", add_BOS=True),
    "a text that the tokenizer does not take": submit(1, "<|forbidden|>"),
    "a stop word that it does not take": submit(1, stop_words=["ok", "<|forbidden|>"]),
}


@pytest.mark.parametrize("request_", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_run_is_answered_with_the_reason(request_, caplog):
    class Picky(ByteTokenizer):
        bos = None

        def tokenize(self, text: str) -> list[int]:
            if "forbidden" in text:
                raise ValueError("disallowed special token")
            return super().tokenize(text)

    engine, link = make_engine()
    engine.controller.tokenizer = Picky()
    link.say(request_, submit(2))
    with caplog.at_level(logging.WARNING):
        engine.schedule_requests()
    assert engine.did == ["add 2"]
    (answer,) = link.answers()
    assert (answer.request_id, answer.status) == (1, "FAILED")
    assert DynamicInferenceRequest.deserialize(body(answer)).status is Status.FAILED
    (line,) = caplog.messages
    assert line.startswith("request_refused reason=")


def test_text_is_tokenized_and_comes_back_with_its_prompt_and_text():
    engine, link = make_engine()
    link.say(submit(1, "hello", detokenize=True), submit(2, "hello"), submit(3, detokenize=True))
    engine.schedule_requests()
    assert engine.get_request(1).prompt_tokens.tolist() == list(b"hello")
    step(engine, 1, 2, 3)
    replies = {a.request_id: body(a) for a in link.answers()}
    assert {n: (r["prompt"], r["generated_text"]) for n, r in replies.items()} == {
        1: ("hello", "xx"),
        2: ("hello", None),
        3: (None, "xx"),
    }
    assert engine.end.wants_text == set()


def test_tokens_that_have_no_text_are_answered_without_it(caplog):
    class Forgetful(ByteTokenizer):
        def detokenize(self, ids: Any, skip_special_tokens: bool = True) -> str:
            raise KeyError("no such token")

    engine, link = make_engine()
    engine.controller.tokenizer = Forgetful()
    link.say(submit(1, detokenize=True))
    engine.schedule_requests()
    step(engine, 1)
    (answer,) = link.answers()
    assert (answer.status, body(answer)["generated_text"]) == ("COMPLETED", None)
    assert "reply_without_text" in caplog.text


# --- answers -------------------------------------------------------------------------------------


def test_a_step_s_answers_travel_in_one_message():
    engine, link = make_engine()
    link.say(submit(1), submit(2), submit(3))
    engine.schedule_requests()
    engine.end.cache.begin_epoch(engine, 4)
    result = step(engine, 3, 1)
    assert [r.request_id for r in result["finished_request_records"]] == [3, 1]
    (reply,) = link.sent
    assert [(a.request_id, a.status, a.weight_epoch) for a in reply.answers] == [
        (3, "COMPLETED", 4),
        (1, "COMPLETED", 4),
    ]
    assert body(reply.answers[0])["generated_tokens"] == [ord("x")] * 2


def test_a_step_that_finishes_nothing_says_nothing():
    engine, link = make_engine()
    assert step(engine) == {"finished_request_records": []}
    assert asyncio.run(engine.async_bookkeep(None, {}, 0.1)) == {"finished_request_records": []}
    assert link.sent == []


def test_cached_tokens_are_what_add_request_really_skipped_over_all_chunks():
    engine, link = make_engine()
    link.say(submit(1), submit(2), submit(3))
    engine.schedule_requests()
    first, second, third = (engine.get_request(n) for n in (1, 2, 3))
    first.num_cached_tokens = 999  # the engine's own figure is another
    engine.context.skips.extend([64, 5, 32])
    engine.context.add_request(first, prefill_chunk_length=80)
    engine.context.add_request(second, 8)
    step(engine)  # the total starts anew with every step
    engine.context.add_request(first)
    engine.context.add_request(third)
    step(engine, 1, 2, 3)
    found = {a.request_id: (a.cached_tokens, body(a)["num_cached_tokens"]) for a in link.answers()}
    assert found == {1: (96, 96), 2: (5, 5), 3: (0, 0)}
    assert engine.end.cache.found == {}


def test_log_probs_of_the_prompt_find_nothing_and_tell_nothing_of_the_cache():
    """They would count as a wrong prediction, wherever the prompt is cached."""
    engine, link = make_engine()
    engine.materialize_only_last_token_logits = False
    link.say(submit(1, return_log_probs=True))
    engine.schedule_requests()
    assert engine.get_request(1).precomputed_block_hashes == []
    step(engine, 1)
    (answer,) = link.answers()
    assert (answer.cached_tokens, body(answer)["num_cached_tokens"]) == (-1, 0)


def test_a_chunk_that_cannot_be_scheduled_skips_nothing():
    class Full(DummyContext):
        def add_request(self, request: Any, prefill_chunk_length: int | None = None) -> None:
            raise RuntimeError("no block left")

    engine, _ = make_engine()
    engine.context = Full()
    cache = EngineCache(engine.context)
    with pytest.raises(RuntimeError, match="no block left"):
        engine.context.add_request(SimpleNamespace(request_id=1))
    assert cache.leave(1).skipped == 0


def test_watching_again_after_a_restart_counts_once():
    engine, _ = make_engine()
    old = engine.end
    engine._prefix_routing = EngineEnd(EngineCache(engine.context))
    engine.context.skips.append(8)
    request = SimpleNamespace(request_id=1, precomputed_block_hashes=[])
    engine.end.cache.take(request)
    engine.context.add_request(request)
    assert old.cache.found == {}
    assert engine.end.cache.leave(1).skipped == 8


def test_a_request_that_fails_is_answered_at_once_and_once_only():
    engine, link = make_engine()
    engine.refuses = {1}
    link.say(submit(1), submit(2))
    engine.schedule_requests()
    (failed,) = link.answers()  # before any step
    assert (failed.request_id, failed.status) == (1, "FAILED")
    assert body(failed)["generated_tokens"] == []
    result = step(engine, 2)
    assert [r.request_id for r in result["finished_request_records"]] == [2, 1]
    assert [a.request_id for a in link.answers()] == [2]
    assert (engine.requests, engine.end.cache.found) == ({}, {})


def test_released_replies_are_muted_and_the_rank_is_itself_again_afterwards(monkeypatch):
    seen = []

    async def bookkeep(engine: DummyEngine, *args: Any) -> dict:
        seen.append(engine.is_mp_coordinator)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine_step, "_released_bookkeep", bookkeep)
    engine, _ = make_engine()
    with pytest.raises(RuntimeError, match="out of memory"):
        step(engine)
    assert seen == [False]
    assert engine.is_mp_coordinator is True


def test_an_engine_that_runs_without_a_coordinator_is_left_alone():
    engine = DummyEngine()
    engine.use_coordinator = False
    engine.is_mp_coordinator = True
    engine.refuses = {2}
    for number in (1, 2):
        tokens = torch.tensor([1, 2])
        engine._add_request(
            DynamicInferenceRequest(
                request_id=number, prompt_tokens=tokens, sampling_params=SamplingParams()
            )
        )
    result = step(engine, 1)
    assert [r.request_id for r in result["finished_request_records"]] == [1, 2]
    assert not hasattr(engine, "_prefix_routing")


def test_ranks_without_a_link_answer_nobody_and_forget_as_well():
    engine, link = make_engine(linked=False)
    engine.end.member = SimpleNamespace(receive=lambda give_up: link.drain())
    engine.refuses = {3}
    link.say(
        submit(1, detokenize=True),
        m.Ping(1),
        submit(1),
        submit(2, []),
        submit(3),
        control(Signal.SET_GENERATION_EPOCH, 5, 1),
    )
    assert engine.schedule_requests() == 6
    assert engine.did == ["add 1", "add 3"]
    engine.context.skips.append(4)
    engine.context.add_request(engine.get_request(1))
    step(engine, 1)
    assert link.sent == []
    assert (engine.end.cache.found, engine.end.wants_text, engine.requests) == ({}, set(), {})
    assert engine.end.cache.epoch == 1
