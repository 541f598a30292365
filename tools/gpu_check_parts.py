"""What gpu_check.py sends, and what it notes of a run: all without an engine."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

Prompts = list[list[list[int]]]
"""Token ids by session and turn."""

Answers = dict[tuple[int, int], list[int]]
"""Generated token ids by (session, turn)."""

_VOCABULARY = range(32, 127)
_BYTES_PER_VALUE = {"float32": 4, "bf16": 2}
_MAX_REQUESTS = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the check is. Pickles.

    Attributes:
        device: "cuda" or "cpu".
        dtype: "bf16" or "float32".
        replicas: Engines, all on one device.
        sessions: Conversations held at the same time.
        turns: Requests in each.
        first_tokens: Length of a first turn's prompt.
        last_tokens: Length of a last turn's.
        new_tokens: Tokens generated per request.
        block_size: Tokens in a cache block.
        layers: Of the model, as the next four.
        hidden: Width.
        heads: Attention heads.
        kv_groups: Key and value heads.
        init_std: Deviation of its random weights. The usual 0.02 makes a model that hardly looks
            back, whose answers would not tell a wrong history from the right one.
    """

    device: str = "cuda"
    dtype: str = "bf16"
    replicas: int = 4
    sessions: int = 8
    turns: int = 4
    first_tokens: int = 4000
    last_tokens: int = 6000
    new_tokens: int = 32
    block_size: int = 256
    layers: int = 16
    hidden: int = 1024
    heads: int = 16
    kv_groups: int = 4
    init_std: float = 0.1

    @property
    def requests(self) -> int:
        """Requests in one run."""
        return self.sessions * self.turns

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, its answer included, in whole blocks."""
        return ceil((self.last_tokens + self.new_tokens) / self.block_size) * self.block_size

    @property
    def max_requests(self) -> int:
        """Places of an engine."""
        return max(_MAX_REQUESTS, self.sessions)

    @property
    def cache_blocks(self) -> int:
        """Blocks of one engine's cache: twice what all sessions together fill.

        No replica ever evicts. The released engine's loop ends when lru eviction has filled the
        cache, and a full cache would measure eviction, not routing.
        """
        return 2 * (self.sessions + 1) * (self.longest // self.block_size + 1)

    @property
    def cache_gb(self) -> float:
        """The same in GiB; half a block more, so that rounding loses none."""
        values = 2 * self.layers * self.kv_groups * (self.hidden // self.heads) * self.block_size
        return (self.cache_blocks + 0.5) * values * _BYTES_PER_VALUE[self.dtype] / 2**30


CPU_SIZES = Sizes(
    device="cpu",
    dtype="float32",
    first_tokens=400,
    last_tokens=800,
    new_tokens=8,
    block_size=64,
    layers=4,
    hidden=256,
    heads=4,
    kv_groups=2,
    init_std=0.2,
)
"""What a CPU does in a minute."""


def make_prompts(sizes: Sizes, seed: int = 11) -> Prompts:
    """Every prompt of a run: they share a beginning, and each turn's begins with the one before.

    What a turn adds stands for an answer and the next question, and does not depend on what is
    really answered: all runs send the same prompts.
    """
    source = random.Random(seed)
    system = _tokens(source, sizes.first_tokens // 8)
    lengths = _turn_lengths(sizes)
    sessions = []
    for _ in range(sizes.sessions):
        whole = system + _tokens(source, lengths[-1] - len(system))
        sessions.append([whole[:length] for length in lengths])
    return sessions


def _turn_lengths(sizes: Sizes) -> list[int]:
    steps = max(1, sizes.turns - 1)
    span = sizes.last_tokens - sizes.first_tokens
    return [sizes.first_tokens + span * turn // steps for turn in range(sizes.turns)]


def _tokens(source: random.Random, count: int) -> list[int]:
    return source.choices(_VOCABULARY, k=count)


def skip_bound(prompts: Prompts, block_size: int) -> float:
    """The prefill skip rate of one infinite cache, turn after turn: no routing can do better."""
    from megatron.core.inference.coordinator.hashing import block_hashes, expected_skip

    cache: set[int] = set()
    skipped = 0
    for turn in range(len(prompts[0])):
        for session in prompts:
            hashes = block_hashes(session[turn], block_size)
            held = sum(each in cache for each in hashes)
            skipped += expected_skip(len(session[turn]), held, block_size)
            cache.update(hashes)
    return skipped / sum(len(prompt) for session in prompts for prompt in session)


def first_token_seconds(reply: Mapping[str, Any], sent: float) -> float | None:
    """Time from sending a request to its first token; None if the reply does not tell.

    The engine stamps, in seconds since the epoch of this machine's clock, when it took the request
    in, and counts from there: what the request waited in coordinator and socket comes on top.

    Args:
        reply: A serialized `DynamicInferenceRequest`.
        sent: When it was sent, by the same clock.
    """
    taken = [event["timestamp"] for event in reply["events"] if event["type"] == "ADD_ENGINE"]
    if not taken or reply.get("ttft") is None:
        return None
    return taken[0] - sent + reply["ttft"]


@dataclass(slots=True)
class Outcome:
    """One run.

    Attributes:
        answers: What was generated.
        first_token: Seconds to the first token of each request.
        lost: What came instead of an answer, as "session 1, turn 2: why".
        unsent: Requests for which there was no time.
        seconds: From the first request to the last answer.
        start_seconds: Until all replicas were ready.
        replicas: What each replica reports at the end (gpu_check_replica.py).
    """

    answers: Answers = field(default_factory=dict)
    first_token: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    unsent: int = 0
    seconds: float = 0.0
    start_seconds: float = 0.0
    replicas: list[dict[str, Any]] = field(default_factory=list)
