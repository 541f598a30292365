"""One replica of gpu_check.py: a process with megatron-core's engine, under either coordinator.

It is spawned, so what it needs is imported in the functions: nothing before the environment of its
rank has been set.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from gpu_check_parts import Sizes

OURS = "ours"


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """What a replica is started with. Pickles.

    Attributes:
        sizes: Model, cache and prompts.
        coordinator: `OURS`, or the released coordinator's signal policy.
        log: File that gets everything the process prints.
        environment: What torchrun would set, but for the rank.
    """

    sizes: Sizes
    coordinator: str
    log: str
    environment: dict[str, str]


def run_replica(settings: ReplicaSettings, rank: int, pipe: Connection) -> None:
    """Serve until the pipe says stop or closes; the body of the process.

    It sends ("ready", what it is), then ("stats", what it did), or ("failed", why).
    """
    os.setsid()  # so that it can be ended with all its children
    log = os.open(settings.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for output in (1, 2):
        os.dup2(log, output)
    os.environ |= settings.environment | {"RANK": str(rank)}
    warnings.simplefilter("ignore")
    try:
        asyncio.run(_serve(settings, pipe))
    except BaseException as error:  # also the SystemExit in which the released loop ends
        traceback.print_exc()
        with contextlib.suppress(OSError):
            pipe.send(("failed", f"replica {rank}: {type(error).__name__}: {error}"))
    _end()


def _end() -> None:
    """End this process and those it started, at once: torch takes seconds to go by itself."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.killpg(os.getpid(), signal.SIGKILL)


async def _serve(settings: ReplicaSettings, pipe: Connection) -> None:
    engine, about = _build(settings)
    steps = _time_steps(engine)
    await _warm_up(engine, settings.sizes)
    before = _counters(engine)
    steps.clear()
    address = await engine.start_listening_to_data_parallel_coordinator(hostname="127.0.0.1")
    pipe.send(("ready", about | {"address": address}))
    told = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), told.set)
    waiting = asyncio.create_task(told.wait())
    task = engine.engine_loop_task
    await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
        raise RuntimeError("the engine's loop ended by itself")
    after = _counters(engine)
    counted = {name: after[name] - before[name] for name in after}
    pipe.send(("stats", counted | {"steps": steps, "peak_gib": _peak_gib()}))
    _end()


def _build(settings: ReplicaSettings) -> tuple[Any, dict[str, Any]]:
    """The engine, and what there is to say of it."""
    sizes = settings.sizes
    if settings.coordinator == OURS:
        _patch()
    from megatron.core.inference.config import (
        PrefixCachingCoordinatorPolicy,
        PrefixCachingEvictionPolicy,
    )

    from megatron.core.inference.coordinator.runtime import model as models

    args = models.parse(argv=_model_arguments(sizes), args_defaults=_defaults(models))
    models.initialize(args)
    _without_a_compiler()
    model = models.build_model(args)
    fields: dict[str, Any] = {
        "block_size_tokens": sizes.block_size,
        "buffer_size_gb": sizes.cache_gb,
        "max_requests": sizes.max_requests,
        "enable_prefix_caching": True,
        "prefix_caching_eviction_policy": PrefixCachingEvictionPolicy.LRU,
    }
    if settings.coordinator != OURS:
        policy = PrefixCachingCoordinatorPolicy(settings.coordinator)
        fields["prefix_caching_coordinator_policy"] = policy
    config = models.build_inference_config(args, model, **fields)
    engine = models.build_engine(model, models.build_tokenizer(args), config)
    return engine, _describe(engine, model)


def _describe(engine: Any, model: Any) -> dict[str, Any]:
    import torch

    return {
        "attention": _attention(),
        "parameters": sum(weights.numel() for weights in model.parameters()),
        "cache_blocks": engine.context.kv_block_allocator.total_count,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
    }


def _patch() -> None:
    """Put ours in the released coordinator's place, as a user does."""
    from megatron.core.inference.coordinator import RoutingSettings, patch

    patch(RoutingSettings())


def _model_arguments(sizes: Sizes) -> list[str]:
    """Megatron's arguments of a GPT whose random weights depend on the seed alone."""
    from megatron.core.inference.coordinator.runtime.byte_tokenizer import (
        TOKENIZER_TYPE,
        ByteTokenizer,
    )

    text = (
        f"--num-layers {sizes.layers} --hidden-size {sizes.hidden} "
        f"--num-attention-heads {sizes.heads} --group-query-attention "
        f"--num-query-groups {sizes.kv_groups} --position-embedding-type rope "
        f"--max-position-embeddings {sizes.longest} --seq-length {sizes.longest} "
        f"--inference-max-seq-length {sizes.longest} --init-method-std {sizes.init_std} "
        "--untie-embeddings-and-output-weights --seed 1234 --use-cpu-initialization "
        f"--tokenizer-type {TOKENIZER_TYPE} --padded-vocab-size {ByteTokenizer.vocab_size}"
    )
    return text.split() + (["--bf16"] if sizes.dtype == "bf16" else [])


def _defaults(models: Any) -> dict[str, Any]:
    """Whatever is installed, the same plain model: no Transformer Engine, APEX or compiling."""
    return models.PLAIN_DEFAULTS | {
        "distributed_backend": "gloo",  # NCCL refuses several ranks on one GPU
        "bias_gelu_fusion": False,
        "bias_swiglu_fusion": False,
        "bias_dropout_fusion": False,
    }


def _without_a_compiler() -> None:
    """Triton builds its launcher with a C compiler; where there is none, use no Triton kernel."""
    from megatron.core.inference.contexts import dynamic_context

    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        print("no C compiler: the context appends to the cache in Python")
        dynamic_context.triton_append_key_value_cache = None


def _attention() -> str:
    """Which attention serves."""
    from megatron.core.transformer import attention

    from megatron.core.inference.coordinator.runtime import cpu_device

    ours = attention.flash_attn_varlen_func is cpu_device.flash_attn_varlen_func
    return "torch (overrides 4 to 6 of runtime/cpu_device.py)" if ours else "flash-attn"


def _time_steps(engine: Any) -> list[tuple[float, bool]]:
    """The list that gets (seconds, was it decoding only) of every step from now on."""
    steps: list[tuple[float, bool]] = []
    take_step = engine.async_step

    async def timed() -> Any:
        began = time.perf_counter()
        result = await take_step()
        steps.append((time.perf_counter() - began, engine.decode_only.consumed is True))
        return result

    engine.async_step = timed
    return steps


async def _warm_up(engine: Any, sizes: Sizes) -> None:
    """Answer one long prompt that no session begins with: first steps are slow."""
    from megatron.core.inference.sampling_params import SamplingParams

    greedy = SamplingParams(num_tokens_to_generate=2, top_k=1, termination_id=-1)
    engine.add_request(next(engine.request_counter), [0] * sizes.last_tokens, greedy)
    while engine.has_unfinished_requests():
        await engine.async_step()


def _counters(engine: Any) -> dict[str, int]:
    return {
        "computed": engine._prefill_tokens_computed,
        "skipped": engine._prefill_tokens_skipped,
        "requests": engine.finished_request_count,
        "evicted": engine.evicted_request_count,
    }


def _peak_gib() -> float:
    """Most GPU memory that this replica held at once."""
    import torch

    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return round(peak / 2**30, 2)
