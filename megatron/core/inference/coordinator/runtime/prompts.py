"""Prompts as they travel: token ids as a msgpack array, packed and unpacked by numpy.

msgpack lets a sender choose how many bytes an integer takes. Ours give all ids of a prompt the same
width, so that the array can be made and read as a whole: 0.1 ms for 32k tokens, where a Python int
for each takes 1.5 ms. Any other peer reads it as the msgpack array that it is, and what other peers
send, ids of mixed widths or text, is unpacked by msgpack.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.runtime import wire

_WIDTHS = (
    (1 << 7, None, np.dtype([("value", "u1")])),  # a "positive fixint" is its own tag
    (1 << 16, 0xCD, np.dtype([("tag", "u1"), ("value", ">u2")])),
    (1 << 32, 0xCE, np.dtype([("tag", "u1"), ("value", ">u4")])),
)
"""What ids of a prompt are below, and then the tag in front of each and how both lie in memory."""


def as_array(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Token ids as int64, shape [n].

    Raises:
        TypeError: They are no flat sequence of whole numbers.
        OverflowError: One takes more than 64 bits.
    """
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise TypeError(
                f"token ids must be whole numbers in one dimension, not {tokens.dtype} of shape "
                f"{tokens.shape}"
            )
        return tokens.astype(np.int64, copy=False)
    # numpy would take floats, and cut them; an array takes bytes, as they lie in memory.
    items = tokens if isinstance(tokens, list) else list(tokens)
    return np.frombuffer(array("q", items), np.int64)


def pack(tokens: np.ndarray) -> bytes:
    """Pack token ids, int64 of shape [n]."""
    lowest, highest = tokens.min(initial=0), tokens.max(initial=0)
    fitting = (width for width in _WIDTHS if highest < width[0])
    _, tag, layout = next(fitting, (0, None, None))
    if lowest < 0 or layout is None:
        return wire.pack(tokens.tolist())  # no model has such ids; the engine will say so
    items: Any = np.empty(len(tokens), layout)
    items["value"] = tokens
    if tag is not None:
        items["tag"] = tag
    return _header(len(tokens)) + items.tobytes()


def unpack(body: m.Body) -> Any:
    """Unpack a prompt.

    Returns:
        An int64 array of shape [n] for ids of equal width, else what msgpack finds: a list where
        the widths differ, text, or anything else that a peer sent.

    Raises:
        WireError: It is not msgpack.
    """
    count, begin = _read_header(body)
    width, rest = divmod(len(body) - begin, count) if count else (0, 0)
    for limit, tag, layout in _WIDTHS:
        if width == layout.itemsize and not rest:
            items: Any = np.frombuffer(body, layout, offset=begin)
            alike = items["value"] < limit if tag is None else items["tag"] == tag
            if alike.all():
                return items["value"].astype(np.int64)
    return wire.unpack(body)


def size(body: m.Body) -> int:
    """How many tokens a packed prompt has; of a text, how many bytes. Does not unpack it."""
    count, _ = _read_header(body)
    return min(count, len(body)) or len(body)


def _header(count: int) -> bytes:
    if count < 16:
        return bytes([0x90 | count])
    if count < 1 << 16:
        return b"\xdc" + count.to_bytes(2, "big")
    return b"\xdd" + count.to_bytes(4, "big")


def _read_header(body: m.Body) -> tuple[int, int]:
    """How many items a packed array has, and where they begin; (0, 0) for anything else."""
    head = bytes(memoryview(body)[:5])
    if head and head[0] & 0xF0 == 0x90:
        return head[0] & 0x0F, 1
    length = {0xDC: 2, 0xDD: 4}.get(head[0] if head else 0, 0)
    return (int.from_bytes(head[1 : 1 + length], "big"), 1 + length) if length else (0, 0)
