"""A small tool-use task: look a few things up in a harbour's book, and answer with a sum.

Pure. An episode is a chat: its messages, and what it makes of each answer of the model. The model
here has random weights, so nearly every answer is nonsense; that costs the reward, and the reply
says what was wrong.
"""

import json
import random
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

_NAMES = "Heron Osprey Petrel Gannet Plover Curlew Fulmar Avocet Dunlin Godwit Whimbrel Turnstone"
_QUAYS = {"north": 3, "south": 4, "coal": 2, "fish": 5}

_RULES = """\
You keep the book of a small harbour and answer the skippers' questions about their dues.

The book has two tables.
- ships: one line a ship, with the quay where it lies and its length in metres.
- quays: one line a quay, with the price of a metre for one night, in crowns.

A ship's dues for one night are its length times the price of a metre at its quay. The book is not
printed here, because ships come and go; look up what you need, one line at a time.

Write exactly one JSON object in each message, and nothing before or after it:
- {"table": "ships", "name": "Heron"} looks up a ship;
- {"table": "quays", "name": "north"} looks up a quay;
- {"answer": 120} ends the conversation with your answer, a whole number of crowns.

What you look up comes back as the next message, also as a JSON object. When there is no such line,
or your message cannot be read, that message says so, and the turn is lost. You have {turns} turns,
the answer included, so do not look up the same line twice, and do not guess.

Ships that have called here before: {ships}.
Quays: {quays}.

Remarks for new keepers:
- Lengths are in whole metres and prices in whole crowns; nothing is ever rounded.
- Two ships at the same quay pay the same price; look that quay up once.
- A question about several ships wants the sum of their dues, not a list.
- Skippers are in a hurry. Do not greet, explain or apologise; the object is all they want to see.
- If a skipper names a ship that is not in the book, answer for the others alone.
"""


@dataclass(frozen=True, slots=True)
class Book:
    """What can be looked up.

    Attributes:
        ships: Quay and length by name.
        quays: Price of a metre by name.
    """

    ships: dict[str, tuple[str, int]]
    quays: dict[str, int]

    @classmethod
    def written(cls, seed: int) -> "Book":
        """The book that a seed fills."""
        draw = random.Random(seed)
        ships = {name: (draw.choice(list(_QUAYS)), draw.randint(8, 60)) for name in _NAMES.split()}
        return cls(ships, dict(_QUAYS))

    def look_up(self, table: Any, name: Any) -> Message | None:
        """One line of a table, or None where there is none."""
        if table == "ships" and isinstance(name, str) and name in self.ships:
            quay, length = self.ships[name]
            return {"quay": quay, "length": length}
        if table == "quays" and isinstance(name, str) and name in self.quays:
            return {"price": self.quays[name]}
        return None

    def dues(self, names: tuple[str, ...]) -> int:
        """What these ships pay together for one night."""
        lines = [self.ships[name] for name in names]
        return sum(length * self.quays[quay] for quay, length in lines)


@dataclass(slots=True)
class LookUpEpisode:
    """One agent's attempt at one question.

    Attributes:
        group: Which question; the attempts at it make a group.
        book: Where to look things up.
        ships: Whose dues are asked for.
        turns_left: Messages that the model may still write.
        messages: The chat so far, for the model to go on.
        reward: 1 for the right answer, else 0.
        done: Whether it has ended.
    """

    group: int
    book: Book
    ships: tuple[str, ...]
    turns_left: int
    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False

    def take(self, answer: str) -> None:
        """Go on with what the model wrote."""
        self.turns_left -= 1
        self.messages.append({"role": "assistant", "content": answer})
        move = _parsed(answer)
        if isinstance(move, dict) and "answer" in move:
            self.reward = float(move["answer"] == self.book.dues(self.ships))
            self.done = True
            return
        self.messages.append({"role": "tool", "content": json.dumps(self._reply(move))})
        self.done = self.turns_left <= 0

    def _reply(self, move: Any) -> Message:
        if not isinstance(move, dict):
            error = "this is not one JSON object; write one, and nothing before or after it"
            return {"error": error, "turns_left": self.turns_left}
        line = self.book.look_up(move.get("table"), move.get("name"))
        if line is None:
            error = "there is no such line; name a table, ships or quays, and a name in it"
            return {"error": error, "turns_left": self.turns_left}
        return line


def group_of_attempts(
    group: int, size: int, turns: int, book: Book, seed: int
) -> list[LookUpEpisode]:
    """New attempts at one question.

    Each is told its number: at temperature 0 they would all go the same way otherwise.

    Args:
        group: Number of the group; with the seed it decides the question.
        size: How many attempts.
        turns: Messages that the model may write in each.
        book: Where to look things up.
        seed: Of the run.
    """
    draw = random.Random(f"{seed} {group}")
    ships = tuple(draw.sample(sorted(book.ships), 2))
    system = _system_prompt(book, turns)
    question = f"What do {' and '.join(ships)} owe for tonight, together?"
    return [
        LookUpEpisode(group, book, ships, turns, [system, _attempt(number, size, question)])
        for number in range(1, size + 1)
    ]


def _system_prompt(book: Book, turns: int) -> Message:
    text = _RULES
    names = {"turns": str(turns), "ships": ", ".join(book.ships), "quays": ", ".join(book.quays)}
    for name, value in names.items():
        text = text.replace("{" + name + "}", value)
    return {"role": "system", "content": text}


def _attempt(number: int, size: int, question: str) -> Message:
    return {"role": "user", "content": f"(Keeper {number} of {size}) {question}"}


def _parsed(answer: str) -> Any:
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return None
