"""From the bytes of a request to what its endpoint gets, in this process or beside it.

Python decodes JSON without ever letting another thread run: half a second for 8 MiB of empty lists.
So a large body is decoded, checked and tokenized in a process of its own, one at a time; what comes
back is small or quick to unpickle, as token ids are arrays and free JSON has an end.
"""

import asyncio
import gc
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from megatron.core.inference.text_generation_server.dynamic_text_gen_server import endpoints

from megatron.core.inference.coordinator.runtime.http import errors, jsons
from megatron.core.inference.coordinator.runtime.http.errors import ApiError
from megatron.core.inference.coordinator.runtime.http.limits import LARGE_BODY
from megatron.core.inference.coordinator.runtime.http.validation import (
    Bounds,
    Plan,
    chat_plan,
    completion_plan,
)

logger = logging.getLogger(__name__)

_PLANNERS = {
    endpoints.ChatCompletions.name: chat_plan,
    endpoints.Completions.name: completion_plan,
}

NAMES = frozenset(_PLANNERS)
"""The endpoints whose requests are planned."""

_FIRST_OWN_DESCRIPTOR = 3


class Prompt(str):
    """A prompt's tokens, in the guise of its text.

    The completions endpoint gives a text to the tokenizer and asks nothing else of it. Of token ids
    it would look at each one, again for every choice, and detokenize them all.

    Attributes:
        tokens: Token ids, int32 of shape [n].
    """

    tokens: np.ndarray

    def __new__(cls, text: str, tokens: np.ndarray) -> "Prompt":
        """A prompt that reads as `text`."""
        prompt = super().__new__(cls, text)
        prompt.tokens = tokens
        return prompt

    def __getnewargs__(self) -> tuple[Any, ...]:
        return str(self), self.tokens


class PromptTokenizer:
    """A tokenizer that knows the tokens of a `Prompt`."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def tokenize(self, text: str) -> Any:
        """The token ids of `text`."""
        return text.tokens if isinstance(text, Prompt) else self._tokenizer.tokenize(text)


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans the requests of one model.

    Attributes:
        tokenizer: A megatron-core tokenizer.
        bounds: What requests may ask for.
    """

    tokenizer: Any
    bounds: Bounds

    def plan(self, name: str, data: bytes) -> Plan:
        """Plan a request.

        Args:
            name: Its endpoint's, one of `NAMES`.
            data: Its body.

        Raises:
            ApiError: The request is wrong.
        """
        try:
            body = jsons.loads(data)
        except ValueError as error:
            raise errors.invalid(
                None, f"The request body is not valid JSON: {error}.", "invalid_json"
            ) from None
        plan = _PLANNERS[name](body, self.bounds)
        return self._tokenized(plan) if name == endpoints.Completions.name else plan

    def _tokenized(self, plan: Plan) -> Plan:
        """The plan of a completion with its prompts tokenized, once for each choice."""
        echo = plan.body.get("echo", False)
        prompts, total = [], 0
        for given in plan.body["prompt"]:
            prompt = self._prompt(given, echo)
            self.bounds.check_prompt(len(prompt.tokens), plan.copies, "prompt")
            total += len(prompt.tokens) * plan.copies
            self.bounds.check_total(total, "The prompts of its choices", "prompt")
            prompts.append(prompt)
        repeated = [prompt for prompt in prompts for _ in range(plan.copies)]
        return replace(plan, body=plan.body | {"prompt": repeated})

    def _prompt(self, given: str | list[int], echo: bool) -> Prompt:
        if isinstance(given, list):  # before anything looks at each of its ids
            self.bounds.check_prompt(len(given), param="prompt")
        try:
            text, ids = "", given
            if isinstance(given, str):
                text, ids = given, self.tokenizer.tokenize(given)
            elif echo:
                text = self.tokenizer.detokenize(given)
        except Exception as error:
            raise errors.invalid("prompt", f"Error tokenizing prompt: {error}") from None
        return Prompt(text if echo else "", np.array(ids, np.int32))


class Desk:
    """Where requests are planned: small ones at once, large ones in turn and elsewhere.

    Args:
        planner: How.
        beside: The process that plans large ones, see `start_beside`. None: a thread of this
            process, in which decoding JSON holds up everything else.
    """

    def __init__(self, planner: Planner, beside: Connection | None = None):
        self._planner = planner
        self._beside = beside
        self._in_turn = ThreadPoolExecutor(1, "large-bodies")

    @property
    def bounds(self) -> Bounds:
        """What requests may ask for."""
        return self._planner.bounds

    async def plan(self, name: str, data: bytes) -> Plan:
        """Plan a request; see `Planner.plan`."""
        if len(data) <= LARGE_BODY:
            return self._planner.plan(name, data)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._in_turn, self._plan_large, name, data)

    def _plan_large(self, name: str, data: bytes) -> Plan:
        if self._beside is None:
            return self._planner.plan(name, data)
        try:
            self._beside.send((name, data))
            outcome = self._beside.recv()
        except (EOFError, OSError) as error:
            logger.error("planning_process_ended; this process takes over", exc_info=error)
            self._beside = None
            return self._planner.plan(name, data)
        if isinstance(outcome, Plan):
            return outcome
        raise outcome


def start_beside(planner: Planner) -> Connection:
    """Start a process that plans requests until the other end of its pipe closes.

    It is forked, so call this before there are event loops and sockets. It keeps none of this
    process's open files, and so holds nothing of it open.

    Args:
        planner: How it plans.

    Returns:
        The pipe: takes a name and a body, and gives a `Plan` or the exception instead.
    """
    ours, theirs = Pipe()
    if os.fork() == 0:
        try:
            os.dup2(theirs.fileno(), _FIRST_OWN_DESCRIPTOR)
            os.closerange(_FIRST_OWN_DESCRIPTOR + 1, os.sysconf("SC_OPEN_MAX"))
            with suppress(EOFError, OSError):
                _plan_for(Connection(_FIRST_OWN_DESCRIPTOR), planner)
        finally:
            os._exit(0)
    theirs.close()
    return ours


def _plan_for(pipe: Connection, planner: Planner) -> None:
    gc.disable()  # it would look through what JSON becomes again and again, in the making
    gc.freeze()
    while True:
        pipe.send(_outcome(planner, *pipe.recv()))
        gc.collect()


def _outcome(planner: Planner, name: str, data: bytes) -> Plan | Exception:
    try:
        return planner.plan(name, data)
    except ApiError as error:
        return error
    except Exception as error:
        return RuntimeError(f"planning failed: {type(error).__name__}: {error}")
