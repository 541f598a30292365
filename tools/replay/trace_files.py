"""JSON Lines read with care: what is wrong is told with file and line."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from replay.workload import InputError


class Record:
    """One JSON object of a file.

    Args:
        where: File and line, for messages.
        values: The object.
    """

    def __init__(self, where: str, values: Any):
        self.where = where
        if not isinstance(values, dict):
            raise self.wrong("is no JSON object")
        self.values: dict[str, Any] = values

    def wrong(self, what: str) -> InputError:
        """The error to raise."""
        return InputError(f"{self.where}: {what}")

    def number(self, key: str, minimum: float, default: float | None = None) -> float:
        """A number that is not less than `minimum`."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= minimum:
            raise self.wrong(f"{key} is {value!r}; it must be a number, {minimum:g} or more")
        return value

    def whole(self, key: str, minimum: int, default: int | None = None) -> int:
        """The same, a whole number."""
        value = self.number(key, minimum, default)
        if value != int(value):
            raise self.wrong(f"{key} is {value!r}; it must be a whole number")
        return int(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(f"{key} is {value!r}; it must be a string")
        return value

    def records(self, key: str) -> list["Record"]:
        """A list of objects, at least one."""
        value = self.values.get(key)
        if not isinstance(value, list) or not value:
            raise self.wrong(f"{key} must be a list of one object or more")
        return [Record(f"{self.where}, {key}[{n}]", item) for n, item in enumerate(value)]

    def ids(self, key: str) -> np.ndarray:
        """Block ids, run-length coded as [[start, count], …]; shape [blocks]."""
        runs = self.values.get(key)
        if not isinstance(runs, list) or not all(_is_run(run) for run in runs):
            raise self.wrong(f"{key} must be a list of [start, count]")
        return np.concatenate([np.empty(0, np.int64), *(np.arange(s, s + n) for s, n in runs)])


def _is_run(run: Any) -> bool:
    if not isinstance(run, list) or len(run) != 2:
        return False
    return all(type(item) is int for item in run) and run[0] >= 0 and run[1] >= 1


def records(path: Path) -> Iterator[Record]:
    """The objects of a JSON Lines file, packed by gzip if its name ends in .gz.

    A last line without an end is left out if it is none: its writer was stopped, or is still at it.

    Raises:
        InputError: It cannot be read, or a line is no JSON object.
    """
    opener: Any = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip() and not (line[-1] != "\n" and _is_cut(line)):
                    yield Record(f"{path}:{number}", json.loads(line))
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}:{number}: is no JSON ({error.msg}: column {error.colno}); if it was cut off, "
            "remove the line"
        ) from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        place = f"{path}:{number + 1}" if number else str(path)
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{place}: cannot be read ({reason})") from None


def _is_cut(line: str) -> bool:
    try:
        json.loads(line)
    except json.JSONDecodeError:
        return True
    return False
