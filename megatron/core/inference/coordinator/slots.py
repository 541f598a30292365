"""Slots and leases: what beliefs about a rank's cache hang on."""

from collections import OrderedDict

from megatron.core.inference.coordinator.prefixes import Run


class Slot:
    """One lifetime of what is believed of one rank.

    Attributes:
        rank: The rank's number.
        bit: Its bit in sets of slots.
        capacity: Blocks in the engine's cache; None when unknown.
        retention: Seconds that a prompt is retained after its answer.
        trusted: Whether the engine's events say what it holds.
        blocks: Blocks believed held.
        leases: The leases that are out.
        retained: Prompts retained, by their last run, unused for longest first; when last used.
        ended: Nothing is believed any more.
    """

    __slots__ = (
        "bit", "blocks", "capacity", "ended", "leases", "rank", "retained", "retention", "trusted",
    )  # fmt: skip

    def __init__(self, rank: int, bit: int, capacity: int | None, retention: float, trusted: bool):
        self.rank = rank
        self.bit = bit
        self.capacity = capacity
        self.retention = retention
        self.trusted = trusted
        self.blocks = 0
        self.leases: dict[Lease, None] = {}
        self.retained: OrderedDict[Run, float] = OrderedDict()
        self.ended = False


class Lease:
    """A request's hold on its blocks; given back once, on its answer."""

    __slots__ = ("hashes", "leaf", "slot")

    def __init__(self, slot: Slot, leaf: Run, hashes: bytes):
        self.slot = slot
        self.leaf = leaf
        self.hashes = hashes

    @property
    def void(self) -> bool:
        """Whether what it holds was forgotten: a weight update, or its rank is gone."""
        return self.slot.ended
