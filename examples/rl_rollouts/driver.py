"""What the first rank alone does: plays the agents, measures, and compares outputs."""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agents import Agents, Rollout
from curriculum import Curriculum
from figures import Accuracy, Iteration, by_iteration, totals
from tqdm import tqdm

Prompt = tuple[int, ...]
Answer = list[int] | None


class Driver:
    """Plays the agents and keeps the figures.

    Args:
        args: See options.py.
        urls: Front ends of all ranks.

    Attributes:
        answer_tokens: Length of the answers that are compared.
    """

    def __init__(self, args: argparse.Namespace, urls: Sequence[str]):
        self.answer_tokens = args.answer_tokens
        self._agents = Agents(urls, args.answer_tokens, args.temperature)
        self._curriculum = Curriculum(args)
        self._iterations: list[Iteration] = []
        self._rollouts: list[Rollout] = []
        self._served = [0] * len(urls)

    async def play(self, number: int) -> list[Rollout]:
        """The rollouts of one iteration.

        The agents run in a thread of their own: this one's event loop is held by every step of the
        engine.
        """
        episodes = self._curriculum.episodes(number)
        sent, answered = self._agents.sent, self._agents.answered
        longest = sum(episode.turns_left for episode in episodes)
        with tqdm(
            total=longest, desc=f"iteration {number}", unit="turn", leave=False, disable=None
        ) as bar:
            self._rollouts = await asyncio.to_thread(self._agents.play, episodes, bar.update)
        turns = [turn for rollout in self._rollouts for turn in rollout.turns]
        self._iterations.append(
            Iteration(
                sent=self._agents.sent - sent,
                answered=self._agents.answered - answered,
                prompt_tokens=sum(len(turn.prompt) for turn in turns),
                cached_tokens=sum(turn.cached_tokens for turn in turns),
                reward=sum(each.reward for each in self._rollouts) / max(1, len(self._rollouts)),
            )
        )
        return self._rollouts

    def updated(self, loss: float, served: Sequence[int]) -> None:
        """Note the update that followed the last iteration, and tell of both.

        Args:
            loss: The loss before it.
            served: Requests that each rank has finished since the start.
        """
        iteration = self._iterations[-1]
        iteration.loss = loss
        iteration.served = [now - then for now, then in zip(served, self._served, strict=True)]
        self._served = list(served)
        _say(f"iteration {len(self._iterations)}: {iteration.line()}")

    async def ask_again(self) -> dict[Prompt, list[Answer]]:
        """Two greedy answers of the served engines to each of some prompts.

        Among the prompts are those of the last rollouts, whose prefixes the engines computed under
        the weights before, and one that shares no more than their system prompt. The second answer
        may rest on what was cached for the first.
        """
        prompts = self._sample()
        _say(f"comparing the answers to {len(prompts)} prompts")
        once = await asyncio.to_thread(self._agents.complete, prompts, self.answer_tokens)
        twice = await asyncio.to_thread(self._agents.complete, prompts, self.answer_tokens)
        return {prompt: [a, b] for prompt, a, b in zip(prompts, once, twice, strict=True)}

    def _sample(self) -> list[Prompt]:
        """First and last prompts, one rollout a group; and the first one's, cut after a while."""
        of_group = {rollout.group: rollout for rollout in self._rollouts if rollout.turns}
        turns = [(each.turns[0], each.turns[-1]) for each in of_group.values()]
        prompts = [tuple(turn.prompt) for pair in turns for turn in pair]
        half = prompts[0][: len(prompts[0]) // 2] if prompts else ()
        return list(dict.fromkeys([*prompts, (*half, *b" What do you think?")]))

    def result(
        self, answers: Mapping[Prompt, list[Answer]], fresh: Sequence[Answer], schedule: Path
    ) -> dict[str, Any]:
        """The totals, after what the coordinator tells of each iteration.

        Args:
            answers: What the served engines answered.
            fresh: What a fresh engine with the same weights answers to the same prompts.
            schedule: The coordinator's decisions.
        """
        records = json.loads(schedule.read_text())["records"]
        accuracies = by_iteration(records, self._iterations)
        for number, accuracy in enumerate(accuracies, 1):
            _say(f"iteration {number}: {accuracy.line()}")
        wrong = [
            given != [right, right] for given, right in zip(answers.values(), fresh, strict=True)
        ]
        kinds = len(set(map(tuple, fresh)))  # if it always says the same, equality means little
        _say(
            f"{sum(wrong)} of {len(wrong)} prompts were answered otherwise than by a fresh engine "
            f"(which gave {kinds} different answers)"
        )
        lost = self._agents.sent - self._agents.answered
        return totals(self._iterations, not any(wrong), lost, Accuracy.of(records))


def _say(text: str) -> None:
    tqdm.write(f"[rollouts] {text}", file=sys.stderr)
