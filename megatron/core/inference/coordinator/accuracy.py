"""How well the coordinator knows what its engines cache: predicted against really skipped."""

from dataclasses import dataclass


@dataclass(slots=True)
class Accuracy:
    """Prediction error of one rank, in tokens of prefill per request.

    A request is *in the window* when the engine's blocks of its prompt changed between its routing
    and its scheduling, other than by the storing of what counted as held already: nobody could
    have known. Errors are kept for those outside it.

    Attributes:
        replies: Requests compared.
        in_window: Of these, in the window.
        wrong: Outside it, predicted wrongly.
        total_error: Outside it, sum of |predicted - skipped|.
        worst_error: Outside it, the largest of these.
    """

    replies: int = 0
    in_window: int = 0
    wrong: int = 0
    total_error: int = 0
    worst_error: int = 0

    def add(self, predicted: int, skipped: int, *, in_window: bool) -> None:
        """Compare one request."""
        self.replies += 1
        if in_window:
            self.in_window += 1
            return
        error = abs(predicted - skipped)
        self.wrong += error > 0
        self.total_error += error
        self.worst_error = max(self.worst_error, error)

    @property
    def mean_error(self) -> float:
        """Mean error outside the window."""
        outside = self.replies - self.in_window
        return self.total_error / outside if outside else 0.0

    @property
    def window_share(self) -> float:
        """Share of the requests that were in the window."""
        return self.in_window / self.replies if self.replies else 0.0

    def fields(self) -> dict[str, float]:
        """Everything, for a log or a file."""
        return {
            "replies": self.replies,
            "in_window": round(self.window_share, 6),
            "wrong": self.wrong,
            "mean_error": round(self.mean_error, 3),
            "worst_error": self.worst_error,
        }
