"""Hashing one long prompt, from a list and from an array, beside megatron-core's own function."""

import time
from collections.abc import Callable
from typing import Any

from coordinator_bench.options import Options
from coordinator_bench.prompts import tokens_of
from coordinator_bench.rows import FASTER, Row, Target
from coordinator_bench.workers import alternate, workers

TOKENS = 131_072
_REPEATS = 5
"""Prompts hashed in a round."""


class Hashing:
    """Both functions in one process: neither keeps anything that the other could feel.

    Args:
        tokens: Length of the prompt.
        block: Tokens in a block.

    Raises:
        ValueError: The two disagree.
    """

    def __init__(self, tokens: int, block: int):
        import torch
        from megatron.core.inference.inference_request import compute_block_hashes_batched

        from megatron.core.inference.coordinator.hashing import block_hashes

        array = tokens_of(1, tokens)
        listed = array.tolist()
        self._functions: dict[tuple[str, str], Callable[[], Any]] = {
            ("ours", "a list"): lambda: block_hashes(listed, block),
            ("ours", "an array"): lambda: block_hashes(array, block),
            # As the released coordinator does it.
            ("released", "a list"): lambda: compute_block_hashes_batched(
                torch.tensor(listed, dtype=torch.int64), block
            ),
            ("released", "an array"): lambda: compute_block_hashes_batched(
                torch.from_numpy(array), block
            ),
        }
        expected = list(self._functions["released", "a list"]())
        for name, function in self._functions.items():
            if list(function()) != expected:
                raise ValueError(f"{name} gives other hashes")

    def round(self, side: str, kind: str) -> float:
        """Milliseconds of processor time for one prompt."""
        function = self._functions[side, kind]
        began = time.thread_time_ns()
        for _ in range(_REPEATS):
            function()
        return (time.thread_time_ns() - began) / _REPEATS / 1e6


def measure(options: Options) -> list[Row]:
    """The rows of this part."""
    rows = []
    with workers(both=(Hashing, TOKENS, options.block)) as made:
        for kind, faster in (("a list", 2.0), ("an array", 1.0)):
            measures = {
                side: lambda _, side=side, kind=kind: made["both"].call("round", side, kind)
                for side in ("ours", "released")
            }
            found = alternate(options.rounds, measures, f"hashing, from {kind}")
            rows.append(
                Row(
                    "hashing",
                    f"{TOKENS:,} tokens, blocks of {options.block}, from {kind}",
                    "ms",
                    found["ours"],
                    found["released"],
                    ratios=(FASTER,),
                    targets=(Target(FASTER, at_least=faster),),
                )
            )
    return rows
