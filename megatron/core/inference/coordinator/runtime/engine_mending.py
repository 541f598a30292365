"""Faults of the released engine that end a server sooner or later, mended from outside."""

from typing import Any

import torch
from megatron.core.inference.config import KVCacheManagementMode, PrefixCachingEvictionPolicy
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.contexts.mamba_slot_allocator import MambaSlotAllocator
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine

_released_resume = DynamicInferenceContext.resume_paused_requests
_released_reset = DynamicInferenceContext.reset
_released_initialize = DynamicInferenceContext.initialize_all_tensors
_released_collect = MambaSlotAllocator._collect_commit_data
_released_suspend = DynamicInferenceEngine.suspend

_MADE_BY_RESET = (
    ("kv_block_allocator", "block_bag"),
    ("mamba_slot_allocator", "free_slots"),
    ("mamba_metadata", "mamba_state_free_slots"),
)


def resume_paused_requests(
    self: Any, active_request_count: int, newly_paused_request_ids: Any
) -> tuple[int, Any]:
    """Make room for paused requests among cached blocks before the released method looks.

    A request whose last block is full is paused until it gets another. The released method counts
    free blocks only. Under `lru` eviction a warm cache leaves none free, although any number can
    be evicted: a lone request then never resumes, and the engine's loop ends with an assertion.

    Args:
        self: The context.
        active_request_count: See the released method.
        newly_paused_request_ids: See the released method.

    Returns:
        What the released method returns.
    """
    allocator = self.kv_block_allocator
    retains = self.prefix_caching_eviction_policy is PrefixCachingEvictionPolicy.LRU
    if self.enable_prefix_caching and retains:
        lacking = self.paused_request_count - allocator.total_avail
        if lacking > 0:
            evictable = int(allocator.get_evictable_block_count())
            allocator.evict_lru_blocks(min(lacking, evictable))
    return _released_resume(self, active_request_count, newly_paused_request_ids)


# --- inference tensors -------------------------------------------------------------------------


def reset_context(self: Any, *args: Any, **kwargs: Any) -> None:
    """Keep a reset in inference mode from making tensors that only that mode may change.

    Each CUDA graph's capture ends with such a reset, and requests are added outside that mode: the
    engine would end at the first eviction.

    Args:
        self: The context.
        args: See the released method.
        kwargs: See the released method.
    """
    _released_reset(self, *args, **kwargs)
    for owner, name in _MADE_BY_RESET:
        holder = getattr(self, owner, None)
        if holder is not None and getattr(holder, name).is_inference():
            with torch.inference_mode(False):
                setattr(holder, name, getattr(holder, name).clone())


def initialize_all_tensors(self: Any) -> None:
    """Make a context's tensors as they were made at first, in inference mode or not.

    A resume that recomputes makes them anew, and our loop is in inference mode.
    """
    mode = vars(self).setdefault("_made_in_inference_mode", torch.is_inference_mode_enabled())
    with torch.inference_mode(mode):
        _released_initialize(self)


# --- asynchronous scheduling -------------------------------------------------------------------


def suspend(self: Any) -> None:
    """The released suspend; where requests are computed anew, so is what was forwarded last.

    Args:
        self: The engine.
    """
    _released_suspend(self)
    if self.context.kv_cache_management_mode is KVCacheManagementMode.RECOMPUTE:
        forget_pending_logits(self)


def forget_pending_logits(engine: Any) -> None:
    """Let an engine without running requests sample nothing at its next step.

    With asynchronous scheduling a forward pass is sampled by the step after it, and the released
    engine drops requests without it: the step then samples for no request, which ends the loop.
    """
    logits = getattr(engine.controller, "_async_sched_logits", None)
    if logits is not None:
        logits.clear()


# --- hybrid models -----------------------------------------------------------------------------


def collect_commit_data(self: Any) -> Any:
    """Leave out Mamba states that find no slot: the released cache ends the engine's loop then.

    Args:
        self: The cache of Mamba states.

    Returns:
        What the released method returns, of as many blocks as there are slots that are free or
        that no running request uses. The last blocks of prompts come first: they let the next
        turn skip most.
    """
    collected = _released_collect(self)
    if collected is None:
        return None
    blocks, sources, ends, rows, hashes = collected
    references = self.context.kv_block_allocator.block_ref_counts
    room = self.free_count + int(((self.block_to_slot >= 0) & (references == 0)).sum())
    stored: set[int] = set()
    for block in [*ends, *reversed(blocks)]:
        if block not in stored and self.block_to_slot[block] < 0:
            if room == 0:
                continue
            room -= 1
        stored.add(block)
    inner = [n for n, block in enumerate(blocks) if block in stored]
    last = [n for n, block in enumerate(ends) if block in stored]
    kept_hashes = [hashes[n] for n in inner] + [hashes[len(blocks) + n] for n in last]
    return (
        [blocks[n] for n in inner],
        [sources[n] for n in inner],
        [ends[n] for n in last],
        [rows[n] for n in last],
        kept_hashes,
    )
