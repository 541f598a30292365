"""An engine's link to its coordinator: registration, and noticing that nobody is there any more."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import zmq

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.lifecycle import FleetState
from megatron.core.inference.coordinator.runtime import link as link_module
from megatron.core.inference.coordinator.runtime import sockets, wire
from megatron.core.inference.coordinator.runtime.keys import Credentials, Lock, Role
from megatron.core.inference.coordinator.runtime.link import CoordinatorLink
from megatron.core.inference.coordinator.runtime.process import CoordinatorDied

REGISTER = m.Register(1, "job", 0, 0, 8, 16, 100, "lru")
ACK = m.RegisterAck(0, 1, 5, FleetState.RUNNING)
NAME = b"engine-job-0"
IDENTITY = NAME + b"-1"


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

    def __init__(self, port: int | str = "*", lock: Lock | None = None):
        self._context = zmq.Context()
        self.router = sockets.router(self._context)
        self._guard = lock and lock.guard(self._context)
        if lock is not None:
            lock.apply(self.router)
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

    def hear(self, peer: bytes = IDENTITY) -> m.ToCoordinator:
        assert self.router.poll(5000), "nothing came"
        sender, *frames = self.router.recv_multipart()
        assert sender == peer
        return wire.decode_for_coordinator(frames)

    def close(self) -> None:
        self.router.close(linger=0)
        if self._guard is not None:
            self._guard.stop()
            self._guard = None
        self._context.destroy(linger=0)


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    made = Coordinator()
    yield made
    made.close()


def linked(context: zmq.Context, coordinator: Coordinator, **options) -> CoordinatorLink:
    """A link whose connection stands."""
    link = CoordinatorLink(context, coordinator.address, NAME, **options)
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


@pytest.mark.parametrize(
    ("somebody", "state"),
    [(True, "it has not taken this engine yet"), (False, "nothing listens there")],
)
def test_who_waits_for_a_coordinator_says_so_and_how_long(
    context, coordinator, somebody, state, caplog, monkeypatch
):
    monkeypatch.setattr(link_module, "_SILENT_SECONDS", 0.3)
    if not somebody:
        coordinator.close()
    link = CoordinatorLink(context, coordinator.address, NAME)
    with pytest.raises(CoordinatorDied):
        link.register(REGISTER, 1.5)
    (said,) = caplog.messages
    assert said.startswith(
        f"waiting_for_coordinator address={coordinator.address} state='{state}'; another 1 s"
    )


@pytest.mark.parametrize("somebody", [True, False])
def test_a_registration_that_nobody_takes_ends_with_what_was_tried(context, coordinator, somebody):
    if not somebody:
        coordinator.close()
    link = CoordinatorLink(context, coordinator.address, NAME)
    began = time.monotonic()
    with pytest.raises(CoordinatorDied) as died:
        link.register(REGISTER, 0.3)
    assert time.monotonic() - began < 15
    assert str(died.value) == (
        f"the coordinator at {coordinator.address} did not take this engine's registration "
        "within 0.3 s; is it running, is this its address, are these its keys, and are all "
        "replicas running the same version?"
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
    link = CoordinatorLink(context, first.address, NAME)
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

    link = CoordinatorLink(context, coordinator.address, NAME, died)
    with pytest.raises(CoordinatorDied, match=r"\(pid 1\) died: no memory$"):
        link.register(REGISTER, 60)


LOCK, OTHER = Lock.generate(), Lock.generate()
ENGINE_KEYS = LOCK.ring.credentials(Role.ENGINE)


@contextmanager
def locked(lock: Lock | None) -> Iterator[Coordinator]:
    made = Coordinator(lock=lock)
    try:
        yield made
    finally:
        made.close()


def test_with_the_right_keys_it_is_let_in(context):
    with locked(LOCK) as coordinator:
        linked(context, coordinator, credentials=ENGINE_KEYS)


@pytest.mark.parametrize(
    ("lock", "credentials", "how"),
    [
        (LOCK, None, "with keys"),
        (None, ENGINE_KEYS, "with other keys, or in plain"),
        (LOCK, Credentials(LOCK.own.public, OTHER.ring.pairs[Role.ENGINE]), "with other keys"),
    ],
)
def test_who_is_not_let_in_is_told_at_once(context, lock, credentials, how):
    with locked(lock) as coordinator:
        link = CoordinatorLink(context, coordinator.address, NAME, credentials=credentials)
        with pytest.raises(CoordinatorDied, match=f"does not take this engine; .* speak {how}"):
            link.register(REGISTER, 600)  # that long, if nobody told it


def test_the_keys_of_an_earlier_coordinator_are_a_warning_while_it_is_tried(context, caplog):
    """It may be on its way: another one is started there with the right keys."""
    with locked(LOCK) as wrong:
        link = CoordinatorLink(
            context, wrong.address, NAME, credentials=OTHER.ring.credentials(Role.ENGINE)
        )
        link.send(REGISTER)
        deadline = time.monotonic() + 20
        while "handshakes_fail" not in caplog.text and time.monotonic() < deadline:
            assert not link.check()
            time.sleep(0.01)
    assert caplog.text.count("handshakes_fail") == 1
    right = Coordinator(port_of(wrong), OTHER)
    try:
        assert right.hear() == REGISTER
        assert not link.check()
    finally:
        right.close()


# --- afterwards ----------------------------------------------------------------------------------


def test_a_drain_leaves_what_would_take_long(context, coordinator, monkeypatch):
    monkeypatch.setattr(link_module, "_DRAINED_BYTES", 250)
    link = linked(context, coordinator)
    messages = [m.EngineRequest(n, 0, b"sampling", b"p" * 100) for n in range(5)]
    coordinator.say(*messages, m.Ping(1))
    drained: list[list[list[bytes]]] = []
    deadline = time.monotonic() + 5
    while sum(map(len, drained)) < 6 and time.monotonic() < deadline:
        drained.append(link.drain())
    assert max(map(len, drained)) <= 3
    expected = [wire.encode(message) for message in [*messages, m.Ping(1)]]
    assert [frames for one in drained for frames in one] == expected


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


def test_it_is_noticed_once_the_grace_is_over_and_at_every_later_check(context, coordinator):
    link = linked(context, coordinator, grace=0.2)
    coordinator.close()
    assert 0.2 <= seconds_until_noticed(link, 5) < 1
    with pytest.raises(CoordinatorDied):
        link.check()


def broken(link: CoordinatorLink, seconds: float = 5) -> bool:
    """Whether a check within these seconds tells that the connection broke."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if link.check():
            return True
        time.sleep(0.01)
    return False


def port_of(coordinator: Coordinator) -> int:
    return int(coordinator.address.rsplit(":", 1)[1])


def test_a_coordinator_that_comes_back_within_the_grace_is_no_error(context, coordinator):
    link = linked(context, coordinator, grace=0.6)
    coordinator.close()
    assert broken(link)
    assert not broken(link, 0.1)  # it is told once
    back = Coordinator(port_of(coordinator))
    try:
        never_noticed(link, 0.8)
        back.close()
        assert seconds_until_noticed(link, 5) >= 0.6  # counted anew
    finally:
        back.close()


def test_where_something_listens_there_is_more_patience(context, coordinator):
    """A process that stands still, or a busy machine; a process that ended does not listen."""
    link = linked(context, coordinator, grace=0.2)
    coordinator.close()
    with socket.create_server(("127.0.0.1", port_of(coordinator))):
        assert broken(link)
        never_noticed(link, 1)
        assert link.broken


def test_every_connection_has_an_identity_of_its_own_and_begins_with_nothing(context, coordinator):
    link = linked(context, coordinator, grace=60)
    coordinator.say(m.EngineRequest(1, 0, b"", b""))
    assert link.socket.poll(5000)
    for connection in (2, 3):
        coordinator.close()
        link.send(m.Pong(connection))  # on its way when the connection breaks: lost
        assert broken(link)
        assert link.drain() == []
        link.send(REGISTER)
        coordinator = Coordinator(port_of(coordinator))
        peer = b"%s-%d" % (NAME, connection)
        assert coordinator.hear(peer) == REGISTER
        coordinator.say(ACK, peer=peer)
        assert context_until(link.drain, 1) == [wire.encode(ACK)]
        assert not broken(link, 0.1)
    coordinator.close()


def test_who_comes_back_before_the_coordinator_has_noticed_is_heard(context):
    """A ROUTER takes no notice of a second peer of the same identity, then or later."""
    coordinator = Coordinator()
    coordinator.router.setsockopt(zmq.HEARTBEAT_IVL, 0)
    coordinator.router.bind("tcp://127.0.0.1:*")  # this one never looks whether peers are there
    coordinator.address = coordinator.router.getsockopt_string(zmq.LAST_ENDPOINT)
    with frozen_on_demand(port_of(coordinator)) as (port, freeze):
        link = CoordinatorLink(context, f"tcp://127.0.0.1:{port}", NAME, grace=60)
        try:
            link.send(m.Pong(0))
            assert coordinator.hear() == m.Pong(0)
            freeze()
            assert broken(link)
            link.send(REGISTER)
            assert coordinator.hear(NAME + b"-2") == REGISTER
            coordinator.say(m.Ping(1))  # the coordinator believes in the old connection still
        finally:
            link.close()
            coordinator.close()


@contextmanager
def frozen_on_demand(port: int) -> Iterator[tuple[int, Callable[[], None]]]:
    """A way to a port on which the connections made so far can be made to stand still."""
    frozen: set[socket.socket] = set()
    open_: set[socket.socket] = set()

    def carry(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while (data := source.recv(65536)) and source not in frozen:
                target.sendall(data)

    def accept(server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = server.accept()
                far = socket.create_connection(("127.0.0.1", port))
                open_.update((near, far))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=carry, args=ends, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, args=(server,), daemon=True).start()
        yield server.getsockname()[1], lambda: frozen.update(open_)
        server.shutdown(socket.SHUT_RDWR)
    for each in open_:
        each.close()


@pytest.mark.parametrize("answer", [None, m.RegisterAgain()])
def test_a_connection_that_breaks_during_registration_is_registered_on_anew(context, answer):
    """The coordinator ended after it had taken the registration, and is started again."""
    coordinator = Coordinator()
    link = linked(context, coordinator, grace=60)

    def restart() -> None:
        assert coordinator.hear() == REGISTER
        coordinator.close()
        back = Coordinator(port_of(coordinator))
        peer = NAME + b"-2"
        assert back.hear(peer) == REGISTER
        if answer is not None:
            back.say(answer, peer=peer)
        back.say(ACK, peer=peer)
        done.wait(10)
        back.close()

    done = threading.Event()
    thread = threading.Thread(target=restart)
    thread.start()
    try:
        assert link.register(REGISTER, 10) == ACK
    finally:
        done.set()
        thread.join(10)


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
            context.term()  # would wait for ever for a socket that is still open
        finally:
            made.close()


def test_the_last_messages_arrive(context, coordinator):
    link = linked(context, coordinator)
    for n in range(1000):
        link.send(m.Pong(n))
    link.send(m.Disconnect())
    link.close()
    assert [coordinator.hear() for _ in range(1001)][-1] == m.Disconnect()


def test_a_coordinator_that_is_gone_does_not_delay_the_end():
    made = Coordinator()
    with context_of() as context:
        link = linked(context, made)
        made.close()
        link.send(m.Disconnect())
        began = time.monotonic()
        link.close()
        context.term()
        assert time.monotonic() - began < 15


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_connections_that_broke_leave_nothing_open(context, coordinator):
    link = linked(context, coordinator, grace=60)
    before = open_files()
    for _ in range(5):
        coordinator.close()
        assert broken(link)
        coordinator = Coordinator(port_of(coordinator))
        link.send(REGISTER)
        assert coordinator.router.poll(5000)
    deadline = time.monotonic() + 5
    while open_files() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert open_files() <= before
    coordinator.close()
