"""Checks of single request fields. Each takes a field's name and value and returns its normal form.

Pure. A check raises `ApiError` with status 400 that names the field and what it must be. None never
reaches a check: it means "not given".
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from megatron.core.inference.coordinator.runtime.http.errors import ApiError, invalid

Check = Callable[[str, Any], Any]

LARGEST_INT = 2**31 - 1
"""Largest integer the engine's 32-bit tensors hold."""

MAX_STOP_WORDS = 64
"""The engine compares every stop word after every token."""

MAX_STOP_LENGTH = 1024
"""Characters of a stop word: each choice carries a copy of all of them."""

MAX_ITEMS = 10_000
"""Most messages, tools or parts of a content: each costs time in the one thread of a front end."""

MAX_DEPTH = 64
"""Deepest nesting of free JSON: templates and encoders go down one call a level."""

MAX_VALUES = 100_000
"""Most values in the free JSON of a body: each takes up to 200 bytes, and holds up the loop."""

TEMPLATE_ARGUMENTS = frozenset(
    {
        "self",
        "conversation",
        "messages",
        "chat_template",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "tools",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "tokenizer",
        "processor_kwargs",
    }
)
"""Arguments of a tokenizer's `apply_chat_template` that are no variables of the template. A request
that sets them would bring its own template (code), or make the tokenizer pad to any length."""

_WRONG_TYPE = "invalid_type"


def integer(low: int, high: int = LARGEST_INT) -> Check:
    """An integer in [low, high]; true and false are none."""

    def check(name: str, value: Any) -> int:
        if type(value) is not int:
            raise invalid(name, f"{name} must be an integer.", _WRONG_TYPE)
        if not low <= value <= high:
            raise invalid(name, f"{name} must be between {low} and {high}.")
        return value

    return check


def number(low: float, high: float) -> Check:
    """A number in [low, high]; NaN is none."""

    def check(name: str, value: Any) -> float:
        if type(value) not in (int, float):
            raise invalid(name, f"{name} must be a number.", _WRONG_TYPE)
        if not low <= value <= high:
            raise invalid(name, f"{name} must be between {low:g} and {high:g}.")
        return float(value)

    return check


def flag(name: str, value: Any) -> bool:
    """True or false."""
    if type(value) is not bool:
        raise invalid(name, f"{name} must be true or false.", _WRONG_TYPE)
    return value


def no_stream(name: str, value: Any) -> bool:
    """False: answers come whole."""
    if flag(name, value):
        raise invalid(name, "Streaming is not supported; send stream: false.", "unsupported_value")
    return value


def json_object(name: str, value: Any) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise invalid(name, f"{name} must be an object.", _WRONG_TYPE)
    return value


def template_variables(name: str, value: Any) -> dict[str, Any]:
    """An object of variables for the chat template, and nothing else that steers its rendering."""
    taken = TEMPLATE_ARGUMENTS & json_object(name, value).keys()
    for key in sorted(taken):
        raise not_taken(f"{name}.{key}")
    return value


def not_taken(name: str) -> ApiError:
    """The error of a field that the server sets and requests must not."""
    text = f"{name} is not taken from requests: it is for the server to choose."
    return invalid(name, text, "unsupported_parameter")


def free_json(name: str, value: Any) -> int:
    """Passes JSON that is neither nested too deeply nor has too many values; how many it has."""
    level, values = [value], 1
    for _ in range(MAX_DEPTH):
        values += sum(len(each) for each in level if isinstance(each, (dict, list)))
        if values > MAX_VALUES:
            raise invalid(name, f"{name} must not have more than {MAX_VALUES} values.")
        level = [child for each in level for child in _children(each)]
        if not level:
            return values
    raise invalid(name, f"{name} must not be nested deeper than {MAX_DEPTH} levels.")


def json_list(name: str, value: Any) -> list[Any]:
    """A list that is not too long."""
    if not isinstance(value, list):
        raise invalid(name, f"{name} must be a list.", _WRONG_TYPE)
    if len(value) > MAX_ITEMS:
        raise invalid(name, f"{name} must have at most {MAX_ITEMS} items.")
    return value


def json_objects(name: str, value: Any) -> list[dict[str, Any]]:
    """A list of JSON objects."""
    value = json_list(name, value)
    return [json_object(f"{name}[{index}]", each) for index, each in enumerate(value)]


def text(name: str, value: Any) -> str:
    """A string that UTF-8 can carry."""
    if not isinstance(value, str):
        raise invalid(name, f"{name} must be a string.", _WRONG_TYPE)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid(name, f"{name} has a lone surrogate, which is no character.") from None
    return value


def filled_text(name: str, value: Any) -> str:
    """A string that is not empty."""
    if not text(name, value):
        raise invalid(name, f"{name} must not be empty.")
    return value


def stop_words(name: str, value: Any) -> list[str]:
    """One string or a list of them, as a list."""
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise invalid(name, f"{name} must be a string or a list of strings.", _WRONG_TYPE)
    if len(words) > MAX_STOP_WORDS:
        raise invalid(name, f"{name} must have at most {MAX_STOP_WORDS} strings.")
    if any(len(word) > MAX_STOP_LENGTH for word in words):
        raise invalid(name, f"{name} must have strings of at most {MAX_STOP_LENGTH} characters.")
    return [filled_text(name, word) for word in words]


def tool_choice(name: str, value: Any) -> str | dict[str, Any]:
    """One of three words, or the tool to call."""
    if isinstance(value, dict) or value in ("none", "auto", "required"):
        return value
    raise invalid(name, f'{name} must be "none", "auto", "required" or an object.')


def token_ids(vocab_size: int | None) -> Check:
    """A list of ids in [0, vocab_size); any that fits 32 bits when None."""
    largest = LARGEST_INT if vocab_size is None else vocab_size - 1

    def check(name: str, value: Any) -> list[int]:
        if not isinstance(value, list) or not only(value, {int}):
            raise invalid(name, f"{name} must be a list of token ids.", _WRONG_TYPE)
        if value and not (min(value) >= 0 and max(value) <= largest):
            raise invalid(name, f"{name} has a token id outside 0 to {largest}.")
        return value

    return check


def only(values: Sequence[Any], types: Collection[type]) -> bool:
    """Whether every value is exactly of one of `types`; quick on long lists."""
    return set(map(type, values)) <= set(types)


def _children(value: Any) -> list[Any]:
    """The lists and objects in a list or an object."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [each for each in inside if isinstance(each, (dict, list))]
