"""What an engine can take: requests that would end its loop are refused before they reach it.

The released engine asserts on such input, or fails in the middle of a batch, and with it every
request in flight.
"""

import math
from dataclasses import fields
from typing import Any

import numpy as np
from megatron.core.inference.sampling_params import SamplingParams

from megatron.core.inference.coordinator.hashing import LARGEST_HASH

_COLDEST = 1e-5
"""Below this a temperature means greedy: logits divided by it would overflow."""

_NAMES = frozenset(field.name for field in fields(SamplingParams))
_FLAGS = ("return_log_probs", "skip_prompt_log_probs", "add_BOS", "detokenize_stop_sequence")


class RequestRefused(ValueError):
    """The request cannot be run; the text says what is wrong with it."""


BOTH_FILTERS = frozenset({"flashinfer"})
"""Megatron's sampling backends that take `top_k` and `top_p` together; the other one asserts."""


def checked_sampling(values: Any, vocab_size: int, backend: str = "torch") -> SamplingParams:
    """Build sampling parameters from what a client sent.

    A temperature of (almost) 0 means greedy. A `top_p` of 1 filters nothing and is left out, since
    not every backend takes a `top_k` beside it.

    Args:
        values: The unpacked parameters.
        vocab_size: Tokens in the model's vocabulary.
        backend: The engine's sampling backend.

    Raises:
        RequestRefused: A value is of the wrong type or out of range, or two contradict.
    """
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise RequestRefused("sampling parameters are no map of names to values")
    for key in values.keys() - _NAMES:
        if hasattr(SamplingParams, key):  # e.g. serialize: it would take the method's place
            raise RequestRefused(f"{key!r} is no sampling parameter")
    try:
        params = SamplingParams.deserialize(values)
    except (TypeError, AssertionError) as error:
        raise RequestRefused(f"sampling parameters: {error}") from None
    temperature = _number(params, "temperature", 0.0, 1e6)
    top_p = _number(params, "top_p", 0.0, 1.0)
    top_k = _integer(params, "top_k", 0, vocab_size - 1)
    _integer(params, "top_n_logprobs", 0, vocab_size)
    for name in ("num_tokens_to_generate", "num_tokens_total", "termination_id"):
        if getattr(params, name) is not None:
            _integer(params, name, -1 if name == "termination_id" else 0, 2**31 - 1)
    for name in _FLAGS:
        if not isinstance(getattr(params, name), bool):
            raise RequestRefused(f"{name} must be true or false, not {getattr(params, name)!r}")
    if temperature < _COLDEST:
        params.temperature, params.top_k, params.top_p = 1.0, 1, 0.0
    elif top_p == 1.0:
        params.top_p = 0.0
    elif top_k and top_p and backend not in BOTH_FILTERS:
        raise RequestRefused(
            "this engine's sampler does not take top_k and top_p together; give one of them"
        )
    _check_combinations(params)
    return params


def _check_combinations(params: SamplingParams) -> None:
    if params.num_tokens_to_generate is not None and params.num_tokens_total is not None:
        raise RequestRefused("give num_tokens_to_generate or num_tokens_total, not both")
    if params.top_n_logprobs and not params.return_log_probs:
        raise RequestRefused("top_n_logprobs needs return_log_probs")
    words = params.stop_words
    if words is not None and not (
        isinstance(words, list) and all(isinstance(w, str) and w for w in words)
    ):
        raise RequestRefused("stop_words must be a list of non-empty strings")


def checked_tokens(tokens: Any, vocab_size: int) -> np.ndarray:
    """Check a prompt's token ids.

    Args:
        tokens: What a client sent, or what its text became: an int64 array, or a list.
        vocab_size: Tokens in the model's vocabulary.

    Returns:
        The token ids as int64, shape [n].

    Raises:
        RequestRefused: It is no list of token ids, or empty, or one is outside the vocabulary.
    """
    if not isinstance(tokens, np.ndarray):
        if not isinstance(tokens, list) or not set(map(type, tokens)) <= {int}:
            raise RequestRefused("a prompt must be text or a list of token ids")
        try:
            tokens = np.fromiter(tokens, np.int64, len(tokens))
        except OverflowError:
            tokens = np.array(tokens, object)
    if not len(tokens):
        raise RequestRefused("the prompt is empty")
    lowest, highest = tokens.min(), tokens.max()
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise RequestRefused(f"token id {wrong} is outside the vocabulary of {vocab_size}")
    return tokens


def wants_prompt_log_probs(params: SamplingParams) -> bool:
    """Whether the answer must hold log probabilities of the prompt's tokens."""
    return bool(params.return_log_probs and not params.skip_prompt_log_probs)


def check_log_probs(params: SamplingParams, only_last_logits: bool) -> None:
    """Refuse log probabilities of the prompt where the engine does not compute its logits.

    Raises:
        RequestRefused: It does not.
    """
    if wants_prompt_log_probs(params) and only_last_logits:
        raise RequestRefused(
            "this engine computes no log probabilities of prompt tokens: ask with "
            "skip_prompt_log_probs, or start it with --return-log-probs"
        )


def checked_salt(salt: Any) -> int:
    """Check what a request's block hashes are to be masked with.

    Raises:
        RequestRefused: It is no such number.
    """
    if type(salt) is not int or not 0 <= salt <= LARGEST_HASH:
        raise RequestRefused("cache_salt must be a whole number from 0 to 2^63 - 1")
    return salt


def _number(params: SamplingParams, name: str, lowest: float, highest: float) -> float:
    value = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestRefused(f"{name} must be a number, not {value!r}")
    if not math.isfinite(value) or not lowest <= value <= highest:
        raise RequestRefused(f"{name} is {value!r}; it must be between {lowest:g} and {highest:g}")
    setattr(params, name, float(value))
    return float(value)


def _integer(params: SamplingParams, name: str, lowest: int, highest: int) -> int:
    value = getattr(params, name)
    if type(value) is not int or not lowest <= value <= highest:
        raise RequestRefused(
            f"{name} is {value!r}; it must be a whole number from {lowest} to {highest}"
        )
    return value
