"""Agents: each plays one episode, asking the model over HTTP, turn by turn."""

import asyncio
import itertools
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from openai import AsyncOpenAI, OpenAIError

_SECONDS = 120.0
"""For one answer; a request that takes longer counts as lost."""


class Episode(Protocol):
    """What an agent plays: see task.py and sessions.py."""

    group: int
    messages: list[dict[str, Any]]
    turns_left: int
    done: bool

    @property
    def reward(self) -> float:
        """From 0 to 1."""

    def take(self, answer: str) -> None:
        """Go on with what the model wrote."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request and its answer.

    Attributes:
        prompt: Token ids of the prompt, as the server rendered it.
        generated: Token ids of the answer.
        cached_tokens: Tokens of the prompt that were not computed again.
    """

    prompt: list[int]
    generated: list[int]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """A played episode.

    Attributes:
        group: Which group it belongs to.
        reward: From 0 to 1.
        turns: The requests that were answered.
    """

    group: int
    reward: float
    turns: list[Turn]


class Agents:
    """Plays episodes, and asks the same prompts again where outputs are to be compared.

    Args:
        urls: Front ends; each request goes to the next one.
        max_tokens: Longest answer.
        temperature: Sent as it is; 0 is greedy.

    Attributes:
        sent: Requests so far.
        answered: Of these, answered.
    """

    def __init__(self, urls: Sequence[str], max_tokens: int, temperature: float):
        self._urls = urls
        self._sampling = {"max_tokens": max_tokens, "temperature": temperature}
        self.sent = self.answered = 0

    def play(self, episodes: Sequence[Episode], tick: Callable[[], Any]) -> list[Rollout]:
        """Play all episodes at the same time.

        Args:
            episodes: What to play; they are played to their end.
            tick: Called after each answer.
        """

        async def play() -> list[Rollout]:
            async with self._clients() as clients:
                plays = [self._play(episode, clients, tick) for episode in episodes]
                return await asyncio.gather(*plays)

        return asyncio.run(play())

    def complete(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int] | None]:
        """The greedy answers to prompts of token ids; None for one that was lost."""

        async def complete() -> list[list[int] | None]:
            async with self._clients() as clients:
                asked = [self._complete(prompt, max_tokens, clients) for prompt in prompts]
                return await asyncio.gather(*asked)

        return asyncio.run(complete())

    def _clients(self) -> "_Clients":
        return _Clients(self._urls)

    async def _play(
        self, episode: Episode, clients: "_Clients", tick: Callable[[], Any]
    ) -> Rollout:
        turns: list[Turn] = []
        while not episode.done:
            answer = await self._counted(
                clients.next().chat.completions.create(
                    model="megatron", messages=episode.messages, **self._sampling
                )
            )
            if answer is None:
                break
            message, usage = answer.choices[0].message, answer.usage
            cached = usage.prompt_tokens_details.cached_tokens or 0
            turns.append(Turn(message.prompt_token_ids, message.generation_token_ids, cached))
            episode.take(message.content or "")
            tick()
        return Rollout(episode.group, episode.reward, turns)

    async def _complete(
        self, prompt: Sequence[int], max_tokens: int, clients: "_Clients"
    ) -> list[int] | None:
        answer = await self._counted(
            clients.next().completions.create(
                model="megatron",
                prompt=list(prompt),
                max_tokens=max_tokens,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
        )
        return None if answer is None else answer.choices[0].generation_token_ids

    async def _counted(self, request: Any) -> Any:
        """The answer, or None where there is none; the reason is printed."""
        self.sent += 1
        try:
            answer = await request
        except OpenAIError as error:
            print(f"[rollouts] a request was lost: {error}", file=sys.stderr)
            return None
        self.answered += 1
        return answer


class _Clients(AsyncExitStack):
    """A client a URL; they belong to the event loop that opened them."""

    def __init__(self, urls: Sequence[str]):
        super().__init__()
        self._urls = urls

    async def __aenter__(self) -> "_Clients":
        opened = [
            await self.enter_async_context(
                AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=_SECONDS)
            )
            for url in self._urls
        ]
        self._turns = itertools.cycle(opened)
        return self

    def next(self) -> AsyncOpenAI:
        """Whose turn it is."""
        return next(self._turns)
