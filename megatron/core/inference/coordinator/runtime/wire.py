"""Messages and frames: the only module that knows the plugin's own wire format.

A message is `[metadata, *bodies]`. Metadata is one msgpack array whose first item is the header
number; its size does not depend on the prompt. Bodies are passed on untouched. What released
megatron-core peers say instead is in `released.py`; `codec.py` tells the two apart.

Two tables lead from headers to functions that decode, one from message classes to functions that
encode. A message is checked in two steps: whether all is well takes one look at the types of its
items; only where it is not, they are gone through for what is wrong.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any, get_args

import msgpack

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.lifecycle import EPOCH_SIGNALS, FleetState, Signal
from megatron.core.inference.coordinator.messages import Header

_LARGEST_METADATA = 1 << 20
"""Bytes of metadata that are looked at; only a batch of replies comes near (20 bytes a reply)."""

SIGNAL_ARGS = {signal: 1 if signal is Signal.SET_GENERATION_EPOCH else 0 for signal in Signal}
"""How many arguments each control signal has when a client sends it."""

_ID = int | str | bytes  # a client's own name for a request

LONGEST_NAME = 255
"""Characters, or bytes, of what a peer may name itself or a request: names are kept."""

_Decoder = Callable[[list[Any], list[Any]], Any]
"""Makes a message of the items behind the header and the bodies."""


class WireError(ValueError):
    """What was received is no message of this protocol; the text says why."""


def pack(value: Any) -> bytes:
    """Pack a body or metadata."""
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def unpack(data: m.Body) -> Any:
    """Unpack a body or metadata.

    Raises:
        WireError: It is not msgpack.
    """
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise WireError(f"not msgpack ({type(error).__name__})") from None


def encode(message: m.ToCoordinator | m.FromCoordinator) -> list[m.Body]:
    """The frames of a message, in our own dialect."""
    return _ENCODERS[type(message)](message)


def decode_for_coordinator(frames: Sequence[Any]) -> m.ToCoordinator:
    """The message that a peer of our dialect sent to the coordinator.

    Args:
        frames: The metadata as bytes, and the bodies, bytes or `zmq.Frame`.

    Raises:
        WireError: It is none.
    """
    message: m.ToCoordinator = _decode(_TO_COORDINATOR, frames)
    if isinstance(message, m.Register) and message.state:
        _expect_state(message.state)
    return message


def decode_from_coordinator(frames: Sequence[Any]) -> m.FromCoordinator:
    """The message that the coordinator sent to a client or an engine.

    Raises:
        WireError: It is none.
    """
    message: m.FromCoordinator = _decode(_FROM_COORDINATOR, frames)
    if isinstance(message, m.RegisterAck):
        _expect_state(message.state)
        message = replace(message, state=FleetState(message.state))
    return message


def _expect_state(name: str) -> None:
    if name not in FleetState:
        raise WireError(f"unknown fleet state {name!r}")


def _decode(decoders: Mapping[int, _Decoder], frames: Sequence[Any]) -> Any:
    metadata, *bodies = frames
    if len(metadata) > _LARGEST_METADATA:
        raise WireError(f"metadata of {len(metadata)} bytes")
    values = unpack(metadata)
    if type(values) is not list or not values or type(values[0]) is not int:
        raise WireError("metadata is no array that begins with a header number")
    header, *items = values
    decoder = decoders.get(header)
    if decoder is None:
        raise WireError(f"unknown header {header}")
    return decoder(items, bodies)


# --- most messages -----------------------------------------------------------------------------


class _Layout:
    """How a message class lies in frames: its first fields are metadata, the next are bodies.

    Args:
        header: Its number.
        message: The class.
        types: Of the fields in the metadata.
        extra: Of fields behind the bodies, which are metadata as well; they are left out where
            all of them are empty.
        bodies: How many there are.
        optional: Of the bodies, how many at the end may be absent.
        looked_into: Which body, if any, is to be bytes, since somebody looks into it.
        names: Which items are names, of at most `LONGEST_NAME`.
    """

    def __init__(
        self,
        header: Header,
        message: type,
        types: tuple[Any, ...],
        bodies: int = 0,
        optional: int = 0,
        looked_into: int | None = None,
        names: tuple[int, ...] = (),
        extra: tuple[Any, ...] = (),
    ):
        self.header, self.message = header, message
        self._types, self._bodies, self._optional = types, bodies, optional
        self._extra = extra
        self._counts = range(bodies - optional, bodies + 1)
        self._accepted = _accepted(types)
        self._looked_into = bodies if looked_into is None else looked_into
        self._names = names
        known = [field.name for field in fields(message)]
        self._in_metadata = known[: len(types)]
        self._in_bodies = known[len(types) : len(types) + bodies]
        self._behind = known[len(types) + bodies :] if extra else []

    def decode(self, items: list[Any], bodies: list[Any]) -> Any:
        extra = self._take_extra(items) if self._extra else {}
        if tuple(map(type, items)) not in self._accepted or len(bodies) not in self._counts:
            self._complain(items, bodies)
        for name in self._names:
            check_name(items[name])
        if len(bodies) > self._looked_into:
            bodies[self._looked_into] = bytes(bodies[self._looked_into])
        return self.message(*items, *bodies, **extra)

    def _take_extra(self, items: list[Any]) -> dict[str, Any]:
        count = len(self._types)
        extra = items[count:]
        if not extra:
            return {}
        del items[count:]
        _expect_count("items", count + len(extra), count + len(self._extra))
        _expect_types(extra, self._extra)
        for item in extra:
            if type(item) is list:
                _expect_types(item, (int,) * len(item))
            else:
                check_name(item)
        return dict(zip(self._behind, extra, strict=True))

    def encode(self, message: Any) -> list[m.Body]:
        items = [getattr(message, name) for name in self._in_metadata]
        extra = [getattr(message, name) for name in self._behind]
        if any(extra):
            items += extra
        bodies = [getattr(message, name) for name in self._in_bodies]
        return [pack([int(self.header), *items]), *(body for body in bodies if body is not None)]

    def _complain(self, items: list[Any], bodies: list[Any]) -> None:
        _expect_count("items", len(items), len(self._types))
        _expect_types(items, self._types)
        _expect_count("bodies", len(bodies), self._bodies, self._optional)


def check_name(name: Any) -> None:
    """Raise `WireError` for a name that is too long to be kept."""
    if type(name) is not int and len(name) > LONGEST_NAME:
        raise WireError(f"a name of {len(name)} characters")


def _accepted(types: Sequence[Any]) -> frozenset[tuple[type, ...]]:
    """The types that the items may have together; msgpack makes no subclasses."""
    return frozenset(product(*(get_args(each) or (each,) for each in types)))


def _expect_count(what: str, found: int, expected: int, optional: int = 0) -> None:
    if not expected - optional <= found <= expected:
        raise WireError(f"{found} {what} where {expected} belong")


def _expect_types(items: Sequence[Any], types: Sequence[Any]) -> None:
    for item, expected in zip(items, types, strict=True):
        # A bool is an int to Python; here it is none.
        if type(item) not in (get_args(expected) or (expected,)):
            name = expected.__name__ if isinstance(expected, type) else expected
            raise WireError(f"a {type(item).__name__} stands where {name} belongs")


_TO = [
    _Layout(Header.CONNECT, m.Connect, (int, bool)),
    _Layout(
        Header.SUBMIT_REQUEST,
        m.SubmitRequest,
        (_ID, int),
        bodies=3,
        optional=1,
        looked_into=2,
        names=(0,),
        extra=(str,),
    ),
    _Layout(
        Header.REGISTER,
        m.Register,
        (int, str, int, int, int, int, int, str),
        names=(1, 7),
        extra=(int, list, str),
    ),
    _Layout(Header.KV_EVENTS, m.KvEvents, (int, int, int), 1, looked_into=0),
    _Layout(Header.PONG, m.Pong, (int,)),
    _Layout(Header.DRAIN, m.Drain, ()),
    _Layout(Header.DISCONNECT, m.Disconnect, ()),
    _Layout(Header.SHUTDOWN, m.Shutdown, ()),
]
_FROM = [
    _Layout(Header.CONNECT_ACK, m.ConnectAck, (int, str, int, int)),
    _Layout(Header.SERVING, m.Serving, (bool,), extra=(str,)),
    _Layout(Header.SUBMIT_REQUEST, m.EngineRequest, (int, int), 2),
    _Layout(Header.ENGINE_REPLY, m.Reply, (_ID,), 1),
    _Layout(Header.REGISTER_ACK, m.RegisterAck, (int, int, int, str), extra=(list,)),
    _Layout(Header.REQUEST_ERROR, m.RequestError, (_ID | None, str, str)),
    _Layout(Header.PING, m.Ping, (int,)),
    _Layout(Header.REGISTER_AGAIN, m.RegisterAgain, ()),
    _Layout(Header.RESYNC, m.Resync, ()),
    _Layout(Header.DRAIN_ACK, m.DrainAck, ()),
]

# --- control signals ---------------------------------------------------------------------------


def _control(signal: Signal, count: int) -> _Decoder:
    def decode(items: list[Any], bodies: list[Any]) -> m.Control:
        _expect_count("arguments", len(items), count)
        _expect_types(items, (int,) * count)
        _expect_count("bodies", len(bodies), 0)
        return m.Control(signal, tuple(items))

    return decode


def _encode_control(message: m.Control) -> list[m.Body]:
    return [pack([int(message.signal), *message.args])]


# --- an engine's replies, one body each --------------------------------------------------------

_ANSWER = (int, str, int, int, int)  # the last may be absent


def _decode_replies(items: list[Any], bodies: list[Any]) -> m.EngineReply:
    if len(items) != 1 or type(items[0]) is not list or len(items[0]) != len(bodies):
        _expect_count("items", len(items), 1)
        _expect_types(items, (list,))
        _expect_count("bodies", len(bodies), len(items[0]))
    return m.EngineReply(tuple(map(_answer, items[0], bodies)))


def _answer(described: Any, body: m.Body) -> m.Answer:
    if type(described) is not list:
        raise WireError("a reply is described by no array")
    if len(described) == 4:
        described.append(-1)
    elif len(described) != 5:
        _expect_count("items of a reply", len(described), 5, optional=1)
    number, status, cached, epoch, events = described
    if type(status) is not str or not (
        type(number) is type(cached) is type(epoch) is type(events) is int
    ):
        _expect_types(described, _ANSWER)
    return m.Answer(number, status, cached, epoch, body, events)


def _encode_replies(message: m.EngineReply) -> list[m.Body]:
    described = [
        [a.request_id, a.status, a.cached_tokens, a.weight_epoch]
        + ([a.event_number] if a.event_number >= 0 else [])
        for a in message.answers
    ]
    return [pack([int(Header.ENGINE_REPLY), described]), *(a.body for a in message.answers)]


# --- what the coordinator sends for every request ----------------------------------------------

_SUBMIT, _REPLY = int(Header.SUBMIT_REQUEST), int(Header.ENGINE_REPLY)
_pack_again = msgpack.Packer(use_bin_type=True).pack
"""Half of `pack`'s time, but not safe in threads: only for what a coordinator sends."""


def _encode_engine_request(message: m.EngineRequest) -> list[m.Body]:
    metadata = _pack_again((_SUBMIT, message.request_id, message.weight_epoch))
    return [metadata, message.sampling, message.prompt]


def _encode_reply(message: m.Reply) -> list[m.Body]:
    return [_pack_again((_REPLY, message.client_request_id)), message.body]


# --- the tables --------------------------------------------------------------------------------

_TO_COORDINATOR: dict[int, _Decoder] = {
    **{layout.header: layout.decode for layout in _TO},
    **{signal: _control(signal, SIGNAL_ARGS[signal]) for signal in Signal},
    Header.ENGINE_REPLY: _decode_replies,
}
_FROM_COORDINATOR: dict[int, _Decoder] = {
    **{layout.header: layout.decode for layout in _FROM},
    **{s: _control(s, SIGNAL_ARGS[s] + (s in EPOCH_SIGNALS)) for s in Signal},
}
_ENCODERS: dict[type, Callable[[Any], list[m.Body]]] = {
    **{layout.message: layout.encode for layout in (*_TO, *_FROM)},
    m.Control: _encode_control,
    m.EngineReply: _encode_replies,
    m.EngineRequest: _encode_engine_request,
    m.Reply: _encode_reply,
}
