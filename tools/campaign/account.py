"""What became of every request: one record each, from sending to the end."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

Key = tuple[int, int]
"""A client's number, and its own name for the request."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A request without an answer.

    Attributes:
        prompt: Number of its prompt.
        at: When it was sent.
    """

    prompt: int
    at: float


class Account:
    """Counts what was sent and what came back. It trusts nobody: each key ends once.

    Args:
        expected: The right answer to each prompt, by its number; None leaves answers unchecked.
        deadline: Seconds after which a request without an answer or error is lost.

    Attributes:
        sent: Requests of clients that stay.
        answered: Of these, how many got an answer.
        errors: Of these, how many got an error, by code.
        lost: Of these, how many got neither in time.
        twice: Answers and errors to requests that had got one, or that nobody sent.
        late: Answers and errors to requests that were lost by then; they stay lost.
        wrong: Answers that are not the right one.
        abandoned: Requests of clients that were lost on purpose.
        latencies: Seconds that each answer took.
    """

    def __init__(self, expected: Sequence[list[int]] | None, deadline: float):
        self.expected = expected
        self._deadline = deadline
        self._open: dict[Key, Sent] = {}
        self._ended: set[Key] = set()
        self._lost: set[Key] = set()
        self.errors: Counter[str] = Counter()
        self.sent = self.answered = self.twice = self.late = self.wrong = self.abandoned = 0
        self.latencies: list[float] = []

    @property
    def errored(self) -> int:
        """Requests that got an error."""
        return self.errors.total()

    @property
    def lost(self) -> int:
        """Requests that got nothing in time."""
        return len(self._lost)

    @property
    def in_flight(self) -> int:
        """Requests that may still get something."""
        return len(self._open)

    def send(self, key: Key, prompt: int, now: float) -> None:
        """A request was sent.

        Raises:
            ValueError: One of this name was sent before.
        """
        if key in self._open or key in self._ended or key in self._lost:
            raise ValueError(f"request {key} was sent before")
        self.sent += 1
        self._open[key] = Sent(prompt, now)

    def answer(self, key: Key, status: str, tokens: list[int], now: float) -> None:
        """An answer came; what an engine could not run is an error, with its status for a code."""
        sent = self._end(key)
        if sent is None:
            return
        if status != "COMPLETED":
            self.errors[status] += 1
            return
        self.answered += 1
        self.latencies.append(now - sent.at)
        if self.expected is not None and tokens != self.expected[sent.prompt]:
            self.wrong += 1

    def error(self, key: Key, code: str) -> None:
        """An error came."""
        if self._end(key) is not None:
            self.errors[code] += 1

    def fail_client(self, client: int, code: str) -> None:
        """A client's connection broke: it tells everybody who waits."""
        for key in [key for key in self._open if key[0] == client]:
            self.error(key, code)

    def expire(self, now: float) -> None:
        """What has waited for too long is lost."""
        late = [key for key, sent in self._open.items() if now - sent.at > self._deadline]
        for key in late:
            del self._open[key]
        self._lost.update(late)

    def lose_all(self) -> None:
        """Nobody is there any more who could answer."""
        self.expire(float("inf"))

    def check_integrity(self) -> None:
        """Compare the counts with the records.

        Raises:
            AssertionError: They differ.
        """
        assert self.sent == self.answered + self.errored + self.lost + self.in_flight
        assert len(self._ended) == self.answered + self.errored
        assert len(self.latencies) == self.answered

    def latency(self, share: float) -> float:
        """Seconds that this share of the answers took at most; 0 without answers."""
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    def _end(self, key: Key) -> Sent | None:
        """The record of a request that ends now; None where it has ended before."""
        sent = self._open.pop(key, None)
        if sent is not None:
            self._ended.add(key)
        elif key in self._lost:
            self.late += 1
        else:
            self.twice += 1
        return sent
