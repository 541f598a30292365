"""megatron-core's dynamic inference engine on a CPU, and on a GPU without flash-attn.

The engine assumes CUDA in a few places only. Each override below replaces one of them by what
serves on a CPU; importing this module replaces nothing. The rest of the model side follows from
them: megatron-core's memory buffer and rotary embedding ask `torch.cuda.current_device` where to
live, and get a CPU.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Window = tuple[int, int]
_EVERYTHING: Window = (-1, -1)


def install_cpu_overrides() -> None:
    """Makes the engine run on a CPU, in this process. Calling it again changes nothing.

    Call it before the model is built. A spawned child needs its own call.
    """
    if torch.cuda.current_device is _cpu:
        return
    from megatron.core.inference.contexts import dynamic_context

    # 1. Where the engine, the memory buffer and the rotary embedding allocate.
    torch.cuda.current_device = _cpu
    # 2. The controller makes a copy stream; nothing on a CPU is ever put on it.
    torch.cuda.Stream = _Stream
    # 3. Pinned memory speeds up copies to a GPU, and cannot be had without its driver.
    _drop_pinning()
    # 4., 5., 6. The kernels of flash-attn are for GPUs.
    install_attention_overrides()
    # 7. None selects the context's own Python code; a Triton kernel needs a GPU.
    dynamic_context.triton_append_key_value_cache = None
    # 8., 9. Suspend and resume wait for the device and log its memory; so does a checkpoint.
    torch.cuda.synchronize = _synchronize
    torch.cuda.memory_stats = _memory_stats
    # Beyond those nine. --inference-logging-step-interval and asynchronous scheduling record
    # events, which needs a GPU.
    torch.cuda.Event = _Event
    torch.cuda.current_stream = _Stream
    # Batches are padded to 64 tokens, which suits the kernels of a GPU; a CPU computes each one
    # (a step that decodes for one request: 14 ms, with 8: 9 ms).
    dynamic_context.DynamicInferenceContext.TOKEN_ROUNDER = 8


def install_attention_overrides() -> None:
    """Overrides 4 to 6: paged attention without flash-attn, on whatever device the query is.

    Alone, they let a GPU serve on which flash-attn is not installed. Not in CUDA graphs: they read
    the lengths of the sequences on the host.
    """
    from megatron.core.transformer import attention

    # 4. Steps that prefill. 5. Steps that only decode.
    attention.flash_attn_varlen_func = flash_attn_varlen_func
    attention.flash_attn_with_kvcache = flash_attn_with_kvcache
    # 6. Attention refuses dynamic batching unless flash-attn is new enough for paging.
    attention.is_fa_min_version = _any_version


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _EVERYTHING,
    block_table: Tensor,
    return_attn_probs: bool = False,
) -> Tensor:
    """Attention of packed queries over a paged KV cache, for steps that prefill.

    The last query of a sequence is aligned with its last key, so a sequence may have more keys
    than queries (a prefix that was cached, an earlier chunk).

    Args:
        q: Queries of all sequences, one after the other: (tokens, heads, head size). Rows past
            the last sequence are padding; they come back as zeros.
        k: Keys of the whole cache: (blocks, block size, KV heads, head size). `heads` is a
            multiple of `KV heads`.
        v: Values, shaped as `k`.
        cu_seqlens_q: Where each sequence's queries begin, and where the last one's end:
            (sequences + 1,).
        cu_seqlens_k: The same for keys, of which the lengths are used: (sequences + 1,).
        max_seqlen_q: Unused, the kernel of flash-attn needs it.
        max_seqlen_k: Unused, the kernel of flash-attn needs it.
        softmax_scale: Factor on the scores; 1 / sqrt(head size) if None.
        causal: Whether a query sees later keys.
        window_size: How many keys to the left and to the right a query sees; -1: all.
        block_table: Blocks of each sequence, in order: (sequences, any width). Entries past a
            sequence's length are not read.
        return_attn_probs: Must be False: torch's attention gives no log-sum-exp.

    Returns:
        Shaped as `q`.

    Raises:
        NotImplementedError: The model's softmax has a sink, which needs the log-sum-exp.
    """
    _refuse_log_sum_exp(return_attn_probs)
    query_bounds = pairwise(_on_host("cu_seqlens_q", cu_seqlens_q))
    key_bounds = pairwise(_on_host("cu_seqlens_k", cu_seqlens_k))
    out = torch.zeros_like(q)
    for row, (bounds, (begin, end)) in enumerate(zip(query_bounds, key_bounds, strict=True)):
        queries, kv_length = slice(*bounds), end - begin
        if queries.start < queries.stop:
            keys = _gather(k, v, block_table[row], kv_length)
            out[queries] = _attend(q[queries], *keys, softmax_scale, causal, window_size)
    return out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _EVERYTHING,
    block_table: Tensor,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """Attention of a few queries per sequence over a paged KV cache, for steps that only decode.

    Args:
        q: Queries: (sequences, queries each, heads, head size).
        k_cache: Keys of the whole cache: (blocks, block size, KV heads, head size).
        v_cache: Values, shaped as `k_cache`.
        cache_seqlens: Keys of each sequence, those of its queries included: (sequences,). A
            sequence without keys is padding, and its rows come back as zeros.
        softmax_scale: See `flash_attn_varlen_func`, also for the next three.
        causal: -
        window_size: -
        block_table: -
        num_splits: Unused, the kernel of flash-attn needs it.
        return_softmax_lse: Must be False: torch's attention gives no log-sum-exp.

    Returns:
        Shaped as `q`.

    Raises:
        NotImplementedError: The model's softmax has a sink, which needs the log-sum-exp.
    """
    _refuse_log_sum_exp(return_softmax_lse)
    out = torch.zeros_like(q)
    for row, kv_length in enumerate(_on_host("cache_seqlens", cache_seqlens)):
        if kv_length:
            keys = _gather(k_cache, v_cache, block_table[row], kv_length)
            out[row] = _attend(q[row], *keys, softmax_scale, causal, window_size)
    return out


_read_lengths: dict[str, tuple[Tensor, int, list[int]]] = {}
"""What was read last, by the name of the argument: the tensor, its version and its values."""


def _on_host(name: str, lengths: Tensor) -> list[int]:
    """Read lengths once a step: all layers get the same tensor, and each read waits for the GPU."""
    if lengths.is_inference():  # of these torch does not tell whether they were written to
        return lengths.tolist()
    tensor, version, values = _read_lengths.get(name, (None, 0, []))
    if tensor is not lengths or version != lengths._version:
        values = lengths.tolist()
        _read_lengths[name] = lengths, lengths._version, values
    return values


def _gather(k: Tensor, v: Tensor, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """A sequence's keys and values out of the cache: (length, KV heads, head size) each."""
    used = blocks[: -(-length // k.shape[1])]
    # A third of the time that k[used] takes.
    k, v = k.index_select(0, used), v.index_select(0, used)
    return k.flatten(0, 1)[:length], v.flatten(0, 1)[:length]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, window: Window
) -> Tensor:
    """One sequence's attention: q (n, heads, head size) over k and v (m, KV heads, head size)."""
    n, m = q.shape[0], k.shape[0]
    square = causal and n == m and window == _EVERYTHING
    mask = None if square else _mask(n, m, causal, window, q.device)
    # torch wants the heads before the sequence, and a batch.
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    out = scaled_dot_product_attention(
        q, k, v, mask, is_causal=square, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out[0].transpose(0, 1)


def _mask(n: int, m: int, causal: bool, window: Window, device: torch.device) -> Tensor | None:
    """Which of m keys each of the last n positions sees: (n, m), or None for all."""
    left, right = window
    if causal:
        right = 0
    if left < 0 and (right < 0 or n == 1):
        return None
    position = torch.arange(m - n, m, device=device)[:, None]
    key = torch.arange(m, device=device)
    seen = torch.ones(n, m, dtype=torch.bool, device=device)
    if left >= 0:
        seen &= key >= position - left
    if right >= 0:
        seen &= key <= position + right
    return seen


def _refuse_log_sum_exp(wanted: bool) -> None:
    if wanted:
        raise NotImplementedError(
            "This model's softmax has a sink (--softmax-type), which needs flash-attn to serve."
        )


def _any_version(version: str, check_equality: bool = True) -> bool:
    return True


def _cpu() -> torch.device:
    return torch.device("cpu")


def _synchronize(device: Any = None) -> None:
    pass


def _memory_stats(device: Any = None) -> dict[str, int]:
    """The figures the engine reads out; there is no device memory to report."""
    return dict.fromkeys(
        (
            "allocation.all.current",
            "allocated_bytes.all.current",
            "reserved_bytes.all.current",
        ),
        0,
    )


def _drop_pinning() -> None:
    """Takes pin_memory out of the calls with which the engine allocates.

    A `TorchFunctionMode` would do it in one place, but a mode belongs to the thread that entered
    it, and an engine that resumes in another thread allocates there.
    """
    for name in ("empty", "full", "empty_like"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, device=None: self


def _unpinned(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def allocate(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return factory(*args, **kwargs)

    return allocate


class _Stream:
    """Stands for a CUDA stream that nobody uses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Event:
    """Stands for a CUDA event: on a CPU, work is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: _Event) -> float:
        """Milliseconds from this event to a later one."""
        return (later._time - self._time) * 1e3
