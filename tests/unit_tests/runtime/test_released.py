"""The dialect of released peers: what they send and get, and splicing between the dialects."""

import msgpack
import pytest
import torch
import zmq
from builders import make_connect, make_register
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.inference.inference_request import DynamicInferenceRequest, Status
from megatron.core.inference.sampling_params import SamplingParams

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.lifecycle import FleetState, Signal
from megatron.core.inference.coordinator.runtime import released, wire
from megatron.core.inference.coordinator.runtime.codec import Codec

STOCK_CLIENT, STOCK_ENGINE = b"stock client", b"mp-coord-0"
OUR_CLIENT, OUR_ENGINE = b"our client", b"our engine"


def pack(value):
    return msgpack.packb(value, use_bin_type=True)


def unpack(data):
    return msgpack.unpackb(data, raw=False)


@pytest.fixture
def codec():
    """A codec that knows one peer of each kind; it marks replies that it gave a text."""
    codec = Codec(lambda body: pack(unpack(body) | {"generated_text": "text"}))
    assert codec.decode(STOCK_CLIENT, [pack([0])]) == m.Connect(None)
    assert codec.decode(STOCK_ENGINE, [b""]) == m.Register(None)
    assert codec.decode(OUR_CLIENT, wire.encode(make_connect())) == make_connect()
    assert codec.decode(OUR_ENGINE, wire.encode(make_register())) == make_register()
    return codec


# --- what they send ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"", m.Register(None)),
        (pack([0]), m.Connect(None)),
        (pack([40]), m.Control(Signal.PAUSE)),
        (pack([44, 12]), m.Control(Signal.SET_GENERATION_EPOCH, (12,))),
        (pack([47]), m.Control(Signal.STOP_CUDA_PROFILER)),
        (pack([60]), m.Disconnect()),
        (pack([61]), m.Shutdown()),
        (pack([21, []]), m.EngineReply(())),
    ],
)
def test_the_small_messages_of_released_peers(frame, message):
    assert Codec(bytes).decode(b"peer", [frame]) == message


@pytest.mark.parametrize("prompt", ["text", "", [], [1, 2, 300_000], list(range(5000)), "é" * 999])
@pytest.mark.parametrize("name", [0, 127, 2**31, "id", b"id"])
def test_a_submission_is_cut_out_of_its_frame(prompt, name):
    params = SamplingParams(temperature=0.5, stop_words=["x"]).serialize()
    message = released.decode(pack([20, name, prompt, params]))
    assert message.client_request_id == name
    assert message.prompt_tokens == -1
    assert message.hashes is None
    assert message.prompt == pack(prompt)
    assert unpack(message.sampling) == params | {"detokenize": True}


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"\x94\x14", "broken msgpack (OutOfData)"),
        (pack([20, 1, "x", {}])[:-1], "broken msgpack (OutOfData)"),
        (pack([20, 1, "abc", {}])[:5], "broken msgpack (OutOfData)"),
        (b"\x94\x14\x01\xc1\x80", "broken msgpack (FormatError)"),
        (pack([20, [1], "x", {}]), "a request id is neither number nor text"),
        (pack([20, None, "x", {}]), "a request id is neither number nor text"),
        (pack([20, 1, "x", None]), "sampling parameters are no map, or a huge one"),
        (pack([20, 1, "x", [1]]), "sampling parameters are no map, or a huge one"),
        (
            pack([20, 1, "x", dict.fromkeys(range(65535), 0)]),
            "sampling parameters are no map, or a huge one",
        ),
        (b"\x92\x15", "broken msgpack (OutOfData)"),
        (b"\x92\x15\x91", "broken msgpack (IndexError)"),
        (b"\x92\x15\xdc", "broken msgpack (OutOfData)"),
        (pack([21, [{}]]), "a reply names no request"),
        (pack([21, [{"status": "COMPLETED"}]]), "a reply names no request"),
        (pack([21, [{"request_id": "1"}]]), "a reply names no request"),
        (pack([21, [{"request_id": True}]]), "a reply names no request"),
        (pack([21, [{"request_id": 1}, 5]]), "broken msgpack (ValueError)"),
        (pack([21, [{"request_id": 1}, {"request_id": 2}]])[:-1], "broken msgpack (OutOfData)"),
        (b"\x92\x15\x91\x81\x90\x00", "broken msgpack (TypeError)"),
    ],
)
def test_a_broken_frame_is_malformed_and_says_why(frame, reason):
    assert Codec(bytes).decode(b"peer", [frame]) == m.Malformed(reason)


def test_a_map_of_65534_sampling_parameters_is_still_one():
    params = dict.fromkeys(range(65534), 0)
    sampling = released.with_detokenize(pack(params))
    assert msgpack.unpackb(sampling, strict_map_key=False) == params | {"detokenize": True}


@pytest.mark.parametrize("size", [0, 1, 15, 16, 300])
def test_detokenize_is_added_to_a_map_of_any_size(size):
    params = {f"p{i}": [i] for i in range(size)}
    assert unpack(released.with_detokenize(pack(params))) == params | {"detokenize": True}


# --- what they get -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "items"),
    [
        (m.ConnectAck(1, "longest_prefix", 16, 3), [1]),
        (m.Control(Signal.PAUSE), [40]),
        (m.Control(Signal.RESUME, (3,)), [43]),
        (m.Control(Signal.SET_GENERATION_EPOCH, (12, 3)), [44, 12]),
        (m.EngineRequest(7, 3, pack({"top_k": 1}), pack("text")), [20, 7, "text", {"top_k": 1}]),
        (m.Reply("id", pack({"request_id": 7})), [21, "id", {"request_id": 7}]),
        (m.RequestError(4, "no_replica", "why"), [21, 4, released.failed_reply("why")]),
    ],
)
def test_what_released_peers_get_is_one_frame_without_any_epoch(message, items):
    assert released.encode(message) == [pack(items)]


def test_what_lies_in_frames_is_spliced_like_bytes():
    sampling, prompt, reply = pack({"top_k": 1}), pack([1, 2, 3]), pack({"request_id": 7})
    request = m.EngineRequest(7, 3, zmq.Frame(sampling), zmq.Frame(prompt))
    assert released.encode(request) == released.encode(m.EngineRequest(7, 3, sampling, prompt))
    frames = released.encode(m.Reply(5, zmq.Frame(reply)))
    assert frames == released.encode(m.Reply(5, reply))


@pytest.mark.parametrize(
    "message",
    [m.RegisterAck(0, 1, 0, FleetState.RUNNING), m.Ping(1), m.RegisterAgain(), m.Serving(True)],
)
def test_for_what_they_do_not_know_there_is_no_frame(message):
    assert released.encode(message) is None


def test_no_header_above_29_but_signals_ever_reaches_a_stock_peer(codec):
    messages = [
        *(m.ConnectAck(1, "x", 1, 0), m.Reply(1, b"\x80"), m.RequestError(1, "c", "t")),
        *(m.EngineRequest(1, 0, b"\x80", b"\x90"), m.RegisterAck(0, 1, 0, FleetState.RUNNING)),
        *(m.Ping(1), m.RegisterAgain(), m.RequestError(None, "c", "t")),
    ]
    for message in messages:
        frames = codec.encode(STOCK_CLIENT, message)
        assert frames is None or unpack(frames[0])[0] <= 29


@pytest.mark.parametrize("transient", [True, False])
def test_a_released_client_can_read_that_its_request_failed(transient):
    reply = unpack(pack(released.failed_reply("lost", request_id=5, transient=transient)))
    request = DynamicInferenceRequest.deserialize(reply)
    assert request.status is Status.FAILED
    assert (request.request_id, request.generated_text, request.generated_tokens) == (5, "", [])
    (event,) = request.events
    assert event.type.name == ("ERROR_TRANSIENT" if transient else "ERROR_NONTRANSIENT")
    assert (event.payload.message, event.payload.is_transient) == ("lost", transient)


def test_a_released_client_without_deserialization_reads_the_failure_too():
    (frame,) = released.encode(m.RequestError(3, "replica_lost", "send it again"))
    header, name, reply = unpack(frame)
    assert (header, name, reply["status"]) == (21, 3, "FAILED")
    assert reply["events"][0]["payload"]["message"] == "send it again"
    reply["latency"] = 0.1  # what the released client adds before it deserializes
    assert DynamicInferenceRequest.deserialize(reply).latency == 0.1


# --- splicing equals decoding and encoding again -------------------------------------------------

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)
PARAMS = st.dictionaries(st.text(max_size=9), VALUES, max_size=8)
NAMES = st.integers(-(2**63), 2**64 - 1) | st.text(max_size=40)
PROMPTS = st.text(max_size=300) | st.lists(st.integers(0, 2**32), max_size=70)
STOCK_OR_OURS = (
    st.sampled_from([STOCK_CLIENT, OUR_CLIENT]),
    st.sampled_from([STOCK_ENGINE, OUR_ENGINE]),
)


def fresh_codec():
    codec = Codec(lambda body: body)
    codec.decode(STOCK_CLIENT, [pack([0])])
    codec.decode(STOCK_ENGINE, [b""])
    codec.decode(OUR_CLIENT, wire.encode(make_connect()))
    codec.decode(OUR_ENGINE, wire.encode(make_register()))
    return codec


@given(*STOCK_OR_OURS, NAMES, PROMPTS, PARAMS, st.integers(0, 2**63))
def test_a_request_crosses_between_any_two_dialects(client, engine, name, prompt, params, number):
    codec = fresh_codec()
    if client is STOCK_CLIENT:
        frames = [pack([20, name, prompt, params])]
        expected = params | {"detokenize": True}
    else:
        frames = [pack([20, name, 12]), pack(params), pack(prompt)]
        expected = params
    message = codec.decode(client, frames)
    assert message.client_request_id == name

    request = m.EngineRequest(number, 3, message.sampling, message.prompt)
    sent = codec.encode(engine, request)
    if engine is STOCK_ENGINE:
        (frame,) = sent
        assert unpack(frame) == [20, number, prompt, expected]
        if client is OUR_CLIENT:
            assert frame == pack([20, number, prompt, params])
    else:
        metadata, sampling_body, prompt_body = sent
        assert unpack(metadata) == [20, number, 3]
        assert (unpack(sampling_body), prompt_body) == (expected, pack(prompt))


@given(*STOCK_OR_OURS, NAMES, st.lists(PARAMS, min_size=1, max_size=3))
def test_replies_cross_between_any_two_dialects(client, engine, name, replies):
    codec = fresh_codec()
    replies = [
        {**reply, "request_id": number, "status": "COMPLETED"}
        for number, reply in enumerate(replies)
    ]
    if engine is STOCK_ENGINE:
        frames = [pack([21, replies])]
        facts = [(number, "COMPLETED", -1, -1) for number in range(len(replies))]
    else:
        described = [[number, "COMPLETED", 5, 2] for number in range(len(replies))]
        frames = [pack([21, described]), *map(pack, replies)]
        facts = [(number, "COMPLETED", 5, 2) for number in range(len(replies))]
    answers = codec.decode(engine, frames).answers
    assert [(a.request_id, a.status, a.cached_tokens, a.weight_epoch) for a in answers] == facts

    for answer, reply in zip(answers, replies, strict=True):
        sent = codec.encode(client, m.Reply(name, answer.body))
        if client is STOCK_CLIENT:
            assert sent == [pack([21, name, reply])]
        else:
            assert sent == [pack([21, name]), pack(reply)]


@pytest.mark.parametrize(
    ("client", "text"), [(STOCK_CLIENT, "text"), (OUR_CLIENT, None)], ids=["stock", "ours"]
)
def test_a_real_reply_of_the_released_engine_reaches_both_kinds_of_clients(codec, client, text):
    finished = DynamicInferenceRequest(
        request_id=7,
        prompt_tokens=torch.tensor([5, 6, 7]),
        sampling_params=SamplingParams(num_tokens_to_generate=2, return_prompt_tokens=True),
        block_size_tokens=2,
        enable_prefix_caching=True,
    )
    finished.status = Status.COMPLETED
    finished.generated_tokens = [8, 9]
    finished.add_event_add_engine()
    finished.add_event_generated_token(8)
    finished.add_event_finish()
    serialized = finished.serialize()

    # As the released engine packs its step's replies.
    frame = msgpack.packb([21, [serialized]], use_bin_type=True)
    (answer,) = codec.decode(STOCK_ENGINE, [frame]).answers
    assert (answer.request_id, answer.status) == (7, "COMPLETED")
    assert answer.body == pack(serialized)

    frames = codec.encode(client, m.Reply(41, answer.body))
    reply = unpack(frames[0])[2] if client is STOCK_CLIENT else unpack(frames[1])
    assert reply["generated_text"] == text
    read = DynamicInferenceRequest.deserialize(reply)
    assert read.prompt_tokens.tolist() == [5, 6, 7]
    assert (read.generated_tokens, read.status, read.prompt_length) == ([8, 9], Status.COMPLETED, 3)
    assert [event.type.name for event in read.events] == ["ADD_ENGINE", "GENERATED_TOKEN", "FINISH"]
    assert read.sampling_params.num_tokens_to_generate == 2
