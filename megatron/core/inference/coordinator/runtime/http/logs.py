"""A front end's log: a client can cause lines with every request, and nobody could read them."""

import logging
from collections import Counter

_SAID_IN_FULL = 20
"""Warnings of one line of code that are all said; beyond, only the 32nd, 64th, 128th … is."""


class Throttle(logging.Filter):
    """Lets fewer and fewer warnings and errors from one line of code pass; add it to a handler."""

    def __init__(self):
        super().__init__()
        self._counts: Counter[tuple[str, int]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is said; what it says ends with how often it came, if it came often."""
        if record.levelno < logging.WARNING:
            return True
        place = record.pathname, record.lineno
        self._counts[place] += 1
        times = self._counts[place]
        if times <= _SAID_IN_FULL:
            return True
        if times & (times - 1):
            return False
        record.msg, record.args = f"{record.getMessage()} (times={times})", None
        return True
