"""What a run is judged by. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Iteration:
    """Figures of one iteration's rollouts.

    Attributes:
        sent: Requests sent.
        answered: Of these, answered.
        prompt_tokens: Tokens of all prompts.
        cached_tokens: Of these, not computed again.
        reward: Mean over the episodes.
        loss: Of the update that followed, before it.
        served: Requests finished by each rank.
    """

    sent: int = 0
    answered: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reward: float = 0.0
    loss: float = 0.0
    served: Sequence[int] = ()

    @property
    def skip_rate(self) -> float:
        """Share of the prompt tokens that were not computed again."""
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def load_spread(self) -> float:
        """Requests of the busiest rank, over the mean; 1 is even."""
        return max(self.served, default=0) * len(self.served) / max(1, sum(self.served))

    def line(self) -> str:
        """For people to read."""
        return (
            f"{self.answered} of {self.sent} requests answered, "
            f"skip rate {self.skip_rate:.1%}, reward {self.reward:.3f}, loss {self.loss:.3f}, "
            f"load spread {self.load_spread:.2f}"
        )


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How well the coordinator knew what the engines cache.

    Attributes:
        prediction_error: Mean of |predicted - really skipped| tokens over the requests outside the
            window; None where nothing was predicted (the released coordinator).
        in_window: Share of requests during whose way to the engine its cache changed.
    """

    prediction_error: float | None
    in_window: float | None

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> "Accuracy":
        """The accuracy over records of the coordinator's schedule."""
        if not records or "predicted_tokens" not in records[0]:
            return cls(None, None)
        outside = [each for each in records if not each.get("in_window", False)]
        errors = [abs(each["predicted_tokens"] - each["cached_tokens"]) for each in outside]
        share = (len(records) - len(outside)) / len(records)
        return cls(sum(errors) / max(1, len(errors)), share)

    def line(self) -> str:
        """For people to read."""
        if self.prediction_error is None:
            return "nothing predicted"
        return (
            f"prediction error {self.prediction_error:.2f} tokens, {self.in_window:.1%} in window"
        )


def by_iteration(
    records: Sequence[Mapping[str, Any]], iterations: Sequence[Iteration]
) -> list[Accuracy]:
    """The accuracy of each iteration; request ids count on from one to the next."""
    ordered = sorted(records, key=lambda record: record["request_id"])
    accuracies, start = [], 0
    for iteration in iterations:
        end = start + iteration.answered
        accuracies.append(Accuracy.of(ordered[start:end]))
        start = end
    return accuracies


def totals(
    iterations: Sequence[Iteration], outputs_equal: bool, lost: int, accuracy: Accuracy
) -> dict[str, Any]:
    """The figures that the run ends with.

    Args:
        iterations: All of them.
        outputs_equal: Whether the served engines answered as a fresh one, after the last update.
        lost: Requests sent and not answered.
        accuracy: Over all requests.
    """
    prompt_tokens = sum(each.prompt_tokens for each in iterations)
    cached_tokens = sum(each.cached_tokens for each in iterations)
    return {
        "outputs_equal": outputs_equal,
        "skip_rate": round(cached_tokens / max(1, prompt_tokens), 4),
        "prediction_error": _rounded(accuracy.prediction_error),
        "in_window": _rounded(accuracy.in_window),
        "lost": lost,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
