"""Keys: files that only their owner reads, and what each kind of peer may do."""

import json
import os
import pickle

import pytest
import zmq

from megatron.core.inference.coordinator.messages import Right
from megatron.core.inference.coordinator.runtime import keys
from megatron.core.inference.coordinator.runtime.keys import (
    KEY_FILE_VARIABLE,
    KeyFileError,
    KeyRing,
    Lock,
    Role,
)


@pytest.fixture(scope="module")
def lock():
    return Lock.generate()


def test_every_role_has_a_pair_of_its_own(lock):
    publics = [pair.public for pair in lock.ring.pairs.values()] + [lock.own.public]
    assert len(set(publics)) == 4
    assert set(lock.ring.pairs) == set(Role)


def test_no_secret_is_shown(lock):
    text = repr(lock) + str(lock)
    assert lock.own.secret not in text
    assert all(pair.secret not in text for pair in lock.ring.pairs.values())


def test_a_lock_survives_pickling(lock):
    assert pickle.loads(pickle.dumps(lock)) == lock


def test_a_ring_gives_the_first_role_that_it_holds(lock):
    weak = lock.ring.only(Role.SUBMIT)
    assert set(weak.pairs) == {Role.SUBMIT}
    assert weak.credentials(Role.CONTROL, Role.SUBMIT).own == lock.ring.pairs[Role.SUBMIT]
    assert lock.ring.credentials(Role.CONTROL).own == lock.ring.pairs[Role.CONTROL]
    with pytest.raises(KeyFileError, match="none of: engine, control"):
        weak.credentials(Role.ENGINE, Role.CONTROL)


# --- files ---------------------------------------------------------------------------------------


def test_a_key_file_is_its_owners_alone_whatever_was_there(lock, tmp_path):
    path = tmp_path / "keys.json"
    path.write_text("{}")
    path.chmod(0o644)
    mask = os.umask(0)
    try:
        lock.ring.write(path)
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o600
    assert KeyRing.read(path) == lock.ring
    assert [p.name for p in tmp_path.iterdir()] == ["keys.json"]


def test_a_partial_ring_is_written_and_read_as_it_is(lock, tmp_path):
    weak = lock.ring.only(Role.SUBMIT)
    weak.write(tmp_path / "weak.json")
    assert KeyRing.read(tmp_path / "weak.json") == weak
    assert lock.ring.pairs[Role.CONTROL].secret not in (tmp_path / "weak.json").read_text()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777])
def test_a_file_that_others_may_read_is_refused(lock, tmp_path, mode):
    path = tmp_path / "keys.json"
    lock.ring.write(path)
    path.chmod(mode)
    with pytest.raises(KeyFileError, match="chmod 600"):
        KeyRing.read(path)


@pytest.mark.parametrize(
    "content",
    ["", "no json", "[]", "{}", '{"server": 5}', '{"server": "short"}'],
)
def test_a_broken_file_is_refused(tmp_path, content):
    path = tmp_path / "keys.json"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match="was it written by a coordinator"):
        KeyRing.read(path)


def test_a_broken_pair_is_refused(lock, tmp_path):
    path = tmp_path / "keys.json"
    lock.ring.write(path)
    content = json.loads(path.read_text())
    content["submit"] = {"public": "x"}
    path.write_text(json.dumps(content))
    with pytest.raises(KeyFileError, match="holds no keys"):
        KeyRing.read(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(KeyFileError, match=r"nothing\.json: No such file"):
        KeyRing.read(tmp_path / "nothing.json")


def test_the_environment_names_the_file(lock, tmp_path, monkeypatch):
    monkeypatch.delenv(KEY_FILE_VARIABLE, raising=False)
    assert keys.known("tcp://127.0.0.1:1") is None
    lock.ring.write(tmp_path / "keys.json")
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(tmp_path / "keys.json"))
    assert keys.known("tcp://127.0.0.1:1") == lock.ring


def test_the_job_of_ones_own_goes_before_the_environment(lock, tmp_path, monkeypatch):
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(tmp_path / "missing.json"))
    monkeypatch.setattr(keys, "_rings", {})
    keys.remember("tcp://127.0.0.1:2", lock.ring)
    assert keys.known("tcp://127.0.0.1:2") is lock.ring


def test_a_coordinator_that_is_started_again_takes_the_keys_that_its_peers_have(tmp_path):
    path = tmp_path / "keys.json"
    first = Lock.kept(path)
    assert KeyRing.read(path) == first.ring
    assert Lock.kept(path) == first
    for written in tmp_path.iterdir():
        assert written.stat().st_mode & 0o777 == 0o600
        # Peers get the key file: it tells nothing of the coordinator's own secret.
        assert (first.own.secret in written.read_text()) is (written != path)


def test_keys_that_are_not_whole_or_that_others_may_have_read_are_not_taken_again(tmp_path):
    path, beside = tmp_path / "keys.json", tmp_path / "keys.json.coordinator"

    def lose_the_ring(lock: Lock) -> None:
        path.unlink()

    def lose_the_secret(lock: Lock) -> None:
        beside.unlink()

    def let_others_read(lock: Lock) -> None:
        beside.chmod(0o644)

    def break_it(lock: Lock) -> None:
        beside.write_text("[]")

    def put_another_in_its_place(lock: Lock) -> None:
        Lock.generate().ring.write(path)

    def leave_a_part(lock: Lock) -> None:
        lock.ring.only(Role.SUBMIT).write(path)

    for happens in (
        lose_the_ring,
        lose_the_secret,
        let_others_read,
        break_it,
        put_another_in_its_place,
        leave_a_part,
    ):
        before = Lock.kept(path)
        happens(before)
        after = Lock.kept(path)
        assert after.own != before.own, happens
        assert KeyRing.read(path) == after.ring


# --- on the wire ---------------------------------------------------------------------------------


@pytest.fixture
def guarded(lock):
    """A ROUTER behind the lock, its guard, and the address."""
    context = zmq.Context()
    guard = lock.guard(context)
    router = context.socket(zmq.ROUTER)
    lock.apply(router)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    yield router, guard, f"tcp://127.0.0.1:{port}"
    router.close(linger=0)
    guard.stop()
    context.term()


def say(address, credentials, text=b"hello"):
    """Connect, say something, and return the context and socket to close."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    if credentials is not None:
        credentials.apply(socket)
    socket.connect(address)
    socket.send(text)
    return context, socket


@pytest.mark.parametrize(
    ("role", "rights"),
    [
        (Role.ENGINE, Right.ENGINE),
        (Role.SUBMIT, Right.SUBMIT),
        (Role.CONTROL, Right.SUBMIT | Right.CONTROL),
    ],
)
def test_a_message_tells_what_its_sender_may_do(lock, guarded, role, rights):
    router, guard, address = guarded
    context, socket = say(address, lock.ring.credentials(role))
    assert router.poll(5000)
    _, text = router.recv_multipart(copy=False)
    assert (text.bytes, guard.rights(text)) == (b"hello", rights)
    socket.close()
    context.term()


def test_without_a_key_of_the_ring_nothing_arrives(lock, guarded):
    router, _, address = guarded
    stranger = Lock.generate().ring.credentials(Role.CONTROL)
    right_server = keys.Credentials(lock.own.public, stranger.own)
    others = [say(address, credentials) for credentials in (None, stranger, right_server)]
    friend = say(address, lock.ring.credentials(Role.SUBMIT), b"friend")
    assert router.poll(5000)
    assert router.recv_multipart()[1] == b"friend"
    assert not router.poll(300)
    for context, socket in [*others, friend]:
        socket.close()
        context.term()
