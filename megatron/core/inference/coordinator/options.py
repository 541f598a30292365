"""What an option is: default, range and help in one place, and values checked against them.

A settings class (`settings.py`) is a frozen dataclass whose fields carry an `Option`; flags, the
README's tables and the checks derive from it.
"""

import sys
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from enum import Enum
from math import isfinite
from typing import Any, ClassVar, Self


class SettingsError(ValueError):
    """A setting is out of range or contradicts another; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Option:
    """What there is to know of one option besides its default.

    Attributes:
        help: What it does, for `--help` and the README.
        minimum: Smallest value allowed, or None.
        maximum: Largest value allowed, or None.
        reason: Why there are limits, where that is not plain.
    """

    help: str
    minimum: float | None = None
    maximum: float | None = None
    reason: str = ""

    @property
    def range_text(self) -> str:
        """The range in words, empty when there is none."""
        if self.minimum is not None and self.maximum is not None:
            return f"between {self.minimum:.12g} and {self.maximum:.12g}"
        if self.minimum is not None:
            return f"{self.minimum:.12g} or more"
        return ""


def about(help_text: str, reason: str = "", **limits: float) -> dict[str, Option]:
    """The metadata of a field that is an option."""
    return {"option": Option(help_text, reason=reason, **limits)}


class Settings:
    """Base of the settings classes: converts and checks every field.

    Attributes:
        PREFIX: What each option's argparse dest begins with; the flag is the dest with dashes.

    Raises:
        SettingsError: A value is out of its range, or names no choice.
    """

    PREFIX: ClassVar[str]
    __slots__ = ()

    def __post_init__(self):
        for f in fields(self):  # type: ignore[arg-type]
            object.__setattr__(
                self, f.name, _converted(self.flag(f.name), f, getattr(self, f.name))
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build settings from names to values; missing names and None keep their defaults.

        Args:
            values: Field names, with or without `PREFIX`, e.g. `vars(args)`.

        Raises:
            SettingsError: A value is out of its range, or names no choice.
        """
        names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        found = {n: values.get(cls.PREFIX + n, values.get(n)) for n in names}
        return cls(**{n: v for n, v in found.items() if v is not None})

    @classmethod
    def flag(cls, name: str) -> str:
        """The command-line flag of a field, e.g. `--inference-…-prefix-caching-load-beta`."""
        return "--" + (cls.PREFIX + name).replace("_", "-")

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Every option by field name, in the order of the fields."""
        return {f.name: f.metadata["option"] for f in fields(cls)}  # type: ignore[arg-type]

    @classmethod
    def markdown_table(cls) -> str:
        """The options as the README shows them."""
        rows = ["| flag | default | what it does |", "| --- | --- | --- |"]
        for f in fields(cls):  # type: ignore[arg-type]
            option = f.metadata["option"]
            limits = f" ({option.range_text})" if option.range_text else ""
            short = cls.flag(f.name).removeprefix(cls.flag(""))
            rows.append(f"| `…-{short}` | `{shown(f.default)}`{limits} | {option.help} |")
        return "\n".join(rows) + "\n"


def shown(default: Any) -> str:
    """A default as people read it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default.value if isinstance(default, Enum) else default) or "none"


def _converted(flag: str, f: Field, value: Any) -> Any:
    kind, option = f.type, f.metadata["option"]
    assert isinstance(kind, type)
    if kind is bool and not isinstance(value, bool):
        raise SettingsError(f"{flag} is {value!r}; it must be True or False")
    number = "a whole number" if kind is int else "a number"
    try:
        result = kind(value)
    except (TypeError, ValueError, OverflowError):
        expected = (
            "one of " + ", ".join(m.value for m in kind)
            if issubclass(kind, Enum)
            else f"{number}, {option.range_text}"
        )
        raise SettingsError(f"{flag} is {value!r}; it must be {expected}") from None
    if option.minimum is None:
        return result
    above = result > (sys.float_info.max if option.maximum is None else option.maximum)
    fraction_lost = kind is int and isinstance(value, float) and result != value
    if above or not isfinite(result) or result < option.minimum or fraction_lost:
        reason = option.reason and f": {option.reason}"
        raise SettingsError(f"{flag} is {value!r}; give {number} {option.range_text}{reason}")
    return result
