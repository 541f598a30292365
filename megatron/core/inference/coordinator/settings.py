"""Every option of the plugin, once: name, default, range and help.

The command-line flags (`arguments.py`), the table in the README and the settings objects in code
all derive from `RoutingSettings`.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from math import isfinite
from typing import Any

from megatron.core.inference.config import (
    PrefixCachingCoordinatorPolicy,
    PrefixCachingEvictionPolicy,
)

from megatron.core.inference.coordinator.policies import PrefixCachingCostPolicy, routes_on_prefix

FLAG_PREFIX = "inference_dynamic_batching_prefix_caching_"
"""What every option's argparse dest begins with; the flag is the dest with dashes."""

PROTOCOL_VERSION = 1
"""Version of the wire protocol (docs/architecture.md); CONNECT and REGISTER carry it."""


class SettingsError(ValueError):
    """A setting is out of range or contradicts another; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Option:
    """What there is to know of one option besides its default.

    Attributes:
        help: What it does, for `--help` and the README.
        minimum: Smallest value allowed, or None.
        maximum: Largest value allowed, or None.
    """

    help: str
    minimum: float | None = None
    maximum: float | None = None

    @property
    def range_text(self) -> str:
        """The range in words, empty when there is none."""
        if self.minimum is not None and self.maximum is not None:
            return f"between {self.minimum:g} and {self.maximum:g}"
        if self.minimum is not None:
            return f"{self.minimum:g} or more"
        return ""


def _about(help_text: str, **limits: float) -> dict[str, Option]:
    return {"option": Option(help_text, **limits)}


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """How requests are routed. Immutable and picklable.

    Raises:
        SettingsError: A value is out of its range, or names no policy.
    """

    coordinator_policy: PrefixCachingCoordinatorPolicy = field(
        default=PrefixCachingCoordinatorPolicy.LONGEST_PREFIX,
        metadata=_about(
            "What is known of a rank's cache: longest_prefix (how many of the prompt's blocks it "
            "holds, counted from the first), first_prefix_block (whether it holds the first "
            "block) or load_balanced (nothing: the least loaded rank gets the request).",
        ),
    )
    cost_policy: PrefixCachingCostPolicy = field(
        default=PrefixCachingCostPolicy.RELATIVE_LOAD_WEIGHTED,
        metadata=_about(
            "How the cached share of a prompt is weighed against load: relative_load_weighted "
            "(fraction - beta * (load - mean) / max(1, mean)), free_capacity_weighted "
            "(alpha * fraction + (1 - alpha) * free places / max_requests) or prefill_work "
            "(-(blocks not cached) * (1 + load)). The highest score wins.",
        ),
    )
    load_beta: float = field(
        default=1.0,
        metadata=_about(
            "Weight of load in relative_load_weighted. At 1 a rank at twice the mean load gives up "
            "the credit of one fully cached prompt; 0 ignores load.",
            minimum=0.0,
        ),
    )
    routing_alpha: float = field(
        default=0.5,
        metadata=_about(
            "Weight of the cached share in free_capacity_weighted, against free places; no other "
            "cost policy reads it.",
            minimum=0.0,
            maximum=1.0,
        ),
    )
    ttl_seconds: float = field(
        default=300.0,
        metadata=_about(
            "Seconds that a prompt is believed to stay cached after its routing or its answer, "
            "whichever is later, on engines with lru eviction that report no cache events.",
            minimum=0.001,
        ),
    )
    burst_cap: int = field(
        default=0,
        metadata=_about(
            "Up to this many requests follow a request with the same full blocks that is still "
            "being computed, whatever the load; 0 leaves it to the cost policy.",
            minimum=0,
        ),
    )

    generated_tokens: bool = field(
        default=False,
        metadata=_about(
            "Engines also keep the blocks that a request generated, so that the next turn does "
            "not compute the answer again; needs lru eviction.",
        ),
    )

    def __post_init__(self):
        for name, kind in _KINDS.items():
            object.__setattr__(self, name, _converted(name, kind, getattr(self, name)))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "RoutingSettings":
        """Build settings from names to values; missing names and None keep their defaults.

        Args:
            values: Field names, with or without `FLAG_PREFIX`, e.g. `vars(args)`.

        Raises:
            SettingsError: A value is out of its range, or names no policy.
        """
        names = [f.name for f in fields(cls)]
        found = {n: values.get(FLAG_PREFIX + n, values.get(n)) for n in names}
        return cls(**{n: v for n, v in found.items() if v is not None})


_KINDS: dict[str, type] = {f.name: f.type for f in fields(RoutingSettings)}  # type: ignore[misc]


def options() -> dict[str, Option]:
    """Every option by field name, in the order of `RoutingSettings`."""
    return {f.name: f.metadata["option"] for f in fields(RoutingSettings)}


def flag(name: str) -> str:
    """The command-line flag of an option, e.g. `--inference-…-prefix-caching-load-beta`."""
    return "--" + (FLAG_PREFIX + name).replace("_", "-")


def shown(default: Any) -> str:
    """A default as people read it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default.value if isinstance(default, Enum) else default)


def markdown_table() -> str:
    """The options as the README shows them."""
    rows = ["| flag | default | what it does |", "| --- | --- | --- |"]
    for f in fields(RoutingSettings):
        option = f.metadata["option"]
        default = shown(f.default)
        limits = f" ({option.range_text})" if option.range_text else ""
        short = flag(f.name).removeprefix(flag(""))
        rows.append(f"| `…-{short}` | `{default}`{limits} | {option.help} |")
    return "\n".join(rows) + "\n"


def unused_options(settings: RoutingSettings) -> list[str]:
    """What was set and will not be read, one sentence each."""
    readers = {
        "load_beta": PrefixCachingCostPolicy.RELATIVE_LOAD_WEIGHTED,
        "routing_alpha": PrefixCachingCostPolicy.FREE_CAPACITY_WEIGHTED,
    }
    defaults = RoutingSettings()
    return [
        f"{flag(name)} is read by {flag('cost_policy')} {reader.value} alone, and "
        f"{settings.cost_policy.value} is in force"
        for name, reader in readers.items()
        if getattr(settings, name) != getattr(defaults, name) and settings.cost_policy != reader
    ]


def _converted(name: str, kind: type, value: Any) -> Any:
    option = options()[name]
    if kind is bool and not isinstance(value, bool):
        raise SettingsError(f"{flag(name)} is {value!r}; it must be True or False")
    number = "a whole number" if kind is int else "a number"
    try:
        result = kind(value)
    except (TypeError, ValueError, OverflowError):
        expected = (
            "one of " + ", ".join(m.value for m in kind)
            if issubclass(kind, Enum)
            else f"{number}, {option.range_text}"
        )
        raise SettingsError(f"{flag(name)} is {value!r}; it must be {expected}") from None
    if option.minimum is None:
        return result
    above = result > (sys.float_info.max if option.maximum is None else option.maximum)
    fraction_lost = kind is int and isinstance(value, float) and result != value
    if above or not isfinite(result) or result < option.minimum or fraction_lost:
        raise SettingsError(f"{flag(name)} is {value!r}; give {number} {option.range_text}")
    return result


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """What a coordinator is started with, beside how it routes. Immutable and picklable.

    Attributes:
        routing: How requests are routed.
        expected_ranks: Requests wait until this many ranks have registered.
        prefix_caching: Whether the engines cache prefixes at all; off means least-loaded routing.
        block_size_tokens: Tokens in one cached block, or None when there is no prefix caching.
        max_requests: Places of a stock engine, which does not tell its own.
        eviction: Eviction policy of a stock engine, which does not tell its own.
        deterministic: Break ties by load and rank number only, so that a run can be repeated.
        trace: Emit a `Trace` effect for every answered request.
    """

    routing: RoutingSettings = field(default_factory=RoutingSettings)
    expected_ranks: int = 0
    prefix_caching: bool = True
    block_size_tokens: int | None = 256
    max_requests: int = 1024
    eviction: PrefixCachingEvictionPolicy = PrefixCachingEvictionPolicy.REF_ZERO
    deterministic: bool = False
    trace: bool = False

    def __post_init__(self):
        object.__setattr__(self, "eviction", PrefixCachingEvictionPolicy(self.eviction))
        if self.max_requests < 1:
            raise SettingsError(f"max_requests is {self.max_requests}; it must be 1 or more")
        if self.expected_ranks < 0:
            raise SettingsError(f"expected_ranks is {self.expected_ranks}; it must be 0 or more")
        if self.prefix_caching and not (self.block_size_tokens and self.block_size_tokens > 0):
            raise SettingsError("prefix caching needs block_size_tokens of 1 or more")

    @property
    def signal(self) -> PrefixCachingCoordinatorPolicy:
        """The signal policy in force: without prefix caching nobody has anything to match."""
        if not self.prefix_caching:
            return PrefixCachingCoordinatorPolicy.LOAD_BALANCED
        return self.routing.coordinator_policy

    @property
    def hashed(self) -> bool:
        """Whether clients should hash their prompts."""
        return routes_on_prefix(self.signal)
