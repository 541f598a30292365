"""A fuzzing peer: it says what a client, an engine or a stranger might, mostly damaged.

It is honest in one thing: requests that it is given as an engine it answers, and rightly, since
whoever has an engine's key is trusted with that, and valid traffic must be unharmed.
"""

import hashlib
import random
from contextlib import suppress
from typing import Any

import msgpack

from coordinator_fuzz.mutations import (
    Frames,
    damaged_frames,
    damaged_items,
    odd_hashes,
    pack,
    packed_hashes,
)
from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.runtime import released, wire

BLOCK = 16
"""Tokens in a block of every coordinator that is attacked."""

_PROBE = "probe-"
_OUT_OF_REACH = 2**31
"""No run gives so many numbers to requests."""

_MENUS: dict[str, dict[str, float]] = {
    "client": {"connect": 3, "submit": 16, "control": 2, "leave": 0.3, "foreign": 3},
    "engine": {"register": 1, "reply": 8, "events": 8, "pong": 2, "leave": 0.2, "foreign": 3},
    "stranger": {"foreign": 8, "noise": 4},
}
_FOREIGN = ["connect", "submit", "control", "register", "reply", "events", "pong", "leave"]
_SAMPLING = pack({"temperature": 1.0, "num_tokens_to_generate": 16})


def digest(prompt: bytes) -> bytes:
    """The right answer to a packed prompt."""
    return hashlib.blake2b(prompt, digest_size=12).digest()


def chain(conversation: int, blocks: int) -> list[int]:
    """Block hashes of a conversation's prompts; the first two blocks are everybody's."""
    rng = random.Random(conversation)
    return [7, 8] + [rng.randrange(1, 2**63 - 1) for _ in range(blocks - 2)]


class Peer:
    """What one peer says and how it takes what it is told, without a socket.

    Args:
        kind: "client", "engine" or "stranger".
        stock: It speaks as released peers do.
        name: Tells it from all others.
        rng: The source of all chance.

    Attributes:
        acknowledged: Number of the last probe that came back.
    """

    def __init__(self, kind: str, stock: bool, name: int, rng: random.Random):
        self.kind, self.stock, self.name = kind, stock, name
        self.acknowledged = 0
        self._rng = rng
        self._menu = _MENUS[kind]
        self._newest = self._next_event = self._epoch = 0

    def introduction(self) -> Frames:
        """A valid CONNECT or REGISTER; a stranger's first word is its own."""
        made = {"client": "connect", "engine": "register", "stranger": "pong"}[self.kind]
        return self._framed(*getattr(self, f"_{made}")())

    def probe(self, number: int) -> Frames:
        """A request that is answered in any case, if only by an error that names it."""
        return [pack([20, f"{_PROBE}{number}", -1]), _SAMPLING, pack([number])]

    def mutant(self) -> Frames:
        """The next message; one in three has its metadata and its frames as they should be."""
        rng = self._rng
        while True:
            (what,) = rng.choices(list(self._menu), list(self._menu.values()))
            if what == "noise":
                return [rng.randbytes(rng.randrange(60)) for _ in range(rng.randint(1, 4))]
            items, bodies = getattr(self, f"_{what}")()
            damage = rng.random()
            if damage < 0.35:
                items = damaged_items(rng, items)
            frames = self._framed(items, bodies)
            if 0.3 < damage < 0.65:
                frames = damaged_frames(rng, frames)
            if not self._forbidden(frames):
                return frames

    def take(self, frames: Frames) -> list[Frames]:
        """What it says to a message of the coordinator."""
        try:
            items = msgpack.unpackb(frames[0], raw=False, strict_map_key=False)
        except (ValueError, TypeError):  # somebody's damaged request, passed on as it came
            return self._take_spliced(frames[0])
        if items[0] == 20:
            self._newest = max(self._newest, items[1])
            if len(frames) == 1:
                return self._take_spliced(frames[0])
            self._epoch = items[2]
            answer = pack({"answer": digest(frames[2])})
            return [[pack([21, [[items[1], "COMPLETED", 0, self._epoch]]]), answer]]
        if items[0] in (21, 33) and str(items[1]).startswith(_PROBE):
            self.acknowledged = int(items[1].removeprefix(_PROBE))
        if items[0] == 34:
            return [[pack([35, items[1]])]]
        if items[0] == 36 and self.kind == "engine" and self._rng.random() < 0.5:
            return [self.introduction()]
        if items[0] == 37 and self._rng.random() < 0.5:
            return [self._framed(*self._events_of([0, *chain(self.name, 6)]))]
        return []

    def _take_spliced(self, frame: bytes) -> list[Frames]:
        """Answer a request in the released dialect, whose prompt may be anything."""
        if not frame.startswith(b"\x94\x14"):
            return []
        unpacker = msgpack.Unpacker(raw=False, strict_map_key=False)
        unpacker.feed(frame[2:])
        number, start, end = unpacker.unpack(), unpacker.tell(), None
        with suppress(ValueError, msgpack.UnpackException):
            unpacker.skip()
            end = unpacker.tell()
        self._newest = max(self._newest, number)
        answer = digest(frame[2:][start:end])
        return [[pack([21, [{"request_id": number, "status": "COMPLETED", "answer": answer}]])]]

    def _forbidden(self, frames: Frames) -> bool:
        """Whether it would rightly stop the coordinator, or answer what others are to answer."""
        try:
            message = released.decode(frames[0]) if len(frames) == 1 else None
            message = wire.decode_for_coordinator(list(frames)) if message is None else message
        except (wire.WireError, released.ReleasedError):
            return False
        if isinstance(message, m.EngineReply):
            numbers = [answer.request_id for answer in message.answers]
            return any(self._newest < number < _OUT_OF_REACH for number in numbers)
        return isinstance(message, m.Shutdown)

    def _framed(self, items: list[Any], bodies: Frames) -> Frames:
        # A released peer says everything in one frame.
        if self.stock and len(items) == 9:
            return [b""]
        if self.stock and bodies and items and items[0] == 20:
            return [b"".join((b"\x94\x14", *map(pack, items[1:2]), *reversed(bodies[:2])))]
        return [pack(items), *bodies]

    # --- what it may say, undamaged --------------------------------------------------------------

    def _connect(self) -> tuple[list[Any], Frames]:
        return ([0] if self.stock else [0, 1, self._rng.random() < 0.5]), []

    def _submit(self) -> tuple[list[Any], Frames]:
        rng = self._rng
        blocks = rng.choice([2, 4, 4, 12, 40])
        hashes = chain(rng.randrange(40), blocks)
        packed = odd_hashes(rng, hashes) if rng.random() < 0.4 else packed_hashes(hashes)
        tokens = rng.choice([blocks * BLOCK, blocks * BLOCK + 3, -1, rng.randrange(1000)])
        return [20, rng.randrange(1000), tokens], [_SAMPLING, pack([rng.randrange(999)]), packed]

    def _control(self) -> tuple[list[Any], Frames]:
        header = self._rng.randint(40, 47)
        return ([header, self._rng.randrange(4)] if header == 44 else [header]), []

    def _register(self) -> tuple[list[Any], Frames]:
        rng = self._rng
        eviction = rng.choice(["lru", "lru", "ref_zero"])
        places, blocks = rng.choice([1, 64, 1024]), rng.choice([0, 10, 10_000])
        return [30, 1, f"fuzz-{self.name}", 0, self._epoch, places, BLOCK, blocks, eviction], []

    def _reply(self) -> tuple[list[Any], Frames]:
        rng = self._rng
        count = rng.choice([0, 1, 1, 2, 20])
        numbers = [rng.randint(0, self._newest) for _ in range(count)]
        if self.stock:
            return [21, [{"request_id": n, "status": "COMPLETED"} for n in numbers]], []
        told = [[n, "COMPLETED", rng.randrange(99), self._epoch, self._next_event] for n in numbers]
        return [21, told], [pack({"answer": b"not right"})] * count

    def _events_of(self, events: list[int]) -> tuple[list[Any], Frames]:
        first, self._next_event = self._next_event, self._next_event + len(events)
        return [32, self._epoch, first, len(events)], [packed_hashes(events)]

    def _events(self) -> tuple[list[Any], Frames]:
        rng = self._rng
        told = chain(rng.randrange(40), rng.choice([3, 3, 6, 40]))
        told = rng.choice([told, [-h for h in told[2:]], [0, *told], [told[2], -(2**63), 5]])
        items, bodies = self._events_of(told)
        if rng.random() < 0.3:
            items[2] += rng.choice([-1, 1, -(2**40), 2**62])
        if rng.random() < 0.3:
            bodies = [odd_hashes(rng, told)]
            items[3] = len(bodies[0]) // 8 + rng.choice([0, 0, 0, 1, -1])
        return items, bodies

    def _pong(self) -> tuple[list[Any], Frames]:
        return [35, self._rng.randrange(100)], []

    def _leave(self) -> tuple[list[Any], Frames]:
        return [self._rng.choice([38, 60])], []

    def _foreign(self) -> tuple[list[Any], Frames]:
        said: tuple[list[Any], Frames] = getattr(self, f"_{self._rng.choice(_FOREIGN)}")()
        return said
