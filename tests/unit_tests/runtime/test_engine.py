"""The engine's end on megatron-core's real engine, with a real coordinator process.

All tests share this process, its model and its fork server.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator

import pytest
from megatron.core.inference.sampling_params import SamplingParams

PROMPT = list(b"To be, or not to be, that is the question: whether 'tis nobler in the mind")
GREEDY = {"top_k": 1, "num_tokens_to_generate": 6, "termination_id": -1}


@pytest.fixture
def patched():
    from megatron.core.inference import coordinator

    coordinator.patch(coordinator.RoutingSettings())
    yield
    coordinator.unpatch()


@contextlib.asynccontextmanager
async def coordinated(engine, **options) -> AsyncIterator[str]:
    """The engine's loop under a coordinator, ours or released as they are patched."""
    address = await engine.start_listening_to_data_parallel_coordinator(
        hostname="127.0.0.1", **options
    )
    try:
        yield address
    finally:
        engine.engine_loop_task.cancel()
        await asyncio.wait({engine.engine_loop_task})
        process = engine.inference_coordinator_process
        process.terminate()
        process.join(5)
        assert not process.is_alive()


@contextlib.asynccontextmanager
async def connected(client) -> AsyncIterator:
    client.start(asyncio.get_running_loop())
    try:
        yield client
    finally:
        client.stop()


async def answer_of(client, prompt, **sampling) -> dict:
    future = client.add_request(prompt, SamplingParams(**(GREEDY | sampling)))
    return await asyncio.wait_for(future, 60)


async def reached(engine, state: str) -> None:
    from megatron.core.inference.engines.dynamic_engine import EngineState

    await asyncio.wait_for(engine.wait_until(EngineState[state]), 30)


def test_text_and_tokens_give_the_same_answer_and_the_second_skips_its_prefill(
    patched, cpu_engine, recomputed
):
    from megatron.core.inference.coordinator.runtime.client import InferenceClient

    async def run() -> list[dict]:
        engine = cpu_engine()
        async with coordinated(engine) as address:
            with_tokenizer = InferenceClient(address, tokenizer=engine.controller.tokenizer)
            without = InferenceClient(address)
            async with connected(with_tokenizer), connected(without):
                text = bytes(PROMPT).decode()
                return [
                    await answer_of(client, prompt)
                    for client in (with_tokenizer, without)
                    for prompt in (PROMPT, text)
                ]

    replies = asyncio.run(run())
    answer = replies[0]["generated_tokens"]
    assert answer == recomputed(PROMPT, answer)
    assert [reply["generated_tokens"] for reply in replies] == [answer] * 4
    assert len({reply["generated_text"] for reply in replies}) == 1
    assert replies[0]["generated_text"] is not None
    assert [reply["num_cached_tokens"] for reply in replies] == [0, 64, 64, 64]
    assert [reply["prompt"] for reply in replies] == [None, bytes(PROMPT).decode()] * 2


def test_a_salt_keeps_prefixes_from_whoever_has_another(patched, cpu_engine):
    """As front ends do it for API keys; the routing hashes are salted like the engine's keys."""
    from megatron.core.inference.coordinator.runtime.client import InferenceClient

    async def run() -> list[int]:
        engine = cpu_engine()
        async with (
            coordinated(engine) as address,
            connected(InferenceClient(address, tokenizer=engine.controller.tokenizer)) as client,
        ):
            return [
                (await answer_of(client, client.prepare(prompt, owner="x", salt=salt)))[
                    "num_cached_tokens"
                ]
                for salt in (7, 8, 7, 0, 8, 0)
                for prompt in (PROMPT,)
            ]

    assert asyncio.run(run()) == [0, 0, 64, 0, 64, 64]


def test_a_burst_beyond_what_a_step_takes_is_answered_rightly_and_stops_nobody(
    patched, cpu_engine, recomputed, monkeypatch
):
    """One that runs goes on step by step while the others are taken one at a time."""
    from megatron.core.inference.coordinator.runtime import engine_step
    from megatron.core.inference.coordinator.runtime.client import InferenceClient

    monkeypatch.setattr(engine_step, "_TOKENS_A_STEP", 1)
    prompts = [[65 + n, *PROMPT[n:]] for n in range(12)]

    async def run() -> tuple[list[dict], list[int]]:
        engine = cpu_engine()
        taken = added_each_step(engine)
        async with coordinated(engine) as address, connected(InferenceClient(address)) as client:
            running = asyncio.create_task(answer_of(client, PROMPT, num_tokens_to_generate=60))
            while len(taken) < 5:
                await asyncio.sleep(0.001)
            replies = await asyncio.gather(*(answer_of(client, prompt) for prompt in prompts))
            await running
        return replies, taken

    replies, taken = asyncio.run(run())
    answers = [reply["generated_tokens"] for reply in replies]
    assert answers == [recomputed(*both) for both in zip(prompts, answers, strict=True)]
    assert (max(taken), sum(taken)) == (1, 13)


def added_each_step(engine) -> list[int]:
    """How many requests come into the engine between two of its steps, from now on."""
    step, add, added, taken = engine.async_step, engine._add_request, [], []

    async def async_step():
        taken.append(len(added))
        added.clear()
        return await step()

    def add_request(request):
        added.append(request)
        return add(request)

    engine.async_step, engine._add_request = async_step, add_request
    return taken


def test_a_prompt_stays_in_the_host_s_memory_where_the_context_s_tables_are(
    patched, cpu_engine, monkeypatch
):
    """On the GPU it would be copied back to be hashed and scheduled, each time waiting for all
    that the GPU has to do. A device without memory stands for it: any use would be an error."""
    import torch

    from megatron.core.inference.coordinator.runtime import engine_step
    from megatron.core.inference.coordinator.runtime.client import InferenceClient

    async def run() -> dict:
        engine = cpu_engine()
        async with coordinated(engine) as address, connected(InferenceClient(address)) as client:
            take = engine_step._take_request

            def take_on_meta(*args):
                with monkeypatch.context() as patch:
                    patch.setattr(torch.cuda, "current_device", lambda: torch.device("meta"))
                    take(*args)

            monkeypatch.setattr(engine_step, "_take_request", take_on_meta)
            await answer_of(client, PROMPT)
            return await answer_of(client, PROMPT)

    assert asyncio.run(run())["num_cached_tokens"] == 64


def test_a_long_first_step_loses_no_rank_and_a_long_later_one_does(
    patched, cpu_engine, monkeypatch
):
    """The step holds Python's lock for three hung timeouts, as a compiler may: heartbeats go on."""
    from megatron.core.inference.coordinator.runtime import engine_start
    from megatron.core.inference.coordinator.runtime.client import InferenceClient
    from megatron.core.inference.coordinator.settings import FleetSettings

    monkeypatch.setattr(engine_start, "fleet_settings", lambda: FleetSettings(hung_timeout=3))

    async def run(long_step: int, seconds: int) -> tuple[list[list[int]], int, int]:
        """The answers to a prompt sent twice, how often it was given, and the last generation."""
        engine, ids, steps = cpu_engine(), [], 0
        add, step = engine._add_request, engine.async_step

        def add_request(request):
            ids.append(request.request_id)
            return add(request)

        async def async_step():
            nonlocal steps
            if steps == long_step:
                ctypes.PyDLL(None).sleep(seconds)
            steps += 1
            return await step()

        engine._add_request, engine.async_step = add_request, async_step
        async with coordinated(engine) as address, connected(InferenceClient(address)) as client:
            replies = [await answer_of(client, PROMPT) for _ in range(2)]
            generation = engine._prefix_routing.generation
        return [reply["generated_tokens"] for reply in replies], len(set(ids)), generation

    answers, given, generation = asyncio.run(run(0, 9))
    assert answers[0] == answers[1]
    assert (given, generation) == (2, 1)  # each once, and the rank did not register again
    assert asyncio.run(run(8, 6)) == (answers, 3, 2)  # the second was tried again


WAITS_FOR_A_GPU = [
    *("tolist", "item", "cpu", "numpy", "nonzero"),
    *("__bool__", "__int__", "__float__", "__index__"),
]
"""Methods of a tensor that need its values in the host's memory."""


@pytest.mark.parametrize("generated_tokens", [False, True])
def test_steps_that_decode_read_no_tensor_for_our_sake(generated_tokens, cpu_engine, monkeypatch):
    """On a GPU each such read would make the host wait for all that it has given it to do.

    Counted are reads by this package's code, but for the stand-ins of GPU kernels (cpu_device.py).
    """
    from pathlib import Path

    import torch

    from megatron.core.inference import coordinator
    from megatron.core.inference.coordinator.runtime.client import InferenceClient

    ours = str(Path(coordinator.__file__).parent)
    reads: list[str] = []

    def counted(name, method):
        def read(*args, **kwargs):
            code = sys._getframe(1).f_code
            if code.co_filename.startswith(ours) and "cpu_device" not in code.co_filename:
                reads.append(f"{name} in {code.co_name}")
            return method(*args, **kwargs)

        return read

    async def run() -> int:
        engine = cpu_engine()
        taken = added_each_step(engine)
        async with coordinated(engine) as address, connected(InferenceClient(address)) as client:
            lengths = {"num_tokens_to_generate": 40}
            answers = [
                asyncio.create_task(answer_of(client, [n, *PROMPT], **lengths)) for n in range(4)
            ]
            while sum(taken) < 4 or taken[-1]:
                await asyncio.sleep(0.001)
            began = len(taken)
            with monkeypatch.context() as patch:
                for name in WAITS_FOR_A_GPU:
                    patch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
                while len(taken) < began + 20:
                    await asyncio.sleep(0.001)
                assert torch.ones(1).tolist()  # nothing of the above keeps tensors from being read
            assert not any(answer.done() for answer in answers)
            await asyncio.gather(*answers)
        return began

    coordinator.patch(coordinator.RoutingSettings(generated_tokens=generated_tokens))
    try:
        asyncio.run(run())
    finally:
        coordinator.unpatch()
    assert reads == []


@pytest.mark.parametrize("our_engine", [True, False])
def test_our_and_released_clients_get_equal_answers(our_engine, cpu_engine, monkeypatch):
    """A released engine runs under our coordinator when only that is patched."""
    from megatron.core.inference.engines import dynamic_engine
    from megatron.core.inference.inference_client import InferenceClient as ReleasedClient

    from megatron.core.inference.coordinator.runtime import drop_in, engine_start, patching
    from megatron.core.inference.coordinator.runtime.client import InferenceClient
    from megatron.core.inference.coordinator.settings import AccessSettings

    monkeypatch.setattr(engine_start, "access_settings", lambda: AccessSettings(plain=True))

    async def run() -> list[dict]:
        engine = cpu_engine()
        async with coordinated(engine) as address:
            ours, theirs = InferenceClient(address), ReleasedClient(address)
            tokenizing = InferenceClient(address, tokenizer=engine.controller.tokenizer)
            async with connected(ours), connected(theirs), connected(tokenizing):
                text = bytes(PROMPT).decode()
                return [await answer_of(c, text) for c in (ours, theirs, tokenizing)]

    released = dynamic_engine.DataParallelInferenceCoordinator
    if our_engine:
        patching.patch()
    else:
        dynamic_engine.DataParallelInferenceCoordinator = drop_in.DataParallelInferenceCoordinator
    try:
        replies = asyncio.run(run())
    finally:
        patching.unpatch()
        dynamic_engine.DataParallelInferenceCoordinator = released
    assert len({tuple(reply["generated_tokens"]) for reply in replies}) == 1
    assert len({reply["generated_text"] for reply in replies}) == 1
    assert replies[0]["generated_text"]


BAD_REQUESTS = {
    "an empty prompt": ([], {}),
    "an empty text": ("", {}),
    "a token outside the vocabulary": ([5, 10**6], {}),
    "a negative token": ([5, -1], {}),
    "top_k and top_p": (PROMPT, {"top_k": 5, "top_p": 0.5}),
    "top_k beyond the vocabulary": (PROMPT, {"top_k": 10**6}),
    "a temperature that is text": (PROMPT, {"temperature": "hot"}),
    "a temperature that is no number": (PROMPT, {"temperature": float("nan")}),
    "top_p above 1": (PROMPT, {"top_k": 0, "top_p": 1.5}),
    "log probabilities of the prompt": (PROMPT, {"return_log_probs": True}),
    "top log probabilities alone": (PROMPT, {"top_n_logprobs": 2}),
    "two lengths": (PROMPT, {"num_tokens_total": 100}),
    "a negative length": (PROMPT, {"num_tokens_to_generate": -3}),
    "stop words that are none": (PROMPT, {"stop_words": [1, 2]}),
    "a prompt longer than the context": ([65] * 9000, {}),
}
HARMLESS = {
    "temperature 0": {"temperature": 0.0, "top_k": 0},
    "top_k beside a top_p of 1": {"top_k": 5, "top_p": 1.0},
    "no token to generate": {"num_tokens_to_generate": 0},
}


def test_log_probs_of_a_prompt_are_computed_though_it_is_cached(patched, cpu_engine):
    from megatron.core.inference.coordinator.runtime.client import InferenceClient

    fields = "prompt_log_probs", "generated_log_probs", "generated_tokens"

    async def run() -> list[dict]:
        engine = cpu_engine(materialize_only_last_token_logits=False)
        async with coordinated(engine) as address, connected(InferenceClient(address)) as client:
            first = await answer_of(client, PROMPT, return_log_probs=True)
            plain = [await answer_of(client, PROMPT) for _ in range(2)]
            assert plain[1]["num_cached_tokens"] == 64
            return [first, await answer_of(client, PROMPT, return_log_probs=True)]

    first, second = asyncio.run(run())
    assert len(first["prompt_log_probs"]) == len(PROMPT) - 1
    assert len(first["generated_log_probs"]) == 6
    for name in fields:
        assert second[name] == pytest.approx(first[name])


def test_what_an_engine_cannot_run_is_answered_and_ends_nobody(patched, cpu_engine):
    from megatron.core.inference.coordinator.runtime.client import InferenceClient

    async def run() -> tuple[dict, dict, dict]:
        engine = cpu_engine()
        async with coordinated(engine) as address:
            client = InferenceClient(address)
            async with connected(client):
                good = await answer_of(client, PROMPT)
                bad = {n: await answer_of(client, p, **s) for n, (p, s) in BAD_REQUESTS.items()}
                fine = {n: await answer_of(client, PROMPT, **s) for n, s in HARMLESS.items()}
                assert (await answer_of(client, PROMPT))["generated_tokens"] == (
                    good["generated_tokens"]
                )
                assert engine.requests == {}
                assert engine._prefix_routing.cache.found == {}
                assert engine._prefix_routing.wants_text == set()
        return good, bad, fine

    good, bad, fine = asyncio.run(run())
    assert {name: reply["status"] for name, reply in bad.items()} == dict.fromkeys(bad, "FAILED")
    assert {name: reply["status"] for name, reply in fine.items()} == dict.fromkeys(
        fine, "COMPLETED"
    )
    assert fine["temperature 0"]["generated_tokens"] == good["generated_tokens"]


def test_signals_sent_in_one_burst_are_taken_in_order(patched, cpu_engine):
    from megatron.core.inference.coordinator.runtime.client import InferenceClient

    async def run() -> tuple[dict, int]:
        engine = cpu_engine()
        async with coordinated(engine) as address:
            client = InferenceClient(address)
            async with connected(client):
                await answer_of(client, PROMPT)
                client.pause_engines()
                client.suspend_engines()
                client.resume_engines()
                client.unpause_engines()
                reply = await answer_of(client, PROMPT)
                await reached(engine, "RUNNING")
        return reply, engine._prefix_routing.cache.epoch

    reply, weight_epoch = asyncio.run(run())
    assert reply["status"] == "COMPLETED"
    assert weight_epoch == 1


def test_requests_and_a_new_generation_epoch_of_one_drain_are_taken_in_order(patched, cpu_engine):
    from megatron.core.inference.coordinator.runtime.client import InferenceClient

    async def run() -> tuple[dict, dict, int]:
        engine = cpu_engine()
        async with coordinated(engine) as address:
            client = InferenceClient(address)
            async with connected(client):
                before = asyncio.ensure_future(answer_of(client, PROMPT))
                await asyncio.sleep(0)
                client.set_generation_epoch(7)
                after = asyncio.ensure_future(answer_of(client, PROMPT))
                return await before, await after, engine._prefix_routing.cache.epoch

    before, after, weight_epoch = asyncio.run(run())
    # Released: all requests are added first, and the second is stamped as if it were older.
    assert before["policy_epoch"] in ([[0, 7]], [[0, 7], [len(PROMPT) - 1, 7]])
    assert after["policy_epoch"] == [[0, 7]]
    assert weight_epoch == 1


@pytest.mark.parametrize("scheduling", ["legacy", "async"])
def test_a_reset_answers_what_is_in_flight_with_an_error(scheduling, patched, cpu_engine):
    from megatron.core.inference.config import AsyncScheduleMode

    from megatron.core.inference.coordinator.runtime.client import InferenceClient

    async def run() -> list[dict]:
        engine = cpu_engine(async_sched_mode=AsyncScheduleMode(scheduling))
        async with coordinated(engine) as address:
            client = InferenceClient(address)
            async with connected(client):
                running = [
                    asyncio.ensure_future(answer_of(client, PROMPT, num_tokens_to_generate=400))
                    for _ in range(2)
                ]
                while engine.context.get_active_request_count() == 0:
                    await asyncio.sleep(0.01)
                engine.reset()
                after = await answer_of(client, PROMPT)
                assert engine._prefix_routing.cache.found == {}
                return [await running[0], await running[1], after]

    *lost, after = asyncio.run(run())
    assert [reply["status"] for reply in lost] == ["FAILED"] * 2
    assert "the engine was reset" in str(lost[0]["events"])
    assert (after["status"], after["num_cached_tokens"]) == ("COMPLETED", 0)


@pytest.mark.parametrize("scheduling", ["legacy", "async"])
@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_a_weight_update_loses_nothing_and_old_kv_is_not_reused(
    mode, scheduling, patched, cpu_engine, built_in_model, recomputed
):
    """Pause, suspend, update, new epoch, resume, with requests in flight; the whole way."""
    import torch
    from megatron.core.inference.config import AsyncScheduleMode, KVCacheManagementMode

    from megatron.core.inference.coordinator.runtime.client import InferenceClient

    weight = built_in_model.output_layer.weight
    before = weight.detach().clone()

    async def run() -> tuple[dict, list[dict]]:
        engine = cpu_engine(
            kv_cache_management_mode=KVCacheManagementMode(mode),
            async_sched_mode=AsyncScheduleMode(scheduling),
            max_requests=4,
        )
        async with coordinated(engine) as address:
            client = InferenceClient(address)
            async with connected(client):
                await answer_of(client, PROMPT)
                running = [
                    asyncio.ensure_future(answer_of(client, PROMPT[n:], num_tokens_to_generate=40))
                    for n in range(6)
                ]
                await asyncio.sleep(0.1)
                client.pause_engines()
                await reached(engine, "PAUSED")
                client.suspend_engines()
                await reached(engine, "SUSPENDED")
                with torch.no_grad():
                    weight.copy_(before.flip(0))
                client.set_generation_epoch(1)
                client.resume_engines()
                await reached(engine, "RESUMED")
                client.unpause_engines()
                replies = await asyncio.gather(*running)
                assert engine._prefix_routing.cache.epoch == 2  # the epoch, and the resume
                return await answer_of(client, PROMPT), replies

    try:
        after, replies = asyncio.run(run())
        assert [reply["status"] for reply in replies] == ["COMPLETED"] * 6
        answer = after["generated_tokens"]
        assert answer == recomputed(PROMPT, answer)
        assert after["policy_epoch"] == [[0, 1]]
    finally:
        with torch.no_grad():
            weight.copy_(before)


@pytest.mark.parametrize(
    ("mode", "scheduling", "gone"),
    [
        ("persist", "legacy", "trainer"),
        ("offload", "async", "trainer"),
        ("recompute", "legacy", "trainer"),
        ("persist", "async", "asker"),
    ],
)
def test_a_suspended_engine_computes_nothing_for_nobody_once_it_runs_again(
    mode, scheduling, gone, patched, cpu_engine, recomputed, monkeypatch
):
    """The trainer dies and the requests are given up, or whoever asked is gone."""
    from megatron.core.inference.config import AsyncScheduleMode, KVCacheManagementMode

    from megatron.core.inference.coordinator.runtime import engine_start
    from megatron.core.inference.coordinator.runtime.client import InferenceClient
    from megatron.core.inference.coordinator.settings import FleetSettings

    monkeypatch.setattr(engine_start, "fleet_settings", lambda: FleetSettings(pause_wait=0.5))

    async def run() -> tuple[list[str], dict]:
        engine = cpu_engine(
            kv_cache_management_mode=KVCacheManagementMode(mode),
            async_sched_mode=AsyncScheduleMode(scheduling),
            max_requests=4,
        )
        async with coordinated(engine) as address:
            asker, trainer, other = (InferenceClient(address) for _ in range(3))
            async with connected(asker), connected(trainer), connected(other):
                await answer_of(asker, PROMPT)
                running = [  # two of them wait in the engine
                    asker.add_request(
                        PROMPT[n:], SamplingParams(**GREEDY | {"num_tokens_to_generate": 400})
                    )
                    for n in range(6)
                ]
                while engine.context.get_active_request_count() < 4:
                    await asyncio.sleep(0.01)
                trainer.pause_engines()
                await reached(engine, "PAUSED")
                trainer.suspend_engines()
                await reached(engine, "SUSPENDED")
                assert len(engine.requests) == 6
                (trainer if gone == "trainer" else asker).stop()
                end = engine._prefix_routing
                while not end.drop_due:
                    await asyncio.sleep(0.01)
                failures = await asyncio.gather(*running, return_exceptions=True)
                other.resume_engines()
                late = asyncio.ensure_future(answer_of(other, PROMPT))
                await reached(engine, "RESUMED")
                while late.done() or len(engine.requests) != 1:
                    await asyncio.sleep(0.01)
                assert list(end.cache.found) == list(engine.requests)
                other.unpause_engines()
                answer = await late
                assert end.events.counts["requests_dropped"] == 1
                return [getattr(f, "code", type(f).__name__) for f in failures], answer

    codes, answer = asyncio.run(asyncio.wait_for(run(), 120))
    assert codes == [{"trainer": "fleet_paused", "asker": "CancelledError"}[gone]] * 6
    assert answer["num_cached_tokens"] == 0
    assert answer["generated_tokens"] == recomputed(PROMPT, answer["generated_tokens"])


def test_unpause_and_suspend_of_a_running_engine_are_no_end(patched, cpu_engine, caplog):
    """The released engine asserts; here the coordinator refuses what has no place."""
    from megatron.core.inference.coordinator.runtime.client import InferenceClient

    async def run() -> dict:
        engine = cpu_engine()
        async with coordinated(engine) as address:
            client = InferenceClient(address)
            async with connected(client):
                for signal_ in (client.unpause_engines, client.suspend_engines):
                    signal_()
                client.resume_engines()
                client.stop_engines()
                return await answer_of(client, PROMPT)

    assert asyncio.run(run())["status"] == "COMPLETED"


def test_a_coordinator_that_dies_is_noticed_within_2_seconds(patched, cpu_engine, caplog):
    noticed = {}

    async def run() -> None:
        engine = cpu_engine()
        await engine.start_listening_to_data_parallel_coordinator(hostname="127.0.0.1")
        await asyncio.sleep(0.3)
        os.kill(engine.inference_coordinator_process.pid, signal.SIGKILL)
        began = time.monotonic()
        try:
            await engine.engine_loop_task
        finally:
            noticed["seconds"] = time.monotonic() - began

    with caplog.at_level(logging.ERROR), pytest.raises(SystemExit):
        asyncio.run(run())
    assert noticed["seconds"] < 2
    assert "died: killed by SIGKILL" in caplog.text


def test_a_coordinator_port_in_use_is_an_error_where_the_command_line_named_it(
    patched, cpu_engine, monkeypatch
):
    """Code that names one, e.g. megatron.rl, would else run once on a machine."""
    import socket

    from megatron.core.inference.coordinator.runtime import engine_start
    from megatron.core.inference.coordinator.runtime.process import CoordinatorDied

    async def run(port: int) -> str:
        async with coordinated(cpu_engine(), inference_coordinator_port=port) as address:
            return address

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert int(asyncio.run(run(port)).rsplit(":", 1)[1]) not in (0, port)
        parsed = {"inference_coordinator_port": port}
        monkeypatch.setattr(engine_start, "_parsed_arguments", lambda: parsed)
        with pytest.raises(CoordinatorDied, match=f"port {port} on 127.0.0.1 is in use"):
            asyncio.run(run(port))


SAMPLED = {"top_k": 0, "temperature": 1.0, "num_tokens_to_generate": 12}


def test_jobs_and_restarts_draw_samples_of_their_own(patched, cpu_engine):
    from megatron.core.inference.coordinator.runtime.client import InferenceClient

    async def draw(engine) -> list[list[int]]:
        async with coordinated(engine) as address, connected(InferenceClient(address)) as client:
            one_by_one = [await answer_of(client, PROMPT, **SAMPLED) for _ in range(2)]
        return [answer["generated_tokens"] for answer in one_by_one]

    async def draw_8_over_two_jobs() -> list[list[int]]:
        async with coordinated(cpu_engine()) as address:
            second = cpu_engine()
            await second.start_listening_to_data_parallel_coordinator(coordinator_address=address)
            async with connected(InferenceClient(address)) as client:
                answers = [answer_of(client, PROMPT, **SAMPLED) for _ in range(8)]
                drawn = [each["generated_tokens"] for each in await asyncio.gather(*answers)]
            counts = second.finished_request_count
            second.engine_loop_task.cancel()
            await asyncio.wait({second.engine_loop_task})
            assert 0 < counts < 8
            return drawn

    def distinct(samples: list[list[int]]) -> int:
        return len(set(map(tuple, samples)))

    assert distinct(asyncio.run(draw_8_over_two_jobs())) == 8
    drawn = [sample for _ in range(2) for sample in asyncio.run(draw(cpu_engine()))]
    assert distinct(drawn) == 4


def test_samples_are_drawn_again_where_that_was_asked_for(patched, cpu_engine):
    import torch

    from megatron.core.inference.coordinator.runtime.client import InferenceClient

    async def draw() -> list[int]:
        async with (
            coordinated(cpu_engine()) as address,
            connected(InferenceClient(address)) as client,
        ):
            return (await answer_of(client, PROMPT, **SAMPLED))["generated_tokens"]

    torch.use_deterministic_algorithms(True)
    try:
        assert asyncio.run(draw()) == asyncio.run(draw())
    finally:
        torch.use_deterministic_algorithms(False)


def test_megatron_async_llm_runs_on_it_unchanged(patched, built_in_model, built_in_args):
    from megatron.core.inference.apis import MegatronAsyncLLM

    from megatron.core.inference.coordinator.runtime import model

    config = model.build_inference_config(
        built_in_args, built_in_model, enable_prefix_caching=True, block_size_tokens=16
    )
    tokenizer = model.build_tokenizer(built_in_args)

    async def run() -> list:
        llm = MegatronAsyncLLM(
            model=built_in_model,
            tokenizer=tokenizer,
            inference_config=config,
            coordinator_host="127.0.0.1",
        )
        async with llm:
            assert hasattr(llm.engine, "_prefix_routing")
            params = SamplingParams(**GREEDY)
            return await llm.generate([PROMPT, bytes(PROMPT).decode()], params)

    first, second = asyncio.run(run())
    assert list(first.generated_tokens) == list(second.generated_tokens)
    assert first.generated_text


def test_a_lone_request_goes_on_when_lru_has_filled_the_cache(patched, cpu_engine, generate):
    """The released engine ends with an assertion at the fifth (engine_mending.py)."""
    engine = cpu_engine(buffer_size_gb=41 * 16 * 8192 / 2**30, max_requests=4)
    assert engine.context.kv_block_allocator.total_count == 41
    prompts = [[65 + i, *range(32, 32 + 153 - i), *range(i)] for i in range(6)]
    answers = [generate(engine, [prompt[:154]], 9)[0] for prompt in prompts]
    assert [len(answer) for answer in answers] == [9] * 6


SMALL = {"buffer_size_gb": 41 * 16 * 8192 / 2**30, "max_requests": 4}
DIFFERENT = [[65 + i] * 100 for i in range(12)]  # more than the small cache holds


@pytest.mark.parametrize("built_in_mode", [False, True])
@pytest.mark.parametrize("before_patching", [False, True])
def test_an_engine_whose_graphs_were_captured_evicts_and_updates(
    built_in_mode, before_patching, cpu_engine, generate
):
    """Capture makes inference tensors; others on the event loop do not run in inference mode."""
    import torch
    from megatron.core.inference.config import KVCacheManagementMode

    from megatron.core.inference import coordinator
    from megatron.core.inference.coordinator.runtime.client import InferenceClient

    def warm_engine():
        recompute = {"kv_cache_management_mode": KVCacheManagementMode.RECOMPUTE}
        with torch.inference_mode(built_in_mode):
            engine = cpu_engine(**SMALL, **recompute)
        with torch.inference_mode():
            engine.context.reset()  # what the capture of each CUDA graph ends with
        return engine

    async def run(engine) -> list[dict]:
        async with coordinated(engine) as address:
            client = InferenceClient(address)
            async with connected(client):
                replies = [await answer_of(client, prompt) for prompt in DIFFERENT]
                client.pause_engines()
                await reached(engine, "PAUSED")
                client.set_generation_epoch(1)
                client.suspend_engines()
                await reached(engine, "SUSPENDED")
                client.resume_engines()
                await reached(engine, "RESUMED")
                client.unpause_engines()
                replies += [await answer_of(client, prompt) for prompt in DIFFERENT]
                assert not torch.is_inference_mode_enabled()
                assert engine.context.request_ids.is_inference() is (
                    built_in_mode or before_patching
                )
                return replies

    engine = warm_engine() if before_patching else None
    coordinator.patch(coordinator.RoutingSettings())
    try:
        replies = asyncio.run(run(engine or warm_engine()))
    finally:
        coordinator.unpatch()
    assert [reply["status"] for reply in replies] == ["COMPLETED"] * 24


def test_an_engine_whose_graphs_were_captured_evicts_without_a_coordinator(
    patched, cpu_engine, generate
):
    import torch

    engine = cpu_engine(**SMALL)
    with torch.inference_mode():
        engine.context.reset()
    answers = [generate(engine, [prompt], 3)[0] for prompt in DIFFERENT]
    assert [len(answer) for answer in answers] == [3] * 12
