"""The flags of the loop, beside Megatron's and those of routing."""

import argparse
import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.core.inference.coordinator.arguments import add_prefix_routing_args
from megatron.core.inference.coordinator.runtime import model as models

_DEFAULTS = {
    "inference_dynamic_batching_enable_prefix_caching": True,
    "inference_dynamic_batching_prefix_caching_eviction_policy": "lru",
    "inference_dynamic_batching_block_size": 64,
}
"""Caches that last from turn to turn, in blocks short enough for prompts of bytes."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Megatron's arguments for the built-in model, with the loop's own among them."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):  # Megatron tells of batch sizes and stages
            return models.parse(_add_flags, [*models.BUILT_IN_MODEL, *argv], _DEFAULTS)
    except BaseException:
        sys.stderr.write(printed.getvalue())  # --help is among it
        raise


def _add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("RL rollouts")
    whole = {"type": int, "metavar": "N"}
    group.add_argument("--iterations", default=3, help="Rounds of rollouts and update.", **whole)
    group.add_argument("--groups", default=4, help="Groups of agents in a round.", **whole)
    group.add_argument("--group-size", default=4, help="Agents in a group.", **whole)
    group.add_argument("--turns", default=4, help="Most answers in a conversation.", **whole)
    group.add_argument("--answer-tokens", default=24, help="Longest answer.", **whole)
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy.")
    group.add_argument("--step-size", type=float, default=1e-4, help="Adam's, of the update.")
    group.add_argument(
        "--window", default=256, help="Tokens before an answer to learn it with.", **whole
    )
    group.add_argument(
        "--sessions", type=Path, metavar="FILE", help="Replay recorded sessions; see README.md."
    )
    group.add_argument(
        "--kv-cache-management-mode",
        dest="rl_kv_cache_management_mode",
        choices=["persist", "offload", "recompute"],
        default=argparse.SUPPRESS,
        help="What engines do with their cache while the weights change.",
    )
    group.add_argument(
        "--released",
        action="store_true",
        help="The control: megatron-core's own coordinator, server and engine, without the plugin.",
    )
    return add_prefix_routing_args(parser)
