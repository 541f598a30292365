"""Command-line flags of prefix-affinity routing, as an `extra_args_provider` for Megatron.

The file stands where Megatron's users look for flags, and is imported as
`megatron.core.inference.coordinator.arguments` (a symbolic link): the path
`megatron/training/arguments.py` in site-packages belongs to megatron-core's wheel.
"""

import argparse
from dataclasses import fields
from difflib import get_close_matches
from enum import Enum
from typing import NoReturn

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
            group._group_actions.append(existing)  # its help stands here as well
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


def show_own_help(parser: argparse.ArgumentParser, groups: int) -> None:
    """Let `--help` show what was added to Megatron's parser, and `--help-all` everything.

    Args:
        parser: The parser.
        groups: How many groups of flags it had before.
    """
    show_all = parser.format_help
    own = parser._action_groups[groups:]

    def show() -> str:
        formatter = parser.formatter_class(prog=parser.prog)
        formatter.add_usage("%(prog)s [flags]", [], [])
        for group in own:
            formatter.start_section(group.title)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        formatter.add_text(
            "Megatron's own flags, e.g. --load, --tensor-model-parallel-size and --bf16, count "
            "as well: --help-all shows them."
        )
        return formatter.format_help()

    class ShowAll(argparse.Action):
        def __call__(self, *args: object) -> None:
            print(show_all())
            parser.exit()

    parser.add_argument("--help-all", action=ShowAll, nargs=0, help="Show Megatron's flags, too.")
    parser.format_help = show  # type: ignore[method-assign]


def say_errors_in_one_sentence(parser: argparse.ArgumentParser) -> None:
    """Let a wrong flag be one line that names the nearest one, without a usage of 1,600 lines."""

    def error(message: str) -> NoReturn:
        start, _, unknown = message.partition("unrecognized arguments: ")
        if not start and unknown:
            first = unknown.split()[0].partition("=")[0]
            near = get_close_matches(first, parser._option_string_actions, n=1)
            message = f"there is no flag {first}" if first.startswith("-") else message
            message += f"; did you mean {near[0]}?" if near else "; --help shows those there are"
        parser.exit(2, f"error: {message}\n")

    parser.error = error  # type: ignore[method-assign]


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
