"""Which episodes are played in which iteration."""

import argparse
from collections.abc import Sequence
from typing import Any

from agents import Episode
from sessions import read_sessions, recorded_group
from task import Book, group_of_attempts

from megatron.core.inference.coordinator.runtime.byte_tokenizer import ByteTokenizer


class Curriculum:
    """New questions in every iteration, or the next recorded sessions, over and over.

    Args:
        args: See options.py.

    Raises:
        ValueError: No recorded session begins short enough for the model.
    """

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self._longest = args.inference_max_seq_length - args.answer_tokens
        self._book = Book.written(args.seed)
        self._recorded: list[list[list[dict[str, Any]]]] = []
        if args.sessions is not None:
            recorded = read_sessions(args.sessions).values()
            self._recorded = [sessions for sessions in recorded if self._group(0, sessions)]
            if not self._recorded:
                raise ValueError(f"no session of {args.sessions} fits into {self._longest} tokens")

    def episodes(self, iteration: int) -> list[Episode]:
        """Those of iteration 1, 2, …: whole groups, their members beside each other."""
        count = self._args.groups
        numbers = range((iteration - 1) * count, iteration * count)
        return [episode for number in numbers for episode in self._episodes(number)]

    def _episodes(self, number: int) -> Sequence[Episode]:
        args = self._args
        if self._recorded:
            return self._group(number, self._recorded[number % len(self._recorded)])
        return group_of_attempts(number, args.group_size, args.turns, self._book, args.seed)

    def _group(self, number: int, sessions: Sequence[Sequence[dict[str, Any]]]) -> list[Episode]:
        some = sessions[: self._args.group_size]
        return list(recorded_group(number, some, self._args.turns, self._fits))

    def _fits(self, messages: Sequence[dict[str, Any]]) -> bool:
        tokens = ByteTokenizer().apply_chat_template(messages, add_generation_prompt=True)
        return len(tokens) <= self._longest
