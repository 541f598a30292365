"""Replicas with megatron-core's engine on the CPU: the server's tool, and one to compare with."""

import json
import os

# All that takes long to import: whoever forks from a process that has done it starts at once.
import megatron.core.inference.engines.dynamic_engine
import megatron.training.initialize
import run_dynamic_text_generation_server as tool
import torch
from megatron.core.inference.sampling_params import SamplingParams

import megatron.core.inference.coordinator.runtime.serving  # noqa: F401
from campaign.prompts import GREEDY
from megatron.core.inference.coordinator.runtime import model as models
from megatron.core.inference.coordinator.runtime import private_files

_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def serve(address: str, key_file: str, name: str) -> None:
    """A replica of a job of its own, until it is killed.

    Args:
        address: The coordinator's.
        key_file: Its keys.
        name: Of the job; no other one has it.
    """
    os.environ |= _ALONE | {"TORCHELASTIC_RUN_ID": name}
    torch.set_num_threads(1)
    tool.main(
        [
            *("--device=cpu", "--frontend-replicas=0"),
            f"--inference-coordinator-address={address}",
            f"--inference-coordinator-key-file={key_file}",
        ]
    )


def answer_alone(prompts: list[list[int]], path: str) -> None:
    """Answer prompts one by one, without any caching; the file gets the answers as JSON."""
    os.environ |= _ALONE
    torch.set_num_threads(1)
    args = models.parse(argv=models.BUILT_IN_MODEL)
    models.initialize(args)
    model = models.build_model(args)
    config = models.build_inference_config(args, model, enable_prefix_caching=False)
    engine = models.build_engine(model, models.build_tokenizer(args), config)
    params = SamplingParams.deserialize(GREEDY)
    answers = [
        list(record.merge().generated_tokens)
        for prompt in prompts
        for record in engine.generate([prompt], params)
    ]
    private_files.write(path, json.dumps(answers))
