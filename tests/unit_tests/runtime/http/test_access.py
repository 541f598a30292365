"""API keys: where they come from, whom they admit, and that no text shows them."""

import argparse
import os
import pickle
import stat

import pytest

from megatron.core.inference.coordinator.options import SettingsError
from megatron.core.inference.coordinator.runtime.http import access
from megatron.core.inference.coordinator.runtime.http.access import ApiKeys


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv(access.VARIABLE, raising=False)
    return monkeypatch


def parsed(*flags, host="127.0.0.1"):
    parser = argparse.ArgumentParser()
    access.add_key_args(parser)
    args = parser.parse_args(list(flags))
    args.host = host
    return args


@pytest.mark.parametrize(
    ("authorization", "admitted"),
    [
        (b"Bearer one", True),
        (b"Bearer two", True),
        (b"bearer one", True),
        (b"Bearer  one ", True),
        (b"", False),
        (b"one", False),
        (b"Basic one", False),
        (b"Bearer", False),
        (b"Bearer ", False),
        (b"Bearer on", False),
        (b"Bearer onee", False),
        (b"Bearer ONE", False),
        (b"Bearer one,two", False),
        (b"Bearer \xff", False),
        (b"Bearer " + b"x" * 10_000, False),
    ],
)
def test_who_is_admitted(authorization, admitted):
    keys = ApiKeys(["one", "two"])
    assert (keys.identify(authorization) is not None) is admitted


def test_without_keys_everybody_is():
    assert ApiKeys().identify(b"") == ""
    assert ApiKeys().identify(b"Bearer one") == ""


def test_each_key_has_an_id_of_its_own_that_stays():
    keys, renewed = ApiKeys(["one", "two"]), ApiKeys(["two", "three"])
    one, two = (keys.identify(f"Bearer {name}".encode()) for name in ("one", "two"))
    assert len({one, two}) == 2
    assert renewed.identify(b"Bearer two") == two
    assert len(two) == 16


def test_every_key_is_compared_whichever_fits(monkeypatch):
    compared = []
    compare = access.hmac.compare_digest

    def watched(given, digest):
        compared.append((len(given), len(digest)))
        return compare(given, digest)

    monkeypatch.setattr(access.hmac, "compare_digest", watched)
    keys = ApiKeys(["one", "two", "three"])
    for authorization in (b"Bearer one", b"Bearer x", b"", b"Basic " + b"y" * 500):
        keys.identify(authorization)
    assert compared == [(32, 32)] * 12


def test_no_text_shows_a_key():
    keys = ApiKeys(["sesame"])
    args = parsed("--api-key", "sesame")
    for text in (repr(keys), str(keys), f"{keys}", repr(args), str(args), str(vars(args))):
        assert "sesame" not in text
        assert "1 API keys" in text or "API keys>" in text
    assert b"sesame" not in pickle.dumps(keys)
    assert pickle.loads(pickle.dumps(keys)) == keys


@pytest.mark.parametrize("key", ["", " ", "a b", "a\tb", "\u00e9", "a\x7f"])
def test_a_key_that_no_header_could_carry_is_refused_and_not_shown(key, capsys):
    with pytest.raises(SystemExit):
        parsed(f"--api-key={key}")
    told = capsys.readouterr().err
    assert "argument --api-key: " in told
    assert not key.strip() or key not in told


def test_keys_come_from_flags_the_environment_and_a_file(environment, tmp_path):
    file = tmp_path / "keys"
    file.write_text("four\n\n  five \r\nsix,seven\n")
    environment.setenv(access.VARIABLE, "eight, nine")
    flags = ["--api-key", "one", "--api-key=two,three", "--api-key-file", str(file)]
    keys = access.keys_from_args(parsed(*flags))
    names = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    assert keys == ApiKeys(names)
    assert len(keys) == 9


def test_there_are_none_by_default():
    assert access.keys_from_args(parsed()) == ApiKeys() == access.keys_from_environment()


def test_a_source_that_came_out_empty_is_an_error_and_opens_nothing(environment, tmp_path):
    file = tmp_path / "keys"
    with pytest.raises(SettingsError, match=r"^--api-key-file .*keys cannot be read: No such file"):
        access.keys_from_args(parsed("--api-key-file", str(file)))
    file.write_text("\n \n")
    with pytest.raises(SettingsError, match=r"^--api-key-file .*keys holds no key; leave it out"):
        access.keys_from_args(parsed("--api-key-file", str(file)))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="cannot be read: is not ASCII text"):
        access.keys_from_args(parsed("--api-key-file", str(file)))
    environment.setenv(access.VARIABLE, "")
    with pytest.raises(SettingsError, match=r"^MEGATRON_API_KEY holds no key; leave it out"):
        access.keys_from_environment()


def test_a_file_of_keys_is_a_plain_one_of_this_user(environment, tmp_path):
    file = tmp_path / "keys"
    os.mkfifo(file)  # whoever opens one to read it waits for a writer
    with pytest.raises(SettingsError, match=r"keys cannot be read: is not a plain file$"):
        access.keys_from_args(parsed("--api-key-file", str(file)))
    file.unlink()
    file.write_text("sesame\n" * 10_000)
    with pytest.raises(SettingsError, match="keys cannot be read: has more than 64 KiB"):
        access.keys_from_args(parsed("--api-key-file", str(file)))
    file.write_text("sesame")
    (tmp_path / "link").symlink_to("keys")
    assert len(access.keys_from_args(parsed("--api-key-file", str(tmp_path / "link")))) == 1
    if os.geteuid() == 0:
        os.chown(file, 12345, -1)
        with pytest.raises(SettingsError, match="keys cannot be read: belongs to user 12345; it"):
            access.keys_from_args(parsed("--api-key-file", str(file)))


def test_what_an_operator_is_told(environment, tmp_path):
    file = tmp_path / "keys"
    file.write_text("sesame")
    file.chmod(0o644)
    [note] = access.notes(parsed("--api-key-file", str(file)))
    assert note == f"--api-key-file {file} can be read by others; chmod 600 {file}"
    file.chmod(stat.S_IRUSR)
    assert access.notes(parsed("--api-key-file", str(file), host="0.0.0.0")) == []
    for host in ("127.0.0.1", "::1", "localhost"):
        assert access.notes(parsed(host=host)) == []
    for host in ("0.0.0.0", "::", "10.0.0.1", "node7"):
        [note] = access.notes(parsed(host=host))
        assert note.startswith(f"everybody who reaches {host} may send requests; --api-key or")
    environment.setenv(access.VARIABLE, "sesame")
    assert access.notes(parsed(host="0.0.0.0")) == []


def test_keys_that_are_kept_apart_have_salts_of_their_own_which_no_id_tells():
    together, apart = ApiKeys(["one", "two"]), ApiKeys(["one", "two"], isolated=True)
    assert together.salt(b"Bearer one") == 0
    one, two = apart.salt(b"Bearer one"), apart.salt(b"Bearer two")
    assert one == ApiKeys(["one"], isolated=True).salt(b"bearer  one")  # of every front end
    assert len({one, two, 0}) == 3
    assert all(0 < salt < 2**63 for salt in (one, two))
    identity = apart.identify(b"Bearer one")
    assert identity is not None
    assert one != int(identity, 16)
    assert pickle.loads(pickle.dumps(apart)).salt(b"Bearer one") == one


def test_isolation_needs_keys():
    with pytest.raises(SettingsError, match=r"^--cache-isolation keeps API keys apart, and there"):
        access.keys_from_args(parsed("--cache-isolation"))
    assert access.keys_from_args(parsed("--cache-isolation", "--api-key=k")).isolated
    assert not access.keys_from_args(parsed("--api-key=k")).isolated
