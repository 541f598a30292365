"""Request bodies: checked, and brought into the one form that megatron-core's endpoints can read.

Pure. What the endpoints get holds no null, says greedy and unfiltered sampling in one way, and has
one prompt per choice; what they would ignore or trip over has been refused or set aside.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.inference.coordinator.runtime.http import fields
from megatron.core.inference.coordinator.runtime.http.errors import invalid
from megatron.core.inference.coordinator.runtime.http.fields import Check

MAX_CHOICES = 128
"""Largest `n`."""

MAX_REQUESTS = 4096
"""Most choices of one HTTP request, over all its prompts: each is a request to an engine."""

MAX_LOGPROBS = 20
"""Most alternatives per token."""

GREEDY = {"temperature": 1.0, "top_k": 1, "top_p": 0.0}
"""Greedy sampling. The engine takes the argmax for top_k 1 and divides by the temperature, so a
temperature of 0 never reaches it."""

_COLDEST = 1e-5  # below this a temperature means greedy: logits / temperature would overflow

_NEVER_TAKEN = frozenset(
    {
        "chat_template",
        "tokenizer",
        "parsers",
        "logits_processors",
        "custom_logit_processor",
        "lora_path",
    }
)
"""Fields by which a request could bring code or a path. megatron-core's endpoints read none, but
other servers do: whoever sends one is told, rather than answered as if it had been obeyed."""

_TOKEN_LISTS = ("prompt_token_ids", "generation_token_ids")

_PROMPT_TYPES = (str, int, list)
_PROMPT_FORMS = "a string, a list of strings, a list of token ids, or a list of such lists"

_COMMON: dict[str, Check] = {
    "stream": fields.no_stream,
    "temperature": fields.number(0, 100),
    "top_p": fields.number(0, 1),
    "top_k": fields.integer(-1),
    "n": fields.integer(1, MAX_CHOICES),
    "max_tokens": fields.integer(0),
    "stop": fields.stop_words,
    "ignore_eos": fields.flag,
}
_CHAT = _COMMON | {
    "max_completion_tokens": fields.integer(0),
    "logprobs": fields.flag,
    "top_logprobs": fields.integer(0, MAX_LOGPROBS),
    "skip_prompt_log_probs": fields.flag,
    "add_BOS": fields.flag,
    "tools": fields.json_objects,
    "tool_choice": fields.tool_choice,
    "parallel_tool_calls": fields.flag,
    "chat_template_kwargs": fields.template_variables,
    "prevent_retokenization": fields.flag,
    "return_tokenized_data": fields.flag,
    "return_raw_text": fields.flag,
}
_COMPLETION = _COMMON | {
    "logprobs": fields.integer(0, MAX_LOGPROBS),
    "echo": fields.flag,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """A request as the endpoints get it.

    Attributes:
        body: The normal form.
        copies: Choices per prompt.
        stop: Stop words that the endpoint does not pass on by itself.
    """

    body: dict[str, Any]
    copies: int = 1
    stop: tuple[str, ...] = ()


def chat_plan(body: Any, vocab_size: int | None = None) -> Plan:
    """Plans a chat completion.

    Args:
        body: The decoded JSON body.
        vocab_size: Token ids must be below it; None: unknown.

    Raises:
        ApiError: The request is wrong.
    """
    given = _checked(body, _CHAT)
    given["messages"] = _messages(given.get("messages"), vocab_size)
    if given.get("top_logprobs") and not given.get("logprobs"):
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true.")
    if "max_completion_tokens" in given:
        given["max_tokens"] = given.pop("max_completion_tokens")
    given |= sampling(given, vocab_size)
    return Plan(given, given.get("n", 1), tuple(given.get("stop", ())))


def completion_plan(body: Any, vocab_size: int | None = None) -> Plan:
    """Plans a text completion; choice i belongs to prompt i // n.

    Args:
        body: The decoded JSON body.
        vocab_size: Token ids must be below it; None: unknown.

    Raises:
        ApiError: The request is wrong.
    """
    given = _checked(body, _COMPLETION)
    copies = given.pop("n", 1)
    prompts = _prompts(given.get("prompt"), vocab_size)
    if len(prompts) * copies > MAX_REQUESTS:
        most = MAX_REQUESTS // copies
        raise invalid("prompt", f"prompt must have at most {most} prompts with n {copies}.")
    given["prompt"] = [prompt for prompt in prompts for _ in range(copies)]
    given |= sampling(given, vocab_size)
    return Plan(given, copies)


def sampling(given: Mapping[str, Any], vocab_size: int | None = None) -> dict[str, Any]:
    """The sampling fields in the engine's terms, where 0 turns a filter off.

    The engine's sampler asserts that top_k and top_p are not both on, and that top_k is less than
    the vocabulary; a failed assertion there ends the engine.

    Args:
        given: Checked fields; those missing have OpenAI's defaults.
        vocab_size: Size of the vocabulary; None: unknown.

    Raises:
        ApiError: top_k and top_p are both given.
    """
    temperature = given.get("temperature", 1.0)
    top_p = given.get("top_p", 1.0)
    top_k = max(0, given.get("top_k", 0))
    if vocab_size is not None and top_k >= vocab_size:
        top_k = 0
    if temperature < _COLDEST or top_p == 0 or top_k == 1:
        return dict(GREEDY)
    if top_p == 1:
        top_p = 0.0
    if top_k and top_p:
        raise invalid("top_k", "top_k and top_p cannot be combined; give one of them.")
    return {"temperature": temperature, "top_k": top_k, "top_p": top_p}


def _checked(body: Any, checks: Mapping[str, Check]) -> dict[str, Any]:
    """The fields that are not null, those known ones checked."""
    if not isinstance(body, dict):
        raise invalid(None, "The request body must be a JSON object.", "invalid_type")
    given = {name: value for name, value in body.items() if value is not None}
    for name in sorted(_NEVER_TAKEN & given.keys()):
        raise fields.not_taken(name)
    _shallow(given, "", but=("messages", "prompt"))
    for name, check in checks.items():
        if name in given:
            given[name] = check(name, given[name])
    return given


def _shallow(given: Mapping[str, Any], prefix: str, but: Collection[str]) -> None:
    """Passes fields that are not nested too deeply; those of `but` are checked as a whole."""
    for name, value in given.items():
        if name not in but:
            fields.shallow(f"{prefix}{name}", value)


def _prompts(prompt: Any, vocab_size: int | None) -> list[str] | list[list[int]]:
    """A list of prompts, whatever the form they were given in."""
    if prompt is None or prompt in ("", []):
        raise invalid("prompt", "prompt is missing or empty.", "missing_required_parameter")
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, list) or not any(fields.only(prompts, {t}) for t in _PROMPT_TYPES):
        raise invalid("prompt", f"prompt must be {_PROMPT_FORMS}.", "invalid_type")
    if isinstance(prompts[0], int):
        return [fields.token_ids(vocab_size)("prompt", prompts)]
    check = fields.text if isinstance(prompts[0], str) else fields.token_ids(vocab_size)
    for index, each in enumerate(prompts):
        if not check(f"prompt[{index}]", each):
            raise invalid(f"prompt[{index}]", f"prompt[{index}] is empty.")
    return prompts


def _messages(messages: Any, vocab_size: int | None) -> list[dict[str, Any]]:
    if messages is None or messages == []:
        raise invalid("messages", "messages is missing or empty.", "missing_required_parameter")
    return [
        _message(f"messages[{index}]", each, vocab_size)
        for index, each in enumerate(fields.json_objects("messages", messages))
    ]


def _message(name: str, message: dict[str, Any], vocab_size: int | None) -> dict[str, Any]:
    """A message without nulls whose content is one string."""
    given = {key: value for key, value in message.items() if value is not None}
    if "role" not in given:
        raise invalid(f"{name}.role", f"{name} has no role.", "missing_required_parameter")
    _shallow(given, f"{name}.", but=_TOKEN_LISTS)
    fields.filled_text(f"{name}.role", given["role"])
    given["content"] = _content(f"{name}.content", given.get("content", ""))
    if "tool_calls" in given:
        fields.json_objects(f"{name}.tool_calls", given["tool_calls"])
    for key in _TOKEN_LISTS:
        if key in given:
            fields.token_ids(vocab_size)(f"{name}.{key}", given[key])
    return given


def _content(name: str, content: Any) -> str:
    """A message's text; several text parts become one."""
    if isinstance(content, str):
        return fields.text(name, content)
    if not isinstance(content, list):
        raise invalid(name, f"{name} must be a string or a list of text parts.", "invalid_type")
    content = fields.json_list(name, content)
    return "".join(_part(f"{name}[{index}]", part) for index, part in enumerate(content))


def _part(name: str, part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        part = part["text"]
    if not isinstance(part, str):
        raise invalid(name, f"{name} must be a text part.", "unsupported_value")
    return fields.text(name, part)
