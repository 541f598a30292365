"""Recorded sessions, replayed: the model is asked at each turn, and the record goes on.

Pure but for reading the file. A file holds one JSON object a line, maybe gzipped: `messages` as in
OpenAI's chat API, and, where several sessions are attempts at one task, its `group`.
"""

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

Message = dict[str, Any]
Fits = Callable[[Sequence[Message]], bool]


@dataclass(slots=True)
class RecordedEpisode:
    """One recorded session.

    What the model writes is compared with the record and left out: the next turn has the history
    that was recorded, as long as it fits.

    Attributes:
        group: Which task.
        record: All messages of the session.
        turns_left: Messages that the model may still write.
        fits: Whether the model can take such a history.
        messages: The history that the model is to go on.
        agreements: For each turn, the share of the recorded message with which the answer agrees,
            from its beginning.
        done: Whether it has ended.
    """

    group: int
    record: Sequence[Message]
    turns_left: int
    fits: Fits
    messages: list[Message] = field(default_factory=list)
    agreements: list[float] = field(default_factory=list)
    done: bool = False

    def __post_init__(self):
        self._go_on()

    @property
    def reward(self) -> float:
        """The mean agreement, from 0 to 1."""
        return sum(self.agreements) / max(1, len(self.agreements))

    def take(self, answer: str) -> None:
        """Compare what the model wrote with the record, and go on with the record."""
        recorded = _text(self.record[len(self.messages)])
        self.agreements.append(_agreement(answer, recorded))
        self.turns_left -= 1
        self._go_on()

    def _go_on(self) -> None:
        """Up to the next message of the assistant, if there is one that it may write."""
        after = len(self.messages) + bool(self.messages)
        ends = (i for i in range(after, len(self.record)) if _is_assistants(self.record[i]))
        end = next(ends, None)
        if end is None or self.turns_left <= 0 or not self.fits(self.record[:end]):
            self.done = True
        else:
            self.messages = list(self.record[:end])


def read_sessions(path: Path) -> dict[int, list[list[Message]]]:
    """The messages of every session, by group, in the order of the file.

    A session without a `group` is a group of its own.

    Raises:
        ValueError: A line is no session; names it.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    groups: dict[Any, list[list[Message]]] = {}
    with opened(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                group, messages = _session(line, f"{path}, line {number}")
                groups.setdefault(number if group is None else f"group {group}", []).append(
                    messages
                )
    return dict(enumerate(groups.values()))


def recorded_group(
    group: int, sessions: Sequence[Sequence[Message]], turns: int, fits: Fits
) -> list[RecordedEpisode]:
    """Episodes of these sessions; those whose first turn does not fit are left out."""
    episodes = [RecordedEpisode(group, session, turns, fits) for session in sessions]
    return [episode for episode in episodes if not episode.done]


def _session(line: str, where: str) -> tuple[Any, list[Message]]:
    try:
        session = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: this is no JSON ({error})") from None
    messages = session.get("messages") if isinstance(session, dict) else None
    if not isinstance(messages, list) or not all(_is_message(each) for each in messages):
        raise ValueError(f"{where}: a session has a list of messages, each with a role")
    return session.get("group"), messages


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _is_assistants(message: Message) -> bool:
    return message["role"] == "assistant"


def _text(message: Message) -> str:
    """What a model would have had to write for this message."""
    calls = message.get("tool_calls")
    return json.dumps(calls) if calls else str(message.get("content") or "")


def _agreement(answer: str, recorded: str) -> float:
    """The share of `recorded` that both have in common before they first differ."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(answer, recorded, strict=False))
    return sum(1 for _ in same) / max(1, len(recorded))
