"""Command-line flags of prefix-affinity routing, as an `extra_args_provider` for Megatron.

The file stands where Megatron's users look for flags, and is imported as
`megatron.core.inference.coordinator.arguments` (a symbolic link): the path
`megatron/training/arguments.py` in site-packages belongs to megatron-core's wheel.
"""

import argparse
from dataclasses import fields
from enum import Enum

from megatron.core.inference.coordinator.options import Settings, SettingsError, shown
from megatron.core.inference.coordinator.settings import (
    FLAG_PREFIX,
    AccessSettings,
    FleetSettings,
    RecordSettings,
    RoutingSettings,
    flag,
)


def add_prefix_routing_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the routing flags; one that megatron-core has already is adjusted instead.

    Args:
        parser: Megatron's parser, e.g. in `parse_and_validate_args(extra_args_provider=…)`.

    Returns:
        The same parser.
    """
    add_settings(parser, "prefix-affinity routing", RoutingSettings)
    add_settings(parser, "fleet of replicas", FleetSettings)
    add_settings(parser, "access to the coordinator", AccessSettings)
    add_settings(parser, "record of requests", RecordSettings)
    return parser


def add_settings(parser: argparse.ArgumentParser, title: str, settings: type[Settings]) -> None:
    """Add the flags of a settings class, as a group of their own.

    Args:
        parser: The parser.
        title: The group's title.
        settings: The class.
    """
    group = parser.add_argument_group(title)
    for field in fields(settings):  # type: ignore[arg-type]
        option = settings.options()[field.name]
        default = field.default.value if isinstance(field.default, Enum) else field.default
        limits = f" Must be {option.range_text}." if option.range_text else ""
        text = f"{option.help}{limits} Default: {shown(field.default)}."
        name = settings.flag(field.name)
        existing = parser._option_string_actions.get(name)
        if existing is not None:
            existing.default, existing.help = default, text
            parser.set_defaults(**{existing.dest: default})
        elif isinstance(field.default, Enum):
            choices = [member.value for member in type(field.default)]
            group.add_argument(name, default=default, choices=choices, help=text)
        elif isinstance(default, bool):
            action = argparse.BooleanOptionalAction
            group.add_argument(name, default=default, action=action, help=text)
        else:
            group.add_argument(name, default=default, type=type(default), help=text)


def routing_settings_from_args(args: argparse.Namespace) -> RoutingSettings:
    """The routing settings that parsed arguments ask for.

    Raises:
        SettingsError: A value is out of its range or contradicts another; says what to do.
    """
    settings = RoutingSettings.from_mapping(vars(args))
    if settings.burst_cap and settings.coordinator_policy.value == "load_balanced":
        raise SettingsError(
            f"{flag('burst_cap')} has no effect with {flag('coordinator_policy')} load_balanced, "
            "under which no prompt is compared with another; leave one of them out"
        )
    eviction = getattr(args, FLAG_PREFIX + "eviction_policy", "lru")
    if settings.generated_tokens and eviction != "lru":
        raise SettingsError(
            f"{flag('generated_tokens')} keeps nothing under {eviction} eviction; add "
            f"{flag('eviction_policy')} lru"
        )
    return settings
