"""Runs of blocks: how few records there are, and what splits and joins them."""

import sys

import pytest

from megatron.core.inference.coordinator.hashing import pack_hashes
from megatron.core.inference.coordinator.index import PrefixIndex
from megatron.core.inference.coordinator.kv_events import Change
from megatron.core.inference.coordinator.runs import Runs


class Slot:
    """What runs need of a slot."""

    def __init__(self, number=0):
        self.bit = 1 << number
        self.blocks = 0
        self.ended = False


def packed(*blocks):
    return pack_hashes(list(blocks))


def pin(runs, slot, *blocks):
    return runs.pin(slot, runs.match(packed(*blocks)))


def lengths(runs):
    """Blocks of each run, and how many blocks there are that belong to none."""
    return sorted(len(run.hashes) // 8 for run in runs), len(list(runs.single_blocks()))


def test_a_prompt_is_one_run_however_long():
    runs, slot = Runs(), Slot()
    pin(runs, slot, *range(1, 5000))
    assert lengths(runs) == ([4999], 0)
    assert slot.blocks == 4999


def test_a_prompt_that_parts_from_another_splits_its_run_there():
    runs, slot = Runs(), Slot()
    first = pin(runs, slot, *range(1, 11))
    second = pin(runs, slot, *range(1, 5), 21, 22)
    assert lengths(runs) == ([2, 4, 6], 0)
    assert slot.blocks == 12
    runs.unpin(slot, second)
    runs.unpin(slot, first)
    assert lengths(runs) == ([], 0)
    assert slot.blocks == 0


def test_a_lease_survives_the_splitting_of_the_run_that_it_ends_with():
    runs, slot, other = Runs(), Slot(0), Slot(1)
    lease = pin(runs, slot, *range(1, 11))
    for cut in (7, 3, 5):
        pin(runs, other, *range(1, cut), 100 + cut)
    assert runs.match(packed(*range(1, 11))).depth(slot.bit) == 10
    runs.unpin(slot, lease)
    assert runs.match(packed(*range(1, 11))).depth(slot.bit) == 0
    assert slot.blocks == 0
    assert other.blocks == 6 + 3


def test_turns_of_a_conversation_are_joined_once_they_are_stored():
    runs, slot = Runs(), Slot()
    for turn in range(1, 20):
        lease = pin(runs, slot, *range(1, 10 * turn))
        runs.store(slot, packed(*range(max(1, 10 * (turn - 1)), 10 * turn)))
        runs.unpin(slot, lease)
        assert lengths(runs) == ([10 * turn - 1], 0)


@pytest.mark.parametrize("added", [1, 2, 3])
def test_so_are_turns_that_add_less_than_makes_a_run(added):
    runs, slot = Runs(), Slot()
    for end in range(8, 60, added):
        lease = pin(runs, slot, *range(1, end))
        runs.store(slot, packed(*range(1, end)))
        runs.unpin(slot, lease)
    assert lengths(runs) == ([end - 1], 0)


@pytest.mark.parametrize(("blocks", "expected"), [(1, ([], 1)), (3, ([], 3)), (4, ([4], 0))])
def test_a_short_run_that_nobody_pins_is_kept_block_by_block(blocks, expected):
    runs, slot = Runs(), Slot()
    lease = pin(runs, slot, *range(1, blocks + 1))
    assert lengths(runs) == ([blocks], 0)
    runs.store(slot, packed(*range(1, blocks + 1)))
    runs.unpin(slot, lease)
    assert lengths(runs) == expected
    again = pin(runs, slot, *range(1, blocks + 1))
    assert lengths(runs) == ([blocks], 0)
    runs.unpin(slot, again)
    assert runs.remove(slot, packed(*range(1, blocks + 1)))
    assert lengths(runs) == ([], 0)
    assert slot.blocks == 0


def test_single_blocks_that_the_same_slots_store_share_one_set():
    runs, slots = Runs(), [Slot(n) for n in (70, 71)]
    for block in range(1, 100):
        for slot in slots:
            runs.store(slot, packed(block))
    assert len({id(stored) for stored in runs.single_blocks()}) == 1


def test_single_blocks_leave_no_holes_in_the_tables():
    """Holes, of runs that were there before, let the tables grow to twice their size."""
    runs, slot = Runs(), Slot()
    blocks = range(256, 256 * 1000, 256)  # they share their first byte, and so a table
    for block in blocks:
        lease = pin(runs, slot, block)
        runs.store(slot, packed(block))
        runs.unpin(slot, lease)
    assert lengths(runs) == ([], len(blocks))
    table = runs.starts[0]
    assert sys.getsizeof(table) == sys.getsizeof(dict.fromkeys(list(table)))


def test_what_several_slots_hold_differently_is_split_where_they_differ():
    runs, slots = Runs(), [Slot(n) for n in range(3)]
    for slot, end in zip(slots, (41, 21, 31), strict=True):
        runs.store(slot, packed(*range(1, end)))
    assert lengths(runs) == ([10, 10, 20], 0)
    groups = runs.match(packed(*range(1, 50))).groups(0b111)
    assert groups == [(0b010, 20), (0b100, 30), (0b001, 40)]
    assert runs.match(packed(*range(1, 26))).groups(0b111) == [(0b010, 20), (0b101, 25)]


def test_blocks_are_removed_from_the_end_across_runs():
    runs, slot, other = Runs(), Slot(0), Slot(1)
    runs.store(slot, packed(*range(1, 41)))
    runs.store(other, packed(*range(1, 31)))
    assert runs.remove(slot, packed(*range(11, 41)))
    assert runs.match(packed(*range(1, 41))).groups(0b11) == [(0b01, 10), (0b10, 30)]
    assert (slot.blocks, other.blocks) == (10, 30)
    assert not runs.remove(slot, packed(*range(5, 12)))


def test_a_removal_told_as_another_chain_is_taken_block_by_block():
    runs, slot = Runs(), Slot()
    runs.store(slot, packed(1, 2, 3, 4, 5, 6))
    assert runs.remove(slot, packed(6))
    assert not runs.remove(slot, packed(1, 2, 9, 5))  # 5 ends the run; what comes before is wrong
    assert runs.match(packed(1, 2, 3, 4, 5)).depth(slot.bit) == 4


def test_the_work_for_a_prompt_does_not_grow_with_its_blocks():
    """Counted in records touched: no clock."""
    counts = []
    for blocks in (100, 10_000):
        index = PrefixIndex(300.0)
        for rank in range(50):
            index.add_rank(rank, capacity=None, retains=True)
            index.apply(rank, [(Change.CLEARED, b""), (Change.STORED, packed(*range(1, 17)))])
            own = [*range(1, 17), *range(10**6 * (rank + 1), 10**6 * (rank + 1) + blocks)]
            index.apply(rank, [(Change.STORED, packed(*own))])
        match = index.match(packed(*own, 99))
        counts.append((len(match.segments), len(index.holders(match)), len(list(index._runs))))
    assert counts == [(2, 2, 51), (2, 2, 51)]
