"""A distributed checkpoint written by megatron-core is served on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import save_checkpoint
from openai import OpenAI
from serving import serve


def test_a_checkpoint_is_served(tmp_path):
    script = Path(save_checkpoint.__file__)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    subprocess.run([sys.executable, script, checkpoint], check=True, timeout=120)
    expected = json.loads((checkpoint / "answers.json").read_text())

    flags = [f"--load={checkpoint}", "--use-checkpoint-args", "--frontend-replicas=1"]
    with serve(tmp_path, *flags, replicas=1) as served:
        client = OpenAI(base_url=f"{served.urls[0]}/v1", api_key="none")
        completion = client.completions.create(
            model="megatron",
            prompt=save_checkpoint.PROMPTS,
            max_tokens=save_checkpoint.ANSWER_TOKENS,
            temperature=0,
        )
    assert f"loaded {checkpoint / 'iter_0000010'}" in served.log
    assert [choice.generation_token_ids for choice in completion.choices] == expected
