"""What is asked: conversations whose turns share their prefixes, and stand-ins' answers to them."""

import random
import zlib
from typing import Any

from coordinator_bench.frames import SAMPLING

ANSWER_TOKENS = 16
GREEDY: dict[str, Any] = SAMPLING | {
    "num_tokens_to_generate": ANSWER_TOKENS,
    "top_k": 1,
    "termination_id": -1,
}
"""Sampling parameters with which every engine gives the same answer."""

_CONVERSATIONS, _TURNS = 8, 4
_FIRST, _MORE = range(80, 160), range(40, 100)
"""Tokens of a first turn, and what each later one adds."""


def make_prompts(seed: int) -> list[list[int]]:
    """The prompts, as token ids: printable characters of the byte tokenizer."""
    rng = random.Random(seed)
    prompts = []
    for _ in range(_CONVERSATIONS):
        prompt: list[int] = []
        for turn in range(_TURNS):
            length = rng.choice(_MORE if turn else _FIRST)
            prompt = prompt + [rng.randrange(32, 127) for _ in range(length)]
            prompts.append(prompt)
    return prompts


def checksum(packed_prompt: bytes) -> list[int]:
    """What a stand-in answers: tokens that tell whether it got the whole prompt."""
    return list(zlib.crc32(packed_prompt).to_bytes(4, "big"))
