"""A model of a replica, for measure_bursts.py: when requests that queue get their first tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from measure_engines import BLOCK

from megatron.core.inference.coordinator.hashing import expected_skip

PLACES = 64
"""Requests that a replica runs at once."""


@dataclass(frozen=True)
class Replica:
    """A model of a replica; profile `reference`. Times in ms, the rest in tokens."""

    step: float = 8.0
    prefill_token: float = 0.0667
    decoding_request: float = 0.12
    context_token: float = 0.03 / 1000
    prefill_budget: int = 8192
    context: int = 2000
    answer: int = 256

    def first_tokens(self, queue: Sequence[int], load: int, prompt: int) -> tuple[list[float], int]:
        """When the requests of a queue have their first tokens.

        Others decode all the time. Where they have all places, one ends every few steps and leaves
        its place to the queue.

        Args:
            queue: For each request, in order, the name of its prompt.
            load: How many others there are.
            prompt: Length of every prompt, in tokens; at most `prefill_budget`.

        Returns:
            Milliseconds from now to each first token, and how many prompts were computed whole.
        """
        waiting, stored = list(queue), set[int]()
        times: list[float] = []
        now, steps = 0.0, 0
        while waiting:
            freed = steps * PLACES // self.answer if load == PLACES else PLACES - load
            taken, tokens = self._take(waiting, stored, freed - len(times), prompt)
            decoding = load + len(times) - (freed if load == PLACES else 0)
            each = self.decoding_request + self.context_token * self.context
            now += self.step + self.prefill_token * tokens + decoding * each
            steps += 1
            for name in taken:
                waiting.remove(name)
            times += [now] * len(taken)
            stored.update(taken)
        return times, len(stored)

    def _take(
        self, waiting: Sequence[int], stored: set[int], places: int, prompt: int
    ) -> tuple[list[int], int]:
        """What the next step prefills, first come first served; equal prompts wait for the first.

        Returns:
            Names of prompts, and the tokens to compute.
        """
        taken: list[int] = []
        tokens = 0
        rest = prompt - expected_skip(prompt, prompt // BLOCK, BLOCK)
        for name in waiting:
            if name in taken and name not in stored:
                continue
            need = rest if name in stored else prompt
            if len(taken) >= places or tokens + need > self.prefill_budget:
                break
            taken.append(name)
            tokens += need
        return taken, tokens
