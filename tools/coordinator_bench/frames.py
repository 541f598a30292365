"""Frames as they arrive at a coordinator, built from the wire table of docs/architecture.md.

They are built by hand and not by the plugin's own codec: a mistake of the codec must not hide
itself here, and building them stays cheap.
"""

from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

Frames = list[bytes]

BREAK = -(2**63)
"""Event: the block event after it does not extend the one before it."""
CLEARED = 0

SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 0.0,
    "return_log_probs": False,
    "skip_prompt_log_probs": False,
    "return_segments": False,
    "num_tokens_to_generate": 256,
    "num_tokens_total": None,
    "termination_id": 0,
    "top_n_logprobs": 0,
    "return_prompt_top_n_logprobs": False,
    "add_BOS": False,
    "stop_words": None,
    "detokenize_stop_sequence": False,
}
"""Sampling parameters, about as large as real ones."""


def pack(value: Any) -> bytes:
    """Pack with msgpack."""
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def int_at(data: Any, offset: int) -> int:
    """The msgpack integer (0 or more) at an offset, without unpacking what surrounds it."""
    first: int = data[offset]
    if first < 0x80:
        return first
    size = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}[first]
    return int.from_bytes(data[offset + 1 : offset + 1 + size], "big")


def packed_tokens(tokens: np.ndarray) -> bytes:
    """Tokens of [256, 65535] as msgpack packs them, three bytes each, without an array header."""
    packed = np.empty((len(tokens), 3), dtype=np.uint8)
    packed[:, 0] = 0xCD
    packed[:, 1:] = tokens.astype(">u2").view(np.uint8).reshape(-1, 2)
    return packed.tobytes()


def array_header(items: int) -> bytes:
    """The header of an array, as msgpack packs it."""
    if items < 16:
        return bytes([0x90 | items])
    if items < 1 << 16:
        return b"\xdc" + items.to_bytes(2, "big")
    return b"\xdd" + items.to_bytes(4, "big")


def reply_of(request_id: int, generated: Sequence[int]) -> dict[str, Any]:
    """A reply as an engine packs it, with the fields that a coordinator or a client reads."""
    return {
        "request_id": request_id,
        "status": "COMPLETED",
        "prompt": None,
        "sampling_params": SAMPLING,
        "generated_tokens": list(generated),
        "generated_log_probs": [],
        "events": [],
        "policy_epoch": None,
    }


# --- our dialect -------------------------------------------------------------------------------


def connect() -> Frames:
    """CONNECT of a client with a tokenizer."""
    return [pack([0, 1, False])]


def register(rank: int, block: int, max_requests: int, total_blocks: int) -> Frames:
    """REGISTER of an engine with `lru` eviction."""
    return [pack([30, 1, "bench", rank, 0, max_requests, block, total_blocks, "lru"])]


def submit(request: int, tokens: int, body: bytes, hashes: bytes) -> Frames:
    """SUBMIT_REQUEST of a client."""
    return [pack([20, request, tokens]), PACKED_SAMPLING, body, hashes]


def events(first: int, packed: np.ndarray, epoch: int = 0) -> Frames:
    """KV_EVENTS of an engine."""
    return [pack([32, epoch, first, len(packed)]), packed.astype("<i8").tobytes()]


def replies(answers: Sequence[tuple[int, int, int]], bodies: Sequence[bytes]) -> Frames:
    """ENGINE_REPLY of an engine: (request id, cached tokens, events at its scheduling) each."""
    described = [[number, "COMPLETED", cached, 0, seen] for number, cached, seen in answers]
    return [pack([21, described]), *bodies]


def pong(number: int) -> Frames:
    """PONG of an engine."""
    return [pack([35, number])]


def set_generation_epoch(epoch: int) -> Frames:
    """SET_GENERATION_EPOCH of a client."""
    return [pack([44, epoch])]


def disconnect() -> Frames:
    """DISCONNECT; both dialects say it alike."""
    return [pack([60])]


def chains(*parts: np.ndarray) -> np.ndarray:
    """Events of several chains (stored, or removed: negative), none of which extends another."""
    between = np.array([BREAK], dtype=np.int64)
    apart: list[np.ndarray] = []
    for part in parts:
        if apart and len(part) and (apart[-1][-1] < 0) == (part[0] < 0):
            apart.append(between)
        if len(part):
            apart.append(part)
    return np.concatenate(apart) if apart else np.empty(0, dtype=np.int64)


# --- the released dialect ----------------------------------------------------------------------


def released_connect() -> Frames:
    """CONNECT of a released client."""
    return [pack([0])]


def released_submit(request: int, body: bytes) -> Frames:
    """SUBMIT_REQUEST of a released client; `body` is the packed list of tokens."""
    return [b"\x94\x14" + pack(request) + body + PACKED_SAMPLING]


def released_replies(request_ids: Sequence[int], generated: Sequence[int]) -> Frames:
    """ENGINE_REPLY of a released engine, the same answer to every request."""
    return [pack([21, [reply_of(number, generated) for number in request_ids]])]


PACKED_SAMPLING = pack(SAMPLING)
