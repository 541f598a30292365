"""Request bodies: checked, and brought into the one form that megatron-core's endpoints can read.

Pure. What the endpoints get holds no null and no field that they do not read, and says greedy and
unfiltered sampling in one way; what they would trip over has been refused or set aside.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.inference.coordinator.runtime.http import errors, fields
from megatron.core.inference.coordinator.runtime.http.errors import invalid
from megatron.core.inference.coordinator.runtime.http.fields import Check

MAX_CHOICES = 128
"""Largest `n`."""

MAX_REQUESTS = 4096
"""Most choices of one HTTP request, over all its prompts: each is a request to an engine."""

DEFAULT_COMPLETION_TOKENS = 16
"""What the completions endpoint generates where a request does not say."""

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
class Bounds:
    """What the model and the server's settings let a request ask for.

    Attributes:
        vocab_size: Token ids must be below it; None: unknown.
        max_sequence_tokens: Longest sequence of the model; None: unknown.
        max_request_tokens: Most tokens over all choices of an HTTP request, of prompts and of
            answers.
    """

    vocab_size: int | None = None
    max_sequence_tokens: int | None = None
    max_request_tokens: int = 2**22

    def check_prompt(self, tokens: int, copies: int = 1, param: str | None = None) -> None:
        """Refuses what the engine would: a prompt that leaves no room at all is one too many.

        An answer that does not fit is cut to what is left, there as in other servers.

        Args:
            tokens: Length of the prompt.
            copies: Choices that it is for.
            param: Where it stands in the request.

        Raises:
            ApiError: It is too long.
        """
        most = self.max_sequence_tokens
        if most is not None and tokens > most:
            raise errors.context_exceeded(tokens, most, param)
        self.check_total(tokens * copies, "The prompts of its choices", param)

    def check_answers(self, max_tokens: int, choices: int) -> None:
        """Refuses answers that are too much together.

        Args:
            max_tokens: Most tokens of each.
            choices: How many there are.

        Raises:
            ApiError: They are too much.
        """
        what = f"{choices} choices of up to {max_tokens} tokens"
        self.check_total(max_tokens * choices, what, "max_tokens")

    def check_total(self, tokens: int, what: str, param: str | None) -> None:
        """Refuses more tokens than one request may have.

        Raises:
            ApiError: They are more.
        """
        if tokens > self.max_request_tokens:
            raise invalid(
                param,
                f"{what} are {tokens} tokens; this server takes requests of up to "
                f"{self.max_request_tokens} (--http-max-request-tokens). Send several requests.",
                "request_too_large",
            )


UNBOUNDED = Bounds()


@dataclass(frozen=True, slots=True)
class Plan:
    """A request as the endpoints get it.

    Attributes:
        body: The normal form.
        copies: Choices per prompt; a completion's prompts are not repeated for them yet.
        stop: Stop words that the endpoint does not pass on by itself.
    """

    body: dict[str, Any]
    copies: int = 1
    stop: tuple[str, ...] = ()


def chat_plan(body: Any, bounds: Bounds = UNBOUNDED) -> Plan:
    """Plans a chat completion.

    Args:
        body: The decoded JSON body.
        bounds: What it may ask for. What it asks for without saying so, it is to be checked for
            when its prompt is known.

    Raises:
        ApiError: The request is wrong.
    """
    given = _checked(body, _CHAT, "messages")
    reuse = given.get("prevent_retokenization", True)
    given["messages"] = _messages(given.get("messages"), bounds.vocab_size, reuse)
    if given.get("top_logprobs") and not given.get("logprobs"):
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true.")
    if "max_completion_tokens" in given:
        given["max_tokens"] = given.pop("max_completion_tokens")
    given |= sampling(given, bounds.vocab_size)
    copies = given.get("n", 1)
    bounds.check_answers(given.get("max_tokens", 0), copies)
    return Plan(given, copies, tuple(given.get("stop", ())))


def completion_plan(body: Any, bounds: Bounds = UNBOUNDED) -> Plan:
    """Plans a text completion; choice i belongs to prompt i // n.

    Args:
        body: The decoded JSON body.
        bounds: What it may ask for.

    Raises:
        ApiError: The request is wrong.
    """
    given = _checked(body, _COMPLETION, "prompt")
    copies = given.pop("n", 1)
    prompts = given["prompt"] = _prompts(given.get("prompt"), bounds.vocab_size)
    if len(prompts) * copies > MAX_REQUESTS:
        most = MAX_REQUESTS // copies
        raise invalid("prompt", f"prompt must have at most {most} prompts with n {copies}.")
    given |= sampling(given, bounds.vocab_size)
    max_tokens = given.get("max_tokens", DEFAULT_COMPLETION_TOKENS)
    bounds.check_answers(max_tokens, len(prompts) * copies)
    return Plan(given, copies)


def sampling(given: Mapping[str, Any], vocab_size: int | None = None) -> dict[str, Any]:
    """The sampling fields in the engine's terms, where 0 turns a filter off.

    The engine's sampler asserts that top_k is less than the vocabulary. Whether it takes top_k and
    top_p together is the engine's to say.

    Args:
        given: Checked fields; those missing have OpenAI's defaults.
        vocab_size: Size of the vocabulary; None: unknown.
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
    return {"temperature": temperature, "top_k": top_k, "top_p": top_p}


def _checked(body: Any, checks: Mapping[str, Check], needed: str) -> dict[str, Any]:
    """The fields that endpoints read and that are not null, all but the `needed` one checked."""
    if not isinstance(body, dict):
        raise invalid(None, "The request body must be a JSON object.", "invalid_type")
    for name in sorted(_NEVER_TAKEN & body.keys()):
        if body[name] is not None:
            raise fields.not_taken(name)
    known = (*checks, needed)
    given = {name: body[name] for name in known if body.get(name) is not None}
    _check_free_json({"": given}, but=(needed,))
    for name, check in checks.items():
        if name in given:
            given[name] = check(name, given[name])
    return given


def _check_free_json(objects: Mapping[str, Mapping[str, Any]], but: Collection[str]) -> None:
    """Refuses objects whose fields are nested too deeply or hold too much together.

    Args:
        objects: The objects, by what their fields' names begin with.
        but: Fields that are checked otherwise.
    """
    values = 0
    for prefix, given in objects.items():
        for name, value in given.items():
            values += 1 if name in but else fields.free_json(f"{prefix}{name}", value)
        if values > fields.MAX_VALUES:
            param = prefix.removesuffix(".") or None
            raise invalid(param, f"The request must not have more than {fields.MAX_VALUES} values.")


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


def _messages(messages: Any, vocab_size: int | None, reuse: bool) -> list[dict[str, Any]]:
    """Checked messages, of which only the last answer has tokens: others are never read.

    Args:
        messages: What was given.
        vocab_size: Token ids must be below it; None: unknown.
        reuse: Whether any are.
    """
    if messages is None or messages == []:
        raise invalid("messages", "messages is missing or empty.", "missing_required_parameter")
    named = {
        f"messages[{index}]": {key: value for key, value in each.items() if value is not None}
        for index, each in enumerate(fields.json_objects("messages", messages))
    }
    answers = [name for name, each in named.items() if each.get("role") == "assistant"]
    read = answers[-1:] if reuse else []
    for name, each in named.items():
        for key in () if name in read else _TOKEN_LISTS:
            each.pop(key, None)
    objects = {f"{name}.": each for name, each in named.items()}
    _check_free_json(objects, but=_TOKEN_LISTS)
    return [_message(name, each, vocab_size) for name, each in named.items()]


def _message(name: str, given: dict[str, Any], vocab_size: int | None) -> dict[str, Any]:
    """A message whose content is one string."""
    if "role" not in given:
        raise invalid(f"{name}.role", f"{name} has no role.", "missing_required_parameter")
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
