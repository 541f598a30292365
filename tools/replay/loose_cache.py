"""A cache that running requests do not hold on to, as the simulator of issue 6 has it."""

from replay.cache import BlockCache, Node


class LooseCache(BlockCache):
    """Prompts' blocks beside the running requests, which need no room in it.

    The least recently used goes first, also while a request uses it; that one goes on all the same,
    and what it computes is stored as if it were there.
    """

    def acquire(self, hashes: bytes, clock: int) -> tuple[Node, int]:
        """Note that what is there of a prompt is used."""
        node, size = super().acquire(hashes, clock)
        super().release(node)
        return self.root, size

    def take(self, blocks: int) -> bool:
        """Make room, as far as there is something to give up: `free` may be less than 0 then."""
        lacking = blocks - self.free
        if lacking > 0:
            self._evict(min(lacking, self.idle))
        self.free -= blocks
        return True

    def extend(
        self, node: Node, hashes: bytes, start: int, end: int, clock: int
    ) -> tuple[Node, int]:
        """Keep what a request computed, and what it was computed from, which may be gone."""
        node, there = super().acquire(hashes[:end], clock)
        node, new = super().extend(node, hashes, there, end, clock)
        super().release(node)
        return self.root, new

    def release(self, node: Node) -> None:
        """A request held on to nothing."""
