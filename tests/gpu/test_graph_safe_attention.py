"""The attention for tests beside the one that serves, and whether a graph can hold it."""

import graph_safe_attention
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from megatron.core.inference.coordinator.runtime import cpu_device

BLOCK, WIDTH, GROUPS, SIZE = 16, 5, 2, 8
QUERIES, KEYS = [19, 7, 0, 1, 0], [19, 40, 0, 33, 0]
"""A whole prompt, the rest of one, nothing, a decode step, and padding."""


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def case(device: str) -> dict[str, torch.Tensor]:
    """Random queries and caches in blocks that nobody else has; what is not filled is NaN."""
    generator = torch.Generator().manual_seed(5)
    blocks = torch.randperm(len(KEYS) * WIDTH, generator=generator)
    table = blocks.reshape(len(KEYS), WIDTH).int()
    filled = torch.zeros(len(blocks), BLOCK, dtype=torch.bool)
    for row, length in enumerate(KEYS):
        own = torch.zeros(WIDTH * BLOCK, dtype=torch.bool)
        own[:length] = True
        filled[table[row].long()] = own.reshape(WIDTH, BLOCK)
        table[row, -(-length // BLOCK) :] = -1
    shape = len(blocks), BLOCK, GROUPS, SIZE
    k, v = (torch.randn(shape, generator=generator) for _ in range(2))
    q = torch.randn(sum(QUERIES) + 6, 3 * GROUPS, SIZE, generator=generator)
    made = {"q": q, "k": k, "v": v, "table": table, "filled": filled}
    made |= {"queries": starts(QUERIES), "keys": starts(KEYS)}
    made["k"][~filled] = made["v"][~filled] = torch.nan
    return {name: tensor.to(device) for name, tensor in made.items()}


def varlen(function, c, **options) -> torch.Tensor:
    return function(
        *(c["q"], c["k"], c["v"], c["queries"], c["keys"], 19, 40),
        causal=True,
        block_table=c["table"],
        **options,
    )


def decode(function, c, **options) -> torch.Tensor:
    q = c["q"][: 3 * len(KEYS)].unflatten(0, (len(KEYS), 3))
    return function(
        *(q, c["k"], c["v"]),
        cache_seqlens=c["keys"].diff(),
        causal=True,
        block_table=c["table"],
        **options,
    )


PAIRS = [
    (varlen, graph_safe_attention.varlen_in_a_graph, cpu_device.flash_attn_varlen_func),
    (
        decode,
        graph_safe_attention.flash_attn_with_kvcache,
        cpu_device.flash_attn_with_kvcache,
    ),
]


@pytest.mark.parametrize("options", [{}, {"window_size": (5, 0)}, {"softmax_scale": 0.3}])
@pytest.mark.parametrize(("call", "ours", "serving"), PAIRS)
def test_it_equals_the_attention_that_serves(call, ours, serving, options, device):
    c = case(device)
    torch.testing.assert_close(call(ours, c, **options), call(serving, c, **options))


@pytest.mark.parametrize(("call", "ours", "serving"), PAIRS)
def test_it_reads_no_tensor_on_the_host_and_the_one_that_serves_does(call, ours, serving):
    with FakeTensorMode() as mode:
        c = {name: mode.from_tensor(tensor) for name, tensor in case("cpu").items()}
        assert call(ours, c).shape[-2:] == (3 * GROUPS, SIZE)
        with pytest.raises(DataDependentOutputException):
            call(serving, c)


@pytest.mark.parametrize(("call", "ours", "serving"), PAIRS)
def test_a_graph_of_it_follows_what_changes_in_place(call, ours, serving, device):
    if device == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    c = case(device)
    call(ours, c)  # what is loaded at the first call cannot be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call(ours, c)
    c["q"].normal_()
    c["table"][[0, 1]] = c["table"][[1, 0]]
    c["keys"][1:3] += 5
    c["k"].nan_to_num_(1.0)
    c["v"].nan_to_num_(1.0)
    graph.replay()
    torch.testing.assert_close(found, call(serving, c))
