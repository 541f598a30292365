"""A line on the terminal that says how far a campaign is; nothing where there is no terminal."""

import sys
import time


class Progress:
    """Progress of one part.

    Args:
        about: What it is.
        whole: How much there is to do.
    """

    def __init__(self, about: str, whole: int):
        self._about, self._whole = about, max(1, whole)
        self._began = self._shown = time.monotonic()

    def show(self, done: int) -> None:
        """So much is done."""
        now = time.monotonic()
        if not sys.stderr.isatty() or now - self._shown < 0.5:
            return
        self._shown = now
        rate = done / (now - self._began)
        share = min(1.0, done / self._whole)
        print(f"\r{self._about}: {share:4.0%}, {rate:,.0f} a second ", end="", file=sys.stderr)

    def end(self) -> None:
        """All is done."""
        if sys.stderr.isatty():
            print(file=sys.stderr)
