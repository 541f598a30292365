"""The engine's end without an engine: a dummy that answers, and process groups that are made up.

Everything here runs in this process. Where a drain's order matters there is no socket either; where
ranks meet, each starts in a thread of its own, against a coordinator's loop in another.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from megatron.core.inference.config import PrefixCachingEvictionPolicy
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine, EngineState
from megatron.core.inference.inference_request import (
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    Status,
)
from megatron.core.inference.sampling_params import SamplingParams

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.core import Coordinator
from megatron.core.inference.coordinator.lifecycle import Signal
from megatron.core.inference.coordinator.runtime import engine_start, engine_step, sockets, wire
from megatron.core.inference.coordinator.runtime.byte_tokenizer import ByteTokenizer
from megatron.core.inference.coordinator.runtime.client import InferenceClient
from megatron.core.inference.coordinator.runtime.engine_end import EngineEnd
from megatron.core.inference.coordinator.runtime.loop import CoordinatorLoop
from megatron.core.inference.coordinator.runtime.process import CoordinatorDied, bind
from megatron.core.inference.coordinator.settings import CoordinatorSettings, RoutingSettings

BLOCK = 4
SECONDS = 20
"""Until a test that waits for something gives up."""

LRU = PrefixCachingEvictionPolicy.LRU


# --- a dummy engine ------------------------------------------------------------------------------


class DummyContext:
    """Counts skipped prompt tokens as the real one does: a total, reset by the bookkeeping."""

    def __init__(self, prefix_caching: bool = True):
        self.enable_prefix_caching = prefix_caching
        self.block_size_tokens = BLOCK
        self.max_requests = 8
        self.prefix_caching_eviction_policy = LRU
        self.kv_block_allocator = SimpleNamespace(total_count=100)
        self.prefix_cache_prefill_skipped_tokens = 0
        self.skips: deque[int] = deque()
        self.ep_communicator: Any = None

    def add_request(self, request: Any, prefill_chunk_length: int | None = None) -> None:
        """Schedule a chunk; a test says beforehand how much of it is skipped."""
        self.prefix_cache_prefill_skipped_tokens += self.skips.popleft() if self.skips else 0

    def set_ep_zmq_communicator(self, communicator: Any) -> None:
        self.ep_communicator = communicator


class DummyEngine:
    """What the functions of the engine's end touch of an engine, and a loop that answers.

    Attributes:
        did: What was done to it, in order.
        refuses: Ids of requests that cannot be added.
        answer: The token that it generates, again and again.
    """

    start = engine_start.start_listening_to_data_parallel_coordinator
    schedule_requests = engine_step.schedule_requests
    async_bookkeep = engine_step.async_bookkeep
    _handle_failed_request = engine_step.handle_failed_request
    shutdown = engine_step.shutdown

    def __init__(self, groups: Any = None, context: DummyContext | None = None):
        self.pg_collection = groups
        self.context = context or DummyContext()
        self.controller = SimpleNamespace(tokenizer=ByteTokenizer(), vocab_size=260)
        self.materialize_only_last_token_logits = True
        self.enable_chunked_prefill = False
        self.rank = 1  # the released engine's first rank warns of what fails
        self.state = EngineState.RUNNING
        self._state_events = {k: asyncio.Event() for k in DynamicInferenceEngine._STATE_EVENTS}
        self._state_events[EngineState.RUNNING].set()
        self._pending_signals: deque = deque()
        self._generation_epoch: int | None = None
        self.use_coordinator = True
        self.requests: dict[int, SimpleNamespace] = {}
        self.failed_request_ids: list[int] = []
        self.did: list[str] = []
        self.refuses: set[int] = set()
        self.answer = ord("x")

    # What the released engine does with what it is told

    def add_request(self, request_id: int, tokens: list[int], params: SamplingParams) -> None:
        request = DynamicInferenceRequest(
            request_id=request_id,
            prompt_tokens=torch.tensor(tokens),
            sampling_params=params,
            status=Status.ACTIVE_AND_GENERATING_TOKENS,
            generated_tokens=[],
        )
        if self._generation_epoch is not None:
            request.policy_epoch = [(0, self._generation_epoch)]
            request.kv_cache_epoch = [(0, self._generation_epoch)]
        record = DynamicInferenceRequestRecord.from_request(request)
        future = asyncio.Future(loop=_no_loop())
        self.requests[request_id] = SimpleNamespace(record=record, future=future)
        self.did.append(f"add {request_id}")
        if request_id in self.refuses:
            self._handle_failed_request(request_id)

    def get_request(self, request_id: int) -> DynamicInferenceRequest:
        return self.requests[request_id].record[-1]

    def suspend(self) -> None:
        self.did.append("suspend")

    def resume(self) -> None:
        self.did.append("resume")

    # A loop: one step runs everything that is there

    async def run_engine_with_coordinator(self, *, loop: Any = None) -> None:
        self.use_coordinator = True
        settled = {
            EngineState.PAUSING: EngineState.PAUSED,
            EngineState.UNPAUSING: EngineState.RUNNING,
            EngineState.SUSPENDING: EngineState.SUSPENDED,
            EngineState.RESUMING: EngineState.PAUSED,
        }
        try:
            while self.state is not EngineState.STOPPING:
                self.schedule_requests()
                if self.state is EngineState.RUNNING and self.requests:
                    for request_id in self.requests:
                        if request_id not in self.failed_request_ids:
                            self.context.add_request(self.get_request(request_id))
                    await self.step(*self.requests)
                self.state = settled.get(self.state, self.state)
                await asyncio.sleep(0.001)
        finally:
            await self.shutdown()

    async def step(self, *finished: int) -> dict:
        """A step that finishes these requests."""
        return await self.async_bookkeep({"finished": finished}, {}, 0.01)

    @property
    def end(self) -> EngineEnd:
        return self._prefix_routing


def _no_loop() -> asyncio.AbstractEventLoop:
    """A loop for futures that nobody awaits."""
    return _NO_LOOP


_NO_LOOP = asyncio.new_event_loop()


@pytest.fixture(scope="module", autouse=True)
def _close_loop() -> Iterator[None]:
    yield
    _NO_LOOP.close()


async def released_bookkeep(engine: DummyEngine, result: dict | None, state: dict, time: float):
    """A stand-in: finishes what the step says, and replies itself unless it is muted."""
    records = []
    for request_id in (result or {}).get("finished", ()):
        if request_id not in engine.failed_request_ids:
            request = engine.get_request(request_id)
            request.status = Status.COMPLETED
            request.generated_tokens = [engine.answer] * 2
            records.append(engine.requests.pop(request_id).record)
    records += [engine.requests.pop(failed).record for failed in engine.failed_request_ids]
    engine.failed_request_ids.clear()
    engine.context.prefix_cache_prefill_skipped_tokens = 0
    if engine.use_coordinator and engine.is_mp_coordinator:
        engine.socket_for_receiving_requests.send(b"a reply in the released format")
    return {"finished_request_records": records}


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch) -> None:
    monkeypatch.setattr(engine_step, "_released_bookkeep", released_bookkeep)


# --- one engine, no socket -----------------------------------------------------------------------


@dataclass
class DummyLink:
    """What an engine's socket would bring and take."""

    waiting: list[list[bytes]] = field(default_factory=list)
    sent: list[m.ToCoordinator] = field(default_factory=list)
    checks: int = 0

    def check(self) -> None:
        self.checks += 1

    def drain(self) -> list[list[bytes]]:
        taken, self.waiting = self.waiting, []
        return taken

    def send(self, message: m.ToCoordinator) -> None:
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
    engine._prefix_routing = EngineEnd()
    if linked:
        engine.end.link = link
    engine.is_mp_coordinator = linked
    engine_start._watch_skipped_tokens(engine, engine.end)
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
    assert engine.end.weight_epoch == 1


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
    assert (engine.state, engine.did, link.sent) == (EngineState.PAUSING, [], [])
    assert engine._generation_epoch is None

    engine.state = EngineState.PAUSED  # as the engine's loop does once all ranks agree
    assert engine.schedule_requests() == 0
    assert (engine.state, engine.did) == (EngineState.SUSPENDING, ["suspend", "add 7"])
    assert engine.end.weight_epoch == 0

    engine.schedule_requests()
    assert engine.state is EngineState.SUSPENDING
    engine.state = EngineState.SUSPENDED
    engine.schedule_requests()
    assert engine.state is EngineState.RESUMING
    assert engine.did == ["suspend", "add 7", "resume", "add 8"]
    assert link.sent == [m.Pong(1)]
    assert (engine._generation_epoch, engine.end.weight_epoch) == (5, 2)
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
    assert caplog.messages == [
        f"signal_ignored signal={signal.signal.name!r} state={state.name!r}"
    ]


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
    assert (engine._generation_epoch, engine.end.weight_epoch) == (71, 2)


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
    assert (engine.state, engine.end.weight_epoch) == (EngineState.RUNNING, 0)
    (line,) = caplog.messages
    assert line.startswith("message_refused reason=")


def test_a_rank_that_is_told_to_register_again_says_so_and_goes_on(caplog):
    engine, link = make_engine()
    link.say(m.RegisterAgain(), submit(1))
    engine.schedule_requests()
    assert engine.did == ["add 1"]
    assert "not_registered" in caplog.text


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
    engine.end.weight_epoch = 4
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
    assert engine.end.skipped == {}


def test_a_chunk_that_cannot_be_scheduled_skips_nothing():
    class Full(DummyContext):
        def add_request(self, request: Any, prefill_chunk_length: int | None = None) -> None:
            raise RuntimeError("no block left")

    engine, _ = make_engine()
    engine.context = Full()
    engine_start._watch_skipped_tokens(engine, engine.end)
    with pytest.raises(RuntimeError, match="no block left"):
        engine.context.add_request(SimpleNamespace(request_id=1))
    assert engine.end.skipped == {}


def test_watching_again_after_a_restart_counts_once():
    engine, _ = make_engine()
    old = engine.end
    engine._prefix_routing = EngineEnd()
    engine_start._watch_skipped_tokens(engine, engine.end)
    engine.context.skips.append(8)
    engine.context.add_request(SimpleNamespace(request_id=1))
    assert (old.skipped, engine.end.skipped) == ({}, {1: 8})


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
    assert (engine.requests, engine.end.skipped) == ({}, {})


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
    engine.add_request(1, [1, 2], SamplingParams())
    engine.add_request(2, [1, 2], SamplingParams())
    result = step(engine, 1)
    assert [r.request_id for r in result["finished_request_records"]] == [1, 2]
    assert not hasattr(engine, "_prefix_routing")


def test_ranks_without_a_link_answer_nobody_and_forget_as_well():
    engine, link = make_engine(linked=False)
    engine.end.subscriber = SimpleNamespace(receive=lambda give_up: link.drain())
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
    assert (engine.end.skipped, engine.end.wants_text, engine.requests) == ({}, set(), {})
    assert engine.end.weight_epoch == 1


# --- starting: made-up process groups ------------------------------------------------------------


class Group:
    """One rank's view of a process group whose ranks are threads."""

    def __init__(self, ranks: list[int], rank: int, boxes: dict[int, Queue]):
        self.ranks, self.rank, self._boxes = ranks, ranks.index(rank), boxes

    def broadcast(self, box: list, src: int) -> None:
        if self.ranks[self.rank] == src:
            for other in set(self.ranks) - {src}:
                self._boxes[other].put(list(box))
        else:
            box[:] = self._boxes[self.ranks[self.rank]].get(timeout=SECONDS)


def make_groups(dp: int = 1, tp: int = 1, ep: int = 1) -> list[SimpleNamespace]:
    """The process groups of dp x tp ranks, tensor-parallel ranks adjacent."""
    grid = [[replica * tp + shard for shard in range(tp)] for replica in range(dp)]
    layout = {
        "tp": grid,
        "mp": grid,
        "pp": [[rank] for row in grid for rank in row],
        "dp": [list(column) for column in zip(*grid, strict=True)],
        "ep": [[rank] for row in grid for rank in row],
    }
    if ep > 1:
        layout["ep"] = layout["dp"]
    found: dict[int, dict[str, Group]] = {rank: {} for row in grid for rank in row}
    for name, groups in layout.items():
        for ranks in groups:
            boxes: dict[int, Queue] = {rank: Queue() for rank in ranks}
            for rank in ranks:
                found[rank][name] = Group(ranks, rank, boxes)
    return [SimpleNamespace(**found[rank]) for rank in sorted(found)]


@pytest.fixture(autouse=True)
def _made_up_groups(monkeypatch) -> None:
    monkeypatch.setattr(engine_start, "get_pg_rank", lambda group: group.rank)
    monkeypatch.setattr(engine_start, "get_pg_size", lambda group: len(group.ranks))
    monkeypatch.setattr(engine_start, "get_pg_src_rank", lambda group: group.ranks[0])
    monkeypatch.setattr(
        torch.distributed,
        "broadcast_object_list",
        lambda box, src, group: group.broadcast(box, src),
    )
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(engine_start, "_REGISTER_SECONDS", 10.0)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")


class Running:
    """A coordinator's loop in a thread."""

    def __init__(self, **settings: Any):
        self.context = zmq.Context()
        router = sockets.router(self.context)
        self.address = bind(router, "127.0.0.1", 0)
        core = Coordinator(CoordinatorSettings(block_size_tokens=BLOCK, **settings))
        self.loop = CoordinatorLoop(core, router)
        self.peers: set[bytes] = set()
        self._thread = threading.Thread(target=self._run, args=(router,))
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self.address.rsplit(":", 1)[1])

    @property
    def counts(self) -> dict[str, int]:
        return self.loop.events.counts

    def _run(self, router: zmq.Socket) -> None:
        self.loop.run()
        router.close(linger=0)

    def close(self) -> None:
        self.loop.stop()
        self._thread.join(SECONDS)
        self.context.destroy(linger=0)


@contextmanager
def running(**settings: Any) -> Iterator[Running]:
    live = Running(**settings)
    try:
        yield live
    finally:
        live.close()


@contextmanager
def started(
    engines: list[DummyEngine], body: Callable[[DummyEngine], Any] | None = None, **start: Any
) -> Iterator[list[str]]:
    """All engines started, each in a thread with an event loop, and running; ended at the end.

    Yields:
        The coordinator's address as each engine was told it.
    """
    ready: Queue = Queue()
    end = threading.Event()

    async def live(engine: DummyEngine) -> None:
        try:
            ready.put((engine, await engine.start(**start)))
        except BaseException as error:
            ready.put((engine, error))
            raise
        while not end.is_set() and not engine.engine_loop_task.done():
            await asyncio.sleep(0.005)
        engine.end.ending = True
        engine.engine_loop_task.cancel()
        await asyncio.wait({engine.engine_loop_task})
        if not engine.engine_loop_task.cancelled():
            engine.engine_loop_task.result()

    with ThreadPoolExecutor(len(engines)) as pool:
        futures = [pool.submit(asyncio.run, live(engine)) for engine in engines]
        try:
            addresses = dict(ready.get(timeout=SECONDS) for _ in engines)
            for address in addresses.values():
                if isinstance(address, BaseException):
                    raise address
            yield [addresses[engine] for engine in engines]
        finally:
            end.set()
        for future in futures:
            future.result(SECONDS)


async def asked(address: str, *prompts: Any, act: Callable[[InferenceClient], None] | None = None):
    """Answers to prompts, submitted at once; then `act` may send signals."""
    client = InferenceClient(address, connect_timeout=10)
    client.start(asyncio.get_running_loop())
    try:
        futures = [client.add_request(p, SamplingParams(termination_id=-1)) for p in prompts]
        replies = await asyncio.wait_for(asyncio.gather(*futures), SECONDS)
        if act is not None:
            act(client)
        return replies
    finally:
        client.stop()


def test_two_replicas_register_answer_and_take_their_leave():
    engines = [DummyEngine(groups) for groups in make_groups(dp=2)]
    for engine, token in zip(engines, b"ab", strict=True):
        engine.answer = token
    start = {"launch_inference_coordinator": False, "hostname": "127.0.0.1"}
    with running(expected_ranks=2) as live:
        with started(engines, inference_coordinator_port=live.port, **start) as addresses:
            assert addresses == [live.address] * 2
            ranks = sorted((r.number, r.max_requests, r.total_blocks) for r in live.loop.core.ranks)
            assert ranks == [(0, 8, 100), (1, 8, 100)]
            # Equal prompts follow one another to one replica; others go where there is room.
            replies = asyncio.run(asked(live.address, "one", "two", [5] * 3, [6] * 3))
        assert sorted({reply["generated_text"] for reply in replies}) == ["aa", "bb"]
        assert all(reply["status"] == "COMPLETED" for reply in replies)
        wait_for(lambda: live.counts["rank_lost"] == 2)
        assert live.counts["message_refused"] == live.counts["reply_dropped"] == 0
    assert [engine.state for engine in engines] == [EngineState.STOPPED] * 2


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(int(SECONDS / 0.01)):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen")


def test_signals_stop_all_replicas_and_they_disconnect(caplog):
    engines = [DummyEngine(groups) for groups in make_groups(dp=2)]

    def stop(client: InferenceClient) -> None:
        client.pause_engines()
        client.suspend_engines()
        client.resume_engines()
        client.set_generation_epoch(9)
        client.stop_engines()

    start = {"launch_inference_coordinator": False, "hostname": "127.0.0.1"}
    with running(expected_ranks=2) as live, caplog.at_level(logging.WARNING):
        with started(engines, inference_coordinator_port=live.port, **start):
            asyncio.run(asked(live.address, "hi", act=stop))
            wait_for(lambda: all(e.state is EngineState.STOPPED for e in engines))
        wait_for(lambda: live.counts["rank_lost"] == 2)
    lost = [line for line in caplog.messages if line.startswith("rank_lost")]
    assert len(lost) == 2
    assert all("cause='it left'" in line for line in lost)  # said, not found out by a broken send
    for engine in engines:
        assert engine.did[-2:] == ["suspend", "resume"]
        assert (engine._generation_epoch, engine.end.weight_epoch) == (9, 2)


@pytest.mark.parametrize("caching", [True, False])
def test_a_registration_tells_what_the_coordinator_must_know(caching):
    context = zmq.Context()
    router = sockets.router(context)
    address = bind(router, "127.0.0.1", 0)
    engines = [DummyEngine(groups, DummyContext(caching)) for groups in make_groups(dp=2)]
    received: list[tuple[bytes, m.Register]] = []

    def acknowledge() -> None:
        for number in range(2):
            assert router.poll(10_000)
            peer, *frames = router.recv_multipart()
            received.append((peer, wire.decode_for_coordinator(frames)))
            ack = m.RegisterAck(number, 1, 3, "running")
            router.send_multipart([peer, *wire.encode(ack)])

    thread = threading.Thread(target=acknowledge)
    thread.start()
    try:
        start = {"launch_inference_coordinator": False, "hostname": "127.0.0.1"}
        with started(engines, inference_coordinator_port=int(address.rsplit(":", 1)[1]), **start):
            assert [engine.end.weight_epoch for engine in engines] == [3, 3]
    finally:
        thread.join(SECONDS)
        context.destroy(linger=0)
    (_, first), (_, second) = sorted(received, key=lambda each: each[1].dp_rank)
    assert (first.dp_rank, second.dp_rank) == (0, 1)
    assert first.replica == second.replica
    assert first.replica.startswith("test-")
    block = BLOCK if caching else 0
    assert first == m.Register(1, first.replica, 0, 0, 8, block, 100, "lru")
    assert sorted(peer for peer, _ in received) == [
        f"engine-{first.replica}-{rank}".encode() for rank in (0, 1)
    ]


def test_two_jobs_on_one_coordinator_do_not_collide():
    start = {"launch_inference_coordinator": False, "hostname": "127.0.0.1"}
    first, second = (DummyEngine(*make_groups()) for _ in range(2))
    with running() as live:
        start["inference_coordinator_port"] = live.port
        with started([first], **start), started([second], **start):
            assert len(live.loop.core.ranks) == 2


class DummyProcess:
    """Stands in for the coordinator's process: a loop in a thread."""

    made: list["DummyProcess"]

    def __init__(self, settings: Any, tokenizer: Any):
        self.made.append(self)
        self.settings, self.tokenizer = settings, tokenizer
        self.live = Running(expected_ranks=settings.coordinator.expected_ranks)
        self.address = self.live.address
        self.process = object()
        self.died: str | None = None

    def check(self) -> None:
        if self.died is not None:
            raise CoordinatorDied(self.died)


@pytest.fixture
def processes(monkeypatch) -> Iterator[list[DummyProcess]]:
    monkeypatch.setattr(DummyProcess, "made", [], raising=False)
    monkeypatch.setattr(engine_start, "CoordinatorProcess", DummyProcess)
    yield DummyProcess.made
    for process in DummyProcess.made:
        process.live.close()


def test_the_first_rank_alone_starts_the_coordinator_and_the_others_are_told(processes, monkeypatch):
    chosen = RoutingSettings(load_beta=0.25)
    monkeypatch.setattr(engine_start, "_chosen_settings", chosen)
    engines = [DummyEngine(groups) for groups in make_groups(dp=2)]
    with started(
        engines, inference_coordinator_port=5123, coordinator_schedule_output_path="decisions.json"
    ) as addresses:
        (process,) = processes
        assert addresses == [process.address] * 2
        assert engines[0].end.process is process
        assert engines[0].inference_coordinator_process is process.process
        assert engines[1].end.process is None
        assert [engine.is_dp_coordinator for engine in engines] == [True, False]
        assert process.tokenizer is engines[0].controller.tokenizer
        settings = process.settings
        assert (settings.host, settings.port) == ("127.0.0.1", 5123)
        assert settings.schedule_path == "decisions.json"
        assert settings.coordinator == CoordinatorSettings(
            routing=chosen,
            expected_ranks=2,
            prefix_caching=True,
            block_size_tokens=BLOCK,
            max_requests=8,
            eviction=LRU,
            deterministic=False,
            trace=True,
        )


def test_without_a_port_or_a_schedule_the_system_chooses_and_nothing_is_traced(processes):
    with started([DummyEngine(*make_groups())]):
        settings = processes[0].settings
    assert (settings.port, settings.schedule_path, settings.coordinator.trace) == (0, None, False)


def test_a_coordinator_process_that_dies_ends_the_engine_with_its_error(processes):
    engine = DummyEngine(*make_groups())
    with pytest.raises(CoordinatorDied, match=r"^killed by SIGKILL$"), started([engine]):
        processes[0].died = "killed by SIGKILL"
        wait_for(lambda: engine.engine_loop_task.done())
    assert engine.state is EngineState.STOPPED


def test_a_coordinator_that_cannot_start_ends_the_start(monkeypatch):
    def refuse(settings: Any, tokenizer: Any) -> None:
        raise CoordinatorDied("port 5123 on 127.0.0.1 is in use")

    monkeypatch.setattr(engine_start, "CoordinatorProcess", refuse)
    with pytest.raises(CoordinatorDied, match="in use"), started([DummyEngine(*make_groups())]):
        raise AssertionError("it started")


@pytest.mark.parametrize(
    ("world", "local", "loopback"),
    [(None, None, True), ("8", "8", True), ("16", "8", False), ("2", None, True)],
)
def test_the_host_is_loopback_while_the_job_is_on_one_machine(world, local, loopback, monkeypatch):
    for name, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", local)):
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(engine_start.socket, "getfqdn", lambda: "node1.cluster")
    assert engine_start._default_host() == ("127.0.0.1" if loopback else "node1.cluster")


def test_a_model_parallel_group_sees_the_same_and_answers_once():
    engines = [DummyEngine(groups) for groups in make_groups(dp=2, tp=2)]
    start = {"launch_inference_coordinator": False, "hostname": "127.0.0.1"}
    with running(expected_ranks=2) as live:
        with started(engines, inference_coordinator_port=live.port, **start) as addresses:
            assert addresses == [live.address] * 4
            assert [e.end.link is not None for e in engines] == [True, False] * 2
            assert [e.is_mp_coordinator for e in engines] == [True, False] * 2
            prompts = [[n] * 6 for n in range(20)]
            replies = asyncio.run(
                asked(live.address, *prompts, act=lambda c: c.set_generation_epoch(3))
            )
            assert len(replies) == len(prompts)
            wait_for(lambda: all(e._generation_epoch == 3 for e in engines))
            pinged = live.loop.core._ticks
            wait_for(lambda: live.loop.core._ticks > pinged)
        assert live.counts["reply_dropped"] == live.counts["message_refused"] == 0
        assert live.counts["reply_from_stranger"] == live.counts["pong_from_stranger"] == 0
    for first, second in (engines[:2], engines[2:]):
        assert first.did == second.did
        assert len(first.did) == 10
        assert second.end.skipped == {}
    assert [engine.end.weight_epoch for engine in engines] == [1] * 4


@pytest.mark.parametrize(("world", "ep", "expected"), [(1, 1, []), (2, 1, ["world"]), (2, 2, ["ep", "world"])])
def test_barriers_are_made_for_groups_of_more_than_one(world, ep, expected, processes, monkeypatch):
    made: dict[int, list[tuple[str, str]]] = {}

    class Communicator:
        def __init__(self, context: zmq.Context, process_group: Group | None, hostname: str):
            assert not context.closed
            name = "world" if process_group is None else "ep"
            made.setdefault(threading.get_ident(), []).append((name, hostname))

        def close(self) -> None:
            pass

    monkeypatch.setattr(engine_start, "AsyncZMQCommunicator", Communicator)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world)
    engines = [DummyEngine(groups) for groups in make_groups(dp=world, ep=ep)]
    with started(engines, hostname="127.0.0.1"):
        assert [(engine.ep_world_size, engine.ep_rank) for engine in engines] == [
            (ep, rank if ep > 1 else 0) for rank in range(world)
        ]
        for engine in engines:
            assert (engine.context.ep_communicator is not None) is (ep > 1)
    assert list(made.values()) == [[(name, "127.0.0.1") for name in expected]] * len(made)
    assert len(made) == (world if expected else 0)


# --- ending --------------------------------------------------------------------------------------


def test_shutdown_lets_go_of_everything_and_may_be_called_again():
    async def run(port: int) -> DummyEngine:
        engine = DummyEngine(*make_groups())
        await engine.start(port, launch_inference_coordinator=False, hostname="127.0.0.1")
        link = engine.end.link
        engine.engine_loop_task.cancel()
        await asyncio.wait({engine.engine_loop_task})
        assert link._monitor.closed
        assert link.socket.closed
        assert engine.zmq_context.closed
        assert engine.state is EngineState.STOPPED
        await engine.shutdown()
        return engine

    with running(expected_ranks=1) as live:
        asyncio.run(run(live.port))
        wait_for(lambda: live.counts["rank_lost"] == 1)
        assert not len(live.loop.core.ranks)


def test_shutdown_of_an_engine_that_never_started_is_left_to_the_released_one(monkeypatch):
    called = []

    async def released(engine: DummyEngine) -> None:
        called.append(engine)

    monkeypatch.setattr(engine_step, "_released_shutdown", released)
    engine = DummyEngine()
    asyncio.run(engine.shutdown())
    assert called == [engine]
