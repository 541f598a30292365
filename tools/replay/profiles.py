"""What a modelled replica can do, and how long its steps take."""

import json
from dataclasses import dataclass
from pathlib import Path

from replay.workload import InputError


@dataclass(frozen=True, slots=True)
class Profile:
    """The times and limits of one kind of replica.

    A step that prefills P tokens beside N decoding requests with C context tokens among them takes
    `step + prefill * P + decode * N + context * C` seconds.

    Attributes:
        name: What the command line calls it.
        step: Seconds that any step takes.
        prefill: Seconds for each token of prefill.
        decode: Seconds for each request that decodes.
        context: Seconds for each token of context of the requests that decode.
        step_tokens: Tokens of prefill that one step takes at most.
        max_requests: Requests that run at once.
        block_size: Tokens in a cache block.
        cache_tokens: Tokens that the block pool holds.
        strict: Whether running requests hold on to their blocks, those of what they generate
            included, and one that does not fit beside them waits; if not, the pool is a store of
            prompts beside the running requests (`loose_cache.py`).
        agrees: False where it was checked against the engine that it is of, and differed too much.
    """

    name: str
    step: float
    prefill: float
    decode: float
    context: float
    step_tokens: int = 8192
    max_requests: int = 256
    block_size: int = 16
    cache_tokens: int = 500_000
    strict: bool = True
    agrees: bool = True

    @property
    def total_blocks(self) -> int:
        """Blocks in the pool."""
        return self.cache_tokens // self.block_size


PROFILES = {
    profile.name: profile
    for profile in (
        # The profile of issue 6's reference points.
        Profile("reference", 8e-3, 0.0667e-3, 0.12e-3, 0.03e-6, strict=False),
        # The same times, and the pool as the engine manages it.
        Profile("strict", 8e-3, 0.0667e-3, 0.12e-3, 0.03e-6),
    )
}


def find_profile(name: str) -> Profile:
    """A profile by name, or from a file that tools/calibrate_replay.py wrote with --json.

    Raises:
        InputError: There is none.
    """
    if name in PROFILES:
        return PROFILES[name]
    try:
        written = json.loads(Path(name).read_text())
        # Earlier calibrations said beside the profile whether it agreed.
        return Profile(**{"agrees": written.get("agrees", True)} | written["profile"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"--profile {name} is none of {', '.join(PROFILES)}, and no file that "
            f"tools/calibrate_replay.py --json wrote ({error})"
        ) from None
