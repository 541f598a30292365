"""What the ranks of a group tell each other: all of it, in order, and nobody else hears it."""

import asyncio
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from megatron.core.inference.coordinator.runtime import group_channel
from megatron.core.inference.coordinator.runtime.group_channel import (
    GroupError,
    GroupLeader,
    GroupMember,
    Invitation,
)

MEMBERS = 3
ONE_MACHINE, SEVERAL = None, "127.0.0.1"
BOTH = pytest.mark.parametrize("host", [ONE_MACHINE, SEVERAL])


def never() -> bool:
    return False


class Group:
    """A leader, and members in threads of their own."""

    def __init__(self, pool: ThreadPoolExecutor, members: int, host: str | None):
        self._pool = pool
        self._members = 0
        self.leader = GroupLeader(members, host)

    def join(
        self, act: Callable[[GroupMember], object], start: threading.Event | None = None
    ) -> Future:
        """What the next member does, after `start`."""
        self._members += 1
        return self._pool.submit(self._act, self._members, act, start)

    def _act(
        self, rank: int, act: Callable[[GroupMember], object], start: threading.Event | None
    ) -> object:
        if start is not None:
            assert start.wait(10)
        member = GroupMember(self.leader.invitation, rank)
        try:
            return act(member)
        finally:
            member.close()

    def complete(
        self, act: Callable[[GroupMember], object], members: int = MEMBERS
    ) -> list[Future]:
        """So many members that do the same, all joined."""
        found = [self.join(act) for _ in range(members)]
        self.leader.wait_for_members()
        return found


@contextmanager
def grouped(members: int = MEMBERS, host: str | None = ONE_MACHINE) -> Iterator[Group]:
    with ThreadPoolExecutor(members + 1) as pool:
        group = Group(pool, members, host)
        try:
            yield group
        finally:
            group.leader.close()


def drains_of(count: int) -> Callable[[GroupMember], list]:
    return lambda member: [member.receive(never) for _ in range(count)]


@BOTH
def test_nothing_is_published_before_the_last_member_has_joined(host):
    late = threading.Event()
    with grouped(host=host) as group:
        members = [
            group.join(drains_of(1)),
            group.join(drains_of(1)),
            group.join(drains_of(1), late),
        ]
        waiting = group._pool.submit(group.leader.wait_for_members)
        time.sleep(0.2)  # the first two have said hello by now
        assert not waiting.done()
        late.set()
        waiting.result(10)
        group.leader.publish([[b"first"]], never)
        assert [member.result(10) for member in members] == [[[[b"first"]]]] * MEMBERS


@BOTH
def test_frames_are_kept_apart_also_empty_ones_and_empty_drains(host):
    drains = [
        [[b"one"], [b"one", b"two"], [b"one", b"two", b"three"]],
        [],
        [[b""]],
        [[b"", b""], [b"", b"x", b""], [b""]],
        [],
        [[b"\xff" * 100_000, b""]],
    ]
    with grouped(host=host) as group:
        members = group.complete(drains_of(len(drains)))
        for drain in drains:
            group.leader.publish(drain, never)
        assert [member.result(10) for member in members] == [drains] * MEMBERS


def test_thousands_of_drains_keep_their_order_for_members_of_any_speed():
    """The leader is far ahead of the members, and waits for them then: nothing is dropped."""
    drains = [[[b"%d" % n, b"x" * (n % 7)]] * (n % 3) for n in range(5000)]
    with grouped() as group:
        members = group.complete(drains_of(len(drains)))
        for drain in drains:
            group.leader.publish(drain, never)
        assert [member.result(20) for member in members] == [drains] * MEMBERS


def test_a_member_that_votes_at_once_is_not_taken_for_one_that_joins():
    def speak(member: GroupMember) -> None:
        member.tell([b"a vote"])
        member.hear(None)

    with grouped() as group:
        members = group.complete(speak)
        heard = [group.leader.hear(10) for _ in members]
        assert sorted(heard) == [(rank, [b"a vote"]) for rank in (1, 2, 3)]
        group.leader.tell([b"thanks"])
        for member in members:
            member.result(10)


def test_members_that_do_not_come_are_an_error_that_names_them(monkeypatch):
    monkeypatch.setattr(group_channel, "_PATIENCE_SECONDS", 0.5)
    with grouped() as group:
        member = group.join(drains_of(1))
        expected = r"^ranks 2, 3 of a group of 4 did not join at ipc://.+ within 0\.5 s"
        with pytest.raises(GroupError, match=expected):
            group.leader.wait_for_members()
        with pytest.raises(GroupError, match=r"^rank 1 of a group waited for the others at "):
            member.result(10)


def test_a_member_counts_once_however_often_it_says_hello():
    with grouped(members=2) as group:
        member = group.join(lambda member: member.hear(None))
        waiting = group._pool.submit(group.leader.wait_for_members)
        names = [b"rank 1", b"rank 3", b"", b"somebody"]
        context = zmq.Context()
        for name in names:
            stranger = context.socket(zmq.DEALER)
            if name:
                stranger.setsockopt(zmq.IDENTITY, name)
            stranger.connect(group.leader.invitation.address)
            for _ in range(3):
                stranger.send(b"hello")
        time.sleep(0.3)
        assert not waiting.done()
        context.destroy(linger=0)
        second = group.join(lambda member: member.hear(None))
        waiting.result(10)
        group.leader.tell([b"there"])
        assert [m.result(10) for m in (member, second)] == [[b"there"]] * 2


def test_a_group_of_one_has_nobody_to_wait_for_or_to_tell():
    with grouped(members=0) as group:
        group.leader.wait_for_members()
        group.leader.publish([[b"nobody hears it"]], never)


def test_a_member_stops_waiting_when_the_job_ends():
    asked = []

    def give_up() -> bool:
        asked.append(True)
        return len(asked) == 2

    with grouped(members=1) as group:
        (member,) = group.complete(lambda member: member.receive(give_up), members=1)
        with pytest.raises(asyncio.CancelledError):
            member.result(10)
    assert len(asked) == 2


def test_a_member_that_could_stop_still_takes_what_has_come():
    with grouped(members=1) as group:
        (member,) = group.complete(drains_of(1), members=1)
        group.leader.publish([[b"last"]], never)
        assert member.result(10) == [[[b"last"]]]


# --- what goes wrong ------------------------------------------------------------------------------


def publish_until_it_fails(leader: GroupLeader, message: bytes) -> None:
    for _ in range(1000):
        leader.publish([[message]], never)
        time.sleep(0.001)


def test_a_member_that_is_gone_is_an_error_after_a_while_and_none_when_the_job_ends(monkeypatch):
    monkeypatch.setattr(group_channel, "_GONE_SECONDS", 0.3)
    with grouped(members=1) as group:
        (member,) = group.complete(lambda member: None, members=1)
        member.result(10)
        with pytest.raises(GroupError, match=r"^rank 1 of the group is gone for 0\.3 s$"):
            publish_until_it_fails(group.leader, b"anybody?")
        with pytest.raises(asyncio.CancelledError):
            group.leader.publish([], lambda: True)


@BOTH
def test_a_member_that_does_not_read_bounds_the_queue_and_is_an_error(host, monkeypatch):
    monkeypatch.setattr(group_channel, "_WAITING_MESSAGES", 10)
    done = threading.Event()
    with grouped(members=1, host=host) as group:
        group.complete(lambda member: done.wait(30), members=1)
        monkeypatch.setattr(group_channel, "_PATIENCE_SECONDS", 0.2)
        with pytest.raises(GroupError, match=r"^rank 1 of the group has not read what it was told"):
            publish_until_it_fails(group.leader, bytes(1 << 20))
        assert group.leader._sent < 100
        done.set()


def test_a_message_that_is_missing_is_an_error_and_never_skipped():
    with grouped(members=1) as group:
        (member,) = group.complete(drains_of(2), members=1)
        group.leader.publish([], never)
        group.leader._sent += 1
        group.leader.publish([], never)
        with pytest.raises(GroupError, match=r"is lost$"):
            member.result(10)


# --- strangers ------------------------------------------------------------------------------------


def test_on_one_machine_the_door_is_a_private_folder_that_is_gone_once_all_are_in():
    with grouped(members=1) as group:
        folder = Path(group.leader.invitation.address.removeprefix("ipc://")).parent
        mode = folder.stat()
        assert stat.S_IMODE(mode.st_mode) == 0o700
        assert mode.st_uid == os.getuid()
        (member,) = group.complete(drains_of(1), members=1)
        assert not folder.exists()
        group.leader.publish([[b"still heard"]], never)
        assert member.result(10) == [[[b"still heard"]]]


def test_a_long_temporary_folder_makes_no_path_that_a_socket_cannot_have(monkeypatch, tmp_path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(group_channel.tempfile, "tempdir", str(long))
    with grouped(members=1) as group:
        (member,) = group.complete(drains_of(1), members=1)
        group.leader.publish([], never)
        member.result(10)
    assert list(long.iterdir()) == []


def port_of(invitation: Invitation) -> tuple[str, int]:
    host, port = invitation.address.removeprefix("tcp://").rsplit(":", 1)
    return host, int(port)


@pytest.mark.parametrize("kind", [zmq.SUB, zmq.DEALER, zmq.XSUB])
@pytest.mark.parametrize("keys", ["none", "its own"])
def test_strangers_neither_count_nor_hear_nor_stop_anything(kind, keys):
    """Between machines the port is open: they subscribe, say hello, or send what raised before."""
    with grouped(members=1, host=SEVERAL) as group:
        context = zmq.Context()
        stranger = context.socket(kind)
        if keys == "its own":  # a client of CURVE has to know the server's key, which is as secret
            stranger.curve_serverkey = zmq.curve_keypair()[0]
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        if kind == zmq.SUB:
            stranger.setsockopt(zmq.SUBSCRIBE, b"")
        else:
            stranger.setsockopt(zmq.IDENTITY, b"rank 1")
            stranger.setsockopt(zmq.SNDTIMEO, 200)
        stranger.connect(group.leader.invitation.address)
        if kind != zmq.SUB:
            for said in (b"", b"bad", b"\1", b"hello"):
                try:
                    stranger.send(said)
                except zmq.Again:
                    break
        waiting = group._pool.submit(group.leader.wait_for_members)
        time.sleep(0.3)
        assert not waiting.done()
        member = group.join(drains_of(1))
        waiting.result(10)
        group.leader.publish([[b"SECRET PROMPT"]], never)
        assert member.result(10) == [[[b"SECRET PROMPT"]]]
        assert not stranger.poll(200)
        context.destroy(linger=0)


def test_who_knows_the_leaders_key_and_has_none_of_the_groups_stays_out():
    with grouped(members=1, host=SEVERAL) as group:
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.IDENTITY, b"rank 1")
        assert group.leader.invitation.credentials is not None
        stranger.curve_serverkey = group.leader.invitation.credentials.server.encode()
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.connect(group.leader.invitation.address)
        stranger.send(b"hello")
        waiting = group._pool.submit(group.leader.wait_for_members)
        time.sleep(0.3)
        assert not waiting.done()
        context.destroy(linger=0)
        member = group.join(drains_of(1))
        waiting.result(10)
        group.leader.publish([], never)
        member.result(10)


def test_bytes_that_are_no_zeromq_do_nothing():
    with grouped(members=1, host=SEVERAL) as group:
        (member,) = group.complete(drains_of(1), members=1)
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\0" + b"NULL".ljust(20, b"\0") + bytes(32)
        for said in (b"bad", b"GET / HTTP/1.1\r\n\r\n", os.urandom(1000), greeting):
            with socket.create_connection(port_of(group.leader.invitation)) as raw:
                raw.sendall(said)
        group.leader.publish([], never)
        assert member.result(10) == [[]]
