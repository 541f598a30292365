"""The block cache of a modelled replica: which prompts' blocks it keeps, and which it gives up.

Blocks that share a history are one node of a radix tree, named by their packed hashes (8 bytes a
block). What the engine keeps of a block is kept here of a node: how many requests use it, and the
clock of its last use. Under `lru` the unused node without children and with the oldest clock of its
own gives up blocks first, from its end; under `ref_zero` a node goes with its last user.
"""

from heapq import heapify, heappop, heappush

from megatron.core.inference.coordinator.hashing import HASH_BYTES
from megatron.core.inference.coordinator.prefixes import common_bytes

_STALE_ENTRIES = 4
"""The heap is rebuilt when it has this many entries a node, and at least `_SMALL_HEAP`."""

_SMALL_HEAP = 1024


class Node:
    """Consecutive blocks with the same users.

    Attributes:
        hashes: Their packed hashes.
        parent: The node that they extend; None at the root, and once the node is gone.
        children: Nodes that extend them, by the hash of their first block.
        users: Requests that use them.
        used: Clock of their last use.
    """

    __slots__ = ("children", "hashes", "parent", "used", "users")

    def __init__(self, hashes: bytes, parent: "Node | None", users: int, used: int):
        self.hashes = hashes
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.users = users
        self.used = used

    @property
    def blocks(self) -> int:
        """How many blocks it stands for."""
        return len(self.hashes) // HASH_BYTES


class BlockCache:
    """The pool of one replica.

    A request `acquire`s the blocks that are there, `take`s the rest from the pool, `extend`s the
    tree by what it has computed, and in the end `release`s all and `give`s back what is left.

    Args:
        blocks: How many there are.
        keeps: Whether blocks stay when nobody uses them (`lru`), or go at once (`ref_zero`).

    Attributes:
        free: Blocks that hold nothing.
        idle: Blocks that nobody uses and that are kept.
        removed: Packed hashes of the tails given up since the caller last emptied the list.
    """

    def __init__(self, blocks: int, keeps: bool = True):
        self.root = Node(b"", None, 1, 0)
        self.free = blocks
        self.idle = 0
        self.removed: list[bytes] = []
        self._keeps = keeps
        self._leaves: list[tuple[int, int, Node]] = []
        self._pushed = 0
        self._nodes = 0

    def depth(self, hashes: bytes) -> int:
        """Blocks of a prompt that are there, counted from the first; nothing is changed."""
        return self._walk(self.root, hashes, 0, len(hashes))[1] // HASH_BYTES

    def acquire(self, hashes: bytes, clock: int) -> tuple[Node, int]:
        """Use what is there of a prompt.

        Returns:
            The node that it ends with, and how many bytes of `hashes` are there.
        """
        node, size, rest = self._walk(self.root, hashes, 0, len(hashes))
        if rest:
            node = self._split(node, len(node.hashes) - rest)
        self._use(node, self.root, clock)
        return node, size

    def take(self, blocks: int) -> bool:
        """Take blocks out of the pool, giving up what nobody uses.

        Returns:
            Whether there were as many; nothing is changed if not.
        """
        lacking = blocks - self.free
        if lacking > self.idle:
            return False
        if lacking > 0:
            self._evict(lacking)
        self.free -= blocks
        return True

    def give(self, blocks: int) -> None:
        """Put blocks back into the pool."""
        self.free += blocks

    def extend(
        self, node: Node, hashes: bytes, start: int, end: int, clock: int
    ) -> tuple[Node, int]:
        """Keep what a request computed, in blocks that it took.

        Args:
            node: What it used so far, which ends at byte `start` of `hashes`.
            hashes: The prompt's packed hashes.
            start: Byte that the new blocks start at.
            end: Byte that they end at.
            clock: Clock of their use.

        Returns:
            The node that it uses now, and the byte from which on the blocks are really new: those
            before it were computed by somebody else in the meantime.
        """
        there, at, rest = self._walk(node, hashes, start, end)
        if rest:
            there = self._split(there, len(there.hashes) - rest)
        self._use(there, node, clock)
        if at == end:
            return there, at
        own = there.users == 1 and there.used == clock and not there.children
        if own and there is not self.root:
            there.hashes += hashes[at:end]
            return there, at
        new = Node(hashes[at:end], there, 1, clock)
        there.children[new.hashes[:HASH_BYTES]] = new
        self._nodes += 1
        return new, at

    def release(self, node: Node) -> None:
        """A request uses the path to this node no more."""
        root = self.root
        child: Node | None = None
        while node is not root:
            parent = node.parent
            assert parent is not None
            node.users -= 1
            if not node.users:
                self._note_idle(node)
            if child is None or not self._join(node, child):
                child = node
            node = parent

    # --- the tree ----------------------------------------------------------------------------

    def _walk(self, node: Node, hashes: bytes, at: int, end: int) -> tuple[Node, int, int]:
        """Go along a prompt.

        Returns:
            The last node on its way, the byte of `hashes` reached, and how many bytes of that node
            lie beyond.
        """
        while at < end:
            child = node.children.get(hashes[at : at + HASH_BYTES])
            if child is None:
                break
            size = min(common_bytes(child.hashes, hashes, at), end - at)
            at += size
            node = child
            if size < len(child.hashes):
                return node, at, len(child.hashes) - size
        return node, at, 0

    def _use(self, node: Node, until: Node, clock: int) -> None:
        """One more user of the path to a node, from below `until` on."""
        child: Node | None = None
        while node is not until:
            parent = node.parent
            assert parent is not None
            if not node.users:
                self.idle -= node.blocks
            node.users += 1
            node.used = clock
            if child is None or not self._join(node, child):
                child = node
            node = parent

    def _split(self, node: Node, size: int) -> Node:
        """Cut a node in two; returns the first `size` bytes, a new node before the old one."""
        parent = node.parent
        assert parent is not None
        head = Node(node.hashes[:size], parent, node.users, node.used)
        node.hashes = node.hashes[size:]
        node.parent = head
        head.children[node.hashes[:HASH_BYTES]] = node
        parent.children[head.hashes[:HASH_BYTES]] = head
        self._nodes += 1
        return head

    def _join(self, node: Node, child: Node) -> bool:
        """Join a node with a child in the same state; then no request's path ends between them.

        The child stays the same object, since the paths that end with it go on ending with it.
        """
        alike = child.users == node.users and child.used == node.used
        if not alike or child.parent is not node or len(node.children) > 1:
            return False
        parent = node.parent
        assert parent is not None
        child.hashes = node.hashes + child.hashes
        child.parent = parent
        parent.children[child.hashes[:HASH_BYTES]] = child
        node.parent = None
        self._nodes -= 1
        return True

    # --- giving up ---------------------------------------------------------------------------

    def _note_idle(self, node: Node) -> None:
        """The last user of a node is gone."""
        self.idle += node.blocks
        if not self._keeps:
            self._drop(node)
        elif not node.children:
            self._note_leaf(node)

    def _note_leaf(self, node: Node) -> None:
        self._pushed += 1
        heappush(self._leaves, (node.used, self._pushed, node))
        if len(self._leaves) > max(_SMALL_HEAP, _STALE_ENTRIES * self._nodes):
            valid = {id(e[2]): e for e in self._leaves if _is_idle_leaf(e[2], e[0])}
            self._leaves = list(valid.values())
            heapify(self._leaves)

    def _evict(self, blocks: int) -> None:
        """Give up unused blocks, of which there are enough."""
        while blocks:
            used, _, node = self._leaves[0]
            if not _is_idle_leaf(node, used):
                heappop(self._leaves)
                continue
            if node.blocks > blocks:
                keep = len(node.hashes) - blocks * HASH_BYTES
                self.removed.append(node.hashes[keep:])
                node.hashes = node.hashes[:keep]
                self.free += blocks
                self.idle -= blocks
                return
            heappop(self._leaves)
            blocks -= node.blocks
            parent = node.parent
            self._drop(node)
            assert parent is not None
            if not parent.users and not parent.children:
                self._note_leaf(parent)

    def _drop(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        self.removed.append(node.hashes)
        self.free += node.blocks
        self.idle -= node.blocks
        del parent.children[node.hashes[:HASH_BYTES]]
        node.parent = None
        self._nodes -= 1

    def check_integrity(self) -> None:
        """Compare what is counted with the tree.

        Raises:
            AssertionError: They differ.
        """
        nodes, idle = 0, 0
        todo = [self.root]
        while todo:
            node = todo.pop()
            for key, child in node.children.items():
                assert child.parent is node, "a child has another parent"
                assert child.hashes[:HASH_BYTES] == key, "a child is found by another block"
                assert child.users <= node.users, "a block is used, and the one before it less"
                idle += 0 if child.users else child.blocks
                nodes += 1
                todo.append(child)
        assert (nodes, idle) == (self._nodes, self.idle), "nodes or idle blocks were miscounted"


def _is_idle_leaf(node: Node, used: int) -> bool:
    """Whether what was noted of a leaf still holds."""
    live = node.parent is not None
    return live and not node.users and not node.children and node.used == used
