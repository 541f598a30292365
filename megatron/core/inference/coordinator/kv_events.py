"""Cache events: what an engine says of its blocks, and whether it can be believed.

An event is one little-endian int64: a block's hash when the block was stored, minus its hash when
it was removed, 0 when everything was cleared. Blocks come in *chains*: of two stored events in a
row, the second block extends the first; events of removed blocks in a row are the tail of one
chain, and also told from the root's side. Where a block does not extend the one before it, a
`BREAK` stands between them; after a change between stored, removed and cleared it goes without
saying, and so it does at the start of a batch.

Events, breaks included, are numbered per engine; a batch that begins with a clear tells the whole
table, so it can follow anything.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise

import numpy as np

CLEARED = 0
BREAK = -(2**63)
EVENT_BYTES = 8
_REMEMBERED = 4096
"""Latest events kept per rank at least, to tell what changed while a request was on its way."""

_FEW = 80
"""Events up to which a Python loop splits a batch faster than numpy."""

_CLEAR = bytes(EVENT_BYTES)
_EVENT = struct.Struct("<q")


class Change(IntEnum):
    """What happened to the blocks of a segment. The values are the signs of the events."""

    REMOVED = -1
    CLEARED = 0
    STORED = 1


_OF_SIGN = {change.value: change for change in Change}
_BREAK_SIGN = 2


def pack_events(events: Sequence[int]) -> bytes:
    """Pack events for the wire: little-endian int64, 8 bytes each."""
    return np.asarray(events, dtype="<i8").tobytes()


def segments(packed: bytes, count: int) -> list[tuple[Change, bytes]] | None:
    """Split a batch of events into its chains.

    Args:
        packed: The packed events.
        count: How many there should be.

    Returns:
        What happened, in order, each with the packed hashes of its blocks, parents first: a chain
        that was stored, the tail of a chain that was removed, or a clear (no hashes). None when
        the batch does not hold `count` events.
    """
    if len(packed) != count * EVENT_BYTES:
        return None
    signs, starts = _few_runs(packed) if count <= _FEW else _many_runs(packed)
    starts.append(len(packed))
    blocks = np.abs(np.frombuffer(packed, "<i8")).tobytes() if -1 in signs else packed
    return [
        (_OF_SIGN[sign], blocks[start:end] if sign else b"")
        for sign, (start, end) in zip(signs, pairwise(starts), strict=True)
        if sign != _BREAK_SIGN
    ]


def _few_runs(packed: bytes) -> tuple[list[int], list[int]]:
    """Runs of events of one sign: their signs, and the bytes that they start at.

    Events before the first of them are breaks.
    """
    signs, starts, last = [], [], _BREAK_SIGN
    events = struct.unpack(f"<{len(packed) // EVENT_BYTES}q", packed)
    for number, event in enumerate(events):
        sign = 1 if event > 0 else _BREAK_SIGN if event == BREAK else -1 if event else 0
        if sign != last:
            signs.append(sign)
            starts.append(number * EVENT_BYTES)
            last = sign
    return signs, starts


def _many_runs(packed: bytes) -> tuple[list[int], list[int]]:
    """The same, for more events than Python should look at."""
    events = np.frombuffer(packed, "<i8")
    signs = np.sign(events)
    signs[events == BREAK] = _BREAK_SIGN
    starts = np.flatnonzero(np.diff(signs, prepend=_BREAK_SIGN))
    return signs[starts].tolist(), (starts * EVENT_BYTES).tolist()


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
        self._recent = bytearray()  # the latest events, packed

    def take(self, first: int, count: int, packed: bytes) -> bool:
        """Take a batch.

        Args:
            first: Number of its first event.
            count: How many events it holds.
            packed: The packed events.

        Returns:
            Whether it follows what came before. If not, nothing of this engine is believed until
            a batch that begins with a clear.
        """
        recent = self._recent
        if packed.startswith(_CLEAR):
            self.trusted, self.asked = True, False
            recent.clear()
        elif not self.trusted or first != self.next:
            self.trusted = False
            return False
        self.next = first + count
        recent += packed
        if len(recent) > 2 * _REMEMBERED * EVENT_BYTES:
            del recent[: -_REMEMBERED * EVENT_BYTES]
        return True

    def changed(self, since: int, until: int, held: bytes, lacking: bytes) -> bool:
        """Whether events since <= number < until made a belief about a prompt's depth wrong.

        Storing what counted as held already changes nothing, nor does removing what did not.
        Engines store parents before children and remove children before parents, so it is enough
        to look for the removal of the last block that was believed held, and for the storing of
        the first that was not. Numbers that are not remembered any more count as a change.

        Args:
            since: Number of the first event.
            until: One more than the number of the last.
            held: Packed hashes of the prompt's first blocks, those believed to be held.
            lacking: Packed hashes of the others.
        """
        if until <= since:
            return False
        oldest = self.next - len(self._recent) // EVENT_BYTES
        if since < oldest:
            return True
        start, end = (since - oldest) * EVENT_BYTES, (until - oldest) * EVENT_BYTES
        if self._has(_CLEAR, start, end) or self._has(lacking[:EVENT_BYTES], start, end):
            return True
        if not held:
            return False
        (last,) = _EVENT.unpack(held[-EVENT_BYTES:])
        return self._has(_EVENT.pack(-last), start, end)

    def _has(self, event: bytes, start: int, end: int) -> bool:
        """Whether an event is among the latest, between these bytes of them. `b""` never is."""
        if not event:
            return False
        at = self._recent.find(event, start, end)
        while at % EVENT_BYTES and at >= 0:  # parts of two events that look like it
            at = self._recent.find(event, at + 1, end)
        return at >= 0
