"""A sum of blocks to prefill and blocks in use, as NVIDIA Dynamo's KV router documents its cost.

Source: Dynamo's documentation, "KV Router", cost function: the overlap score weight (1 by default)
times the blocks to prefill, those that are queued included, plus the active blocks with this
request's own. Temperature 0; the router's own estimate of queues is replaced by the replicas'.
"""

from collections import Counter
from typing import Any

from megatron.core.inference.coordinator.hashing import HASH_BYTES, expected_skip
from replay.baselines import WithCaches
from replay.workload import Request


class BlockCost(WithCaches):
    """The least weight * (blocks to prefill, new and queued) + (blocks in use, shared ones once).

    Args:
        weight: Of a block to prefill, against one in use.
    """

    def __init__(self, *args: Any, weight: float = 1.0, **options: Any):
        super().__init__(*args, **options)
        self._weight = weight
        self._size = self.replicas[0].profile.block_size
        self._in_use: list[Counter[bytes]] = [Counter() for _ in self.replicas]

    def choose(self, request: Request) -> int:
        """The least sum; of equal ones the least loaded."""
        depths = self.depths(request)

        def cost(number: int) -> tuple[float, int]:
            skipped = expected_skip(request.prompt_tokens, depths.get(number, 0), self._size)
            tokens = self.replicas[number].queued + request.prompt_tokens - skipped
            used = len(self._in_use[number]) + self._not_in_use(number, request.hashes)
            return self._weight * tokens / self._size + used, self.loads[number]

        return min(range(len(self.replicas)), key=cost)

    def note_placed(self, request: Request, number: int) -> None:
        """Its prompt is in use there."""
        super().note_placed(request, number)
        self._in_use[number].update(_blocks(request.hashes))

    def note_ended(self, request: Request, now: float) -> None:
        """Its prompt is in use no more, where others do not share it."""
        super().note_ended(request, now)
        used = self._in_use[request.replica]
        for block in _blocks(request.hashes):
            if used[block] == 1:
                del used[block]
            else:
                used[block] -= 1

    def _not_in_use(self, number: int, hashes: bytes) -> int:
        """Blocks of a prompt that would be in use anew: the last ones, since hashes are chained."""
        used = self._in_use[number]
        low, high = 0, len(hashes) // HASH_BYTES
        total = high
        while low < high:
            middle = (low + high) // 2
            if hashes[middle * HASH_BYTES : (middle + 1) * HASH_BYTES] in used:
                low = middle + 1
            else:
                high = middle
        return total - low


def _blocks(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
