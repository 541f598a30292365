"""Damaged messages: first their structure, then their bytes. Seeded, and never the same twice."""

import random
from collections.abc import Callable
from typing import Any

import msgpack

Frames = list[bytes]

ODD: list[Any] = [
    *(0, -1, 1, 127, 128, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63)),
    *(None, True, False, 0.0, -1.5, float("nan"), float("inf"), "", "x", "\u2028", b"", b"\xff"),
    *("x" * 255, "y" * 256, b"z" * 5000, [], {}, [[]], {"a": {}}, {1: 2}, [None] * 40),
    *(msgpack.ExtType(5, b"ext"), msgpack.ExtType(127, bytes(300)), msgpack.Timestamp(1, 2)),
]
"""What stands where something else belongs."""

DEEP = [b"\x91" * depth + b"\xc0" for depth in (20, 500, 5000)]
LIES = [b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff\x01", b"\xdb\xff\xff\xff\xf0a", b"\xc1"]
"""Bytes that promise more than there is, or are no msgpack at all."""

SPECIAL_HASHES = [0, 1, -1, 2**63 - 1, -(2**63), -(2**63) + 1]


def pack(value: Any) -> bytes:
    """Pack with msgpack."""
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def packed_hashes(hashes: list[int]) -> bytes:
    """Pack hashes, or events, as little-endian int64."""
    return b"".join(number.to_bytes(8, "little", signed=True) for number in hashes)


def odd_hashes(rng: random.Random, hashes: list[int]) -> bytes:
    """Packed hashes or events with something wrong, or with a break where none belongs."""
    odd = list(hashes) or [1]
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(odd))
        match rng.randrange(5):
            case 0:
                odd[at] = rng.choice(SPECIAL_HASHES)
            case 1:
                odd.insert(at, odd[rng.randrange(len(odd))])
            case 2:
                odd[at] = min(2**63 - 1, -odd[at])
            case 3:
                odd[at:at] = [-(2**63)] * rng.randint(1, 3)
            case 4:
                rng.shuffle(odd)
    if rng.random() < 0.005:
        odd *= rng.randint(2, 2000)
    packed = packed_hashes(odd)
    return packed[: len(packed) - rng.choice([0, 0, 0, 1, 4, 8])]


def damaged_items(rng: random.Random, items: list[Any]) -> list[Any]:
    """Metadata with an item that is odd, missing, or too many; also deeper inside."""
    items = list(items)
    at = rng.randrange(len(items))
    if isinstance(items[at], list) and items[at] and rng.random() < 0.8:
        items[at] = damaged_items(rng, items[at])
        return items
    match rng.randrange(6):
        case 0 | 1 | 2:
            items[at] = rng.choice(ODD)
        case 3:
            del items[at]
        case 4:
            items.insert(at, rng.choice([*ODD, items[at]]))
        case 5:
            items[at] = rng.choice([rng.randrange(90), -rng.randrange(90), rng.getrandbits(63)])
    return items


def _flip(rng: random.Random, frames: Frames) -> None:
    at = rng.randrange(len(frames))
    frame = bytearray(frames[at] or b"\0")
    for _ in range(rng.choice([1, 1, 1, 4])):
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    frames[at] = bytes(frame)


def _cut(rng: random.Random, frames: Frames) -> None:
    at = rng.randrange(len(frames))
    frames[at] = frames[at][: rng.randint(0, len(frames[at]))]


def _grow(rng: random.Random, frames: Frames) -> None:
    at = rng.randrange(len(frames))
    place = rng.randint(0, len(frames[at]))
    frames[at] = frames[at][:place] + rng.randbytes(rng.randint(1, 12)) + frames[at][place:]


def _replace(rng: random.Random, frames: Frames) -> None:
    noise = rng.randbytes(rng.choice([0, 1, 8, 60]))
    frames[rng.randrange(len(frames))] = rng.choice([*DEEP, *LIES, noise, noise, noise])


def _drop(rng: random.Random, frames: Frames) -> None:
    if len(frames) > 1:
        del frames[rng.randrange(len(frames))]


def _double(rng: random.Random, frames: Frames) -> None:
    frames.insert(rng.randint(0, len(frames)), frames[rng.randrange(len(frames))])


def _swap(rng: random.Random, frames: Frames) -> None:
    rng.shuffle(frames)


def _empty(rng: random.Random, frames: Frames) -> None:
    at = rng.randint(0, len(frames))
    frames[at:at] = [b""] * rng.choice([1, 1, 2, 9])


def _many(rng: random.Random, frames: Frames) -> None:
    if rng.random() < 0.02:
        frames += [rng.choice([b"", b"x"])] * rng.choice([100, 1000, 10_000])


_ON_FRAMES: list[Callable[[random.Random, Frames], None]] = [
    *(_flip, _flip, _cut, _grow, _replace, _drop, _double, _swap, _empty, _many)
]


def damaged_frames(rng: random.Random, frames: Frames) -> Frames:
    """Frames of which some bytes, or whole frames, are wrong."""
    frames = list(frames)
    for _ in range(rng.choice([1, 1, 2, 3])):
        rng.choice(_ON_FRAMES)(rng, frames)
    return frames
