"""Whatever bytes come, the front end answers in OpenAI's words, and serves whoever is beside.

HTTP_FUZZ_EXAMPLES says how many connections to attack; docs/reliability.md has the long run.
"""

import asyncio
import json
import logging
import os
import time
from collections import Counter
from statistics import mean
from typing import Any

import jinja2.sandbox
import psutil
import pytest
from http_attacks import Attack, attacks
from http_line import Answer, Line, request
from hypothesis import HealthCheck, Phase, given, seed, settings
from megatron.core.inference.text_generation_server.dynamic_text_gen_server.endpoints import (
    chat_completions,
    completions,
)

from megatron.core.inference.coordinator.runtime import wire
from megatron.core.inference.coordinator.runtime.byte_tokenizer import ByteTokenizer
from megatron.core.inference.coordinator.runtime.client import Overloaded, RequestFailed
from megatron.core.inference.coordinator.runtime.http import gate
from megatron.core.inference.coordinator.runtime.http.access import ApiKeys
from megatron.core.inference.coordinator.runtime.http.app import build_app
from megatron.core.inference.coordinator.runtime.http.limits import HttpSettings

EXAMPLES = int(os.environ.get("HTTP_FUZZ_EXAMPLES", "400"))
ROUND = 1000  # hypothesis remembers what it tried: a new test a round keeps its memory small
FIRST_SEED = int(os.environ.get("HTTP_FUZZ_SEED", "0"))
APPS = (0, 0, 0, 1, 1, 1, 2, 3)  # how often which is attacked; the last asks for a key
LIMITS = HttpSettings(max_body_mib=1, max_header_kib=8)
BESIDE = request("/v1/completions", {"prompt": "beside", "max_tokens": 4})
PARSERS = ["deepseek-r1-reasoning", "qwen3-coder-tool"]
TEMPLATE = """
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}
{{- call.function.arguments | tojson }}{% endfor %}
{%- endfor %}{{ a }}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
TEXTS = {
    "ok": "fine",
    "tool call": "<think>so</think><tool_call><function=f><parameter=x>[1]</parameter></function>"
    "</tool_call>",
    "odd tool call": f"<tool_call><function=f><parameter=x><parameter=x>{'[' * 5000}</function>",
}


class TemplateTokenizer(ByteTokenizer):
    """With a template such as models have, in the sandbox that they are rendered in."""

    def __init__(self):
        self._template = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(TEMPLATE)

    def apply_chat_template(self, conversation, chat_template=None, *, tokenize, tools, **kwargs):
        assert tokenize
        assert chat_template is None
        return self.tokenize(self._template.render(messages=conversation, tools=tools, **kwargs))


class PlainTokenizer(ByteTokenizer):
    chat_template = None


class Client:
    """Answers at once as it is told, after doing and checking what a client and an engine do."""

    def __init__(self):
        self.outcomes: list[str] = []

    def add_request(self, prompt: Any, params: Any) -> asyncio.Future:
        _check_as_an_engine_would(prompt, params)
        future = asyncio.get_running_loop().create_future()
        outcome = self.outcomes.pop(0) if self.outcomes else "ok"
        if outcome == "overloaded":
            future.set_exception(Overloaded(outcome, "100000 requests are waiting"))
        elif outcome in ("no_replica", "replica_lost", "fleet_paused"):
            future.set_exception(RequestFailed(outcome, "none is there"))
        elif outcome == "overflow":
            event = {"type": "ERROR_NONTRANSIENT", "payload": "MaxSequenceLengthOverflowError(7)"}
            future.set_result(_reply(prompt, params, "") | {"status": "FAILED", "events": [event]})
        else:
            future.set_result(_reply(prompt, params, TEXTS[outcome]))
        return future

    def start_cuda_profiler(self) -> None: ...

    def stop_cuda_profiler(self) -> None: ...


def _check_as_an_engine_would(prompt: Any, params: Any) -> None:
    wire.pack(params.serialize())
    wire.pack(list(prompt))
    assert all(0 <= token < ByteTokenizer.vocab_size for token in prompt)
    assert params.temperature > 0
    assert params.top_k < ByteTokenizer.vocab_size
    assert all(word.encode() for word in params.stop_words or ())


def _reply(prompt: Any, params: Any, text: str) -> dict[str, Any]:
    limit = params.num_tokens_to_generate
    tokens = list(text.encode())[:limit]
    return {
        "status": "COMPLETED",
        "events": [],
        "prompt_tokens": list(prompt) if params.return_prompt_tokens else None,
        "prompt_length": len(prompt),
        "prompt_log_probs": None if params.skip_prompt_log_probs else [-2.0] * (len(prompt) - 1),
        "generated_text": text,
        "generated_tokens": tokens,
        "generated_log_probs": [-0.5] * len(tokens) if params.return_log_probs else None,
        "generated_top_n_logprobs": [{"x": -0.1}] * len(tokens) if params.top_n_logprobs else None,
        "sampling_params": {"num_tokens_to_generate": 9 if limit is None else limit},
        "policy_epoch": None,
        "kv_cache_epoch": None,
        "routing_indices": None,
        "num_cached_tokens": 0,
    }


class Target:
    """Applications under attack, one that is not, and what came of it.

    Attributes:
        tally: How often which status was answered.
        faults: What was logged as an error of ours, or escaped.
    """

    def __init__(self):
        self.tally: Counter[str] = Counter()
        self.faults: list[str] = []
        self._client = Client()
        self._methods: list[str] = []
        self._apps = [
            self._gate(ByteTokenizer()),
            self._gate(TemplateTokenizer(), parsers=PARSERS),
            self._gate(PlainTokenizer()),
            self._gate(ByteTokenizer(), keys=["key"]),
        ]
        unharmed = build_app(Client(), ByteTokenizer())
        self._beside = gate.Gate(unharmed, ApiKeys(), LIMITS.largest_body())

    def _gate(self, tokenizer: Any, parsers: Any = (), keys: Any = ()) -> gate.Gate:
        app = build_app(
            self._client, tokenizer, parsers=list(parsers), max_body_bytes=LIMITS.largest_body()
        )
        methods = self._methods

        class Watched(gate.Gate):
            async def __call__(self, scope, receive, send):
                methods.append(scope["method"])
                await super().__call__(scope, receive, send)

        return Watched(app, ApiKeys(keys), LIMITS.largest_body(), body_budget=2**20)

    async def take(self, attack: Attack) -> None:
        """One connection of an attacker, and one of somebody else in the middle of it."""
        self._methods.clear()
        self._client.outcomes = list(attack.outcomes)
        line = Line(self._apps[attack.app], LIMITS)
        middle = len(attack.pieces) // 2
        await line.send(attack.pieces[:middle])
        await self._serve_somebody_else()
        await line.send(attack.pieces[middle:])
        await line.settle()
        answers = line.answers(self._methods)
        await line.hang_up()
        assert answers or not attack.whole, "a whole request got no answer"
        self.tally["none"] += not answers
        for number, answer in enumerate(answers):
            self._judge(answer, self._methods[number] if number < len(self._methods) else "")
        assert self.faults == []

    async def _serve_somebody_else(self) -> None:
        line = Line(self._beside, LIMITS)
        await line.send(BESIDE)
        await line.settle()
        [answer] = line.answers()
        assert (answer.status, answer.body["choices"][0]["text"]) == (200, "fine"), answer
        await line.hang_up()

    def _judge(self, answer: Answer, method: str) -> None:
        self.tally[str(answer.status)] += 1
        if method == "HEAD" or (method == "OPTIONS" and answer.status == 200):
            return
        assert answer.headers["content-type"] == "application/json", answer
        if answer.status == 200:
            assert answer.body.keys() & {"choices", "data", "status", "object"}, answer
            return
        assert answer.body.keys() == {"error"}
        error = answer.body["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["type"] in ("invalid_request_error", "rate_limit_error", "server_error")
        assert isinstance(error["param"], str | None)
        assert isinstance(error["code"], str)
        assert answer.status < 500 or answer.status == 503, (answer, self.faults)
        unavailable = ("no_replica", "replica_lost", "fleet_paused")
        assert (answer.status == 503) == (error["code"] in unavailable)
        assert (answer.status == 429) == (error["code"] == "overloaded")
        assert ("retry-after" in answer.headers) == (answer.status in (429, 503))
        assert ("www-authenticate" in answer.headers) == (answer.status == 401)


@pytest.fixture
def target(monkeypatch):
    monkeypatch.setattr(gate, "LINGER_S", 0.0)
    target = Target()

    class Ear(logging.Handler):
        def emit(self, record):
            if record.name.startswith("uvicorn") or ".runtime.http" in record.name:
                target.faults.append(record.getMessage())

    ear = Ear(logging.ERROR)
    logging.getLogger().addHandler(ear)
    # They log what is wrong with a request, and pytest would keep all of it.
    for each in (chat_completions, completions):
        monkeypatch.setattr(each.logger, "disabled", True)
    yield target
    logging.getLogger().removeHandler(ear)


def attack_for_a_round(runner: asyncio.Runner, target: Target, number: int) -> int:
    """Attacks ROUND times, or EXAMPLES if that is less; this process's memory in MiB then."""

    @seed(FIRST_SEED + number)
    @settings(
        max_examples=min(ROUND, EXAMPLES),
        database=None,
        deadline=None,
        phases=[Phase.generate],  # making a counter-example smaller would take minutes
        suppress_health_check=list(HealthCheck),
    )
    @given(attacks(APPS))
    def attack(example):
        runner.run(target.take(example))

    attack()
    return psutil.Process().memory_info().rss // 2**20


@pytest.mark.timeout(120 + EXAMPLES // 10)
def test_fuzz(target):
    began = time.monotonic()
    with asyncio.Runner() as runner:
        report = lambda _, context: target.faults.append(str(context))  # noqa: E731
        runner.get_loop().set_exception_handler(report)
        rounds = range(-(-EXAMPLES // ROUND))
        memory = [attack_for_a_round(runner, target, number) for number in rounds]
    fifth = -(-len(memory) // 5)
    early, late = round(mean(memory[fifth:][:fifth] or memory)), round(mean(memory[-fifth:]))
    summary = {
        "examples": EXAMPLES,
        "seconds": round(time.monotonic() - began),
        "answers": dict(sorted(target.tally.items())),
        "rss_mib": [early, late],
    }
    print("\nhttp_fuzz", json.dumps(summary))
    assert target.tally["200"] > EXAMPLES / 20
    assert late - early < 64
