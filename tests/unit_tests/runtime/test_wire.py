"""Messages to frames and back, and whatever else may arrive on the socket."""

import msgpack
import pytest
import zmq
from builders import submission, tokens
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.lifecycle import FleetState, Signal
from megatron.core.inference.coordinator.runtime import wire
from megatron.core.inference.coordinator.runtime.codec import Codec

PEER = b"peer"


def no_text(body):
    raise AssertionError("nobody asked for text")


def decode(*frames, peer=PEER):
    return Codec(no_text).decode(peer, frames)


def pack(*items):
    return msgpack.packb(list(items), use_bin_type=True)


ANSWERS = (m.Answer(7, "COMPLETED", 480, 3, b"one"), m.Answer(2**40, "FAILED", 0, 3, b""))

TO_COORDINATOR = [
    (m.Connect(1, True), [0, 1, True], []),
    (m.Connect(1, False), [0, 1, False], []),
    (m.SubmitRequest(5, 9, b"s", b"p", b"h"), [20, 5, 9], [b"s", b"p", b"h"]),
    (m.SubmitRequest("five", -1, b"s", b"p", None), [20, "five", -1], [b"s", b"p"]),
    (m.SubmitRequest(b"5", 0, b"", b"", b""), [20, b"5", 0], [b"", b"", b""]),
    (m.SubmitRequest(5, 9, b"s", b"p", b"h", "key"), [20, 5, 9, "key"], [b"s", b"p", b"h"]),
    (m.EngineReply(()), [21, []], []),
    (
        m.EngineReply(ANSWERS),
        [21, [[7, "COMPLETED", 480, 3], [2**40, "FAILED", 0, 3]]],
        [b"one", b""],
    ),
    (
        m.Register(1, "job", 10, 2, 64, 16, 512, "lru"),
        [30, 1, "job", 10, 2, 64, 16, 512, "lru"],
        [],
    ),
    (
        m.Register(1, "job", 10, 2, 64, 16, 512, "lru", 3, [7, 9], "suspended"),
        [30, 1, "job", 10, 2, 64, 16, 512, "lru", 3, [7, 9], "suspended"],
        [],
    ),
    (
        m.EngineReply((m.Answer(7, "COMPLETED", 480, 3, b"one", 12),)),
        [21, [[7, "COMPLETED", 480, 3, 12]]],
        [b"one"],
    ),
    (m.KvEvents(3, 10, 2, b"events"), [32, 3, 10, 2], [b"events"]),
    (m.Pong(8), [35, 8], []),
    (m.Drain(), [38], []),
    (m.Disconnect(), [60], []),
    (m.Shutdown(), [61], []),
    *((m.Control(s), [int(s)], []) for s in Signal if s is not Signal.SET_GENERATION_EPOCH),
    (m.Control(Signal.SET_GENERATION_EPOCH, (-3,)), [44, -3], []),
]
FROM_COORDINATOR = [
    (m.ConnectAck(1, "longest_prefix", 16, 4), [1, 1, "longest_prefix", 16, 4], []),
    (m.Serving(False), [50, False], []),
    (m.Serving(False, "has a paused fleet"), [50, False, "has a paused fleet"], []),
    (m.Reply(5, b"body"), [21, 5], [b"body"]),
    (m.Reply("five", b""), [21, "five"], [b""]),
    (m.EngineRequest(9, 4, b"s", b"p"), [20, 9, 4], [b"s", b"p"]),
    (m.RegisterAck(3, 2, 4, FleetState.SUSPENDED), [31, 3, 2, 4, "suspended"], []),
    (m.RequestError(5, m.ErrorCode.REPLICA_LOST, "why"), [33, 5, "replica_lost", "why"], []),
    (m.RequestError(None, m.ErrorCode.NOT_CONNECTED, "no"), [33, None, "not_connected", "no"], []),
    (m.Ping(8), [34, 8], []),
    (m.RegisterAgain(), [36], []),
    (m.Resync(), [37], []),
    (m.DrainAck(), [39], []),
    *(
        (m.Control(s), [int(s)], [])
        for s in Signal
        if s not in (Signal.RESUME, Signal.SET_GENERATION_EPOCH)
    ),
    (m.Control(Signal.RESUME, (4,)), [43, 4], []),
    (m.Control(Signal.SET_GENERATION_EPOCH, (100, 4)), [44, 100, 4], []),
]


def ids(table):
    return [f"{type(message).__name__}-{metadata[0]}" for message, metadata, _ in table]


# --- round trips ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("message", "metadata", "bodies"), TO_COORDINATOR, ids=ids(TO_COORDINATOR))
def test_a_message_to_the_coordinator_is_these_frames_and_comes_back(message, metadata, bodies):
    frames = wire.encode(message)
    assert (msgpack.unpackb(frames[0]), frames[1:]) == (metadata, bodies)
    assert decode(*frames) == message
    assert wire.decode_for_coordinator(frames) == message


@pytest.mark.parametrize(
    ("message", "metadata", "bodies"), FROM_COORDINATOR, ids=ids(FROM_COORDINATOR)
)
def test_a_message_from_the_coordinator_is_these_frames_and_comes_back(message, metadata, bodies):
    frames = wire.encode(message)
    assert (msgpack.unpackb(frames[0]), frames[1:]) == (metadata, bodies)
    decoded = wire.decode_from_coordinator(frames)
    assert decoded == message
    assert type(decoded) is type(message)
    assert Codec(no_text).encode(PEER, message) == frames


def test_the_fleet_state_comes_back_as_a_state():
    frames = wire.encode(m.RegisterAck(0, 1, 0, FleetState.PAUSED))
    assert wire.decode_from_coordinator(frames).state is FleetState.PAUSED


def test_every_kind_of_message_is_in_these_tables():
    """`Malformed`, `PeerLost`, `Tick` and `Sweep` come from the runtime and have no frames."""
    to_coordinator = {type(message) for message, _, _ in TO_COORDINATOR}
    assert to_coordinator == {*m.ToCoordinator.__args__} - {
        *(m.Malformed, m.PeerLost, m.Tick, m.Sweep)
    }
    assert {type(message) for message, _, _ in FROM_COORDINATOR} == {*m.FromCoordinator.__args__}


INT64 = st.integers(-(2**63), 2**64 - 1)
NAMES = INT64 | st.text(max_size=9) | st.binary(max_size=9)


@given(NAMES, INT64, st.binary(), st.binary(), st.none() | st.binary())
def test_any_submission_comes_back(name, prompt_tokens, sampling, prompt, hashes):
    message = m.SubmitRequest(name, prompt_tokens, sampling, prompt, hashes)
    assert decode(*wire.encode(message)) == message


ANSWER = st.builds(m.Answer, INT64, st.text(max_size=9), INT64, INT64, st.binary())


@given(st.lists(ANSWER).map(tuple))
def test_any_replies_come_back(answers):
    assert decode(*wire.encode(m.EngineReply(answers))) == m.EngineReply(answers)


# --- metadata and bodies -------------------------------------------------------------------------


def test_the_metadata_does_not_grow_with_the_prompt():
    def metadata(blocks):
        prompt = tokens(blocks)
        message = submission(1, prompt)
        message = m.SubmitRequest(1, len(prompt), b"s", pack(*prompt), message.hashes)
        request = m.EngineRequest(1, 0, message.sampling, message.prompt)
        reply = m.Reply(1, message.prompt)
        return [len(wire.encode(each)[0]) for each in (message, request, reply)]

    short, long = metadata(1), metadata(20_000)
    assert long == [short[0] + 4, *short[1:]]  # the prompt's length itself: 1 byte or 5
    assert max(long) <= 8


def test_a_reply_takes_about_20_bytes_of_metadata_whatever_its_body():
    answers = tuple(m.Answer(10**6 + i, "COMPLETED", 10**5, 10**4, bytes(999)) for i in range(100))
    assert len(wire.encode(m.EngineReply(answers))[0]) <= 30 * 100


def test_bodies_are_the_same_objects_on_the_way_in_and_out():
    sampling, prompt, hashes = bytes(7), bytes(8), bytes(16)
    frames = wire.encode(m.SubmitRequest(1, 2, sampling, prompt, hashes))
    assert all(a is b for a, b in zip(frames[1:], [sampling, prompt, hashes], strict=True))
    message = decode(*frames)
    assert message.sampling is sampling
    assert message.prompt is prompt
    assert message.hashes is hashes


def test_frames_are_passed_on_and_what_somebody_looks_into_comes_out_as_bytes():
    frames = [zmq.Frame(each) for each in (b"sampling", b"prompt", bytes(16))]
    message = decode(pack(20, 1, 2), *frames)
    assert message.sampling is frames[0]
    assert message.prompt is frames[1]
    assert (type(message.hashes), message.hashes) == (bytes, bytes(16))
    assert decode(pack(20, 1, 2), *frames[:2]).hashes is None
    request = m.EngineRequest(1, 0, message.sampling, message.prompt)
    assert all(a is b for a, b in zip(wire.encode(request)[1:], frames[:2], strict=True))

    events = decode(pack(32, 0, 0, 2), zmq.Frame(bytes(16))).events
    assert (type(events), events) == (bytes, bytes(16))
    (answer,) = decode(pack(21, [[1, "COMPLETED", 0, 0]]), frames[0]).answers
    assert answer.body is frames[0]
    assert wire.encode(m.Reply(1, answer.body))[1] is frames[0]
    assert wire.unpack(zmq.Frame(pack(1, "a"))) == [1, "a"]


def test_bodies_are_not_looked_into():
    garbage = b"\xc1\xc1"
    assert decode(pack(20, 1, 2), garbage, garbage, garbage) == m.SubmitRequest(
        1, 2, garbage, garbage, garbage
    )


# --- what is no message --------------------------------------------------------------------------

MALFORMED = [
    ([], "no frame"),
    ([b"", b""], "not msgpack (ValueError)"),
    ([b"\xc1"], "not msgpack (FormatError)"),
    ([b"\x00\x00"], "not msgpack (ExtraData)"),
    ([b"\xa5ab"], "not msgpack (ValueError)"),
    ([b"\xdd\xff\xff\xff\xff"], "not msgpack (ValueError)"),
    ([b"\x91\xa1\xff"], "not msgpack (UnicodeDecodeError)"),
    ([b"\x81\x90\x00"], "not msgpack (TypeError)"),
    ([b"\x91" * 5000 + b"\x00"], "not msgpack (StackError)"),
    ([b"GET / HTTP/1.1\r\n"], "not msgpack (ExtraData)"),
    ([b"\x05"], "metadata is no array that begins with a header number"),
    ([b"\xc0"], "metadata is no array that begins with a header number"),
    ([b"\x80"], "metadata is no array that begins with a header number"),
    ([pack()], "metadata is no array that begins with a header number"),
    ([pack("20", 1, 2)], "metadata is no array that begins with a header number"),
    ([pack(20.0, 1, 2)], "metadata is no array that begins with a header number"),
    ([pack(False, 1, True)], "metadata is no array that begins with a header number"),
    ([pack([20], 1, 2)], "metadata is no array that begins with a header number"),
    ([pack(99)], "unknown header 99"),
    ([pack(-1)], "unknown header -1"),
    ([pack(2**64 - 1)], "unknown header 18446744073709551615"),
    ([pack(80)], "unknown header 80"),
    ([pack(36)], "unknown header 36"),  # what only the coordinator says
    ([pack(1, 1, "longest_prefix", 16, 0)], "unknown header 1"),
    ([pack(0), b"x"], "0 items where 2 belong"),
    ([pack(0, 1)], "1 items where 2 belong"),
    ([pack(0, 1, True, 2)], "3 items where 2 belong"),
    ([pack(0, 1, True), b"x"], "1 bodies where 0 belong"),
    ([pack(0, "1", True)], "a str stands where int belongs"),
    ([pack(0, None, True)], "a NoneType stands where int belongs"),
    ([pack(0, 1, 1)], "a int stands where bool belongs"),
    ([pack(0, True, True)], "a bool stands where int belongs"),
    ([pack(20)], "0 items where 2 belong"),
    ([pack(20, 1, 2)], "0 bodies where 3 belong"),
    ([pack(20, 1, 2), b"s"], "1 bodies where 3 belong"),
    ([pack(20, 1, 2), b"s", b"p", b"h", b"x"], "4 bodies where 3 belong"),
    ([pack(20, None, 2), b"s", b"p"], "a NoneType stands where int | str | bytes belongs"),
    ([pack(20, [1], 2), b"s", b"p"], "a list stands where int | str | bytes belongs"),
    ([pack(20, True, 2), b"s", b"p"], "a bool stands where int | str | bytes belongs"),
    ([pack(20, 1, 2.0), b"s", b"p"], "a float stands where int belongs"),
    ([pack(21)], "0 items where 1 belong"),
    ([pack(21, 5)], "broken msgpack (ValueError)"),  # read as a stock engine's reply
    ([pack(21, {})], "broken msgpack (ValueError)"),
    ([pack(21, 5), b"x"], "a int stands where list belongs"),
    ([pack(21, {}), b"x"], "a dict stands where list belongs"),
    ([pack(21, [1])], "0 bodies where 1 belong"),
    ([pack(21, [1]), b"x"], "a reply is described by no array"),
    ([pack(21, [[1, "COMPLETED", 0]]), b"x"], "3 items of a reply where 5 belong"),
    ([pack(21, [[1, "COMPLETED", 0, 0]])], "0 bodies where 1 belong"),
    ([pack(21, [[1, "COMPLETED", 0, 0]]), b"x", b"y"], "2 bodies where 1 belong"),
    ([pack(21, [["1", "COMPLETED", 0, 0]]), b"x"], "a str stands where int belongs"),
    ([pack(21, [[1, None, 0, 0]]), b"x"], "a NoneType stands where str belongs"),
    ([pack(21, []), b"x"], "1 bodies where 0 belong"),
    ([pack(21, [[1, "COMPLETED", 0, 0, 0, 0]]), b"x"], "6 items of a reply where 5 belong"),
    ([pack(21, [[True, "COMPLETED", 0, 0]]), b"x"], "a bool stands where int belongs"),
    ([pack(21, [[1, "COMPLETED", None, 0]]), b"x"], "a NoneType stands where int belongs"),
    ([pack(21, [[1, "COMPLETED", 0, 0.0]]), b"x"], "a float stands where int belongs"),
    ([pack(21, [[1, "COMPLETED", 0, 0, "0"]]), b"x"], "a str stands where int belongs"),
    ([pack(21, [], []), b"x"], "2 items where 1 belong"),
    ([pack(30, 1)], "1 items where 8 belong"),
    ([pack(30, 1, b"job", 0, 0, 1, 1, 1, "lru")], "a bytes stands where str belongs"),
    ([pack(32, 0, 0), b"x"], "2 items where 3 belong"),
    ([pack(32, 0, 0, True), b"x"], "a bool stands where int belongs"),
    ([pack(32, 0, 0, 1)], "0 bodies where 1 belong"),
    ([pack(35)], "0 items where 1 belong"),
    ([pack(40, 1)], "1 arguments where 0 belong"),
    ([pack(40), b"x"], "1 bodies where 0 belong"),
    ([pack(43, 7)], "1 arguments where 0 belong"),  # the epoch is the coordinator's to tell
    ([pack(44)], "0 arguments where 1 belong"),
    ([pack(44, 1, 2)], "2 arguments where 1 belong"),
    ([pack(44, "1")], "a str stands where int belongs"),
    ([pack(60, 0)], "1 items where 0 belong"),
    ([pack(61), b""], "1 bodies where 0 belong"),
    ([pack(21, [0] * 2**20)], "metadata of 1048583 bytes"),
    ([pack(20, "x" * 256, 2), b"s", b"p"], "a name of 256 characters"),
    ([pack(20, b"x" * 256, 2), b"s", b"p"], "a name of 256 characters"),
    ([pack(20, "x" * 256, "prompt", {})], "a name of 256 characters"),
    ([pack(30, 1, "x" * 256, 0, 0, 1, 1, 1, "lru")], "a name of 256 characters"),
    ([pack(30, 1, "job", 0, 0, 1, 1, 1, "x" * 256)], "a name of 256 characters"),
]


@pytest.mark.parametrize(("frames", "reason"), MALFORMED, ids=range(len(MALFORMED)))
def test_what_is_no_message_is_malformed_and_says_why(frames, reason):
    assert decode(*frames) == m.Malformed(reason)


def test_a_name_may_be_this_long():
    for name in ("x" * 255, b"x" * 255):
        message = m.SubmitRequest(name, 2, b"s", b"p")
        assert decode(*wire.encode(message)) == message
    message = m.Register(1, "x" * 255, 0, 0, 1, 1, 1, "lru")
    assert decode(*wire.encode(message)) == message


def test_huge_bodies_are_no_reason_to_refuse():
    assert isinstance(decode(pack(20, 1, 2), b"", bytes(2**21)), m.SubmitRequest)


KINDS = tuple(m.ToCoordinator.__args__)
VALID = [
    *(wire.encode(message) for message, _, _ in TO_COORDINATOR),
    [b""],
    [pack(0)],
    [pack(20, 3, "text", {"temperature": 1.0})],
    [pack(21, [{"request_id": 1, "status": "COMPLETED"}, {"request_id": 2, "status": None}])],
]


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_random_bytes_never_raise(frames):
    assert isinstance(decode(*frames), KINDS)


@given(st.sampled_from([20, 21, 0, 30, 44]), st.integers(1, 5), st.binary(max_size=40))
def test_random_bytes_behind_a_good_beginning_never_raise(header, length, rest):
    frame = bytes([0x90 + length, header]) + rest
    assert isinstance(decode(frame), KINDS)
    assert isinstance(decode(frame, b"x"), KINDS)


@given(st.data())
def test_damaged_messages_never_raise(data):
    frames = [bytearray(frame) for frame in data.draw(st.sampled_from(VALID))]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = data.draw(st.sampled_from(frames))
        position = data.draw(st.integers(0, len(frame)))
        match data.draw(st.sampled_from(["cut", "set", "insert", "drop"])):
            case "cut":
                del frame[position:]
            case "set" if position < len(frame):
                frame[position] = data.draw(st.integers(0, 255))
            case "insert":
                frame[position:position] = data.draw(st.binary(max_size=9))
            case "drop" if len(frames) > 1:
                frames.remove(frame)
    assert isinstance(decode(*map(bytes, frames)), KINDS)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | INT64
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=5))
    | st.builds(msgpack.Timestamp, st.integers(0, 2**40), st.integers(0, 999)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


@given(st.integers(0, 90), st.lists(VALUES, max_size=9), st.lists(st.binary(max_size=3)))
def test_any_values_behind_any_header_never_raise(header, items, bodies):
    assert isinstance(decode(pack(header, *items), *bodies), KINDS)
    try:
        message = wire.decode_from_coordinator([pack(header, *items), *bodies])
    except wire.WireError:
        return
    assert isinstance(message, m.FromCoordinator)


def test_a_state_that_nobody_knows_is_a_wire_error():
    with pytest.raises(wire.WireError, match="unknown fleet state 'resting'"):
        wire.decode_from_coordinator([pack(31, 0, 1, 0, "resting")])
