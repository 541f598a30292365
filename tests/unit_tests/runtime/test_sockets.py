"""Whole messages in and out of a ROUTER: what is copied, and who cannot be reached."""

import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from megatron.core.inference.coordinator.runtime import sockets

WAIT_MS = 5000
LARGE = bytes(range(256)) * 33  # just more than shares a buffer with others
SMALL = LARGE[:8192]


class Ends:
    """A mailbox, and DEALERs that talk to it."""

    def __init__(self):
        self.context = zmq.Context()
        self.router = sockets.router(self.context)
        self.router.bind("tcp://127.0.0.1:*")
        self.address = self.router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.mailbox = sockets.Mailbox(self.router)

    def peer(self, name: bytes) -> zmq.Socket:
        """One that has said hello."""
        dealer = sockets.dealer(self.context, self.address, name)
        dealer.send(b"hello")
        assert self.receive() == (name, [b"hello"])
        return dealer

    def receive(self):
        assert self.router.poll(WAIT_MS), "nothing came"
        peer, frames, _ = self.mailbox.receive()
        return peer, frames


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.context.destroy(linger=0)


def test_a_process_may_have_as_many_connections_as_the_system_allows():
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before, 512), most))
    try:
        assert sockets.raise_descriptor_limit() == most
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def test_a_coordinator_sends_no_heartbeats_and_its_peers_do(ends):
    """libzmq ends a process whose ROUTER does (`sockets.CLIENT_PULSE`)."""
    assert ends.router.getsockopt(zmq.HEARTBEAT_IVL) == 0
    options = zmq.HEARTBEAT_IVL, zmq.HEARTBEAT_TIMEOUT, zmq.HEARTBEAT_TTL
    engine = ends.peer(b"engine")
    assert [engine.getsockopt(option) for option in options] == [500, 2000, 2000]
    client = sockets.dealer(ends.context, ends.address, b"client", pulse=sockets.CLIENT_PULSE)
    assert [client.getsockopt(option) for option in options] == [2500, 10_000, 10_000]


def test_the_kernel_gives_up_connections_at_both_ends(ends):
    options = zmq.TCP_KEEPALIVE, zmq.TCP_KEEPALIVE_IDLE, zmq.TCP_KEEPALIVE_INTVL, zmq.TCP_MAXRT
    for end in (ends.router, ends.peer(b"peer")):
        assert [end.getsockopt(option) for option in options] == [1, 1, 1, 2000]


def test_a_peer_is_silent_when_not_even_heartbeats_come(ends):
    dumb = ends.context.socket(zmq.DEALER)  # without heartbeats, like one that was stopped
    dumb.setsockopt(zmq.IDENTITY, b"dumb")
    dumb.connect(ends.address)
    dumb.send(b"hello")
    assert ends.receive() == (b"dumb", [b"hello"])
    ends.mailbox.expect_heartbeats(b"dumb")
    alive = ends.peer(b"alive")
    ends.mailbox.expect_heartbeats(b"alive")
    assert not ends.mailbox.silent(b"dumb")
    time.sleep(2.3)
    assert ends.mailbox.silent(b"dumb")
    assert not ends.mailbox.silent(b"alive")
    assert not ends.mailbox.silent(b"nobody remembers")
    dumb.send(b"hello")
    ends.receive()
    assert not ends.mailbox.silent(b"dumb")
    alive.close(linger=0)


def test_a_peer_of_an_old_zmtp_has_no_connection_to_watch(ends):
    """libzmq does not tell which one it has: the fuzz found that asking for it is an error."""
    port = int(ends.address.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as old:
        old.sendall(b"\x01\x00" + b"\x06\x00hello")  # ZMTP 1: no name, and a frame
        name, frames = ends.receive()
        assert frames == [b"hello"]
        ends.mailbox.expect_heartbeats(name)
        assert not ends.mailbox.silent(name)


def test_nothing_has_come(ends):
    assert ends.mailbox.receive() is None


def test_messages_come_one_by_one_with_who_sent_them(ends):
    one, two = ends.peer(b"one"), ends.peer(b"two")
    one.send_multipart([b"a", b"", b"b"])
    assert ends.receive() == (b"one", [b"a", b"", b"b"])
    two.send(b"")
    one.send(b"c")
    assert sorted([ends.receive(), ends.receive()]) == [(b"one", [b"c"]), (b"two", [b""])]
    assert ends.mailbox.receive() is None


def test_large_bodies_stay_in_the_frame_they_came_in_and_nothing_else_does(ends):
    peer = ends.peer(b"peer")  # held, or it would be closed with what it has to send
    peer.send_multipart([LARGE, SMALL, LARGE, b"", LARGE])
    _, frames = ends.receive()
    assert [type(frame) for frame in frames] == [bytes, bytes, zmq.Frame, bytes, zmq.Frame]
    assert [bytes(frame) for frame in frames] == [LARGE, SMALL, LARGE, b"", LARGE]


def test_what_is_sent_arrives_whatever_it_lies_in(ends):
    peer = ends.peer(b"peer")
    peer.send_multipart([b"", LARGE])
    _, (_, frame) = ends.receive()
    messages = [[b"x"], [b"", frame], [frame, SMALL, frame, b""], [LARGE, LARGE]]
    for message in messages:
        assert ends.mailbox.send(b"peer", message)
    del frame
    for message in messages:
        assert peer.recv_multipart() == [bytes(frame) for frame in message]


def test_who_cannot_be_reached_gets_nothing_and_the_next_one_all(ends):
    gone, here = ends.peer(b"gone"), ends.peer(b"here")
    gone.close(linger=0)
    while ends.mailbox.send(b"gone", [b"are you there?"]):
        ends.router.poll(10)
    assert not ends.mailbox.send(b"never came", [b"a", b"b"])
    assert not ends.mailbox.send(b"gone", [b"a", LARGE])
    assert ends.mailbox.send(b"here", [b"c", b"d"])
    assert here.recv_multipart() == [b"c", b"d"]


def test_to_pass_on_what_is_large_takes_no_thread_of_pyzmq(ends):
    """Its thread would free memory of Python's that libzmq was lent, and take turns with ours."""
    threads = threading.active_count()
    peer = ends.peer(b"peer")
    peer.send_multipart([b"", LARGE])
    assert ends.mailbox.send(*ends.receive())
    assert peer.recv_multipart() == [b"", LARGE]
    assert threading.active_count() == threads


def test_a_frame_is_all_that_is_kept_of_what_it_came_with(ends):
    peer = ends.peer(b"peer")
    peer.send_multipart([b"1", LARGE, b"2"])
    _, (_, kept, _) = ends.receive()
    peer.send_multipart([b"3", LARGE[::-1], b"4"])
    ends.receive()
    peer.close(linger=0)
    assert bytes(kept) == LARGE
