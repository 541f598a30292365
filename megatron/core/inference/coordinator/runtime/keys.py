"""Who may talk to a coordinator: ZeroMQ CURVE keys, one pair for each kind of peer.

The coordinator's port takes messages that stop the fleet. Keys are made when a coordinator starts.
Its engines get theirs over the process group, front ends the weakest one; other programs that are
trusted read them from a file that only its owner may read.
"""

import json
import logging
import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from megatron.core.inference.coordinator.messages import Right
from megatron.core.inference.coordinator.runtime import private_files
from megatron.core.inference.coordinator.runtime.eventlog import render
from megatron.core.inference.coordinator.settings import AccessSettings

logger = logging.getLogger(__name__)

KEY_FILE_VARIABLE = "MEGATRON_COORDINATOR_KEY_FILE"
"""Names the key file to programs that are not part of the job."""

_DOMAIN = "coordinator"


class KeyFileError(ValueError):
    """A key file cannot be used; the text says why and what to do."""


class Role(StrEnum):
    """Kinds of peers, by what they may do."""

    ENGINE = "engine"
    SUBMIT = "submit"
    CONTROL = "control"


RIGHTS = {
    Role.ENGINE: Right.ENGINE,
    Role.SUBMIT: Right.SUBMIT,
    Role.CONTROL: Right.SUBMIT | Right.CONTROL,
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A CURVE key pair, Z85 text, 40 characters each. The secret one is kept out of any repr."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def generate(cls) -> "Pair":
        """A new pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    @property
    def content(self) -> dict[str, str]:
        """What a file holds of it."""
        return {"public": self.public, "secret": self.secret}


@dataclass(frozen=True, slots=True)
class Credentials:
    """What one peer needs to talk to a coordinator.

    Attributes:
        server: The coordinator's public key.
        own: The peer's pair.
    """

    server: str
    own: Pair

    def apply(self, socket: zmq.Socket) -> None:
        """Let a socket, not connected yet, use them."""
        socket.curve_serverkey = self.server.encode()
        socket.curve_publickey = self.own.public.encode()
        socket.curve_secretkey = self.own.secret.encode()


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The keys of a coordinator's peers; picklable.

    Attributes:
        server: The coordinator's public key.
        pairs: The pair of each role; a ring may hold some of them only.
    """

    server: str
    pairs: dict[Role, Pair]

    def credentials(self, *roles: Role) -> Credentials:
        """Those of the first of some roles that the ring holds.

        Raises:
            KeyFileError: It holds none of them.
        """
        for role in roles:
            if role in self.pairs:
                return Credentials(self.server, self.pairs[role])
        raise KeyFileError(f"these keys are for none of: {', '.join(roles)}")

    def only(self, *roles: Role) -> "KeyRing":
        """A ring that holds no other roles' pairs."""
        return KeyRing(self.server, {r: p for r, p in self.pairs.items() if r in roles})

    def write(self, path: str | Path) -> None:
        """Write a key file of mode 0600; an older one is replaced."""
        pairs = {role.value: pair.content for role, pair in self.pairs.items()}
        _write(path, {"server": self.server} | pairs)

    @classmethod
    def read(cls, path: str | Path) -> "KeyRing":
        """Read a key file.

        Raises:
            KeyFileError: There is none, others may have read or written it, or it is broken.
        """
        content = _read(path)
        try:
            pairs = {role: Pair(**content[role]) for role in Role if role in content}
            ring = cls(content["server"], pairs)
        except (KeyError, TypeError):
            raise _holds_no_keys(path) from None
        _check_keys(path, ring.server, *(k for p in pairs.values() for k in (p.public, p.secret)))
        return ring

    @classmethod
    def from_environment(cls) -> "KeyRing | None":
        """The ring in the file that `KEY_FILE_VARIABLE` names; None where it names none.

        Raises:
            KeyFileError: See `read`.
        """
        path = os.environ.get(KEY_FILE_VARIABLE)
        return cls.read(path) if path else None


@dataclass(frozen=True, slots=True)
class Lock:
    """A coordinator's side of the keys; picklable.

    Attributes:
        own: The coordinator's pair.
        ring: Its peers' keys.
    """

    own: Pair
    ring: KeyRing

    @classmethod
    def generate(cls) -> "Lock":
        """New keys for a coordinator and for every role."""
        own = Pair.generate()
        return cls(own, KeyRing(own.public, {role: Pair.generate() for role in Role}))

    @classmethod
    def kept(cls, path: str | Path) -> "Lock":
        """The lock that wrote a key file, else a new one, which writes it.

        So a coordinator that is started again takes the keys that its peers have. Its own secret
        key lies beside the file and is for nobody else. New keys lock out all who have the old
        ones, so they are made only where one of the two files is missing.

        Raises:
            KeyFileError: The files are there and cannot be used.
            OSError: They cannot be written.
        """
        beside = f"{path}.coordinator"
        missing = [file for file in (str(path), beside) if not os.path.lexists(file)]
        if not missing:
            return cls._read(path, beside)
        if len(missing) == 1:
            logger.warning("%s", render("keys_renewed", {"file": str(path), "missing": missing[0]}))
        lock = cls.generate()
        Path(path).unlink(missing_ok=True)  # or what is left if this ends here is no pair
        _write(beside, lock.own.content)
        lock.ring.write(path)
        return lock

    @classmethod
    def _read(cls, path: str | Path, beside: str) -> "Lock":
        ring = KeyRing.read(path)
        try:
            own = Pair(**_read(beside))
        except TypeError:
            raise _holds_no_keys(beside) from None
        _check_keys(beside, own.public, own.secret)
        if own.public != ring.server or set(ring.pairs) != set(Role):
            raise KeyFileError(
                f"key files {path} and {beside} are not a coordinator's two; put those back that "
                "its peers have, or remove both and give the new ones to all peers"
            )
        return cls(own, ring)

    def apply(self, socket: zmq.Socket) -> None:
        """Let a ROUTER, not bound yet, take only peers with a key of the ring."""
        socket.zap_domain = _DOMAIN.encode()
        socket.curve_server = True
        socket.curve_publickey = self.own.public.encode()
        socket.curve_secretkey = self.own.secret.encode()

    def guard(self, context: zmq.Context) -> "Guard":
        """Start to check the peers of the context's sockets."""
        return Guard(context, self.ring)


class Guard:
    """Checks who connects, and tells what they may do.

    Args:
        context: The context of the sockets that `Lock.apply` was applied to.
        ring: The peers' keys.
    """

    def __init__(self, context: zmq.Context, ring: KeyRing):
        self._rights = {pair.public: RIGHTS[role] for role, pair in ring.pairs.items()}
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a peer with this public key may connect (pyzmq calls it)."""
        return key.decode() in self._rights

    def rights(self, frame: zmq.Frame) -> Right:
        """What the sender of a received frame may do, by the key that its connection proved."""
        return self._rights[str(frame.get("User-Id"))]

    def stop(self) -> None:
        """End the checking; the context can be terminated then."""
        self._authenticator.stop()


def _write(path: str | Path, content: dict[str, Any]) -> None:
    """Write a file of mode 0600; an older one is replaced."""
    private_files.write(path, json.dumps(content, indent=2) + "\n")


def _read(path: str | Path) -> Any:
    """What such a file holds.

    Raises:
        KeyFileError: There is none, others may have read or written it, or it is no JSON.
    """
    try:
        return json.loads(private_files.read(path))
    except OSError as error:
        raise KeyFileError(f"key file {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise KeyFileError(
            f"key file {path} is not JSON; was it written by a coordinator?"
        ) from None


def _check_keys(path: str | Path, *keys: Any) -> None:
    if not all(isinstance(key, str) and len(key) == 40 and key.isascii() for key in keys):
        raise _holds_no_keys(path)


def _holds_no_keys(path: str | Path) -> KeyFileError:
    return KeyFileError(f"key file {path} holds no keys; was it written by a coordinator?")


def make_lock(settings: AccessSettings) -> Lock | None:
    """Keys for a coordinator that is about to start; None where it speaks in plain.

    They are those of the key file, if the settings or the environment name one (`Lock.kept`).

    Raises:
        KeyFileError: There is a key file, and it cannot be used.
        OSError: It cannot be written.
    """
    if settings.plain:
        return None
    path = settings.key_file or os.environ.get(KEY_FILE_VARIABLE)
    return Lock.kept(path) if path else Lock.generate()


def ring_to_join(address: str, settings: AccessSettings) -> KeyRing | None:
    """The keys for a coordinator that is there already; None where it speaks in plain.

    Raises:
        KeyFileError: There is a key file, and it cannot be used.
    """
    if settings.plain:
        return None
    return KeyRing.read(settings.key_file) if settings.key_file else known(address)


_rings: dict[str, KeyRing] = {}


def remember(address: str, ring: KeyRing) -> None:
    """This process is part of the job of the coordinator at an address, and has its keys."""
    _rings[address] = ring


def known(address: str) -> KeyRing | None:
    """The keys for a coordinator: of this process's job, else of the environment's key file.

    None means that it has to be spoken to in plain.

    Raises:
        KeyFileError: There is a key file, and it cannot be used.
    """
    return _rings.get(address) or KeyRing.from_environment()
