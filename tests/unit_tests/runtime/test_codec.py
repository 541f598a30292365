"""A coordinator's peers speak two dialects: whom it takes for what, and what they get."""

import msgpack
import pytest
from builders import make_connect, make_register, stock_register, submission

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.runtime import released, wire
from megatron.core.inference.coordinator.runtime.codec import Codec

PEER = b"peer"


def no_text(body):
    raise AssertionError("nobody asked for text")


def pack(*items):
    return msgpack.packb(list(items), use_bin_type=True)


STOCK_CONNECT, STOCK_REGISTER = pack(0), b""


def in_dialect_of(first_frames, message, *later):
    """How a message to a peer is encoded after it has sent some frames."""
    codec = Codec(no_text)
    for frames in [first_frames, *later]:
        codec.decode(PEER, frames)
    return codec.encode(PEER, message)


ERROR = m.RequestError(1, "no_replica", "why")
OURS = wire.encode(ERROR)


def is_stock(frames):
    return len(frames) == 1 and msgpack.unpackb(frames[0])[0] == 21


def test_the_first_message_fixes_the_dialect():
    assert in_dialect_of(wire.encode(make_connect()), ERROR) == OURS
    assert in_dialect_of(wire.encode(make_register()), ERROR) == OURS
    assert is_stock(in_dialect_of([STOCK_CONNECT], ERROR))
    assert in_dialect_of([STOCK_REGISTER], m.Ping(1)) is None


def test_a_peer_that_said_nothing_is_spoken_to_in_our_own_dialect():
    assert Codec(no_text).encode(PEER, ERROR) == OURS


def test_a_later_message_in_the_other_dialect_changes_nothing():
    connect = wire.encode(make_connect())
    assert in_dialect_of(connect, ERROR, [STOCK_CONNECT], [STOCK_REGISTER]) == OURS
    assert is_stock(in_dialect_of([STOCK_CONNECT], ERROR, connect))


@pytest.mark.parametrize("first", [[b"\xc1"], [pack(40)], [pack(44, 1)], [pack(99)], []])
def test_garbage_or_a_signal_before_the_greeting_does_not_fix_the_dialect(first):
    """A stock client may send a signal, which looks the same in both dialects, before CONNECT."""
    assert is_stock(in_dialect_of(first, ERROR, [STOCK_CONNECT]))
    assert in_dialect_of(first, ERROR, wire.encode(make_connect())) == OURS


def test_a_request_before_connect_is_answered_in_the_dialect_it_came_in():
    assert is_stock(in_dialect_of([pack(20, 1, "text", {})], ERROR))
    assert in_dialect_of(wire.encode(submission(1)), ERROR) == OURS


def test_who_leaves_or_is_lost_is_forgotten():
    assert in_dialect_of([STOCK_CONNECT], ERROR, [pack(60)]) == OURS
    codec = Codec(no_text)
    codec.decode(PEER, [STOCK_CONNECT])
    codec.forget(PEER)
    codec.forget(b"unknown")
    assert codec.encode(PEER, ERROR) == OURS


def test_peers_have_dialects_of_their_own():
    codec = Codec(no_text)
    assert codec.decode(b"stock", [STOCK_CONNECT]) == m.Connect(None)
    assert codec.decode(b"ours", wire.encode(make_connect())) == make_connect()
    assert codec.decode(b"engine", [STOCK_REGISTER]) == stock_register()
    assert is_stock(codec.encode(b"stock", ERROR))
    assert codec.encode(b"ours", ERROR) == OURS
    assert codec.encode(b"engine", m.Ping(1)) is None


@pytest.mark.parametrize(
    ("connect", "body", "expected"),
    [
        (m.Connect(1, text_prompts=True), released.BodyWithoutText(b"bare"), b"BARE"),
        (m.Connect(1, text_prompts=False), released.BodyWithoutText(b"bare"), b"bare"),
        (m.Connect(1, text_prompts=True), b"complete", b"complete"),
        (m.Connect(1, text_prompts=False), b"complete", b"complete"),
    ],
)
def test_text_is_added_only_to_stock_replies_for_clients_without_a_tokenizer(
    connect, body, expected
):
    codec = Codec(lambda reply: reply.upper())
    codec.decode(PEER, wire.encode(connect))
    assert codec.encode(PEER, m.Reply(1, body)) == [pack(21, 1), expected]


def test_a_stock_client_gets_text_too():
    codec = Codec(lambda reply: msgpack.packb({"generated_text": "hello"}))
    codec.decode(PEER, [STOCK_CONNECT])
    (frame,) = codec.encode(PEER, m.Reply(1, released.BodyWithoutText(b"\x80")))
    assert msgpack.unpackb(frame) == [21, 1, {"generated_text": "hello"}]


def test_strangers_leave_nothing_behind_that_adds_up():
    codec = Codec(no_text)
    for number in range(20_000):
        codec.decode(b"ours-%d" % number, wire.encode(submission(1)))
        codec.decode(b"stock-%d" % number, [pack(20, 1, "text", {})])
        codec.decode(b"refused-%d" % number, wire.encode(m.Connect(99, True)))
        codec.encode(b"refused-%d" % number, m.RequestError(None, "not_connected", "why"))
    assert len(codec._dialects) == len(codec._passers_by) == 4096
    assert is_stock(codec.encode(b"stock-19999", ERROR))
    codec.decode(b"stock-19999", [STOCK_CONNECT])
    codec.decode(b"stock-19998", [pack(60)])
    assert (len(codec._dialects), len(codec._passers_by)) == (4095, 4094)


def test_engines_that_come_back_under_new_identities_leave_nothing_behind():
    """Nothing is sent any more to the old one, so nobody finds out that it is gone."""
    codec = Codec(no_text)
    for number in range(100):
        peer = b"engine-job-0-%d" % number
        codec.decode(peer, [pack(40)])  # looks the same in both dialects
        codec.decode(peer, wire.encode(make_register()))
        assert codec.encode(peer, ERROR) == OURS
    assert (codec._dialects, codec._passers_by) == ({}, {})
