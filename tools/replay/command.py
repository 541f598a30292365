"""The tool from its arguments to what it writes."""

import argparse
import os
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from replay.advice import advice
from replay.experiment import Comparison, compare
from replay.options import described, in_a_line, parser, setting_of
from replay.policies import Conditions, UnknownPolicy, parse_policies
from replay.table import as_json, summary, write_json
from replay.workload import InputError

_WIDTH = 100
"""Of what is said in words, characters."""


def main(description: str | None, argv: Sequence[str] | None = None) -> int:
    """Run the tool.

    Args:
        description: What `--help` says.
        argv: Arguments, without the program's name; those of the process by default.

    Returns:
        The exit code.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    args = parser(description).parse_args(words)
    try:
        code = _claims(args) if args.claims else _compare(args, words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read it has enough: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (InputError, UnknownPolicy) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2


def _compare(args: argparse.Namespace, words: Sequence[str]) -> int:
    conditions = Conditions(args.eviction, args.max_rank_requests)
    policies = parse_policies(args.policies, conditions)
    setting = setting_of(args)
    comparison = compare(setting, policies, args.quiet)
    written = list(_write(args, words, comparison, described(setting)))
    print(f"{in_a_line(setting)}\n{summary(comparison)}\n")
    for paragraph in advice(comparison):
        print(textwrap.fill(paragraph, _WIDTH, break_long_words=False, break_on_hyphens=False))
    _say_written(*written)
    return 0


def _write(
    args: argparse.Namespace,
    words: Sequence[str],
    comparison: Comparison,
    setting: dict[str, Any],
) -> Iterator[Path]:
    """Files come first: who reads what is printed may stop at any time."""
    if args.json:
        write_json(args.json, as_json(comparison, setting))
        yield args.json
    if args.html:
        from replay.pages import write_page

        line = shlex.join(["python", "tools/replay", *words])
        write_page(args.html, comparison, setting, line)
        yield args.html
    if args.pictures:
        from replay.plots import write_pictures

        yield from write_pictures(args.pictures, comparison)


def _claims(args: argparse.Namespace) -> int:
    from replay.claims import check, claims_table

    setting = setting_of(args)
    claims = check(setting, args.quiet)
    write_json(args.claims, [claim.as_json() for claim in claims])
    print(f"{in_a_line(setting)}\n{claims_table(claims)}")
    _say_written(args.claims)
    return 0


def _say_written(*paths: Path) -> None:
    print("".join(f"\nwritten: {path}" for path in paths))
