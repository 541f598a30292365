"""Files that other users of the machine can neither read, nor plant, nor put a link in place of.

What is wrong with a file is an `OSError` whose `strerror` says what to do.
"""

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO

PRIVATE, PUBLIC = 0o600, 0o644
"""Modes of files with secrets or traffic in them, and of those that only hold addresses."""

_LARGEST = 64 << 10
"""Bytes of a file that is read whole."""


def write(path: str | Path, text: str, mode: int = PRIVATE) -> None:
    """Write a file that appears whole; what was there is replaced, a link included.

    Args:
        path: The file. While it is written, its folder holds another one of a random name.
        text: What it holds then.
        mode: Its mode; the umask may take something off.

    Raises:
        OSError: It cannot be written.
    """
    path = Path(path)
    partial = path.with_name(f".{secrets.token_hex(8)}.partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with open(os.open(partial, flags, mode), "w", encoding="utf-8") as file:
            file.write(text)
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # the one that the caller knows
        raise


def read(path: str | Path, private: bool = True) -> str:
    """Read a small text file that this user or root wrote. Links to one are followed.

    Args:
        path: The file.
        private: Refuse a file that others may read.

    Raises:
        OSError: It cannot be read, or is not such a file.
    """
    descriptor = _open(path, os.O_RDONLY, {os.geteuid(), 0})
    with open(descriptor, "rb") as file:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        if private and mode & 0o077:
            raise _refused(path, f"has mode {mode:o}; run: chmod 600 {path}")
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise _refused(path, f"has more than {_LARGEST >> 10} KiB; is it the right file?")
    if not content.isascii():
        raise _refused(path, "is not ASCII text; is it the right file?")
    return content.decode()


def append(path: str | Path) -> BinaryIO:
    """Open a private file to add to what it holds; others lose the right to open an older one.

    Raises:
        OSError: It cannot be opened, or is not a plain file of this user.
    """
    try:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        descriptor = _open(path, flags, {os.geteuid()})
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refused(path, "is a symbolic link; name the file itself") from None
        raise
    file = open(descriptor, "ab")  # noqa: SIM115
    os.fchmod(descriptor, PRIVATE)
    return file


def _open(path: str | Path, flags: int, owners: set[int]) -> int:
    """Open a plain file that one of these users owns, and do not wait for a FIFO's other end."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, PRIVATE)
    status = os.fstat(descriptor)
    reason = ""
    if not stat.S_ISREG(status.st_mode):
        reason = "is not a plain file"
    elif status.st_uid not in owners:
        names = " or ".join(str(user) for user in sorted(owners, reverse=True))
        reason = f"belongs to user {status.st_uid}; it must be a file of user {names}"
    if reason:
        os.close(descriptor)
        raise _refused(path, reason)
    return descriptor


def _refused(path: str | Path, reason: str) -> PermissionError:
    return PermissionError(errno.EPERM, reason, str(path))
