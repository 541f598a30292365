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


def test_where_one_of_the_two_files_is_missing_there_are_new_keys_and_it_is_told(tmp_path, caplog):
    path, beside = tmp_path / "keys.json", tmp_path / "keys.json.coordinator"
    for missing in (path, beside):
        before = Lock.kept(path)
        missing.unlink()
        after = Lock.kept(path)
        assert after.own != before.own
        assert KeyRing.read(path) == after.ring
        assert Lock.kept(path) == after
    assert caplog.messages == [
        f"keys_renewed file='{path}' missing='{missing}'" for missing in (path, beside)
    ]


def test_keys_whose_writer_was_killed_between_the_files_are_made_anew(tmp_path, monkeypatch):
    path = tmp_path / "keys.json"
    Lock.kept(path)
    (tmp_path / "keys.json.coordinator").unlink()

    def killed(ring, path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(KeyRing, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            Lock.kept(path)
    assert Lock.kept(path).ring == KeyRing.read(path)


def test_keys_that_cannot_be_used_are_told_and_left_as_they_are(tmp_path):
    """New ones would lock out all who have the old ones."""
    path, beside = tmp_path / "keys.json", tmp_path / "keys.json.coordinator"
    lock = Lock.kept(path)
    as_they_were = path.read_text(), beside.read_text()

    def put_a_link_to_nothing() -> None:
        beside.unlink()
        beside.symlink_to("nothing")

    for happens, sentence in (
        (lambda: path.chmod(0o640), f"{path}: has mode 640; run: chmod 600 {path}$"),
        (lambda: beside.chmod(0o604), f"{beside}: has mode 604; run: chmod 600 {beside}$"),
        (lambda: beside.write_text("[]"), f"{beside} holds no keys"),
        (lambda: beside.write_text('{"public": 1, "secret": 2}'), f"{beside} holds no keys"),
        (lambda: path.write_text("{"), f"{path} is not JSON"),
        (lambda: Lock.generate().ring.write(path), "are not a coordinator's two; put those back"),
        (lambda: lock.ring.only(Role.SUBMIT).write(path), "are not a coordinator's two"),
        (put_a_link_to_nothing, f"{beside}: No such file"),
    ):
        happens()
        found = path.read_text()
        with pytest.raises(KeyFileError, match=sentence):
            Lock.kept(path)
        assert path.read_text() == found
        beside.unlink()
        for file, text in zip((path, beside), as_they_were, strict=True):
            file.write_text(text)
            file.chmod(0o600)
        assert Lock.kept(path) == lock


def test_a_key_file_goes_into_no_file_of_anybody_else(lock, tmp_path):
    path, others = tmp_path / "keys.json", tmp_path / "others"
    others.write_text("precious")
    for name in ("keys.json", "keys.json.partial", "keys.partial"):
        (tmp_path / name).symlink_to(others)
    lock.ring.write(path)
    assert not path.is_symlink()
    assert others.read_text() == "precious"
    assert (tmp_path / "keys.json.partial").is_symlink()  # it is nobody's business of ours


def test_what_is_not_a_plain_file_of_keys_is_refused(lock, tmp_path):
    path = tmp_path / "keys.json"
    os.mkfifo(path, 0o600)  # whoever opens one to read it waits for a writer
    with pytest.raises(KeyFileError, match=f"key file {path}: is not a plain file"):
        KeyRing.read(path)
    with pytest.raises(KeyFileError, match=f"key file {tmp_path}: is not a plain file"):
        KeyRing.read(tmp_path)
    path.unlink()
    for content, sentence in (
        ("\N{BULLET}" * 40, "is not ASCII text"),
        ("x" * 70_000, "has more than 64 KiB"),
        ("[" * 60_000, "is not JSON"),
        (json.dumps({"server": "\N{BULLET}" * 40}), "holds no keys"),
    ):
        path.write_text(content)
        path.chmod(0o600)
        with pytest.raises(KeyFileError, match=sentence):
            KeyRing.read(path)


def test_a_link_to_a_key_file_is_followed(lock, tmp_path):
    """Secrets of Kubernetes are links."""
    lock.ring.write(tmp_path / "real.json")
    (tmp_path / "keys.json").symlink_to("real.json")
    assert KeyRing.read(tmp_path / "keys.json") == lock.ring


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file away")
def test_keys_that_somebody_else_put_there_are_refused(lock, tmp_path, monkeypatch):
    path = tmp_path / "keys.json"
    lock.ring.write(path)
    os.chown(path, 12345, -1)
    with pytest.raises(KeyFileError, match=r"belongs to user 12345; it must be a file of user 0$"):
        KeyRing.read(path)
    os.chown(path, 0, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # root's are anybody's
    assert KeyRing.read(path) == lock.ring


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
