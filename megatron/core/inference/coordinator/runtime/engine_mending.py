"""Faults of the released engine that end a server sooner or later, mended from outside."""

from typing import Any

from megatron.core.inference.config import PrefixCachingEvictionPolicy
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

_released_resume = DynamicInferenceContext.resume_paused_requests


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
