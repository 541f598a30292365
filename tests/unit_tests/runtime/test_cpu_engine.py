"""megatron-core's engine on the CPU: the attention functions, and answers against a recompute."""

import random
import sys

import pytest
import torch
from megatron.core.inference.config import AsyncScheduleMode, KVCacheManagementMode

from megatron.core.inference.coordinator.runtime import cpu_device


def tokens(count, seed):
    return [random.Random(seed).randrange(256) for _ in range(count)]


def computed(engine):
    """Prompt tokens (computed, skipped) since the engine was made."""
    return engine._prefill_tokens_computed, engine._prefill_tokens_skipped


# --- The attention functions ---


def naive(q, k, v, *, causal=True, window=(-1, -1), scale=None):
    """Attention by its definition: q (n, H, D) over k, v (m, G, D), the last n of m positions."""
    n, heads, size = q.shape
    m, groups, _ = k.shape
    out = torch.empty_like(q)
    for head in range(heads):
        keys, values = k[:, head * groups // heads], v[:, head * groups // heads]
        scores = q[:, head] @ keys.T * (size**-0.5 if scale is None else scale)
        for i in range(n):
            for j in range(m):
                ahead = j - (m - n + i)
                left, right = window
                unseen = (causal and ahead > 0) or (right >= 0 and ahead > right)
                if unseen or (left >= 0 and -ahead > left):
                    scores[i, j] = -torch.inf
        out[:, head] = scores.softmax(-1) @ values
    return out


def paged(lengths, block_size, groups, size, generator):
    """Random caches k and v, a block table, and each sequence's own keys and values."""
    counts = [-(-length // block_size) for length in lengths]
    blocks = torch.randperm(sum(counts) + 3, generator=generator)
    table = torch.full((len(lengths), max(counts) + 2), -1, dtype=torch.int32)
    k, v = torch.randn(2, len(blocks), block_size, groups, size, generator=generator)
    sequences = []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine, blocks = blocks[:count], blocks[count:]
        table[row, :count] = mine
        sequences.append((k[mine].flatten(0, 1)[:length], v[mine].flatten(0, 1)[:length]))
    return k, v, table, sequences


def starts(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("options", [{}, {"window_size": (5, 0)}, {"softmax_scale": 0.3}])
def test_varlen_equals_the_definition(heads, groups, options):
    generator = torch.Generator().manual_seed(heads * 10 + groups)
    # A whole prompt, the rest after a cached prefix, a decode step, and padding.
    queries, keys = [19, 7, 1, 0], [19, 40, 33, 0]
    k, v, table, sequences = paged(keys, 16, groups, 8, generator)
    q = torch.randn(sum(queries) + 5, heads, 8, generator=generator)

    out = cpu_device.flash_attn_varlen_func(
        q, k, v, starts(queries), starts(keys), 19, 40, causal=True, block_table=table, **options
    )

    window, scale = options.get("window_size", (-1, -1)), options.get("softmax_scale")
    parts = [
        naive(part, *own, window=window, scale=scale)
        for part, own in zip(q.split([*queries, 5])[:3], sequences[:3], strict=True)
    ]
    torch.testing.assert_close(out, torch.cat([*parts, torch.zeros(5, heads, 8)]))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_kvcache_equals_the_definition(queries, heads, groups, causal):
    generator = torch.Generator().manual_seed(queries)
    lengths = [16, 37, 5]
    k, v, table, sequences = paged(lengths, 16, groups, 8, generator)
    table = torch.cat([table, torch.full_like(table[:1], -1)])  # a row of padding
    q = torch.randn(4, queries, heads, 8, generator=generator)

    out = cpu_device.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=torch.tensor([*lengths, 0]), causal=causal, block_table=table
    )

    expected = [naive(q[row], *own, causal=causal) for row, own in enumerate(sequences)]
    torch.testing.assert_close(out, torch.stack([*expected, torch.zeros_like(q[3])]))


def test_lengths_are_read_once_a_step_and_not_once_a_layer(cpu_engine, generate, monkeypatch):
    """Where flash-attn is missing on a GPU, each read waits for all layers before."""
    reads = []
    read = torch.Tensor.tolist

    def tolist(self):
        if sys._getframe(1).f_code.co_filename == cpu_device.__file__:
            reads.append(self.shape)
        return read(self)

    engine = cpu_engine()
    generate(engine, [[65] * 40], 1)
    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    generate(engine, [[66] * 40, [67] * 50], 5)
    assert len(reads) == 2 + 4  # queries and keys of the prefill, and keys of each step after it


def test_lengths_that_were_written_to_are_read_anew():
    lengths = torch.tensor([1, 2])
    assert cpu_device._on_host("x", lengths) == [1, 2]
    lengths += 1
    assert cpu_device._on_host("x", lengths) == [2, 3]
    with torch.inference_mode():
        lengths += 1
        assert cpu_device._on_host("x", lengths[:]) == [3, 4]
        made_here = torch.tensor([5])
        assert cpu_device._on_host("x", made_here) == [5]
        made_here += 1
        assert cpu_device._on_host("x", made_here) == [6]


def test_a_softmax_with_a_sink_is_refused():
    q = torch.zeros(1, 1, 1, 8)
    with pytest.raises(NotImplementedError, match="flash-attn"):
        cpu_device.flash_attn_with_kvcache(
            q, q, q, cache_seqlens=torch.tensor([1]), block_table=None, return_softmax_lse=True
        )


# --- The engine ---


def test_installing_again_changes_nothing(built_in_args):
    before = torch.empty, torch.full, torch.cuda.Stream
    cpu_device.install_cpu_overrides()
    assert before == (torch.empty, torch.full, torch.cuda.Stream)


@pytest.mark.parametrize("block_size", [16, 64])
def test_turns_of_a_chat_skip_their_history(cpu_engine, generate, recomputed, block_size):
    engine = cpu_engine(block_size_tokens=block_size)
    first = tokens(200, seed=1)
    (answer,) = generate(engine, [first], 9)
    second = first + answer + tokens(50, seed=2)
    (reply,) = generate(engine, [second], 9)
    (again,) = generate(engine, [second[:192]], 9)

    assert answer == recomputed(first, answer)
    assert reply == recomputed(second, reply)
    assert again == recomputed(second[:192], again)
    # Full blocks of the first prompt; of a prompt that is cached whole, all but the last block.
    skipped = 192, 192 - block_size
    assert computed(engine) == (200 + 259 + 192 - sum(skipped), sum(skipped))


@pytest.mark.parametrize("block_size", [16, 64])
def test_prompts_at_once_share_a_prefix(cpu_engine, generate, recomputed, block_size):
    engine = cpu_engine(block_size_tokens=block_size)
    shared = tokens(130, seed=3)
    prompts = [shared + tokens(20 * k, seed=k) for k in range(5)] + [tokens(77, seed=9)]
    answers = generate(engine, prompts, 9)

    assert answers == [recomputed(*pair) for pair in zip(prompts, answers, strict=True)]
    # One computes the prefix, the other four wait for it and skip it.
    assert computed(engine)[1] == 4 * 128


def test_answers_survive_eviction(cpu_engine, generate, recomputed):
    engine = cpu_engine(buffer_size_gb=41 * 16 * 8192 / 2**30, max_requests=4)
    assert engine.context.kv_block_allocator.total_count == 41
    # Each fills 10 of 40 blocks, its answer included. With an answer that needs one more while no
    # block is free, the released engine stops at an assertion, however many it could evict.
    prompts = [tokens(145 + k, seed=k) for k in range(6)]
    for prompt in prompts * 2:
        (answer,) = generate(engine, [prompt], 9)
        assert answer == recomputed(prompt, answer)
    assert computed(engine)[1] == 0  # the least recently used of six is always the next
    assert generate(engine, [prompts[-1]], 9) == [answer]
    assert computed(engine)[1] == 144
    answers = generate(engine, prompts, 9)
    assert answers == [recomputed(*pair) for pair in zip(prompts, answers, strict=True)]


def test_chunked_prefill(cpu_engine, generate, recomputed):
    engine = cpu_engine(enable_chunked_prefill=True, max_tokens=64, max_requests=8)
    prompts = [tokens(300, seed=4), tokens(40, seed=5), tokens(301, seed=6)]
    answers = generate(engine, prompts, 9)
    longer = prompts[0] + answers[0] + tokens(100, seed=7)
    (reply,) = generate(engine, [longer], 9)

    assert answers == [recomputed(*pair) for pair in zip(prompts, answers, strict=True)]
    assert reply == recomputed(longer, reply)
    assert computed(engine)[1] == 288


@pytest.mark.parametrize("mode", KVCacheManagementMode)
def test_suspend_and_resume(cpu_engine, generate, recomputed, mode):
    engine = cpu_engine(kv_cache_management_mode=mode)
    prompt = tokens(100, seed=8)
    before = generate(engine, [prompt], 9)
    engine.suspend()
    engine.resume()
    after = generate(engine, [prompt], 9)
    assert before == after == [recomputed(prompt, after[0])]
    kept = 0 if mode is KVCacheManagementMode.RECOMPUTE else 96
    assert computed(engine)[1] == kept


@pytest.mark.parametrize(
    "fields",
    [
        {"async_sched_mode": AsyncScheduleMode.ASYNC},
        {"logging_step_interval": 1},
        {"enable_prefix_caching": False},
    ],
)
def test_other_settings_answer_alike(cpu_engine, generate, recomputed, fields):
    engine = cpu_engine(**fields)
    prompts = [tokens(90, seed=10), tokens(35, seed=11)]
    answers = generate(engine, prompts, 9)
    assert answers == [recomputed(*pair) for pair in zip(prompts, answers, strict=True)]


def test_temperature_zero_as_the_http_server_sends_it(cpu_engine, generate):
    engine = cpu_engine()
    prompt = tokens(30, seed=12)
    greedy = generate(engine, [prompt], 9)
    assert generate(engine, [prompt], 9, temperature=0.0) == greedy
    assert generate(engine, [prompt], 9, temperature=50.0, top_k=0) != greedy
