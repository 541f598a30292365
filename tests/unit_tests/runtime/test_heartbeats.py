"""Whether anything comes over a connection any more, by the kernel's word."""

import socket
import time
from contextlib import ExitStack

import pytest

from megatron.core.inference.coordinator.runtime.heartbeats import Heartbeats

TIMEOUT_MS = 100


@pytest.fixture
def connected():
    """Makes connections; returns this end and the other."""
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as listening:

        def connect():
            theirs = stack.enter_context(socket.create_connection(listening.getsockname()))
            return stack.enter_context(listening.accept()[0]), theirs

        yield connect


@pytest.fixture
def heartbeats():
    return Heartbeats(TIMEOUT_MS)


def outwait():
    time.sleep(3 * TIMEOUT_MS / 1000)


def test_a_peer_has_missed_its_heartbeats_when_nothing_came_for_too_long(heartbeats, connected):
    (ours, theirs), (others, _) = connected(), connected()
    heartbeats.expect(b"peer", ours.fileno())
    heartbeats.expect(b"quiet", others.fileno())
    outwait()
    theirs.send(b".")
    assert ours.recv(1)
    assert heartbeats.missed(b"quiet")
    assert not heartbeats.missed(b"peer")


def test_what_is_not_expected_is_not_missed(heartbeats):
    assert b"peer" not in heartbeats
    assert not heartbeats.missed(b"peer")


def test_of_a_connection_that_is_closed_nothing_is_known(heartbeats, connected):
    ours, _ = connected()
    heartbeats.expect(b"peer", ours.fileno())
    ours.close()
    outwait()
    assert not heartbeats.missed(b"peer")


def test_the_descriptor_of_a_closed_connection_may_be_another_peers(heartbeats, connected):
    """A peer that came back by itself must not count as silent because a stranger is."""
    ours, _ = connected()
    number = ours.fileno()
    heartbeats.expect(b"peer", number)
    ours.close()
    assert number in [stranger.fileno() for stranger in connected()]
    outwait()
    assert not heartbeats.missed(b"peer")


def test_nor_may_it_be_no_connection_at_all(heartbeats, connected, tmp_path):
    ours, _ = connected()
    heartbeats.expect(b"peer", ours.fileno())
    ours.close()
    with open(tmp_path / "file", "w"), open(tmp_path / "other", "w"):
        assert not heartbeats.missed(b"peer")


def test_a_peer_that_connected_anew_is_judged_by_its_new_connection(heartbeats, connected):
    (old, _), (new, theirs) = connected(), connected()
    heartbeats.expect(b"peer", old.fileno())
    outwait()
    heartbeats.expect(b"peer", new.fileno())
    theirs.send(b".")
    assert new.recv(1)
    assert not heartbeats.missed(b"peer")
    outwait()
    assert heartbeats.missed(b"peer")


def test_the_next_peer_with_the_same_connection_takes_its_place(heartbeats, connected):
    ours, _ = connected()
    for number in range(100):
        heartbeats.expect(b"%d" % number, ours.fileno())
        heartbeats.expect(b"%d" % number, ours.fileno())
    outwait()
    assert heartbeats.missed(b"99")
    assert not heartbeats.missed(b"98")
    assert len(heartbeats._connections) == len(heartbeats._peers) == 1
