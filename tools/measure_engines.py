"""Real engines in this process, under a real coordinator: for the tools that measure.

The built-in model on the CPU, one thread, blocks of 16 tokens.
"""

import asyncio
import contextlib
import logging
import os
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

BLOCK = 16
TOKEN_BYTES = 8192
"""Keys and values of one token in the built-in model: 2 x 4 layers x 256 wide x 4 bytes."""


async def answer(client: Any, prompt: list[int], length: int) -> list[int]:
    """The greedy answer to a prompt, as token ids."""
    from megatron.core.inference.sampling_params import SamplingParams

    params = SamplingParams(num_tokens_to_generate=length, top_k=1, termination_id=-1)
    reply = await asyncio.wait_for(client.add_request(prompt, params), 120)
    return list(reply["generated_tokens"])


def engine_factory() -> Callable[..., Any]:
    """A function of (cache blocks, eviction, max_requests) that makes engines of one model.

    It takes fields of `InferenceConfig` by name as well.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # megatron-core warns a dozen times of what only GPUs have, and tells of its defaults.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import torch

    torch.set_num_threads(1)
    from megatron.core.inference.config import PrefixCachingEvictionPolicy

    from megatron.core.inference.coordinator.runtime import fork_server, model

    fork_server.warm_up()
    with contextlib.redirect_stdout(sys.stderr):
        args = model.parse(argv=model.BUILT_IN_MODEL)
        model.initialize(args)
        weights, tokenizer = model.build_model(args), model.build_tokenizer(args)

    def make(blocks: int, eviction: str, max_requests: int, **fields: Any) -> Any:
        usual = {
            "block_size_tokens": BLOCK,
            "max_requests": max_requests,
            "enable_prefix_caching": True,
            "prefix_caching_eviction_policy": PrefixCachingEvictionPolicy(eviction),
        }
        fields = usual | fields
        cache_tokens = (blocks + 1) * fields["block_size_tokens"]  # one block is never used
        fields.setdefault("buffer_size_gb", cache_tokens * TOKEN_BYTES / 2**30)
        config = model.build_inference_config(args, weights, **fields)
        return model.build_engine(weights, tokenizer, config)

    return make


@contextlib.asynccontextmanager
async def served(
    engines: Sequence[Any], schedule: Path | None = None, **routing: Any
) -> AsyncIterator[Any]:
    """Run engines under one coordinator.

    Args:
        engines: Fresh engines; several are told apart as replicas of different jobs.
        schedule: Where the coordinator writes its decisions when it ends.
        routing: Fields of `RoutingSettings`.

    Yields:
        A connected client.
    """
    from megatron.core.inference.coordinator import RoutingSettings, patch
    from megatron.core.inference.coordinator.runtime.client import InferenceClient

    patch(RoutingSettings(**routing))
    first, *others = engines
    path = str(schedule) if schedule else None
    address = await first.start_listening_to_data_parallel_coordinator(
        hostname="127.0.0.1", coordinator_schedule_output_path=path
    )
    client = InferenceClient(address)
    try:
        for engine in others:
            await engine.start_listening_to_data_parallel_coordinator(
                int(address.rpartition(":")[2]), False, hostname="127.0.0.1"
            )
        client.start(asyncio.get_running_loop())
        yield client
    finally:
        client.stop()
        tasks = [e.engine_loop_task for e in engines if hasattr(e, "engine_loop_task")]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        first._prefix_routing.process.stop(10)


@contextlib.contextmanager
def tracking(kind: str) -> Iterator[None]:
    """With `history`, engines tell nothing of their caches."""
    from megatron.core.inference.coordinator.runtime.engine_end import EngineEnd

    silent = mock.patch.object(EngineEnd, "tell_events")
    with silent if kind == "history" else contextlib.nullcontext():
        yield
