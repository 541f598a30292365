"""What a request handed to the engines, and what that says about its usage.

megatron-core's endpoints call `client.add_request` and shape the replies; `RecordingClient` stands
in for the client and takes notes, so that nothing of the endpoints has to be repeated here.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from quart import g

from megatron.core.inference.coordinator.runtime.http.errors import invalid
from megatron.core.inference.coordinator.runtime.http.validation import Plan


@dataclass(slots=True)
class Work:
    """One HTTP request and its engine requests, in order of submission.

    Attributes:
        plan: What was asked for.
        submitted: Each engine request's prompt tokens and future.
        finished: Whether the answer has been completed with what is known here.
    """

    plan: Plan
    submitted: list[tuple[int, asyncio.Future]] = field(default_factory=list)
    finished: bool = False

    def failures(self) -> list[BaseException]:
        """Exceptions of the engine requests."""
        done = (future for _, future in self.submitted if future.done() and not future.cancelled())
        return [failure for future in done if (failure := future.exception()) is not None]

    def usage(self, completion_tokens: int) -> dict[str, Any]:
        """OpenAI's usage: every prompt counts once, however many choices it has.

        Of a prompt's choices the one with most cached tokens counts; all of them have an answer.
        """
        prompts = list(self._prompts())
        prompt_tokens = sum(tokens for tokens, _ in prompts)
        cached = sum(min(tokens, max(map(_cached, replies))) for tokens, replies in prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _prompts(self) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        for start in range(0, len(self.submitted), self.plan.copies):
            group = self.submitted[start : start + self.plan.copies]
            yield group[0][0], [future.result() for _, future in group]


class RecordingClient:
    """The inference client as the endpoints see it; whatever else it can do is passed through."""

    def __init__(self, client: Any):
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def add_request(self, prompt: list[int], sampling_params: Any) -> asyncio.Future:
        """Submits a prompt with the request's stop words and notes its future in `g.work`.

        Raises:
            ApiError: The prompt came out without any token.
        """
        work: Work = g.work
        if not len(prompt):
            raise invalid(None, "The prompt has no tokens.")
        if work.plan.stop:
            sampling_params.stop_words = list(work.plan.stop)
        future = self._client.add_request(prompt, sampling_params)
        if future.done():
            _fill_log_probs(future)
        else:
            future.add_done_callback(_fill_log_probs)
        work.submitted.append((len(prompt), future))
        return future


class RepeatingTokenizer:
    """A tokenizer that does the work once for a prompt that is repeated for its choices."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._seen: Any = None
        self._tokens: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def tokenize(self, text: str) -> list[int]:
        """The token ids of `text`."""
        if text is not self._seen:
            self._tokens = self._tokenizer.tokenize(text)
            self._seen = text
        return self._tokens


def finish(answer: dict[str, Any], work: Work, model: str) -> None:
    """Completes an endpoint's answer in place: model, usage, and log probabilities in step.

    The completions endpoint puts a None before the log probabilities of generated tokens also
    where there is no first prompt token that it could stand for.
    """
    answer["model"] = model
    answer["usage"] = work.usage(answer["usage"]["completion_tokens"])
    for choice in answer["choices"]:
        logprobs = choice.get("logprobs") or {}
        for name in ("token_logprobs", "top_logprobs"):
            values = logprobs.get(name)
            if values and len(values) == len(logprobs["tokens"]) + 1:
                logprobs[name] = values[1:]
    work.finished = True


def _fill_log_probs(future: asyncio.Future) -> None:
    """Gives a reply the log probabilities under the names that the endpoints look for.

    The chat endpoint reads them as `log_probs`, a field that replies do not have, and where they
    are None it logs the whole reply as a warning.
    """
    if future.cancelled() or future.exception() is not None:
        return
    reply = future.result()
    if reply.get("generated_log_probs") is None:
        reply["generated_log_probs"] = []
    reply.setdefault("log_probs", reply["generated_log_probs"])


def _cached(reply: dict[str, Any]) -> int:
    return max(0, reply.get("num_cached_tokens") or 0)
