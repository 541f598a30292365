"""Greedy answers of one engine without any caching, to compare others with.

    one_engine.py FILE

The file gets them as JSON, by prompt (`PROMPTS`).
"""

import json
import random
import sys
from pathlib import Path

ANSWER_TOKENS = 40
_SOURCE = random.Random(11)
PROMPTS = [
    [_SOURCE.randrange(32, 127) for _ in range(_SOURCE.randrange(100, 300))] for _ in range(12)
]


def main(file: Path) -> None:
    from megatron.core.inference.sampling_params import SamplingParams

    from megatron.core.inference.coordinator.runtime import model as models

    args = models.parse(argv=models.BUILT_IN_MODEL)
    models.initialize(args)
    model = models.build_model(args)
    config = models.build_inference_config(args, model, enable_prefix_caching=False)
    engine = models.build_engine(model, models.build_tokenizer(args), config)
    greedy = SamplingParams(num_tokens_to_generate=ANSWER_TOKENS, top_k=1, termination_id=-1)
    answers = [
        list(record.merge().generated_tokens)
        for prompt in PROMPTS
        for record in engine.generate([prompt], greedy)
    ]
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(answers))
    partial.replace(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
