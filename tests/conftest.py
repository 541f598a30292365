"""Fixtures for tests that run megatron-core's real engine in this process, as a rule on the CPU.

Importing megatron.core takes seconds: the fixtures import it, not this module, and share one model.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest


@pytest.fixture(scope="session")
def model_arguments() -> Sequence[str]:
    """Megatron's arguments of the model that tests share; tests/gpu has another on a GPU."""
    from megatron.core.inference.coordinator.runtime import model

    return model.BUILT_IN_MODEL


@pytest.fixture(scope="session")
def built_in_args(model_arguments: Sequence[str]) -> Iterator[Any]:
    """Parsed arguments of the built-in model, in a process group of one."""
    import torch

    from megatron.core.inference.coordinator.runtime import model

    torch.set_num_threads(1)
    args = model.parse(argv=model_arguments)
    model.initialize(args)
    yield args
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def built_in_model(built_in_args: Any) -> Any:
    """The built-in model. Tests share it: restore what you change."""
    from megatron.core.inference.coordinator.runtime import model

    return model.build_model(built_in_args)


@pytest.fixture(scope="session")
def cpu_engine(built_in_args: Any, built_in_model: Any) -> Callable[..., Any]:
    """`cpu_engine(**fields)`: a new engine for the built-in model.

    Prefix caching is on, with blocks of 16 tokens, lru eviction and room for 6,500 tokens; any
    field of `InferenceConfig` overrides that.
    """
    from megatron.core.inference.config import PrefixCachingEvictionPolicy

    from megatron.core.inference.coordinator.runtime import model

    def make(**fields: Any) -> Any:
        defaults = {
            "block_size_tokens": 16,
            "buffer_size_gb": 0.05,
            "enable_prefix_caching": True,
            "prefix_caching_eviction_policy": PrefixCachingEvictionPolicy.LRU,
        }
        config = model.build_inference_config(built_in_args, built_in_model, **defaults | fields)
        return model.build_engine(built_in_model, model.build_tokenizer(built_in_args), config)

    return make


@pytest.fixture
def generate() -> Callable[..., list[list[int]]]:
    """`generate(engine, prompts, count)`: steps until all prompts are answered, greedily.

    The prompts are token ids and run at the same time. Returns each one's generated ids.
    """
    from megatron.core.inference.sampling_params import SamplingParams

    def run(engine: Any, prompts: Sequence[list[int]], count: int, **sampling: Any):
        params = {"num_tokens_to_generate": count, "top_k": 1, "termination_id": -1} | sampling
        ids = [next(engine.request_counter) for _ in prompts]
        for request_id, prompt in zip(ids, prompts, strict=True):
            engine.add_request(request_id, prompt, SamplingParams(**params))
        answers = {}
        while engine.has_unfinished_requests():
            for record in engine.step_modern()["finished_request_records"]:
                answers[record.request_id] = list(record.merge().generated_tokens)
        return [answers[request_id] for request_id in ids]

    return run


@pytest.fixture(scope="session")
def recomputed(built_in_model: Any) -> Callable[[list[int], list[int]], list[int]]:
    """`recomputed(prompt, answer)`: the greedy answer without any cache.

    One plain forward pass over prompt and answer gives, at each place, the token that the model
    would put there after what precedes it. The result equals `answer` exactly where every one
    of its tokens is the greedy choice.
    """
    import torch

    def run(prompt: list[int], answer: list[int]) -> list[int]:
        with torch.inference_mode(), next(built_in_model.parameters()).device:
            tokens = torch.tensor([[*prompt, *answer[:-1]]])
            length = tokens.shape[1]
            later = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
            positions = torch.arange(length)[None]
            logits = built_in_model(tokens, positions, later, runtime_gather_output=True)
        return logits[0, len(prompt) - 1 :].argmax(-1).tolist()

    return run
