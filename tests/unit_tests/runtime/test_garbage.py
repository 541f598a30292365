"""The collector of the coordinator process: what it looks through, and how little is left to it."""

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from builders import make_connect, make_register, make_settings, submission, tokens

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.core import Coordinator
from megatron.core.inference.coordinator.runtime import garbage, sockets, wire
from megatron.core.inference.coordinator.runtime.loop import CoordinatorLoop
from megatron.core.inference.coordinator.runtime.records import Books
from megatron.core.inference.coordinator.settings import RecordSettings

WAIT_MS = 5000


@pytest.fixture
def generations() -> Iterator[list[int]]:
    """The generations that were collected, in order; the collector is left as it was."""
    thresholds, collected = gc.get_threshold(), []

    def note(phase, info):
        if phase == "stop":
            collected.append(info["generation"])

    gc.callbacks.append(note)
    yield collected
    gc.callbacks.remove(note)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


class Node:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self):
        self.itself = self


def is_looked_through(kept) -> bool:
    return any(each is kept for each in gc.get_objects())


def test_however_many_objects_are_kept_only_the_young_are_looked_through(generations):
    garbage.spare_the_old()
    kept = [[number] for number in range(400_000)]
    assert len(kept) == 400_000
    assert len(generations) > 100
    assert set(generations) <= {0, 1}


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there all are, a part at a time")
def test_without_it_all_of_them_are(generations):
    kept = [[number] for number in range(400_000)]
    assert len(kept) == 400_000
    assert 2 in generations


def test_what_is_there_at_the_start_is_never_looked_through(generations):
    there = Node()
    assert is_looked_through(there)
    garbage.spare_the_old()
    assert not is_looked_through(there)


def test_what_has_lived_through_a_tick_is_not_looked_through_any_more(generations):
    garbage.spare_the_old()
    kept = Node()
    assert is_looked_through(kept)
    garbage.freeze()
    assert not is_looked_through(kept)


def test_cycles_that_die_young_are_freed_by_themselves_and_by_a_tick(generations):
    garbage.spare_the_old()
    first = weakref.ref(Node())
    kept = [[number] for number in range(100_000)]
    assert len(kept) == 100_000
    assert first() is None
    second = weakref.ref(Node())
    garbage.freeze()
    assert second() is None


def test_what_is_frozen_and_no_cycle_is_freed_as_ever(generations):
    kept = {"name": Node()}
    kept["name"].itself = None
    gone = weakref.ref(kept["name"])
    garbage.freeze()
    del kept["name"]
    assert gone() is None


# --- a request forms no cycle --------------------------------------------------------------------


@contextmanager
def running_loop(record: str) -> Iterator[tuple[CoordinatorLoop, zmq.Context, str]]:
    context = zmq.Context()
    router = sockets.router(context)
    router.bind("tcp://127.0.0.1:*")
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)
    books = Books(make_settings(), None, RecordSettings(record=record))
    loop = CoordinatorLoop(Coordinator(make_settings(trace=True)), router, traced=books.add)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield loop, context, address
    finally:
        loop.stop()
        thread.join(10)
        context.destroy(linger=0)
        books.close()


class Peer:
    """An end that talks to the loop."""

    def __init__(self, context: zmq.Context, address: str, name: bytes):
        self.socket = sockets.dealer(context, address, name)

    def say(self, *messages: m.ToCoordinator) -> None:
        for message in messages:
            self.socket.send_multipart(wire.encode(message))

    def hear(self, kind: type):
        while True:
            assert self.socket.poll(WAIT_MS), "nothing came"
            message = wire.decode_from_coordinator(self.socket.recv_multipart())
            if isinstance(message, kind):
                return message


def requests(client: Peer, engine: Peer, count: int) -> None:
    """Hashed and not, small and large, answered in batches, with events and what is dropped."""
    large = bytes(100_000)
    for first in range(0, count, 20):
        for number in range(first, first + 20):
            name = number % 7
            request = submission(number, tokens(1 + number % 50, name) if name else None)
            request.prompt = large if number % 3 else b""
            client.say(request)
        taken = [engine.hear(m.EngineRequest).request_id for _ in range(20)]
        answers = tuple(m.Answer(number, "COMPLETED", 0, 0, large[::5]) for number in taken)
        engine.say(m.KvEvents(0, first // 20, 1, bytes(8)))
        engine.say(m.EngineReply(answers), m.EngineReply(answers[:1]), m.Pong(1))
        for _ in range(20):
            client.hear(m.Reply)
    client.say(m.SubmitRequest(None, 0, b"", b""))  # malformed


def test_thousands_of_requests_leave_nothing_to_the_collector(tmp_path):
    with running_loop(str(tmp_path / "record.jsonl")) as (loop, context, address):
        client, engine = Peer(context, address, b"client"), Peer(context, address, b"engine")
        client.say(make_connect())
        engine.say(make_register())
        engine.hear(m.RegisterAck)
        requests(client, engine, 100)
        gc.disable()
        try:
            gc.collect()
            requests(client, engine, 3000)
            assert gc.collect() == 0
        finally:
            gc.enable()
        assert loop.events.counts["reply_dropped"] == 155
    assert len((tmp_path / "record.jsonl").read_text().splitlines()) == 1 + 3100
