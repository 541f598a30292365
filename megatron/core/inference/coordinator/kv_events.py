"""Cache events: what an engine says of its blocks, and whether it can be believed.

An event is one int64: a block's hash when the block was stored, minus its hash when it was removed,
0 when everything was cleared. Events are numbered per engine; a batch that begins with a clear
tells the whole table, so it can follow anything.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

CLEARED = 0
EVENT_BYTES = 8
_REMEMBERED = 4096
"""Latest events kept per rank, to tell what changed while a request was on its way."""


def pack_events(events: Sequence[int]) -> bytes:
    """Pack events for the wire: little-endian int64, 8 bytes each."""
    return np.asarray(events, dtype="<i8").tobytes()


def unpack_events(packed: bytes, count: int) -> list[int] | None:
    """Unpack a batch of events, or None when it does not hold `count` of them."""
    if len(packed) != count * EVENT_BYTES:
        return None
    events: list[int] = np.frombuffer(packed, dtype="<i8").tolist()
    return events


class EventStream:
    """The numbering of one engine's events.

    Attributes:
        next: Number of the event that must come next.
        trusted: Whether every event since the last clear was seen.
        asked: Whether the engine was asked for its whole table and has not sent it yet.
    """

    __slots__ = ("_recent", "asked", "next", "trusted")

    def __init__(self):
        self.next = 0
        self.trusted = False
        self.asked = False
        self._recent: deque[int] = deque(maxlen=_REMEMBERED)

    def take(self, first: int, events: Sequence[int]) -> bool:
        """Take a batch.

        Args:
            first: Number of its first event.
            events: The events.

        Returns:
            Whether it follows what came before. If not, nothing of this engine is believed until
            a batch that begins with a clear.
        """
        if events and events[0] == CLEARED:
            self.trusted, self.asked = True, False
            self._recent.clear()
        elif not self.trusted or first != self.next:
            self.trusted = False
            return False
        self.next = first + len(events)
        self._recent.extend(events)
        return True

    def changed(self, since: int, until: int, held: Iterable[int], lacking: Iterable[int]) -> bool:
        """Whether events since <= number < until made a belief about some blocks wrong.

        Storing what counted as held already changes nothing, nor does removing what did not.
        Numbers that are not remembered any more count as a change.

        Args:
            since: Number of the first event.
            until: One more than the number of the last.
            held: Blocks believed to be held.
            lacking: Blocks believed not to be.
        """
        if until <= since:
            return False
        oldest = self.next - len(self._recent)
        if since < oldest:
            return True
        surprises = {-block for block in held} | set(lacking) | {CLEARED}
        return not surprises.isdisjoint(islice(self._recent, since - oldest, until - oldest))
