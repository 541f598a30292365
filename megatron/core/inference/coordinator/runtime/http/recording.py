"""What a request handed to the engines, and what that says about its usage.

megatron-core's endpoints call `client.add_request` and shape the replies; `RecordingClient` stands
in for the client and takes notes, so that nothing of the endpoints has to be repeated here.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from quart import g, request

from megatron.core.inference.coordinator.runtime.http.errors import invalid
from megatron.core.inference.coordinator.runtime.http.validation import Bounds, Plan


@dataclass(slots=True)
class Work:
    """One HTTP request and its engine requests, in order of submission.

    Attributes:
        plan: What was asked for.
        submitted: Each engine request's prompt tokens and future.
        finished: Whether the answer has been completed with what is known here.
        prepared: The prompt that was submitted last, as the endpoint and as the client have it.
    """

    plan: Plan
    submitted: list[tuple[int, asyncio.Future]] = field(default_factory=list)
    finished: bool = False
    prepared: tuple[Any, Any] = (None, None)

    def failures(self) -> list[BaseException]:
        """Exceptions of the engine requests."""
        done = (future for _, future in self.submitted if future.done() and not future.cancelled())
        return [failure for future in done if (failure := future.exception()) is not None]

    def refusals(self) -> list[str]:
        """What engines said of requests that they refused for another reason than their length.

        On the wire such a reason comes under the one name that released clients can read.
        """
        done = [future for _, future in self.submitted if future.done()]
        replies = [f.result() for f in done if not f.cancelled() and f.exception() is None]
        said = (event.get("payload") for reply in replies for event in reply.get("events") or ())
        return [
            payload["message"]
            for payload in said
            if isinstance(payload, dict) and payload.get("type") == "ContextOverflowError"
        ]

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
    """The inference client as the endpoints see it; whatever else it can do is passed through.

    Args:
        client: The inference client. Where it has `prepare`, a prompt is packed and hashed once
            for all its choices.
        bounds: What requests may ask for.
    """

    def __init__(self, client: Any, bounds: Bounds):
        self._client = client
        self._bounds = bounds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def add_request(self, prompt: Any, sampling_params: Any) -> asyncio.Future:
        """Submits a prompt with the request's stop words and notes its future in `g.work`.

        Args:
            prompt: Token ids; while it is the same object, it has the same ids.
            sampling_params: How to sample.

        Raises:
            ApiError: The prompt came out without any token, or with too many.
        """
        work: Work = g.work
        if work.prepared[0] is not prompt:
            self._check(prompt, work.plan.copies, sampling_params.num_tokens_to_generate)
            work.prepared = prompt, self._prepare(prompt)
        if work.plan.stop:
            sampling_params.stop_words = list(work.plan.stop)
        future = self._client.add_request(work.prepared[1], sampling_params)
        if future.done():
            _fill_log_probs(future)
        else:
            future.add_done_callback(_fill_log_probs)
        work.submitted.append((len(prompt), future))
        return future

    def _check(self, prompt: Any, copies: int, max_tokens: int | None) -> None:
        if not len(prompt):
            raise invalid(None, "The prompt has no tokens.")
        self._bounds.check_prompt(len(prompt), copies)
        most = self._bounds.max_sequence_tokens
        if max_tokens is None and most is not None:  # then the engine goes on to the end
            self._bounds.check_answers(most - len(prompt), copies)

    def _prepare(self, prompt: Any) -> Any:
        prepare = getattr(self._client, "prepare", None)
        if prepare is not None:
            return prepare(prompt, owner=_owner(), salt=request.scope.get("cache_salt", 0))
        return prompt if isinstance(prompt, list) else prompt.tolist()


def _owner() -> str:
    """Whose request this is: the holder of its API key, else an address."""
    scope = request.scope
    address = (scope.get("client") or ("",))[0]
    return scope.get("api_key_id") or f"address {address}"


def finish(answer: dict[str, Any], work: Work, model: str) -> None:
    """Completes an endpoint's answer in place: id, model, usage, and log probabilities in step.

    The completions endpoint puts a None before the log probabilities of generated tokens also
    where there is no first prompt token that it could stand for.
    """
    if answer["object"] == "text_completion":  # the chat endpoint does so itself
        answer["id"] = f"cmpl-{answer['id'].replace('-', '')}"
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
