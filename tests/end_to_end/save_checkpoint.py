"""Writes a checkpoint as Megatron does, of the built-in model under another seed.

    save_checkpoint.py FOLDER

Beside it goes `answers.json`: greedy answers of that model, from one engine without any caching.
megatron-core's writer starts processes of its own, so this is a script with a main guard.
"""

import json
import sys
from pathlib import Path

PROMPTS = ["A checkpoint, not a seed.", "Whoever loads it must say the same. " * 8]
ANSWER_TOKENS = 8


def main(folder: Path) -> None:
    from megatron.core.inference.sampling_params import SamplingParams

    from megatron.core import dist_checkpointing
    from megatron.core.inference.coordinator.runtime import model as models

    args = models.parse(argv=[*models.BUILT_IN_MODEL, "--seed", "4321"])
    models.initialize(args)
    model = models.build_model(args)
    iteration = folder / "iter_0000010"
    iteration.mkdir()
    state = {"model": model.sharded_state_dict(), "args": args, "iteration": 10}
    dist_checkpointing.save(state | {"checkpoint_version": 3.0}, str(iteration))
    (folder / "latest_checkpointed_iteration.txt").write_text("10")

    config = models.build_inference_config(args, model, enable_prefix_caching=False)
    engine = models.build_engine(model, models.build_tokenizer(args), config)
    greedy = SamplingParams(num_tokens_to_generate=ANSWER_TOKENS, top_k=1)
    records = engine.generate(PROMPTS, greedy)
    answers = [list(record.merge().generated_tokens) for record in records]
    (folder / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
