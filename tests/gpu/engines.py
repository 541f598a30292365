"""Engines of this process under our coordinator or the released one, and what their steps take."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from megatron.core.inference.sampling_params import SamplingParams

from megatron.core.inference import coordinator

TOKEN_BYTES = 8192
"""Keys and values of one token, in the model for the CPU and in that for a GPU."""

ANSWER_SECONDS = 100
"""Without an answer for so long, a part hangs."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is asked on a device.

    Attributes:
        block: Tokens in a cache block; flash-attn wants 256.
        batches: Requests that decode at once, by part.
        steps: Tokens that each of them gets.
        sessions: Conversations at once.
        turns: Requests in each.
        first: Tokens of a first prompt.
        added: Tokens that each later one is longer.
        long: Prompts that arrive at once while others decode.
        long_tokens: Tokens of each of these.
        agreement: What at least is equal of answers that should be: in bf16 a batch of another
            composition rounds differently, one token then differs, and all after it do.
        ratio: How many times as long as the released one's a step of ours may take.
    """

    block: int = 16
    batches: tuple[int, ...] = (1, 4, 8)
    steps: int = 12
    sessions: int = 3
    turns: int = 2
    first: int = 150
    added: int = 60
    long: int = 8
    long_tokens: int = 250
    agreement: float = 1.0
    ratio: float = float("inf")


SIZES = {
    "cpu": Sizes(),
    "cuda": Sizes(256, (1, 64, 256), 64, 8, 3, 1500, 600, 64, 16000, agreement=0.5, ratio=2.0),
}

GPU_MODEL = (
    *("--num-layers=4", "--hidden-size=2048", "--num-attention-heads=32"),
    *("--group-query-attention", "--num-query-groups=8", "--max-position-embeddings=20480"),
    *("--seq-length=20480", "--inference-max-seq-length=20480", "--init-method-std=0.1"),
    *("--bf16", "--cuda-graph-impl=local"),
    # The same whatever is installed: no Transformer Engine, no APEX, nothing that is compiled.
    *("--transformer-impl=local", "--no-persist-layer-norm", "--no-masked-softmax-fusion"),
    *("--no-rope-fusion", "--no-bias-gelu-fusion", "--no-bias-swiglu-fusion"),
    "--no-bias-dropout-fusion",
)
"""What differs from the built-in model on a GPU: 170 million weights, bf16, CUDA graphs."""


def tokens(count: int, seed: int) -> list[int]:
    """A prompt of printable bytes."""
    return random.Random(seed).choices(range(32, 127), k=count)


def room(count: int) -> float:
    """The buffer for so many tokens, in GiB; half a token more, so that rounding loses none."""
    return (count + 0.5) * TOKEN_BYTES / 2**30


@contextlib.asynccontextmanager
async def serving(engine: Any, ours: bool = True, **routing: Any) -> AsyncIterator[Any]:
    """Run an engine's loop under a coordinator; yields a client that has connected."""
    from megatron.core.inference import inference_client

    if ours:
        coordinator.patch(coordinator.RoutingSettings(**routing))
    try:
        address = await engine.start_listening_to_data_parallel_coordinator(hostname="127.0.0.1")
        client = inference_client.InferenceClient(address)  # ours if it is patched
        try:
            client.start(asyncio.get_running_loop())
            yield client
        finally:
            client.stop()
            engine.engine_loop_task.cancel()
            await asyncio.wait({engine.engine_loop_task})
            engine.inference_coordinator_process.terminate()
            engine.inference_coordinator_process.join(5)
    finally:
        coordinator.unpatch()


def submit(client: Any, prompt: Any, count: int) -> asyncio.Future:
    """Ask for a greedy answer of so many tokens."""
    greedy = SamplingParams(num_tokens_to_generate=count, top_k=1, termination_id=-1)
    return client.add_request(prompt, greedy)


async def answers(client: Any, prompts: Sequence[Any], count: int) -> list[list[int]]:
    """Ask everything at once; every answer must be a whole one."""
    futures = [submit(client, prompt, count) for prompt in prompts]
    replies = await asyncio.wait_for(asyncio.gather(*futures), ANSWER_SECONDS)
    assert [reply["status"] for reply in replies] == ["COMPLETED"] * len(prompts)
    return [list(reply["generated_tokens"]) for reply in replies]


def agreement(ones: Sequence[list[int]], others: Sequence[list[int]]) -> float:
    """The share of tokens before the first that differs, over all pairs of answers."""
    equal = total = 0
    for one, other in zip(ones, others, strict=True):
        same = [a == b for a, b in zip(one, other, strict=True)]
        equal += same.index(False) if False in same else len(same)
        total += len(same)
    return equal / total


@dataclass(frozen=True, slots=True)
class Step:
    """When an engine's step began and ended, in seconds, and whether it only decoded."""

    began: float
    ended: float
    decodes: bool


def watch(engine: Any) -> list[Step]:
    """The list that gets every step from now on; call it when the engine serves."""
    steps: list[Step] = []
    take_step: Callable[[], Any] = engine.async_step

    async def timed() -> Any:
        began = time.perf_counter()
        result = await take_step()
        steps.append(Step(began, time.perf_counter(), engine.decode_only.consumed is True))
        return result

    engine.async_step = timed
    return steps


def decode_ms(steps: Sequence[Step]) -> float:
    """The median from one step that only decodes to the next: with the work between them."""
    gaps = [b.began - a.began for a, b in pairwise(steps) if a.decodes and b.decodes]
    return median(gaps) * 1e3


def longest_ms(steps: Sequence[Step]) -> tuple[float, float]:
    """The longest from step to step, and of that what lay between the steps."""
    gaps = [(b.began - a.began, b.began - a.ended) for a, b in pairwise(steps)]
    return max(whole for whole, _ in gaps) * 1e3, max(between for _, between in gaps) * 1e3
