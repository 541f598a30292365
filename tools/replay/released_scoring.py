"""The released coordinator's scoring, kept as a baseline: only holders of the deepest block count.

Its history is never forgotten: a block that was once routed to a replica counts as held for good.
It is kept here in a tree of runs, not block by block, with the same outcome.
"""

from collections.abc import Sequence

from megatron.core.inference.coordinator.hashing import HASH_BYTES
from megatron.core.inference.coordinator.prefixes import common_bytes
from replay.baselines import WithCaches
from replay.replica import Replica
from replay.workload import Request


class _Routed:
    """Consecutive blocks, and when each replica got them last."""

    __slots__ = ("children", "hashes", "when")

    def __init__(self, hashes: bytes, when: dict[int, int]):
        self.hashes = hashes
        self.when = when
        self.children: dict[bytes, _Routed] = {}


class ReleasedScoring(WithCaches):
    """Score = alpha * depth of the deepest known block + (1 - alpha) * free places.

    Ties go to the replica that got the block last, then to the lowest number.

    Args:
        replicas: The replicas.
        seed: Not used.
        true_caches: Whether replicas tell of their caches; the released coordinator's do not.
        sized: Not used.
        max_requests: Places of a replica, as it is told at start.
        alpha: Weight of the depth.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        seed: int,
        true_caches: bool,
        sized: bool = True,
        max_requests: int = 256,
        alpha: float = 0.5,
    ):
        super().__init__(replicas, seed, true_caches)
        self._max_requests = max_requests
        self._alpha = alpha
        self._root = _Routed(b"", {})
        self._clock = 0

    def choose(self, request: Request) -> int:
        """The highest score."""
        depth, when = self._deepest(request.hashes)
        if self.true_caches:
            depths = self.depths(request)
            depth = max(depths.values(), default=0)
            when = {n: when.get(n, 0) for n, own in depths.items() if own == depth}
        if not depth:
            return min(range(len(self.loads)), key=lambda number: self.loads[number])
        fraction = depth * HASH_BYTES / len(request.hashes)
        places, alpha = self._max_requests, self._alpha

        def rank(number: int) -> tuple[float, int, int]:
            free = max(0, places - self.loads[number]) / places
            score = alpha * (fraction if number in when else 0.0) + (1 - alpha) * free
            return -score, -when.get(number, 0), number

        return min(range(len(self.loads)), key=rank)

    def note_placed(self, request: Request, number: int) -> None:
        """Record the prompt for good."""
        if self.true_caches:
            super().note_placed(request, number)
        self._record(request.hashes, number)

    def _deepest(self, hashes: bytes) -> tuple[int, dict[int, int]]:
        """Depth of the deepest block that anybody got, and when each who did got it last."""
        node, at = self._root, 0
        while at < len(hashes):
            child = node.children.get(hashes[at : at + HASH_BYTES])
            if child is None:
                break
            at += common_bytes(child.hashes, hashes, at)
            node = child
        return at // HASH_BYTES, node.when

    def _record(self, hashes: bytes, number: int) -> None:
        self._clock += 1
        node, at = self._root, 0
        while at < len(hashes):
            key = hashes[at : at + HASH_BYTES]
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Routed(hashes[at:], {})
            else:
                child = _cut(node, child, common_bytes(child.hashes, hashes, at))
            child.when[number] = self._clock
            at += len(child.hashes)
            node = child


def _cut(parent: _Routed, node: _Routed, size: int) -> _Routed:
    """The first bytes of a node, cut off from the rest where there is one."""
    if size == len(node.hashes):
        return node
    head = _Routed(node.hashes[:size], dict(node.when))
    parent.children[head.hashes[:HASH_BYTES]] = head
    node.hashes = node.hashes[size:]
    head.children[node.hashes[:HASH_BYTES]] = node
    return head
