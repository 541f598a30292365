"""A dummy engine: what the engine's end touches of megatron-core's, and a loop that answers."""

import asyncio
from collections import deque
from concurrent.futures import Future
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.inference.config import InferenceConfig, PrefixCachingEvictionPolicy
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine, EngineState
from megatron.core.inference.inference_request import (
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    Status,
)

from megatron.core.inference.coordinator.runtime import engine_endings, engine_start, engine_step
from megatron.core.inference.coordinator.runtime.byte_tokenizer import ByteTokenizer
from megatron.core.inference.coordinator.runtime.engine_end import EngineEnd

BLOCK = 4
LRU = PrefixCachingEvictionPolicy.LRU


class DummyAllocator:
    """An allocator of 100 blocks that nothing is registered with."""

    total_count = 100

    def __init__(self):
        self.on_blocks_deregistered: Any = None
        self.block_hashes = torch.full((self.total_count,), -1)
        self.block_ref_counts = torch.zeros(self.total_count, dtype=torch.int32)

    def register_kv_block_hashes(self, ids: list, keys: list, parents: Any = None) -> None:
        """Nothing is cached here."""

    def _deregister_blocks(self, ids: Any) -> None:
        assert ids.numel() == 0

    def reset(self) -> None:
        """Nothing is cached here."""


class DummyContext:
    """Counts skipped prompt tokens as the real one does: a total, reset by the bookkeeping."""

    def __init__(self, prefix_caching: bool = True):
        self.enable_prefix_caching = prefix_caching
        self.is_hybrid_model, self.mamba_slot_allocator = False, None
        self.block_size_tokens = BLOCK
        self.max_requests = 8
        self.prefix_caching_eviction_policy = LRU
        self.kv_block_allocator = DummyAllocator()
        self.prefix_caching_coordinator_policy = InferenceConfig.prefix_caching_coordinator_policy
        self.prefix_caching_routing_alpha = InferenceConfig.prefix_caching_routing_alpha
        self.config = InferenceConfig()
        self.step_count = 0
        self.prefix_cache_prefill_skipped_tokens = 0
        self.skips: deque[int] = deque()
        self.ep_communicator: Any = None

    def add_request(self, request: Any, prefill_chunk_length: int | None = None) -> None:
        """Schedule a chunk; a test says beforehand how much of it is skipped."""
        self.prefix_cache_prefill_skipped_tokens += self.skips.popleft() if self.skips else 0

    def release_memory_blocks_from_request_indexes(self, rows: Any) -> None:
        """Nothing holds a block here."""

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
    reset = engine_endings.reset
    shutdown = engine_endings.shutdown

    def __init__(self, groups: Any = None, context: DummyContext | None = None):
        self.pg_collection = groups
        self.context = context or DummyContext()
        self.controller = SimpleNamespace(
            tokenizer=ByteTokenizer(),
            vocab_size=260,
            sampling_rng=torch.Generator(),
            model_config=SimpleNamespace(inference_sampling_seed=1),
        )
        self.materialize_only_last_token_logits = True
        self.enable_chunked_prefill = False
        self.rank = 1  # the released engine's first rank warns of what fails
        self.state = EngineState.RUNNING
        self._state_events = {k: asyncio.Event() for k in DynamicInferenceEngine._STATE_EVENTS}
        self._state_events[EngineState.RUNNING].set()
        self._cond = asyncio.Condition()
        self._pending_signals: deque = deque()
        self._generation_epoch: int | None = None
        self.use_coordinator = True
        self.requests: dict[int, SimpleNamespace] = {}
        self.request_counter = count()
        self.failed_request_ids: list[int] = []
        self.waiting_request_ids: deque = deque()
        self.resume_request_ids: list[int] | None = None
        self.ep_world_size = 1
        self.did: list[str] = []
        self.refuses: set[int] = set()
        self.answer = ord("x")

    # What the released engine does with what it is told

    def _add_request(self, request: DynamicInferenceRequest) -> None:
        request_id = request.request_id
        request.status = Status.ACTIVE_AND_GENERATING_TOKENS
        if self._generation_epoch is not None:
            request.policy_epoch = [(0, self._generation_epoch)]
            request.kv_cache_epoch = [(0, self._generation_epoch)]
        record = DynamicInferenceRequestRecord.from_request(request)
        self.requests[request_id] = SimpleNamespace(record=record, future=Future())
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
    assert not (engine.use_coordinator and engine.is_mp_coordinator), "the released reply"
    return {"finished_request_records": records}


def released_reset(engine: DummyEngine) -> None:
    """A stand-in: forgets all requests, and what the coordinator made of the engine as well."""
    engine.did.append("reset")
    engine.requests, engine.failed_request_ids = {}, []
    engine.waiting_request_ids = deque()
    engine._generation_epoch, engine.use_coordinator = None, False
    engine._state_events = {k: asyncio.Event() for k in DynamicInferenceEngine._STATE_EVENTS}
    engine.state = EngineState.RUNNING
