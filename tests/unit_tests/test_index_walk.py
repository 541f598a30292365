"""Random walks: the index beside a naive model that keeps sets of single blocks."""

import itertools
import random

import builders  # noqa: F401 (loads the hypothesis profile)
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from megatron.core.inference.coordinator.hashing import pack_hashes
from megatron.core.inference.coordinator.index import PrefixIndex
from megatron.core.inference.coordinator.kv_events import Change

TTL = 100.0
STRIDE = 3  # blocks to a letter
PATHS = ["".join(path) for n in (1, 2, 3) for path in itertools.product("ab", repeat=n)]
PROMPTS = sorted(
    {(path[: -(-n // STRIDE)], n) for path in PATHS for n in range(1, 3 * len(path) + 1)}
)
"""A tree of prompts that part after every third block, cut at every block."""
NUMBER = {prompt: number for number, prompt in enumerate(PROMPTS, start=1)}

RANKS = st.integers(0, 2)
PROMPT = st.sampled_from(PROMPTS)


def chain(prompt):
    """A prompt's blocks: each is named by all that comes before it."""
    path, length = prompt
    return [(path[: -(-n // STRIDE)], n) for n in range(1, length + 1)]


def packed(blocks):
    return pack_hashes([NUMBER[block] for block in blocks])


class Model:
    """One rank, naively."""

    def __init__(self, capacity, retains):
        self.capacity = capacity
        self.retains = retains
        self.trusted = False
        self.in_flight = {}  # number -> prompt
        self.retained = []  # [prompt, last used], unused for longest first
        self.stored = set()
        self.lost = set()  # in flight, and removed by the engine

    def pinned(self):
        return {block for prompt in self.in_flight.values() for block in chain(prompt)}

    def blocks(self):
        retained = {block for prompt, _ in self.retained for block in chain(prompt)}
        return (self.pinned() - self.lost) | retained | self.stored

    def pin(self, number, prompt):
        self.in_flight[number] = prompt
        self.lost -= set(chain(prompt))
        self.trim()

    def release(self, number, now):
        prompt = self.in_flight.pop(number)
        self.lost &= self.pinned()
        if self.retains and not self.trusted:
            part = set(chain(prompt))
            self.retained = [r for r in self.retained if r[0] not in part] + [[prompt, now]]
            self.trim()
            self.expire(now, 2)

    def trim(self):
        while self.retained and self.capacity is not None and len(self.blocks()) > self.capacity:
            path, length = self.retained[0][0]
            self.retained[0][0] = (path[: -(-(length - 1) // STRIDE)], length - 1)
            if length == 1:
                del self.retained[0]

    def expire(self, now, most):
        """The walk only asks for budgets of which this much is sure."""
        while most and self.retained and self.retained[0][1] <= now - TTL:
            del self.retained[0]
            most -= 1

    def restart(self, trusted):
        self.trusted = trusted
        self.retained, self.stored, self.lost = [], set(), set()

    def children(self, block):
        return {
            other for other in self.stored if len(chain(other)) > 1 and chain(other)[-2] == block
        }


class IndexBesideModel(RuleBasedStateMachine):
    """The index and the model get the same calls, and must give the same answers."""

    leases = Bundle("leases")

    def __init__(self):
        super().__init__()
        self.index = PrefixIndex(TTL)
        self.models = {}
        self.out = {}  # number -> (lease, model)
        self.numbers = 0
        self.now = 0.0

    @rule(rank=RANKS, capacity=st.sampled_from([None, None, 0, 1, 4, 9]), retains=st.booleans())
    def add_rank(self, rank, capacity, retains):
        self.index.add_rank(rank, capacity=capacity, retains=retains)
        self.models[rank] = Model(capacity, retains)

    @rule(rank=RANKS)
    def drop_rank(self, rank):
        self.index.drop_rank(rank)
        self.models.pop(rank, None)

    @rule()
    def clear(self):
        self.index.clear()
        for rank, model in self.models.items():
            self.models[rank] = Model(model.capacity, model.retains)
            self.models[rank].trusted = model.trusted

    @rule(target=leases, rank=RANKS, prompt=PROMPT)
    def pin(self, rank, prompt):
        self.numbers += 1
        if rank in self.models:
            match = self.index.match(packed(chain(prompt)))
            self.out[self.numbers] = self.index.pin(rank, match), self.models[rank]
            self.models[rank].pin(self.numbers, prompt)
        return self.numbers

    @rule(number=consumes(leases))
    def release(self, number):
        if number in self.out:
            lease, model = self.out.pop(number)
            self.index.release(lease, self.now)
            if model in self.models.values():
                model.release(number, self.now)

    @rule(seconds=st.sampled_from([0.5, 10.0, TTL / 2, TTL]))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def expire(self):
        self.index.expire(self.now)
        for model in self.models.values():
            model.expire(self.now, 10_000)

    @rule(budget=st.sampled_from([1, 30, 100]))
    def sweep_a_little(self, budget):
        self.index.expire(float("-inf"), budget)

    # --- engines ---

    @rule(rank=RANKS, prompts=st.lists(PROMPT, max_size=3))
    def tell_all(self, rank, prompts):
        if rank not in self.models:
            return
        model = self.models[rank]
        model.restart(trusted=True)
        segments = [(Change.CLEARED, b""), *(self.newly_stored(model, p) for p in prompts)]
        assert self.index.apply(rank, segments)

    @rule(rank=RANKS, prompt=PROMPT)
    def store(self, rank, prompt):
        if rank in self.models and self.models[rank].trusted:
            assert self.index.apply(rank, [self.newly_stored(self.models[rank], prompt)])

    def newly_stored(self, model, prompt):
        new = [block for block in chain(prompt) if block not in model.stored]
        model.stored |= set(new)
        model.lost -= set(new)
        return Change.STORED, packed(new)

    @rule(rank=RANKS, which=st.integers(0, 100), most=st.integers(1, 9))
    def remove(self, rank, which, most):
        model = self.models.get(rank)
        if model is None or not model.trusted:
            return
        leaves = sorted(block for block in model.stored if not model.children(block))
        if not leaves:
            return
        tail = []
        for block in reversed(chain(leaves[which % len(leaves)])):
            if len(tail) == most or model.children(block):
                break
            tail.insert(0, block)
            model.stored.remove(block)
        model.lost |= set(tail) & model.pinned()
        assert self.index.apply(rank, [(Change.REMOVED, packed(tail))])

    @rule(rank=RANKS)
    def distrust(self, rank):
        if rank in self.models:
            self.index.distrust(rank)
            if self.models[rank].trusted:
                self.models[rank].restart(trusted=False)

    # --- after every step ---

    @invariant()
    def is_consistent(self):
        self.index.check_integrity([lease for lease, _ in self.out.values()])

    @invariant()
    def holds_what_the_model_holds(self):
        blocks = {rank: model.blocks() for rank, model in self.models.items()}
        assert len(self.index) == sum(map(len, blocks.values()))
        for prompt in PROMPTS:
            depths = {}
            match = self.index.match(packed(chain(prompt)))
            for rank, held in blocks.items():
                depth = len(list(itertools.takewhile(held.__contains__, chain(prompt))))
                assert self.index.depth(rank, match) == depth
                if depth:
                    depths[rank] = depth
            groups = self.index.holders(match)
            assert {r: d for slots, d in groups for r in self.index.ranks(slots)} == depths
            assert [d for _, d in groups] == sorted(set(depths.values()))

    def teardown(self):
        """Nothing is left once everything was let go."""
        for lease, _ in self.out.values():
            self.index.release(lease, self.now)
        for rank in list(self.models):
            self.index.drop_rank(rank)
        while self.index.backlog:
            self.index.expire(self.now)
        assert not list(self.index._runs)
        assert not list(self.index._runs.single_blocks())


IndexBesideModel.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None
)
TestIndexBesideModel = IndexBesideModel.TestCase


@pytest.mark.parametrize("seed", range(20))
def test_lists_that_no_hash_chain_can_make_leave_the_index_consistent(seed):
    """Hash lists are untrusted: what contradicts itself may steer badly, but must not corrupt."""
    rng = random.Random(seed)
    index = PrefixIndex(TTL)
    ranks = range(3)
    for rank in ranks:
        index.add_rank(rank, capacity=rng.choice([None, 3, 10]), retains=rng.random() < 0.5)
    leases = []
    for now in range(300):
        blocks = pack_hashes(rng.sample(range(1, 15), rng.randint(1, 10)))
        rank = rng.choice(ranks)
        step = rng.random()
        if step < 0.45:
            leases.append(index.pin(rank, index.match(blocks)))
        elif step < 0.8 and leases:
            index.release(leases.pop(rng.randrange(len(leases))), float(now))
        elif step < 0.9:
            index.apply(rank, [(rng.choice([Change.STORED, Change.REMOVED]), blocks)])
        elif step < 0.92:
            index.apply(rank, [(Change.CLEARED, b"")])
        elif step < 0.94:
            index.distrust(rank)
        else:
            index.expire(float(now), budget=rng.randint(0, 300))
        index.check_integrity(leases)
    for lease in leases:
        index.release(lease, 1000.0)
    for rank in ranks:
        index.drop_rank(rank)
    while index.backlog:
        index.expire(1e9)
    assert len(index) == 0
    assert not list(index._runs)
    assert not list(index._runs.single_blocks())
