"""Log events: a constant name and fields, and not more of them than anybody can read."""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.inference.coordinator.messages import Log

_PEERS_REMEMBERED = 4096
_SAID_IN_FULL = 20
"""Events of one name that are all said; beyond, only the 32nd, 64th, 128th … is."""

_AT_ONCE, _A_SECOND = 200, 1.0
"""Of events that no peer is named with, replicas that come and go: so many of one name are said,
and so many more a second. Who has an engine's key can register thousands of times a second."""


def render(event: str, fields: dict[str, Any]) -> str:
    """An event on one line: `name key=value …`."""
    return " ".join([event, *(f"{key}={value!r}" for key, value in fields.items())])


def log_to_stderr(form: str, level: int) -> None:
    """Set up this process's log: no text in it can look like a line or a color of its own.

    Args:
        form: What a line is, as `logging` formats it.
        level: The lowest level that is said.
    """
    logging.basicConfig(level=level)
    for handler in logging.getLogger().handlers:  # an import may have set one up
        handler.setFormatter(_Formatter(form))


class _Formatter(logging.Formatter):
    """Escapes what does not print. Only tracebacks have several lines; they are indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  {_escaped(line)}" for line in lines)


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


@dataclass(slots=True)
class _Allowance:
    """How many events of one name may be said at present."""

    at: float
    left: float = _AT_ONCE
    unsaid: int = 0

    def take(self, now: float) -> bool:
        self.left = min(_AT_ONCE, self.left + (now - self.at) * _A_SECOND)
        self.at = now
        if self.left < 1:
            self.unsaid += 1
            return False
        self.left -= 1
        return True


class EventLog:
    """Writes `Log` effects. What a peer can cause is said once per peer and event.

    Args:
        logger: Where to write.
        clock: Seconds.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic):
        self._logger = logger
        self._clock = clock
        self._allowances: dict[str, _Allowance] = {}
        self._said: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        self.counts: Counter[str] = Counter()
        self._tellers: Counter[str] = Counter()  # peers that caused an event

    def write(self, log: Log) -> None:
        """Count an event, and say it unless it was said often enough."""
        self.counts[log.event] += 1
        if log.peer is not None and self._heard(log.event, log.peer):
            return
        fields = dict(log.fields)
        if log.peer is not None:
            self._tellers[log.event] += 1
            tellers = self._tellers[log.event]
            if tellers > _SAID_IN_FULL and tellers & (tellers - 1):
                return
            fields |= {"peer": log.peer.hex(), "times": self.counts[log.event]}
        elif not self._allowed(log.event, fields):
            return
        level = logging.WARNING if log.warning else logging.INFO
        self._logger.log(level, "%s", render(log.event, fields))

    def summary(self) -> dict[str, int]:
        """How often each event happened."""
        return dict(self.counts)

    def _allowed(self, event: str, fields: dict[str, Any]) -> bool:
        """Whether an event may be said now; how many were not is said with it."""
        now = self._clock()
        allowance = self._allowances.setdefault(event, _Allowance(now))
        if not allowance.take(now):
            return False
        if allowance.unsaid:
            fields["unsaid"], allowance.unsaid = allowance.unsaid, 0
        return True

    def _heard(self, event: str, peer: bytes) -> bool:
        key = (event, peer)
        if key in self._said:
            self._said.move_to_end(key)
            return True
        self._said[key] = None
        if len(self._said) > _PEERS_REMEMBERED:
            self._said.popitem(last=False)
        return False
