"""Messages and frames: the only module that knows the plugin's own wire format.

A message is `[metadata, *bodies]`. Metadata is one msgpack array whose first item is the header
number; its size does not depend on the prompt. Bodies are passed on untouched. What released
megatron-core peers say instead is in `released.py`; `Codec` tells the two apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import msgpack

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.lifecycle import EPOCH_SIGNALS, FleetState, Signal
from megatron.core.inference.coordinator.messages import Header
from megatron.core.inference.coordinator.runtime import released

_LARGEST_METADATA = 1 << 20
"""Bytes of metadata that are looked at; only a batch of replies comes near (20 bytes a reply)."""

SIGNAL_ARGS = {signal: 1 if signal is Signal.SET_GENERATION_EPOCH else 0 for signal in Signal}
"""How many arguments each control signal has when a client sends it."""


class WireError(ValueError):
    """What was received is no message of this protocol; the text says why."""


class _Layout(NamedTuple):
    """How a message class lies in frames: its first fields are metadata, the rest are bodies."""

    message: type
    types: tuple[Any, ...]
    bodies: int = 0
    optional: int = 0  # of the bodies, how many at the end may be absent


_ID = int | str | bytes  # a client's own name for a request

_TO_COORDINATOR = {
    Header.CONNECT: _Layout(m.Connect, (int, bool)),
    Header.SUBMIT_REQUEST: _Layout(m.SubmitRequest, (_ID, int), bodies=3, optional=1),
    Header.REGISTER: _Layout(m.Register, (int, str, int, int, int, int, int, str)),
    Header.KV_EVENTS: _Layout(m.KvEvents, (int, int, int), bodies=1),
    Header.PONG: _Layout(m.Pong, (int,)),
    Header.DISCONNECT: _Layout(m.Disconnect, ()),
    Header.SHUTDOWN: _Layout(m.Shutdown, ()),
}
_FROM_COORDINATOR = {
    Header.CONNECT_ACK: _Layout(m.ConnectAck, (int, str, int, int)),
    Header.SUBMIT_REQUEST: _Layout(m.EngineRequest, (int, int), bodies=2),
    Header.ENGINE_REPLY: _Layout(m.Reply, (_ID,), bodies=1),
    Header.REGISTER_ACK: _Layout(m.RegisterAck, (int, int, int, str)),
    Header.REQUEST_ERROR: _Layout(m.RequestError, (_ID | None, str, str)),
    Header.PING: _Layout(m.Ping, (int,)),
    Header.REGISTER_AGAIN: _Layout(m.RegisterAgain, ()),
    Header.RESYNC: _Layout(m.Resync, ()),
}
_HEADERS = {
    layout.message: (header, layout)
    for table in (_TO_COORDINATOR, _FROM_COORDINATOR)
    for header, layout in table.items()
}


def pack(value: Any) -> bytes:
    """Pack a body or metadata."""
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def unpack(data: bytes) -> Any:
    """Unpack a body or metadata.

    Raises:
        WireError: It is not msgpack.
    """
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise WireError(f"not msgpack ({type(error).__name__})") from None


def encode(message: m.ToCoordinator | m.FromCoordinator) -> list[bytes]:
    """The frames of a message, in our own dialect."""
    if isinstance(message, m.Control):
        return [pack([int(message.signal), *message.args])]
    if isinstance(message, m.EngineReply):
        described = [
            [a.request_id, a.status, a.cached_tokens, a.weight_epoch]
            + ([a.event_number] if a.event_number >= 0 else [])
            for a in message.answers
        ]
        return [pack([int(Header.ENGINE_REPLY), described]), *(a.body for a in message.answers)]
    header, layout = _HEADERS[type(message)]
    values = [getattr(message, f.name) for f in fields(message)]
    split = len(layout.types)
    return [pack([int(header), *values[:split]]), *(b for b in values[split:] if b is not None)]


def decode_for_coordinator(frames: Sequence[bytes]) -> m.ToCoordinator:
    """The message that a peer of our dialect sent to the coordinator.

    Raises:
        WireError: It is none.
    """
    header, items = _open(frames)
    if header in Signal:
        signal = Signal(header)
        return _decode_control(signal, items, frames[1:], SIGNAL_ARGS[signal])
    if header == Header.ENGINE_REPLY:
        return _decode_replies(items, frames[1:])
    return _decode(_TO_COORDINATOR, header, items, frames[1:])


def decode_from_coordinator(frames: Sequence[bytes]) -> m.FromCoordinator:
    """The message that the coordinator sent to a client or an engine.

    Raises:
        WireError: It is none.
    """
    header, items = _open(frames)
    if header in Signal:
        signal = Signal(header)
        count = SIGNAL_ARGS[signal] + (signal in EPOCH_SIGNALS)
        return _decode_control(signal, items, frames[1:], count)
    message = _decode(_FROM_COORDINATOR, header, items, frames[1:])
    if isinstance(message, m.RegisterAck):
        if message.state not in FleetState:
            raise WireError(f"unknown fleet state {message.state!r}")
        message = replace(message, state=FleetState(message.state))
    return message


def _open(frames: Sequence[bytes]) -> tuple[int, list[Any]]:
    if len(frames[0]) > _LARGEST_METADATA:
        raise WireError(f"metadata of {len(frames[0])} bytes")
    metadata = unpack(frames[0])
    if not isinstance(metadata, list) or not metadata or type(metadata[0]) is not int:
        raise WireError("metadata is no array that begins with a header number")
    return metadata[0], metadata[1:]


def _decode(table: dict, header: int, items: list[Any], bodies: Sequence[bytes]) -> Any:
    layout = table.get(header)
    if layout is None:
        raise WireError(f"unknown header {header}")
    _expect_count("items", len(items), len(layout.types))
    _expect_types(items, layout.types)
    _expect_count("bodies", len(bodies), layout.bodies, layout.optional)
    return layout.message(*items, *bodies)


def _decode_control(
    signal: Signal, items: list[Any], bodies: Sequence[bytes], count: int
) -> m.Control:
    _expect_count("arguments", len(items), count)
    _expect_types(items, (int,) * count)
    _expect_count("bodies", len(bodies), 0)
    return m.Control(signal, tuple(items))


def _decode_replies(items: list[Any], bodies: Sequence[bytes]) -> m.EngineReply:
    _expect_count("items", len(items), 1)
    _expect_types(items, (list,))
    _expect_count("bodies", len(bodies), len(items[0]))
    for described in items[0]:
        if not isinstance(described, list):
            raise WireError("a reply is described by no array")
        _expect_count("items of a reply", len(described), 5, optional=1)
        _expect_types(described, (int, str, int, int, int)[: len(described)])
    return m.EngineReply(
        tuple(
            m.Answer(d[0], d[1], d[2], d[3], body, d[4] if len(d) > 4 else -1)
            for d, body in zip(items[0], bodies, strict=True)
        )
    )


def _expect_count(what: str, found: int, expected: int, optional: int = 0) -> None:
    if not expected - optional <= found <= expected:
        raise WireError(f"{found} {what} where {expected} belong")


def _expect_types(items: Sequence[Any], types: Sequence[Any]) -> None:
    for item, expected in zip(items, types, strict=True):
        # To isinstance a bool is an int; here it is none.
        if not isinstance(item, expected) or (type(item) is bool) != (expected is bool):
            name = expected.__name__ if isinstance(expected, type) else expected
            raise WireError(f"a {type(item).__name__} stands where {name} belongs")


@dataclass(slots=True)
class _Dialect:
    """How a peer speaks: a guess by its first message, fixed by its CONNECT or registration."""

    released: bool
    introduced: bool
    wants_text: bool = False


class Codec:
    """Frames to messages and back for a coordinator, whose peers speak two dialects.

    Args:
        add_text: Adds `generated_text` to a packed reply. Released engines leave that to the
            coordinator; it is called only where the client has no tokenizer of its own.
    """

    def __init__(self, add_text: Callable[[bytes], bytes]):
        self._add_text = add_text
        self._dialects: dict[bytes, _Dialect] = {}

    def decode(self, peer: bytes, frames: Sequence[bytes]) -> m.ToCoordinator:
        """The message in some frames; `Malformed` where there is none. Never raises."""
        try:
            if not frames:
                raise WireError("no frame")
            theirs = released.decode(frames)
            message = decode_for_coordinator(frames) if theirs is None else theirs
        except (WireError, released.ReleasedError) as error:
            return m.Malformed(str(error))
        known = self._dialects.get(peer)
        introduces = isinstance(message, m.Connect | m.Register)
        if known is None or (introduces and not known.introduced):
            known = self._dialects[peer] = _Dialect(theirs is not None, introduces)
        if isinstance(message, m.Connect):
            known.wants_text = message.text_prompts
        elif isinstance(message, m.Disconnect):
            self.forget(peer)
        return message

    def encode(self, peer: bytes, message: m.FromCoordinator) -> list[bytes] | None:
        """The frames of a message in the peer's dialect, or None if it has no word for it."""
        dialect = self._dialects.get(peer) or _Dialect(released=False, introduced=False)
        if isinstance(message, m.Reply) and dialect.wants_text:
            body = message.body
            if isinstance(body, released.BodyWithoutText):
                message = m.Reply(message.client_request_id, self._add_text(body))
        return released.encode(message) if dialect.released else encode(message)

    def forget(self, peer: bytes) -> None:
        """The peer is gone."""
        self._dialects.pop(peer, None)
