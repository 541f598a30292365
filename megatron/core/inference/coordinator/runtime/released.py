"""The dialect of released megatron-core peers: one frame, one msgpack array, everything inside.

Requests and replies are cut out of such a frame, and put into one, without being decoded: msgpack
values stand beside each other, so an array is its header followed by its items as they are.
"""

from typing import Any

import msgpack

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.lifecycle import EPOCH_SIGNALS
from megatron.core.inference.coordinator.messages import Header
from megatron.core.inference.coordinator.runtime import wire


def _beginning(items: int, header: Header) -> bytes:
    """An array of some items, at most 15, of which the first is a header number, at most 127."""
    return bytes((0x90 + items, header))


_CONNECT = _beginning(1, Header.CONNECT)
_SUBMIT_REQUEST = _beginning(4, Header.SUBMIT_REQUEST)
_REPLIES = _beginning(2, Header.ENGINE_REPLY)
_REPLY = _beginning(3, Header.ENGINE_REPLY)

CACHE_SALT = "cache_salt"
"""Sampling parameter by which a client keeps its prefixes apart from those of others."""

DETOKENIZE = "detokenize"
"""Extra sampling parameter: the engine end is to put `generated_text` into the reply."""


class ReleasedError(ValueError):
    """A frame of the released dialect is broken; the text says how."""


class BodyWithoutText(bytes):
    """A packed reply of a released engine, which leaves `generated_text` to the coordinator."""

    __slots__ = ()


def decode(frame: bytes) -> m.ToCoordinator | None:
    """The message in the one frame of a released peer, or None if this is no such frame.

    Raises:
        ReleasedError: It is one, and broken.
        WireError: It names a request by a long text.
    """
    if not frame:
        return m.Register(version=None)
    if frame == _CONNECT:
        return m.Connect(version=None)
    try:
        if frame.startswith(_SUBMIT_REQUEST):
            return _split_submit(frame)
        if frame.startswith(_REPLIES) and _holds_maps(frame):
            return _split_replies(frame)
    except (ReleasedError, wire.WireError):
        raise
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise ReleasedError(f"broken msgpack ({type(error).__name__})") from None
    return None


def encode(message: m.FromCoordinator) -> list[m.Body] | None:
    """The frame of a message for a released peer, or None if it has no word for it."""
    match message:
        case m.ConnectAck():
            return [_pack([int(Header.CONNECT_ACK)])]
        case m.Control(signal=signal, args=args):
            # Ours end with the weight epoch, which a released engine does not know.
            return [_pack([int(signal), *(args[:-1] if signal in EPOCH_SIGNALS else args)])]
        case m.EngineRequest():
            head = _SUBMIT_REQUEST + _pack(message.request_id)
            return [b"".join((head, message.prompt, message.sampling))]
        case m.Reply():
            return [_reply(message.client_request_id, message.body)]
        case m.RequestError():
            return [_reply(message.client_request_id, _pack(failed_reply(message.text)))]
    return None


def failed_reply(text: str, *, request_id: int = -1, transient: bool = True) -> dict[str, Any]:
    """A reply, unpacked, that says that a request failed; released clients can deserialize it.

    Args:
        text: The reason, for whoever reads the answer.
        request_id: The coordinator's number of the request.
        transient: Whether the same request may succeed when it is sent again.
    """
    error = {
        "timestamp": 0.0,
        "type": "ERROR_TRANSIENT" if transient else "ERROR_NONTRANSIENT",
        "payload": {
            "type": "ContextOverflowError",
            "request_id": request_id,
            "message": text,
            "is_transient": transient,
        },
    }
    return {
        "request_id": request_id,
        "status": "FAILED",
        "events": [error],
        "prompt": None,
        "prompt_tokens": None,
        "prompt_length": 0,
        "sampling_params": None,
        "inference_parameters": None,
        "generated_text": "",
        "generated_tokens": [],
        "generated_log_probs": [],
        "routing_indices": None,
        "policy_epoch": None,
        "kv_cache_epoch": None,
    }


def with_detokenize(sampling: bytes) -> bytes:
    """Packed sampling parameters with `DETOKENIZE` added, the others untouched.

    Raises:
        ReleasedError: They are no packed map of less than 65,535 entries.
    """
    unpacker = _reader(sampling)
    try:
        size = unpacker.read_map_header()
        header = b"\xde" + (size + 1).to_bytes(2, "big")
    except (ValueError, OverflowError, msgpack.UnpackException):
        raise ReleasedError("sampling parameters are no map, or a huge one") from None
    return header + sampling[unpacker.tell() :] + _pack(DETOKENIZE) + _pack(True)


def _split_submit(frame: bytes) -> m.SubmitRequest:
    unpacker = _reader(frame)
    unpacker.read_array_header()
    unpacker.skip()
    client_request_id = unpacker.unpack()
    if not isinstance(client_request_id, int | str | bytes):
        raise ReleasedError("a request id is neither number nor text")
    wire.check_name(client_request_id)
    start = unpacker.tell()
    unpacker.skip()
    middle = unpacker.tell()
    unpacker.skip()
    end = unpacker.tell()
    sampling = with_detokenize(frame[middle:end])
    return m.SubmitRequest(client_request_id, -1, sampling, frame[start:middle])


def _holds_maps(frame: bytes) -> bool:
    """Whether the first item of the array behind the header is a map: a reply as a whole."""
    unpacker = _reader(frame)
    unpacker.read_array_header()
    unpacker.skip()
    if not unpacker.read_array_header():
        return False
    first = frame[unpacker.tell()]
    return first & 0xF0 == 0x80 or first in (0xDE, 0xDF)


def _split_replies(frame: bytes) -> m.EngineReply:
    unpacker = _reader(frame)
    unpacker.read_array_header()
    unpacker.skip()
    count = unpacker.read_array_header()
    return m.EngineReply(tuple(_split_reply(unpacker, frame) for _ in range(count)))


def _split_reply(unpacker: msgpack.Unpacker, frame: bytes) -> m.Answer:
    start = unpacker.tell()
    found: dict[str, Any] = {"request_id": None, "status": None}
    for _ in range(unpacker.read_map_header()):
        key = unpacker.unpack()
        if key in found:
            found[key] = unpacker.unpack()
        else:
            unpacker.skip()
    if type(found["request_id"]) is not int:
        raise ReleasedError("a reply names no request")
    body = BodyWithoutText(frame[start : unpacker.tell()])
    return m.Answer(found["request_id"], str(found["status"]), -1, -1, body)


def _reply(client_request_id: Any, body: m.Body) -> bytes:
    return b"".join((_REPLY, _pack(client_request_id), body))


def _reader(data: bytes) -> msgpack.Unpacker:
    unpacker = msgpack.Unpacker(raw=False, strict_map_key=False, max_buffer_size=max(len(data), 1))
    unpacker.feed(data)
    return unpacker


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed
