"""Paged attention of torch operations that a CUDA graph can hold: for tests, without flash-attn.

    graph_safe_attention.py SCRIPT [arguments]

runs a script with it. Nothing here reads a tensor on the host, and every shape follows from those
of the arguments: so all of a block table is read, whatever is in it, which takes time and memory
for the longest sequence that there may be. The arguments are those of flash-attn's functions, as
runtime/cpu_device.py describes them.
"""

import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.inference.coordinator.runtime import cpu_device

_with_lengths_on_the_host = cpu_device.flash_attn_varlen_func


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """Steps that only decode."""
    assert not return_softmax_lse
    queries = torch.arange(q.shape[1], device=q.device)
    positions = cache_seqlens[:, None] - q.shape[1] + queries
    keys = _gather(k_cache, block_table), _gather(v_cache, block_table)
    return _attend(q, *keys, cache_seqlens, positions, softmax_scale, causal, window_size)


def flash_attn_varlen_func(q: Tensor, *args: Any, **options: Any) -> Tensor:
    """Steps that prefill: graphs hold short ones, long ones would take too much memory."""
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return varlen_in_a_graph(q, *args, **options)
    return _with_lengths_on_the_host(q, *args, **options)


def varlen_in_a_graph(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    block_table: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    return_attn_probs: bool = False,
) -> Tensor:
    """Every query as a sequence of its own, which ends where its sequence does."""
    assert not return_attn_probs
    token = torch.arange(len(q), device=q.device, dtype=cu_seqlens_q.dtype)
    row = torch.searchsorted(cu_seqlens_q[1:], token, right=True).clamp(max=len(block_table) - 1)
    length = cu_seqlens_k.diff()[row]
    position = length - cu_seqlens_q[row + 1] + token
    length = torch.where(token < cu_seqlens_q[-1], length, 0)  # the others are padding
    keys = _gather(k, block_table[row]), _gather(v, block_table[row])
    return _attend(
        q[:, None], *keys, length, position[:, None], softmax_scale, causal, window_size
    )[:, 0]


def _gather(cache: Tensor, block_table: Tensor) -> Tensor:
    """(sequences, width of the table * block size, KV heads, head size)."""
    return cache[block_table.clamp(0, len(cache) - 1)].flatten(1, 2)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    positions: Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
) -> Tensor:
    """Attention of q (s, n, heads, d) at positions (s, n) over the first `lengths` of k and v."""
    s, n, heads, size = q.shape
    groups = k.shape[2]
    left, right = window
    right = 0 if causal else right
    key = torch.arange(k.shape[1], device=q.device)
    filled = key < lengths[:, None]
    seen = filled[:, None].expand(-1, n, -1)
    if left >= 0:
        seen = seen & (key >= positions[..., None] - left)
    if right >= 0:
        seen = seen & (key <= positions[..., None] + right)
    grouped = q.reshape(s, n, groups, heads // groups, size)
    scores = torch.einsum("sngrd,smgd->sgrnm", grouped, k).float()
    scores = scores * (size**-0.5 if scale is None else scale)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0).to(v.dtype)  # padding sees nothing
    v = v.masked_fill(~filled[..., None, None], 0.0)  # whatever was in memory, NaN included
    return torch.einsum("sgrnm,smgd->sngrd", weights, v).reshape(s, n, heads, size)


def install() -> str:
    """Put it in the place of flash-attn if that is missing; returns which attention serves."""
    from megatron.core.inference.contexts import dynamic_context
    from megatron.core.transformer import attention

    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        # Triton builds its launcher with a C compiler; None selects the context's own code.
        dynamic_context.triton_append_key_value_cache = None
    if attention.HAVE_FA4 or attention.HAVE_FA3:
        return "flash-attn 4" if attention.HAVE_FA4 else "flash-attn 3"
    if getattr(attention.flash_attn_varlen_func, "__module__", "").startswith("flash_attn"):
        return "flash-attn 2"
    for module in (attention, cpu_device):  # on a CPU, the overrides take the second's
        module.flash_attn_varlen_func = flash_attn_varlen_func
        module.flash_attn_with_kvcache = flash_attn_with_kvcache
    attention.is_fa_min_version = lambda *_, **__: True
    return "torch (tests/gpu/graph_safe_attention.py)"


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    print("attention:", install(), flush=True)
    runpy.run_path(sys.argv[0], run_name="__main__")
