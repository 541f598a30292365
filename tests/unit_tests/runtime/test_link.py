"""An engine's link to its coordinator: registration, and noticing that nobody is there any more."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.lifecycle import FleetState
from megatron.core.inference.coordinator.runtime import link as link_module
from megatron.core.inference.coordinator.runtime import sockets, wire
from megatron.core.inference.coordinator.runtime.link import CoordinatorLink
from megatron.core.inference.coordinator.runtime.process import CoordinatorDied

REGISTER = m.Register(1, "job", 0, 0, 8, 16, 100, "lru")
ACK = m.RegisterAck(0, 1, 5, FleetState.RUNNING)
IDENTITY = b"engine-job-0"


@contextmanager
def context_of() -> Iterator[zmq.Context]:
    context = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with context_of() as made:
        yield made


class Coordinator:
    """A bound ROUTER that does what a test tells it."""

    def __init__(self, port: int | str = "*"):
        self._context = zmq.Context()
        self.router = sockets.router(self._context)
        deadline = time.monotonic() + 5
        while True:  # a port just given up may need a moment
            try:
                self.router.bind(f"tcp://127.0.0.1:{port}")
                break
            except zmq.ZMQError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        self.address = self.router.getsockopt_string(zmq.LAST_ENDPOINT)

    def say(self, *messages: m.FromCoordinator, peer: bytes = IDENTITY) -> None:
        for message in messages:
            self.router.send_multipart([peer, *wire.encode(message)])

    def hear(self) -> m.ToCoordinator:
        assert self.router.poll(5000), "nothing came"
        peer, *frames = self.router.recv_multipart()
        assert peer == IDENTITY
        return wire.decode_for_coordinator(frames)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    made = Coordinator()
    yield made
    made.close()


def linked(context: zmq.Context, coordinator: Coordinator, **options) -> CoordinatorLink:
    """A link whose connection stands."""
    link = CoordinatorLink(context, coordinator.address, IDENTITY, **options)
    link.send(m.Pong(0))
    assert coordinator.hear() == m.Pong(0)
    link.check()
    return link


def seconds_until_noticed(link: CoordinatorLink, limit: float) -> float:
    began = time.monotonic()
    expected = rf"^the connection to the coordinator at {link.address} broke$"
    with pytest.raises(CoordinatorDied, match=expected):
        never_noticed(link, limit)
    return time.monotonic() - began


def never_noticed(link: CoordinatorLink, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        link.check()
        time.sleep(0.01)


# --- registration --------------------------------------------------------------------------------


def test_registration_returns_the_acknowledgement_and_keeps_what_follows(context, coordinator):
    link = linked(context, coordinator)
    request = m.EngineRequest(3, 0, b"sampling", b"prompt")
    coordinator.say(m.Ping(1), ACK, request, m.Ping(2))
    assert link.register(REGISTER, 5) == ACK
    assert coordinator.hear() == REGISTER
    assert context_until(link.drain, 2) == [wire.encode(request), wire.encode(m.Ping(2))]


def context_until(drain: Callable[[], list], count: int) -> list:
    """What comes in until it is so much, in any number of drains."""
    found, deadline = [], time.monotonic() + 5
    while len(found) < count:
        assert time.monotonic() < deadline
        found += drain()
    return found


@pytest.mark.parametrize("somebody", [True, False])
def test_a_registration_that_nobody_takes_ends_with_what_was_tried(context, coordinator, somebody):
    if not somebody:
        coordinator.close()
    link = CoordinatorLink(context, coordinator.address, IDENTITY)
    began = time.monotonic()
    with pytest.raises(CoordinatorDied) as died:
        link.register(REGISTER, 0.3)
    assert time.monotonic() - began < 2
    assert str(died.value) == (
        f"the coordinator at {coordinator.address} did not take this engine's registration "
        "within 0.3 s; are all replicas running the same version?"
    )


def test_a_registration_that_is_refused_ends_with_the_reason(context, coordinator):
    link = linked(context, coordinator)
    coordinator.say(m.RequestError(None, m.ErrorCode.REGISTRATION_REFUSED, "protocol 1 is not 2"))
    expected = r"^the coordinator refused this engine: protocol 1 is not 2$"
    with pytest.raises(CoordinatorDied, match=expected):
        link.register(REGISTER, 60)


def test_a_coordinator_that_comes_up_later_gets_the_registration(context):
    first = Coordinator()
    port = int(first.address.rsplit(":", 1)[1])
    first.close()
    link = CoordinatorLink(context, first.address, IDENTITY)
    link.send(REGISTER)
    later = Coordinator(port)
    try:
        assert later.hear() == REGISTER
        link.check()
    finally:
        later.close()


def test_the_process_s_end_is_noticed_during_registration(context, coordinator):
    def died() -> None:
        raise CoordinatorDied("the coordinator process (pid 1) died: no memory")

    link = CoordinatorLink(context, coordinator.address, IDENTITY, died)
    with pytest.raises(CoordinatorDied, match=r"\(pid 1\) died: no memory$"):
        link.register(REGISTER, 60)


# --- afterwards ----------------------------------------------------------------------------------


def test_a_drain_takes_everything_with_its_frames_and_does_not_wait(context, coordinator):
    link = linked(context, coordinator)
    assert link.drain() == []
    messages = [m.EngineRequest(n, 0, b"", b"x" * n) for n in range(5)]
    coordinator.say(*messages)
    assert context_until(link.drain, 5) == [wire.encode(message) for message in messages]
    assert link.drain() == []


def test_a_coordinator_that_goes_away_is_noticed_within_2_seconds(context, coordinator):
    link = linked(context, coordinator)
    coordinator.close()
    assert seconds_until_noticed(link, 5) < 2


def test_it_is_noticed_once_the_grace_is_over_and_at_every_later_check(
    context, coordinator, monkeypatch
):
    monkeypatch.setattr(link_module, "_GRACE_SECONDS", 0.2)
    link = linked(context, coordinator)
    coordinator.close()
    assert 0.2 <= seconds_until_noticed(link, 5) < 1
    with pytest.raises(CoordinatorDied):
        link.check()


def test_a_coordinator_that_comes_back_within_the_grace_is_no_error(
    context, coordinator, monkeypatch
):
    monkeypatch.setattr(link_module, "_GRACE_SECONDS", 0.6)
    link = linked(context, coordinator)
    coordinator.close()
    never_noticed(link, 0.1)
    back = Coordinator(int(coordinator.address.rsplit(":", 1)[1]))
    try:
        link.send(m.Pong(1))
        assert back.hear() == m.Pong(1)  # the same identity, so that it is known again
        never_noticed(link, 0.8)
        back.close()
        assert seconds_until_noticed(link, 5) >= 0.6  # counted anew
    finally:
        back.close()


def test_what_the_check_of_the_process_raises_passes_through(context, coordinator):
    asked = []

    def check() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise CoordinatorDied("killed by SIGKILL")

    link = linked(context, coordinator, check_process=check)
    link.check()
    with pytest.raises(CoordinatorDied, match=r"^killed by SIGKILL$"):
        link.check()


def test_closing_twice_is_harmless_and_leaves_nothing_that_keeps_the_context():
    with context_of() as context:
        made = Coordinator()
        try:
            link = linked(context, made)
            link.close()
            link.close()
            link.socket.close(linger=0)
            context.term()  # would wait for ever for a monitor that is still open
        finally:
            made.close()
