"""API keys: who may send requests over HTTP.

What is kept of a key is its SHA-256 digest, and no text shows even that: a key cannot get into a
log, a traceback or a list of arguments.
"""

import argparse
import hashlib
import hmac
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path

from megatron.core.inference.coordinator.arguments import add_settings
from megatron.core.inference.coordinator.hashing import mask_of
from megatron.core.inference.coordinator.options import SettingsError
from megatron.core.inference.coordinator.runtime import private_files
from megatron.core.inference.coordinator.runtime.http.limits import HttpSettings

VARIABLE = "MEGATRON_API_KEY"
"""Environment variable with the keys of a server, commas between them."""

FLAG = "--api-key"
FILE_FLAG = "--api-key-file"
ISOLATION_FLAG = "--cache-isolation"

_SCHEME = "bearer"
_ID_DIGITS = 16


class ApiKeys:
    """A set of keys, one of which a request must present; an empty set asks for none. Pickles.

    Args:
        keys: The keys.
        isolated: Whether cached prefixes of one key are kept from the others.

    Raises:
        SettingsError: A key could not be sent in a header, or would read as several keys.
    """

    __slots__ = ("_digests", "isolated")

    def __init__(self, keys: Iterable[str] = (), *, isolated: bool = False):
        self._digests = frozenset(_digest(_checked(key)) for key in keys)
        self.isolated = isolated

    @classmethod
    def parse(cls, text: str, source: str) -> "ApiKeys":
        """Keys with commas or line breaks between them.

        Args:
            text: The keys.
            source: Where they come from, for the error.

        Raises:
            SettingsError: There is none, or one could not be sent. An empty source is an error: a
                server that asks for no key because a variable came out empty would be open.
        """
        pieces = (piece.strip() for line in text.splitlines() for piece in line.split(","))
        keys = [piece for piece in pieces if piece]
        if not keys:
            raise SettingsError(f"{source} holds no key; leave it out to serve without keys")
        return cls(keys)

    def __or__(self, other: "ApiKeys") -> "ApiKeys":
        merged = ApiKeys()
        merged._digests = self._digests | other._digests
        return merged

    def __len__(self) -> int:
        return len(self._digests)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ApiKeys) and self._digests == other._digests

    def __hash__(self) -> int:
        return hash(self._digests)

    def __repr__(self) -> str:
        return f"<{len(self)} API keys>"

    def identify(self, authorization: bytes) -> str | None:
        """The id of the key that a request presents, in a time that tells nothing about the keys.

        Args:
            authorization: The value of its Authorization header; empty if it has none.

        Returns:
            16 hex digits that do not lead back to the key; empty where no key is asked for. None:
            the request may not pass.
        """
        if not self._digests:
            return ""
        scheme, _, key = authorization.partition(b" ")
        given = hashlib.sha256(key.strip()).digest()
        found = False
        for digest in self._digests:  # all of them, whichever fits
            found |= hmac.compare_digest(given, digest)
        admitted = found and scheme.lower() == _SCHEME.encode()
        return hashlib.sha256(given).hexdigest()[:_ID_DIGITS] if admitted else None

    def salt(self, authorization: bytes) -> int:
        """What masks the block hashes of whoever presents this key alone; 0 where all share."""
        if not self.isolated:
            return 0
        key = authorization.partition(b" ")[2].strip()
        return mask_of(b"cache salt " + hashlib.sha256(key).digest())


def add_http_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of a server's front ends: who may send requests, how much, and how slowly.

    Args:
        parser: Megatron's parser.

    Returns:
        The same parser.
    """
    add_key_args(parser)
    add_settings(parser, "HTTP limits", HttpSettings)
    return parser


def add_key_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name keys."""
    group = parser.add_argument_group("HTTP access")
    group.add_argument(
        FLAG,
        type=_key_argument,
        action="append",
        default=None,
        metavar="KEY",
        help="Requests must present this key as 'Authorization: Bearer KEY', else they get 401; "
        "/health and /v1/health stay open. May be given several times, or with commas between "
        "keys. A command line is visible to everybody on the machine: prefer the environment "
        f"variable {VARIABLE} or {FILE_FLAG}; keys of all three count. Default: no key, everybody "
        "who reaches the port may send requests.",
    )
    group.add_argument(
        FILE_FLAG,
        type=Path,
        default=None,
        metavar="FILE",
        help="File with a key a line.",
    )
    group.add_argument(
        ISOLATION_FLAG,
        action="store_true",
        help="Requests find cached prefixes of requests with the same API key alone. Otherwise "
        "cached_tokens, and the time of an answer, tell one user whether another asked the same; "
        "but then a system prompt that all users have is cached once for all. Needs API keys.",
    )


def keys_from_args(args: argparse.Namespace) -> ApiKeys:
    """The keys that parsed arguments and the environment name, all of them.

    Raises:
        SettingsError: A source holds no key, or the file cannot be read.
    """
    keys = keys_from_environment()
    for given in args.api_key or ():
        keys |= given
    if args.api_key_file is not None:
        keys |= _keys_in(args.api_key_file)
    if args.cache_isolation and not len(keys):
        raise SettingsError(f"{ISOLATION_FLAG} keeps API keys apart, and there is none; add {FLAG}")
    keys.isolated = args.cache_isolation
    return keys


def keys_from_environment() -> ApiKeys:
    """The keys of `VARIABLE`; none if it is not set.

    Raises:
        SettingsError: It is set and holds no key.
    """
    text = os.environ.get(VARIABLE)
    return ApiKeys() if text is None else ApiKeys.parse(text, VARIABLE)


def notes(args: argparse.Namespace) -> list[str]:
    """What an operator should know about who may send requests, a sentence each."""
    found = []
    path = args.api_key_file
    if path is not None and path.stat().st_mode & 0o077:
        found.append(f"{FILE_FLAG} {path} can be read by others; chmod 600 {path}")
    if not is_loopback(args.host) and not len(keys_from_args(args)):
        found.append(
            f"everybody who reaches {args.host} may send requests; {FLAG} or {VARIABLE} asks them "
            "for a key"
        )
    return found


def is_loopback(host: str) -> bool:
    """Whether a name or address means this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _keys_in(path: Path) -> ApiKeys:
    try:
        text = private_files.read(path, private=False)
    except OSError as error:
        raise SettingsError(f"{FILE_FLAG} {path} cannot be read: {error.strerror}") from None
    return ApiKeys.parse(text, f"{FILE_FLAG} {path}")


def _key_argument(text: str) -> ApiKeys:
    try:
        return ApiKeys.parse(text, FLAG)
    except SettingsError as error:  # argparse would show the key itself
        raise argparse.ArgumentTypeError(str(error)) from None


def _checked(key: str) -> str:
    if not key or not key.isascii() or not key.isprintable() or " " in key or "," in key:
        raise SettingsError(
            "an API key must be printable ASCII without spaces and commas, so that a header can "
            "carry it"
        )
    return key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
