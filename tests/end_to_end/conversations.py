"""Multi-turn sessions against a server, and what one infinite cache would have skipped."""

import random
from dataclasses import dataclass, field

from openai import OpenAI

from megatron.core.inference.coordinator.hashing import block_hashes, expected_skip

SESSIONS, TURNS = 7, 4
BLOCK_SIZE = 64
ANSWER_TOKENS = 8
_SYSTEM_TOKENS = 100
_FIRST_TOKENS = (300, 700)
_TURN_TOKENS = (80, 200)


@dataclass
class Run:
    """What was sent and what came back.

    Attributes:
        answers: Generated token ids by (session, turn).
        prompt_tokens: Prompt tokens, over all requests.
        cached_tokens: Of these, whose prefill was skipped.
        skippable_tokens: Of these, what one infinite cache would have skipped.
    """

    answers: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    skippable_tokens: int = 0

    @property
    def share(self) -> float:
        """What was skipped of what could have been."""
        return self.cached_tokens / self.skippable_tokens


def hold_conversations(urls: list[str], seed: int = 7) -> Run:
    """Run the sessions turn by turn, in a new order each turn, one request after another.

    The prompts depend on the seed and the answers alone, so that runs can be compared.
    """
    clients = [OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) for url in urls]
    text, order = random.Random(seed), random.Random(seed + 1)
    system = _tokens(text, _SYSTEM_TOKENS)
    histories = [system + _tokens(text, text.randint(*_FIRST_TOKENS)) for _ in range(SESSIONS)]
    additions = [
        [_tokens(text, text.randint(*_TURN_TOKENS)) for _ in range(TURNS)] for _ in range(SESSIONS)
    ]
    run, infinite_cache = Run(), set()
    for turn in range(TURNS):
        for session in order.sample(range(SESSIONS), SESSIONS):
            prompt = histories[session]
            client = clients[(session + turn) % len(clients)]
            answer = client.completions.create(
                model="megatron", prompt=prompt, max_tokens=ANSWER_TOKENS, temperature=0
            )
            generated = answer.choices[0].generation_token_ids
            run.answers[session, turn] = generated
            run.prompt_tokens += answer.usage.prompt_tokens
            run.cached_tokens += answer.usage.prompt_tokens_details.cached_tokens
            run.skippable_tokens += _infinite_skip(prompt, infinite_cache)
            histories[session] = prompt + generated + additions[session][turn]
    return run


def five_turn_chat(url: str) -> None:
    """Five turns of a chat: each finds the whole blocks of the prompt before it cached."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    messages = [{"role": "system", "content": "You know everything. " * 20}]
    before = 0
    for turn in range(5):
        messages.append({"role": "user", "content": f"And what about number {turn}? " * 4})
        answer = client.chat.completions.create(
            model="megatron", messages=messages, max_tokens=8, temperature=0
        )
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert cached == before // BLOCK_SIZE * BLOCK_SIZE
        before = answer.usage.prompt_tokens
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})


def _infinite_skip(prompt: list[int], cache: set[int]) -> int:
    hashes = block_hashes(prompt, BLOCK_SIZE)
    held = sum(block in cache for block in hashes)
    cache.update(hashes)
    return expected_skip(len(prompt), held, BLOCK_SIZE)


def _tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(32, 127) for _ in range(count)]
