"""What ranks are believed to hold: small examples, and random walks beside a naive model."""

import itertools
from collections import Counter

import builders  # noqa: F401 (loads the hypothesis profile)
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from megatron.core.inference.coordinator.index import PrefixIndex

TTL = 100.0
A, B, C, D, E = 11, 12, 13, 14, 15  # blocks


def one_rank(capacity=None, retains=True):
    index = PrefixIndex(TTL)
    index.add_rank(0, capacity=capacity, retains=retains)
    return index


def held(index, blocks, rank=0):
    """Those of the blocks that the rank holds, asked one by one."""
    return [block for block in blocks if index.depth(rank, [block])]


# --- examples ------------------------------------------------------------------------------------


def test_a_new_rank_holds_nothing():
    index = one_rank()
    assert index.depth(0, [A, B]) == 0
    assert index.depth(0, []) == 0
    assert index.holders([A, B]) == {}
    assert index.holders([]) == {}
    assert len(index) == 0


def test_a_routed_prompt_counts_as_held_at_once():
    index = one_rank()
    index.pin(0, [A, B, C])
    assert index.depth(0, [A, B, C]) == 3
    assert index.depth(0, [A, B, D, E]) == 2
    assert index.depth(0, [D, A]) == 0
    assert index.holders([A, B, C, D]) == {0: 3}
    assert len(index) == 3


@pytest.mark.parametrize("depth", range(10))
@pytest.mark.parametrize("length", range(10))
def test_depth_counts_from_the_first_block_at_every_length(depth, length):
    index = one_rank()
    blocks = list(range(1, 10))
    index.pin(0, blocks[:depth])
    assert index.depth(0, blocks[:length]) == min(depth, length)


def test_every_holder_has_its_own_depth():
    index = one_rank()
    index.add_rank(5, capacity=None, retains=False)
    index.add_rank(6, capacity=None, retains=True)
    index.pin(0, [A])
    index.pin(5, [A, B, C])
    assert index.holders([A, B, C, D]) == {0: 1, 5: 3}


def test_under_lru_blocks_stay_for_the_ttl_after_the_answer():
    index = one_rank()
    lease = index.pin(0, [A, B])
    index.expire(1000.0)  # in flight: held, however long it takes
    assert held(index, [A, B]) == [A, B]
    index.release(lease, 1000.0)
    index.expire(1099.9)
    assert held(index, [A, B]) == [A, B]
    index.expire(1100.0)
    assert held(index, [A, B]) == []
    assert len(index) == 0


def test_under_lru_a_second_request_begins_the_ttl_anew():
    index = one_rank()
    first, second = index.pin(0, [A, B]), index.pin(0, [A, B, C])
    index.release(second, 10.0)
    index.release(first, 50.0)
    index.expire(110.0)
    assert held(index, [A, B, C]) == [A, B]
    index.expire(150.0)
    assert held(index, [A, B, C]) == []


def test_under_ref_zero_blocks_stay_until_the_last_answer():
    index = one_rank(retains=False)
    first, second = index.pin(0, [A, B, C]), index.pin(0, [A, B, D])
    index.release(first, 1.0)
    assert held(index, [A, B, C, D]) == [A, B, D]
    index.release(second, 1.0)
    assert len(index) == 0


def test_beyond_its_capacity_a_rank_loses_the_longest_unused_blocks_children_first():
    index = one_rank(capacity=4)
    index.release(index.pin(0, [A, B, C]), 1.0)
    assert held(index, [A, B, C]) == [A, B, C]
    lease = index.pin(0, [D, E])
    assert held(index, [A, B, C, D, E]) == [A, B, D, E]
    index.release(lease, 2.0)
    index.release(index.pin(0, [A]), 3.0)  # A is fresh again; B is now the oldest
    index.pin(0, [21, 22])
    assert held(index, [A, B, C, D, E, 21, 22]) == [A, D, 21, 22]


def test_pinned_blocks_are_never_trimmed():
    index = one_rank(capacity=2)
    lease = index.pin(0, [A, B, C])
    assert held(index, [A, B, C]) == [A, B, C]
    index.release(lease, 1.0)
    assert held(index, [A, B, C]) == [A, B]


def test_a_rank_with_no_room_holds_only_what_is_in_flight():
    index = one_rank(capacity=0)
    lease = index.pin(0, [A])
    assert index.depth(0, [A]) == 1
    index.release(lease, 1.0)
    assert index.depth(0, [A]) == 0


def test_clear_forgets_blocks_and_voids_leases_but_keeps_ranks_and_their_kinds():
    index = PrefixIndex(TTL)
    index.add_rank(0, capacity=1, retains=True)
    index.add_rank(1, capacity=None, retains=False)
    leases = [index.pin(rank, [A, B]) for rank in (0, 1)]
    index.clear()
    assert len(index) == 0
    assert index.holders([A]) == {}
    fresh = [index.pin(rank, [A, B]) for rank in (0, 1)]
    for lease in leases:
        index.release(lease, 1.0)
    assert index.holders([A, B]) == {0: 2, 1: 2}
    for lease in fresh:
        index.release(lease, 2.0)
    assert index.holders([A, B]) == {0: 1}
    index.check_integrity([])


def test_a_dropped_rank_is_gone_and_its_leases_are_void():
    index = one_rank()
    lease = index.pin(0, [A, B])
    index.drop_rank(0)
    assert index.holders([A]) == {}
    index.add_rank(0, capacity=None, retains=True)
    newer = index.pin(0, [A])
    index.release(lease, 1.0)
    assert held(index, [A, B]) == [A]
    index.check_integrity([lease, newer])


def test_adding_a_rank_again_drops_what_was_known_of_it():
    index = one_rank()
    index.pin(0, [A])
    index.add_rank(0, capacity=None, retains=True)
    assert index.depth(0, [A]) == 0


def test_dropping_an_unknown_rank_does_nothing():
    index = one_rank()
    index.drop_rank(77)
    assert index.holders([A]) == {}


def test_an_unknown_rank_holds_no_depth_to_ask_for():
    with pytest.raises(KeyError):
        one_rank().depth(1, [A])
    with pytest.raises(KeyError):
        one_rank().pin(1, [A])


def test_expiry_takes_no_more_than_its_budget_oldest_first():
    index = one_rank()
    index.release(index.pin(0, [A, B, C]), 0.0)
    index.release(index.pin(0, [D]), 1.0)
    blocks = [A, B, C, D]
    remaining = []
    for _ in range(5):
        index.expire(500.0, budget=1)
        remaining.append(held(index, blocks))
    assert remaining == [[A, B, D], [A, D], [D], [], []]


def test_one_budget_is_for_all_ranks_together():
    index = one_rank()
    index.add_rank(1, capacity=None, retains=True)
    for rank in (0, 1):
        index.release(index.pin(rank, [A, B]), 0.0)
    remaining = []
    for _ in range(2):
        index.expire(500.0, budget=3)
        remaining.append(len(index))
    assert remaining == [1, 0]


def test_a_dropped_table_is_emptied_within_the_budget_too():
    index = one_rank()
    index.add_rank(1, capacity=None, retains=True)
    index.release(index.pin(0, [A, B, C]), 0.0)
    index.release(index.pin(1, [A]), 0.0)
    index.drop_rank(0)
    index.expire(500.0, budget=2)
    assert index.holders([A]) == {1: 1}  # the budget went into the dropped table
    index.expire(500.0, budget=2)
    assert index.holders([A]) == {}


def test_the_integrity_check_notices_a_lost_lease():
    index = one_rank()
    lease = index.pin(0, [A])
    index.check_integrity([lease])
    with pytest.raises(AssertionError, match="pins differ"):
        index.check_integrity([])
    with pytest.raises(AssertionError, match="pins differ"):
        index.check_integrity([lease, lease])


def test_lists_that_no_hash_chain_can_make_leave_the_index_consistent():
    """Hash lists are untrusted: what contradicts itself may steer badly, but must not corrupt."""
    index = one_rank(capacity=3)
    lists = [[A, B, C], [C, B, A], [B], [D, A], [C, E]]
    leases = [index.pin(0, blocks) for blocks in lists]
    for now, lease in enumerate(list(leases)):
        leases.remove(lease)
        index.release(lease, float(now))
        index.check_integrity(leases)
    index.expire(1000.0)
    assert len(index) == 0


# --- random walks beside a naive model -----------------------------------------------------------

PATHS = ["".join(path) for depth in range(5) for path in itertools.product("ab", repeat=depth)]
NUMBER = {path: number for number, path in enumerate(PATHS) if path}
"""A tree of prompts; each node stands for one block, and has a number as its hash."""

RANKS = st.integers(0, 2)


def chain(path):
    return [NUMBER[path[: i + 1]] for i in range(len(path))]


class Model:
    """One rank, naively: which requests use a block, and when it was last let go."""

    def __init__(self, capacity, retains):
        self.capacity = capacity
        self.retains = retains
        self.users = {}  # block -> set of requests that use it
        self.let_go = {}  # unused block -> (time, order within all that was let go)

    def blocks(self):
        return {block for block, users in self.users.items() if users} | set(self.let_go)

    def trim(self):
        while self.let_go and self.capacity is not None and len(self.blocks()) > self.capacity:
            del self.let_go[self.oldest()[0]]

    def oldest(self):
        return sorted(self.let_go, key=self.let_go.get)


class IndexBesideModel(RuleBasedStateMachine):
    """The index and the model get the same calls, and must give the same answers."""

    leases = Bundle("leases")

    def __init__(self):
        super().__init__()
        self.index = PrefixIndex(TTL)
        self.models = {}
        self.out = {}  # number -> (lease, model, path)
        self.numbers = 0
        self.orders = 0
        self.now = 0.0
        self.backlog = 0  # blocks in dropped tables

    def drop(self, model):
        self.backlog += len(model.blocks())

    @rule(rank=RANKS, capacity=st.sampled_from([None, 0, 1, 3, 6]), retains=st.booleans())
    def add_rank(self, rank, capacity, retains):
        if rank in self.models:
            self.drop(self.models[rank])
        self.index.add_rank(rank, capacity=capacity, retains=retains)
        self.models[rank] = Model(capacity, retains)

    @rule(rank=RANKS)
    def drop_rank(self, rank):
        self.index.drop_rank(rank)
        if rank in self.models:
            self.drop(self.models.pop(rank))

    @rule()
    def clear(self):
        self.index.clear()
        for rank, model in self.models.items():
            self.drop(model)
            self.models[rank] = Model(model.capacity, model.retains)

    @rule(target=leases, rank=RANKS, path=st.sampled_from(PATHS))
    def pin(self, rank, path):
        self.numbers += 1
        if rank in self.models:
            model = self.models[rank]
            lease = self.index.pin(rank, chain(path))
            self.out[self.numbers] = lease, model, path
            for block in chain(path):
                model.users.setdefault(block, set()).add(self.numbers)
                model.let_go.pop(block, None)
            model.trim()
        return self.numbers

    @rule(number=consumes(leases))
    def release(self, number):
        if number not in self.out:
            return
        lease, model, path = self.out.pop(number)
        self.index.release(lease, self.now)
        if model not in self.models.values():
            return
        for block in reversed(chain(path)):
            model.users[block].remove(number)
            if not model.users[block] and model.retains:
                self.orders += 1
                model.let_go[block] = self.now, self.orders
        model.trim()

    @rule(seconds=st.sampled_from([0.5, 10.0, TTL / 2, TTL]))
    def wait(self, seconds):
        self.now += seconds

    @rule(budget=st.sampled_from([0, 1, 2, 5, 1000]))
    def expire(self, budget):
        due = {
            rank: [b for b in model.oldest() if model.let_go[b][0] + TTL <= self.now]
            for rank, model in self.models.items()
        }
        self.index.expire(self.now, budget)
        emptied = min(self.backlog, budget)
        self.backlog -= emptied
        gone = 0
        for rank, model in self.models.items():
            left = [b for b in due[rank] if self.index.depth(rank, [b])]
            assert left == due[rank][len(due[rank]) - len(left) :], "not the oldest first"
            for block in due[rank][: len(due[rank]) - len(left)]:
                del model.let_go[block]
                gone += 1
        assert gone == min(budget - emptied, sum(map(len, due.values())))

    @invariant()
    def is_consistent(self):
        self.index.check_integrity([lease for lease, _, _ in self.out.values()])

    @invariant()
    def holds_what_the_model_holds(self):
        assert len(self.index) == sum(len(model.blocks()) for model in self.models.values())
        for path in PATHS:
            depths = {}
            for rank, model in self.models.items():
                depth = 0
                while depth < len(path) and chain(path)[depth] in model.blocks():
                    depth += 1
                assert self.index.depth(rank, chain(path)) == depth
                if depth:
                    depths[rank] = depth
            assert self.index.holders(chain(path)) == depths

    @invariant()
    def no_block_outlives_its_parent(self):
        for rank in self.models:
            for path, block in NUMBER.items():
                if path[:-1] and self.index.depth(rank, [block]):
                    assert self.index.depth(rank, [NUMBER[path[:-1]]]) == 1

    @invariant()
    def keeps_to_capacity_and_retention(self):
        for rank, model in self.models.items():
            total = sum(self.index.depth(rank, [block]) for block in NUMBER.values())
            used = Counter(b for _, m, path in self.out.values() if m is model for b in chain(path))
            if model.capacity is not None:
                assert total <= max(model.capacity, len(used))
            if not model.retains:
                assert total == len(used)


IndexBesideModel.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestIndexBesideModel = IndexBesideModel.TestCase
