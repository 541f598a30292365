"""The coordinator's loop on a real socket: peers of both dialects, and everything that is wrong.

The loop runs in a thread of the test's process; engines are stubs that answer at once.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import msgpack
import pytest
import zmq
from megatron.core.inference.inference_client import InferenceClient as ReleasedClient
from megatron.core.inference.sampling_params import SamplingParams

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.core import Coordinator
from megatron.core.inference.coordinator.hashing import block_hashes, pack_hashes
from megatron.core.inference.coordinator.runtime import loop as loop_module
from megatron.core.inference.coordinator.runtime import sockets, wire
from megatron.core.inference.coordinator.runtime.client import (
    CoordinatorUnreachable,
    InferenceClient,
    RequestFailed,
)
from megatron.core.inference.coordinator.runtime.loop import CoordinatorLoop
from megatron.core.inference.coordinator.runtime.process import bind
from megatron.core.inference.coordinator.settings import CoordinatorSettings, FleetSettings

BLOCK = 4
WAIT_MS = 5000


class Tokenizer:
    """Characters are tokens."""

    eod = 0

    def tokenize(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def detokenize(self, tokens: list[int]) -> str:
        return "".join(chr(t) for t in tokens)


BODY = b"\x80"
"""A packed reply: an empty map."""


class Running:
    """A loop in a thread, and sockets that talk to it."""

    def __init__(self, settings: CoordinatorSettings):
        self.context = zmq.Context()
        router = sockets.router(self.context)
        self.address = bind(router, "127.0.0.1", 0)
        self.traces: list[m.Trace] = []
        self.loop = CoordinatorLoop(
            Coordinator(settings), router, Tokenizer(), traced=self.traces.append
        )
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(router,))
        self._thread.start()
        self._peers = 0

    def _run(self, router: zmq.Socket) -> None:
        try:
            self.loop.run()
        except BaseException as error:
            self.failure = error
        finally:
            router.close(linger=0)

    def peer(self, identity: bytes | None = None) -> zmq.Socket:
        self._peers += 1
        return sockets.dealer(self.context, self.address, identity or b"p%d" % self._peers)

    def close(self) -> None:
        self.loop.stop()
        self._thread.join(10)
        self.context.destroy(linger=0)
        assert self.failure is None, self.failure


@contextmanager
def running(**settings) -> Iterator[Running]:
    live = Running(CoordinatorSettings(block_size_tokens=BLOCK, **settings))
    try:
        yield live
    finally:
        live.close()


SERVING = [[bytes(f) for f in wire.encode(m.Serving(serving))] for serving in (False, True)]


def receive(socket: zmq.Socket) -> list[bytes]:
    """The next message, but for what clients are told of the fleet."""
    while True:
        assert socket.poll(WAIT_MS), "nothing came"
        frames = socket.recv_multipart()
        if frames not in SERVING:
            return frames


class Engine:
    """An engine of our dialect that answers when told to."""

    def __init__(self, live: Running, dp_rank: int = 0, identity: bytes | None = None):
        self.socket = live.peer(identity)
        self.say(m.Register(1, "job", dp_rank, 0, 8, BLOCK, 1000, "lru"))
        self.acknowledgement = self.hear(m.RegisterAck)

    def say(self, message: m.ToCoordinator) -> None:
        self.socket.send_multipart(wire.encode(message))

    def hear(self, kind: type):
        """The next message of a kind; pings in between are answered."""
        while True:
            message = wire.decode_from_coordinator(receive(self.socket))
            if isinstance(message, m.Ping):
                self.say(m.Pong(message.number))
            if isinstance(message, kind):
                return message

    def answer(self, request: m.EngineRequest, text: str | None = "hi", **more) -> None:
        reply = {
            "request_id": request.request_id,
            "status": "COMPLETED",
            "generated_tokens": [104, 105],
            "generated_text": text,
            "sampling_params": {},
            **more,
        }
        body = wire.pack(reply)
        answer = m.Answer(request.request_id, "COMPLETED", 0, request.weight_epoch, body)
        self.say(m.EngineReply((answer,)))


class ReleasedEngine:
    """An engine that speaks as the released one does."""

    def __init__(self, live: Running, dp_rank: int = 0):
        self.socket = live.peer(b"mp-coord-%d" % dp_rank)
        self.socket.send(b"")

    def hear(self) -> list:
        (frame,) = receive(self.socket)
        return msgpack.unpackb(frame)

    def answer(self, request_id: int, params: dict) -> None:
        reply = {
            "request_id": request_id,
            "status": "COMPLETED",
            "generated_tokens": [104, 105],
            "generated_text": None,
            "sampling_params": params,
        }
        self.socket.send(msgpack.packb([21, [reply]]))


def connect(socket: zmq.Socket) -> None:
    socket.send_multipart(wire.encode(m.Connect(1, False)))
    assert isinstance(wire.decode_from_coordinator(receive(socket)), m.ConnectAck)


def submission(request_id: int = 0, tokens=range(10)) -> m.SubmitRequest:
    hashes = pack_hashes(block_hashes(list(tokens), BLOCK))
    return m.SubmitRequest(request_id, len(tokens), wire.pack({}), wire.pack(list(tokens)), hashes)


def round_trip(client: zmq.Socket, engine: Engine, request_id: int = 0) -> None:
    """One request through, as a sign that all is well."""
    client.send_multipart(wire.encode(submission(request_id)))
    engine.answer(engine.hear(m.EngineRequest))
    while True:
        reply = wire.decode_from_coordinator(receive(client))
        if isinstance(reply, m.Reply) and reply.client_request_id == request_id:
            return


NONSENSE = {
    "an unknown header": [msgpack.packb([99])],
    "a wrong arity": [msgpack.packb([20, 1])],
    "too many arguments": [msgpack.packb([40, 1, 2])],
    "no argument": [msgpack.packb([44])],
    "no msgpack": [b"\xc1\xff\x00"],
    "no array": [msgpack.packb({"a": 1})],
    "an empty array": [msgpack.packb([])],
    "a header that is text": [msgpack.packb(["20"])],
    "too many frames": [*wire.encode(submission()), b"more"],
    "too few frames": wire.encode(submission())[:2],
    "an empty frame among others": [b"", b""],
    "a released request cut short": [msgpack.packb([20, 1, [1] * 50, {}])[:20]],
    "a released reply without an id": [msgpack.packb([21, [{"status": "x"}]])],
    "a released reply for an unknown request": [msgpack.packb([21, [{"request_id": 7}]])],
    "a reply without its body": [msgpack.packb([21, [[1, "COMPLETED", 0, 0]]])],
    "a reply from a stranger": [msgpack.packb([21, [[1, "COMPLETED", 0, 0]]]), b"x"],
    "a request before CONNECT": wire.encode(submission()),
    "a released request before CONNECT": [msgpack.packb([20, 1, "hi", {}])],
    "a signal before CONNECT": [msgpack.packb([40])],
    "SHUTDOWN before CONNECT": [msgpack.packb([61])],
    "a PONG out of nowhere": [msgpack.packb([35, 1])],
    "DISCONNECT out of nowhere": [msgpack.packb([60])],
    "REGISTER with another protocol": [msgpack.packb([30, 9, "j", 0, 0, 1, 4, 9, "lru"])],
    "CONNECT with another protocol": [msgpack.packb([0, 9, True])],
}


@pytest.mark.parametrize("frames", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_is_logged_once_and_stops_nobody(frames, caplog):
    with running() as live, caplog.at_level(logging.INFO):
        engine, client, hostile = Engine(live), live.peer(), live.peer(b"hostile")
        connect(client)
        for _ in range(3):
            hostile.send_multipart(frames)
        round_trip(client, engine)
        deadline = time.monotonic() + 0.5
        while live.loop.events.counts.total() < 4 and time.monotonic() < deadline:
            round_trip(client, engine)
    about_it = [r for r in caplog.records if b"hostile".hex() in r.getMessage()]
    assert len(about_it) == len({r.getMessage().split()[0] for r in about_it})


def test_a_request_before_connect_is_answered_with_an_error():
    with running() as live:
        socket = live.peer()
        socket.send_multipart(wire.encode(submission(5)))
        error = wire.decode_from_coordinator(receive(socket))
    assert error == m.RequestError(5, "not_connected", "send CONNECT before any request")


def test_a_bad_hash_list_makes_the_request_not_hashed_and_it_is_answered():
    with running() as live:
        engine, client = Engine(live), live.peer()
        connect(client)
        for number, hashes in enumerate([b"short", pack_hashes([1, 1]), pack_hashes([0, 5])]):
            bad = m.SubmitRequest(number, 10, wire.pack({}), wire.pack([1]), hashes)
            client.send_multipart(wire.encode(bad))
            engine.answer(engine.hear(m.EngineRequest))
            assert wire.decode_from_coordinator(receive(client)).client_request_id == number
        assert live.loop.events.counts["hashes_refused"] == 3


def test_a_second_reply_and_one_for_another_request_are_dropped():
    with running() as live:
        engine, client = Engine(live), live.peer()
        connect(client)
        client.send_multipart(wire.encode(submission()))
        request = engine.hear(m.EngineRequest)
        for number in (request.request_id, request.request_id, 4711):
            engine.answer(m.EngineRequest(number, 0, b"", b""))
        assert isinstance(wire.decode_from_coordinator(receive(client)), m.Reply)
        round_trip(client, engine, request_id=1)
        assert not client.poll(100)
        assert live.loop.events.counts["reply_dropped"] == 2


def test_a_client_that_vanishes_with_requests_in_flight_hurts_nobody():
    with running() as live:
        engine, client, other = Engine(live), live.peer(), live.peer()
        connect(client)
        connect(other)
        client.send_multipart(wire.encode(submission()))
        request = engine.hear(m.EngineRequest)
        client.close(linger=0)
        time.sleep(0.2)  # until the broken connection is seen
        engine.answer(request)
        round_trip(other, engine)
        assert live.loop.core.fleet.ledger.load(0) == 0


def test_a_rank_that_registers_twice_is_a_new_generation_and_gets_its_requests_again():
    with running() as live:
        engine, client = Engine(live), live.peer()
        connect(client)
        client.send_multipart(wire.encode(submission()))
        first = engine.hear(m.EngineRequest)
        engine.say(m.Register(1, "job", 0, 0, 8, BLOCK, 1000, "lru"))
        assert engine.hear(m.RegisterAck).generation == 2
        again = engine.hear(m.EngineRequest)
        assert (again.prompt, again.request_id) == (first.prompt, first.request_id + 1)
        for request_id in (first.request_id, again.request_id):  # of the first nobody wants to know
            engine.say(m.EngineReply((m.Answer(request_id, "COMPLETED", 0, 0, BODY),)))
        assert wire.decode_from_coordinator(receive(client)) == m.Reply(0, BODY)
        round_trip(client, engine, request_id=2)
    assert live.loop.events.counts["reply_dropped"] == 1


def test_the_requests_of_a_rank_that_dies_go_elsewhere():
    with running(expected_ranks=2) as live:
        first, second = Engine(live, 0, b"one"), Engine(live, 1, b"two")
        client = live.peer()
        connect(client)
        client.send_multipart(wire.encode(submission()))
        request = first.hear(m.EngineRequest)
        first.socket.close(linger=0)
        again = second.hear(m.EngineRequest)  # the next ping finds it gone
        assert (again.prompt, again.request_id) == (request.prompt, request.request_id + 1)
        second.say(m.EngineReply((m.Answer(again.request_id, "COMPLETED", 0, 0, BODY),)))
        assert wire.decode_from_coordinator(receive(client)) == m.Reply(0, BODY)


def test_a_loop_that_stood_still_gives_no_rank_up_that_could_not_be_heard(monkeypatch):
    clock = SimpleNamespace(monotonic=time.monotonic)
    monkeypatch.setattr(loop_module, "time", clock)
    with running(fleet=FleetSettings(hung_timeout=3)) as live:
        engine = Engine(live)
        clock.monotonic = lambda: time.monotonic() + 60.0
        for _ in range(3):
            engine.hear(m.Ping)
        assert (live.loop.events.counts["stood_still"], live.loop.events.counts["rank_lost"]) == (
            1,
            0,
        )


def test_a_client_may_come_before_the_engines():
    with running(expected_ranks=2) as live:
        client = live.peer()
        connect(client)
        client.send_multipart(wire.encode(submission(3)))
        first, _ = Engine(live, 0), Engine(live, 1)
        first.answer(first.hear(m.EngineRequest))
        assert wire.decode_from_coordinator(receive(client)).client_request_id == 3


def test_a_released_engine_that_says_hello_twice_is_one_rank():
    with running() as live:
        engine = ReleasedEngine(live)
        engine.socket.send(b"")
        client = live.peer()
        connect(client)
        client.send_multipart(wire.encode(submission()))
        assert engine.hear()[:3] == [20, 0, list(range(10))]
        assert len(live.loop.core.fleet.ranks) == 1


@pytest.mark.parametrize("released_engine", [False, True])
@pytest.mark.parametrize("released_client", [False, True])
@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99], [2**31] * 50_000])
def test_all_pairings_of_clients_and_engines(released_client, released_engine, prompt):
    """The answer has its text, whoever has a tokenizer."""

    async def ask(live: Running) -> dict:
        client = ReleasedClient(live.address) if released_client else InferenceClient(live.address)
        client.start(asyncio.get_running_loop())
        try:
            future = client.add_request(prompt, SamplingParams(num_tokens_to_generate=2))
            await asyncio.to_thread(serve, live)
            return await asyncio.wait_for(future, 5)
        finally:
            client.stop()

    def serve(live: Running) -> None:
        if released_engine:
            _, request_id, got, params = engine.hear()
            assert got == prompt
            engine.answer(request_id, params)
        else:
            request = engine.hear(m.EngineRequest)
            assert wire.unpack(request.prompt) == prompt
            assert wire.unpack(request.sampling)["detokenize"] is True
            engine.answer(request)

    with running() as live:
        engine = ReleasedEngine(live) if released_engine else Engine(live)
        reply = asyncio.run(ask(live))
    assert reply["generated_text"] == "hi"
    assert reply["status"] == "COMPLETED"


@pytest.mark.parametrize("released_client", [False, True])
def test_large_prompts_and_replies_arrive_as_they_were_sent(released_client):
    tokens = list(range(100_000))
    with running(trace=True) as live:
        engine, client = Engine(live), live.peer()
        if released_client:
            client.send(msgpack.packb([0]))
            receive(client)
            client.send(msgpack.packb([20, 0, tokens, {}]))
        else:
            connect(client)
            client.send_multipart(wire.encode(submission(0, tokens)))
        request = engine.hear(m.EngineRequest)
        assert wire.unpack(request.prompt) == tokens
        engine.answer(request, prompt=tokens)
        frames = receive(client)
        reply = wire.unpack(frames[0])[2] if released_client else wire.unpack(frames[1])
        assert reply["prompt"] == tokens
    (trace,) = live.traces
    assert len(trace.hashes or b"") == (0 if released_client else 8 * 25_000)


def test_our_client_with_a_tokenizer_hashes_text_and_detokenizes():
    async def ask(live: Running) -> dict:
        client = InferenceClient(live.address, tokenizer=Tokenizer())
        client.start()
        future = client.add_request("abcdefghij", SamplingParams())
        request = await asyncio.to_thread(engine.hear, m.EngineRequest)
        assert wire.unpack(request.prompt) == [ord(c) for c in "abcdefghij"]
        engine.answer(request, text=None)
        reply = await asyncio.wait_for(future, 5)
        client.stop()
        return reply

    with running() as live:
        engine = Engine(live)
        Tokenizer.bos = None
        reply = asyncio.run(ask(live))
        assert len(live.loop.core.fleet.index) == 2
    assert reply["generated_text"] == "hi"
    assert reply["prompt"] == "abcdefghij"


@pytest.mark.parametrize("size", [10, 50_000])  # the larger one is not copied to be sent
def test_a_prepared_prompt_travels_as_the_prompt_does(size):
    tokens = list(range(size))

    async def ask(live: Running) -> None:
        client = InferenceClient(live.address)
        client.start()
        prepared = client.prepare(tokens)
        futures = [client.add_request(each, SamplingParams()) for each in (tokens, prepared)]
        tokens.append(7)  # clients go on with the same list
        futures += [client.add_request(each, SamplingParams()) for each in (tokens, prepared)]
        for length in (size, size, size + 1, size):
            request = await asyncio.to_thread(engine.hear, m.EngineRequest)
            assert wire.unpack(request.prompt) == [*range(size), 7][:length]
            engine.answer(request)
        await asyncio.wait_for(asyncio.gather(*futures), 5)
        client.stop()

    with running(trace=True) as live:
        engine = Engine(live)
        asyncio.run(ask(live))
    first, *others = [trace.hashes for trace in live.traces]
    assert len(first or b"") == size // 4 * 8
    assert [others[0], others[2]] == [first, first]


def test_a_cancelled_request_is_dropped_without_leaking():
    async def ask(live: Running) -> None:
        client = InferenceClient(live.address)
        client.start()
        cancelled = client.add_request([1], SamplingParams())
        kept = client.add_request([2], SamplingParams())
        cancelled.cancel()
        for _ in range(2):
            engine.answer(await asyncio.to_thread(engine.hear, m.EngineRequest))
        await asyncio.wait_for(kept, 5)
        await asyncio.sleep(0)
        assert client.completion_futures == {}
        assert client.request_submission_times == {}
        client.stop()

    with running() as live:
        engine = Engine(live)
        asyncio.run(ask(live))


def test_an_error_from_the_coordinator_is_raised_with_its_code():
    async def ask(live: Running) -> None:
        client = InferenceClient(live.address)
        client.start()
        with pytest.raises(RequestFailed, match="no replica is registered") as failure:
            await asyncio.wait_for(client.add_request([1], SamplingParams()), 5)
        assert failure.value.code == "no_replica"
        assert failure.value.retryable
        client.stop()

    with running(fleet=FleetSettings(replica_wait=0)) as live:
        asyncio.run(ask(live))


def test_an_error_reaches_a_released_client_as_a_failed_reply():
    async def ask(live: Running) -> dict:
        client = ReleasedClient(live.address)
        client.start(asyncio.get_running_loop())
        reply = await asyncio.wait_for(client.add_request([1], SamplingParams()), 5)
        client.stop()
        return reply

    with running(fleet=FleetSettings(replica_wait=0)) as live:
        reply = asyncio.run(ask(live))
    assert reply["status"] == "FAILED"
    assert "no replica" in str(reply["events"][-1]["payload"])


def test_a_client_that_finds_nobody_says_what_it_tried():
    async def start() -> None:
        client = InferenceClient("tcp://127.0.0.1:9", connect_timeout=0.2)
        try:
            client.start()
        finally:
            client.stop()

    with pytest.raises(CoordinatorUnreachable, match=r"127\.0\.0\.1:9 \(CONNECT.*within 0\.2 s"):
        asyncio.run(start())


def test_control_signals_reach_engines_of_both_dialects_each_in_its_own_words():
    with running(expected_ranks=2) as live:
        ours, theirs = Engine(live, 0), ReleasedEngine(live, 1)
        client = live.peer()
        connect(client)
        for frame in ([40], [44, 7], [42], [43]):
            client.send(msgpack.packb(frame))
        heard = [wire.encode(ours.hear(m.Control)) for _ in range(4)]
        assert [msgpack.unpackb(frames[0]) for frames in heard] == [[40], [44, 7, 1], [42], [43, 2]]
        assert [theirs.hear() for _ in range(4)] == [[40], [44, 7], [42], [43]]


def test_a_port_in_use_is_an_error_that_says_what_to_do():
    with running() as live:
        context = zmq.Context()
        router = sockets.router(context)
        port = int(live.address.rsplit(":", 1)[1])
        with pytest.raises(OSError, match=f"port {port}.*--inference-coordinator-port"):
            bind(router, "127.0.0.1", port)
        router.close(linger=0)
        context.term()


def test_ranks_are_watched_and_clients_that_answer_pings_are_not():
    with running() as live:
        engine, client = Engine(live), live.peer()
        connect(client)
        for socket in (engine.socket, client):
            socket.send_multipart(wire.encode(m.Pong(1)))
        client.send_multipart(wire.encode(submission(0, [1])))
        engine.hear(m.EngineRequest)  # so both were heard before
        mailbox = live.loop._mailbox
        watched = [mailbox.watches(s.getsockopt(zmq.IDENTITY)) for s in (engine.socket, client)]
    assert watched == [True, False]
