"""What ranks are believed to hold: small examples of history, and forgetting piece by piece.

Random walks beside a naive model are in test_index_walk.py, the runs themselves in test_runs.py.
"""

import builders  # noqa: F401 (loads the hypothesis profile)
import pytest

from megatron.core.inference.coordinator.hashing import pack_hashes
from megatron.core.inference.coordinator.index import PrefixIndex
from megatron.core.inference.coordinator.kv_events import Change

TTL = 100.0
A, B, C, D, E = 11, 12, 13, 14, 15  # blocks


def one_rank(capacity=None, retains=True):
    index = PrefixIndex(TTL)
    index.add_rank(0, capacity=capacity, retains=retains)
    return index


def pin(index, rank, blocks):
    return index.pin(rank, index.match(pack_hashes(blocks)))


def depth(index, rank, blocks):
    return index.depth(rank, index.match(pack_hashes(blocks)))


def holders(index, blocks):
    """The depth of every rank that holds at least the first block."""
    groups = index.holders(index.match(pack_hashes(blocks)))
    return {rank: depth for slots, depth in groups for rank in index.ranks(slots)}


def ask(index, rank, blocks, now):
    """A request comes and is answered."""
    index.release(pin(index, rank, blocks), now)


def sweep(index, now=0.0):
    """Let all that is forgotten be swept out."""
    while index.backlog:
        index.expire(now)


# --- requests in flight --------------------------------------------------------------------------


def test_a_new_rank_holds_nothing():
    index = one_rank()
    assert depth(index, 0, [A, B]) == 0
    assert depth(index, 0, []) == 0
    assert holders(index, [A, B]) == {}
    assert holders(index, []) == {}
    assert len(index) == 0


def test_a_routed_prompt_counts_as_held_at_once():
    index = one_rank()
    pin(index, 0, [A, B, C])
    assert depth(index, 0, [A, B, C]) == 3
    assert depth(index, 0, [A, B, D, E]) == 2
    assert depth(index, 0, [D, A]) == 0
    assert holders(index, [A, B, C, D]) == {0: 3}
    assert len(index) == 3


@pytest.mark.parametrize("held", range(10))
@pytest.mark.parametrize("length", range(10))
def test_depth_counts_from_the_first_block_at_every_length(held, length):
    index = one_rank()
    blocks = list(range(1, 10))
    if held:
        pin(index, 0, blocks[:held])
    assert depth(index, 0, blocks[:length]) == min(held, length)
    assert depth(index, 0, [*blocks[:length], 77]) == min(held, length)


def test_every_holder_has_its_own_depth():
    index = one_rank()
    index.add_rank(5, capacity=None, retains=False)
    index.add_rank(6, capacity=None, retains=True)
    pin(index, 0, [A])
    pin(index, 5, [A, B, C])
    assert holders(index, [A, B, C, D]) == {0: 1, 5: 3}


def test_equal_holders_are_one_group():
    index = PrefixIndex(TTL)
    for rank in range(4):
        index.add_rank(rank, capacity=None, retains=True)
    for rank in (0, 1, 3):
        pin(index, rank, [A, B])
    pin(index, 3, [A, B, C])
    groups = index.holders(index.match(pack_hashes([A, B, C, D])))
    assert [(sorted(index.ranks(slots)), depth) for slots, depth in groups] == [
        ([0, 1], 2),
        ([3], 3),
    ]


# --- history -------------------------------------------------------------------------------------


def test_under_lru_blocks_stay_for_the_ttl_after_the_answer():
    index = one_rank()
    lease = pin(index, 0, [A, B])
    index.expire(1000.0)  # in flight: held, however long it takes
    assert depth(index, 0, [A, B]) == 2
    index.release(lease, 1000.0)
    index.expire(1099.9)
    assert depth(index, 0, [A, B]) == 2
    index.expire(1100.0)
    assert depth(index, 0, [A, B]) == 0
    assert len(index) == 0


def test_under_lru_a_second_request_begins_the_ttl_anew():
    index = one_rank()
    first, second = pin(index, 0, [A, B]), pin(index, 0, [A, B, C])
    index.release(second, 10.0)
    index.release(first, 50.0)
    index.expire(110.0)
    assert depth(index, 0, [A, B, C]) == 2
    index.expire(150.0)
    assert depth(index, 0, [A, B, C]) == 0


def test_a_longer_prompt_takes_over_from_the_one_that_it_begins_with():
    index = one_rank()
    for turn in range(1, 50):
        ask(index, 0, range(1, 10 * turn), float(turn))
    index.check_integrity([])
    index.expire(100.0 + 48)  # every turn but the last is past its time by itself
    assert depth(index, 0, range(1, 490)) == 489
    index.expire(100.0 + 49)
    assert len(index) == 0


def test_under_ref_zero_blocks_stay_until_the_last_answer():
    index = one_rank(retains=False)
    first, second = pin(index, 0, [A, B, C]), pin(index, 0, [A, B, D])
    index.release(first, 1.0)
    assert depth(index, 0, [A, B, C]) == 2
    assert depth(index, 0, [A, B, D]) == 3
    index.release(second, 1.0)
    assert len(index) == 0


def test_beyond_its_capacity_a_rank_loses_the_prompt_unused_for_longest_from_its_end():
    index = one_rank(capacity=4)
    ask(index, 0, [A, B, C], 1.0)
    assert depth(index, 0, [A, B, C]) == 3
    lease = pin(index, 0, [D, E])
    assert (depth(index, 0, [A, B, C]), depth(index, 0, [D, E])) == (2, 2)
    index.release(lease, 2.0)
    ask(index, 0, [A], 3.0)  # A is fresh again; B is now the oldest
    pin(index, 0, [21, 22])
    assert (depth(index, 0, [A, B]), depth(index, 0, [D, E])) == (1, 1)
    index.check_integrity([lease for slot in index._slots.values() for lease in slot.leases])


def test_pinned_blocks_are_never_trimmed():
    index = one_rank(capacity=2)
    lease = pin(index, 0, [A, B, C])
    assert depth(index, 0, [A, B, C]) == 3
    index.release(lease, 1.0)
    assert depth(index, 0, [A, B, C]) == 2


def test_a_rank_with_no_room_holds_only_what_is_in_flight():
    index = one_rank(capacity=0)
    lease = pin(index, 0, [A])
    assert depth(index, 0, [A]) == 1
    index.release(lease, 1.0)
    assert depth(index, 0, [A]) == 0


# --- forgetting a lot at once --------------------------------------------------------------------


def test_clear_forgets_blocks_and_voids_leases_but_keeps_ranks_and_their_kinds():
    index = PrefixIndex(TTL)
    index.add_rank(0, capacity=1, retains=True)
    index.add_rank(1, capacity=None, retains=False)
    leases = [pin(index, rank, [A, B]) for rank in (0, 1)]
    index.clear()
    assert len(index) == 0
    assert holders(index, [A]) == {}
    assert all(lease.void for lease in leases)
    fresh = [pin(index, rank, [A, B]) for rank in (0, 1)]
    for lease in leases:
        index.release(lease, 1.0)
    assert holders(index, [A, B]) == {0: 2, 1: 2}
    for lease in fresh:
        index.release(lease, 2.0)
    assert holders(index, [A, B]) == {0: 1}
    index.check_integrity([])


def test_a_dropped_rank_is_gone_and_its_leases_are_void():
    index = one_rank()
    lease = pin(index, 0, [A, B])
    index.drop_rank(0)
    assert holders(index, [A]) == {}
    index.add_rank(0, capacity=None, retains=True)
    newer = pin(index, 0, [A])
    index.release(lease, 1.0)
    assert (depth(index, 0, [A]), depth(index, 0, [A, B])) == (1, 1)
    index.check_integrity([lease, newer])


def test_adding_a_rank_again_drops_what_was_known_of_it():
    index = one_rank()
    pin(index, 0, [A])
    index.add_rank(0, capacity=None, retains=True)
    assert depth(index, 0, [A]) == 0


def test_dropping_an_unknown_rank_does_nothing():
    index = one_rank()
    index.drop_rank(77)
    assert holders(index, [A]) == {}


def test_an_unknown_rank_holds_no_depth_to_ask_for():
    with pytest.raises(KeyError):
        depth(one_rank(), 1, [A])
    with pytest.raises(KeyError):
        pin(one_rank(), 1, [A])


def test_a_dropped_rank_is_swept_out_of_what_others_hold_too():
    index = one_rank()
    index.add_rank(1, capacity=None, retains=True)
    for rank in (0, 1):
        ask(index, rank, range(1, 9), 0.0)
    ask(index, 0, range(100, 109), 0.0)
    index.drop_rank(0)
    assert holders(index, range(1, 9)) == {1: 8}
    assert index.backlog
    sweep(index)
    assert [run.hashes for run in index._runs] == [pack_hashes(range(1, 9))]
    assert next(iter(index._runs)).pins.keys() == {index._slots[1]}


def test_a_bit_is_given_again_only_when_it_was_swept_out():
    """Else a new rank would hold what an earlier one did."""
    index = one_rank()
    ask(index, 0, [A], 0.0)
    for _ in range(3):
        index.add_rank(0, capacity=None, retains=True)
        assert holders(index, [A]) == {}
    assert index.slot(0) == 0b1000
    sweep(index)
    index.add_rank(1, capacity=None, retains=True)
    assert index.slot(1) == 0b1
    assert holders(index, [A]) == {}


def test_sweeping_takes_no_more_than_its_budget():
    index = one_rank()
    for n in range(3000):
        ask(index, 0, [n + 1], 0.0)
    index.clear()
    index.add_rank(1, capacity=None, retains=True)
    calls = 0
    while index.backlog:
        index.expire(0.0, budget=500)
        calls += 1
    assert 6 <= calls <= 20
    assert not index._discarded


def test_expiry_takes_no_more_than_its_budget_oldest_first():
    index = one_rank()
    for n in range(10):
        ask(index, 0, [100 + n], float(n))
    remaining = []
    for _ in range(4):
        index.expire(500.0, budget=3)
        remaining.append([n for n in range(10) if depth(index, 0, [100 + n])])
    assert remaining == [[3, 4, 5, 6, 7, 8, 9], [6, 7, 8, 9], [9], []]


def test_forgetting_keeps_pace_with_learning_without_any_tick():
    index = one_rank()
    for n in range(1000):
        ask(index, 0, [n + 1], float(n))
    assert len(index) == 100


# --- what engines say ----------------------------------------------------------------------------


def stored(*blocks):
    return Change.STORED, pack_hashes(blocks)


def removed(*blocks):
    return Change.REMOVED, pack_hashes(blocks)


CLEARED = (Change.CLEARED, b"")


def test_events_are_of_no_account_before_the_first_clear():
    index = one_rank()
    assert index.apply(0, [stored(A, B)])
    assert len(index) == 0


def test_a_clear_ends_history_and_keeps_what_is_in_flight():
    index = one_rank()
    ask(index, 0, [A, B], 0.0)
    lease = pin(index, 0, [A, C])
    index.apply(0, [CLEARED, stored(D)])
    assert (depth(index, 0, [A, B]), depth(index, 0, [A, C]), depth(index, 0, [D])) == (1, 2, 1)
    index.check_integrity([lease])
    index.release(lease, 1.0)
    assert (depth(index, 0, [A]), len(index)) == (0, 1)


def test_what_is_stored_outlives_the_answer_and_any_time():
    index = one_rank(capacity=1)
    index.apply(0, [CLEARED])
    lease = pin(index, 0, [A, B, C])
    index.apply(0, [stored(A, B)])
    index.release(lease, 0.0)
    index.expire(1e9)
    assert depth(index, 0, [A, B, C]) == 2


def test_what_was_removed_is_not_held_although_a_request_uses_it():
    """An engine may give up a request that it will run again."""
    index = one_rank()
    index.apply(0, [CLEARED, stored(A, B, C)])
    lease = pin(index, 0, [A, B, C])
    assert index.apply(0, [removed(B, C)])
    assert depth(index, 0, [A, B, C]) == 1
    again = pin(index, 0, [A, B, D])  # will have it computed
    assert (depth(index, 0, [A, B, D]), depth(index, 0, [A, B, C])) == (3, 2)
    index.check_integrity([lease, again])
    for held in (lease, again):
        index.release(held, 1.0)
    assert len(index) == 1


@pytest.mark.parametrize("blocks", [(A,), (B, C), (D, E), (C, E)])
def test_a_removal_of_what_was_never_stored_is_noticed(blocks):
    index = one_rank()
    index.add_rank(1, capacity=None, retains=True)
    index.apply(0, [CLEARED])
    index.apply(1, [CLEARED, stored(A, B, C)])
    assert index.apply(0, [removed(*blocks)]) is False
    index.check_integrity([])
    assert depth(index, 1, [A, B, C]) == 3


def test_distrust_drops_what_was_stored_and_keeps_what_is_in_flight():
    index = one_rank()
    index.apply(0, [CLEARED, stored(A, B)])
    lease = pin(index, 0, [D])
    index.distrust(0)
    index.apply(0, [stored(C)])
    assert holders(index, [A]) == {}
    assert len(index) == 1
    index.release(lease, 0.0)
    assert holders(index, [D]) == {0: 1}  # by history
    index.check_integrity([])


def test_the_integrity_check_notices_a_lost_lease():
    index = one_rank()
    lease = pin(index, 0, [A])
    index.check_integrity([lease])
    with pytest.raises(AssertionError, match="pins differ"):
        index.check_integrity([])
    with pytest.raises(AssertionError, match="pins differ"):
        index.check_integrity([lease, lease])
