"""Which rank gets a request: the behaviour table, every tie rule, signals, costs, fall-backs."""

import random
from fractions import Fraction

import pytest
from builders import BLOCK, LRU, Fleet, make_register, stock_register, submission, tokens
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.inference.config import PrefixCachingCoordinatorPolicy

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.decision import (
    SCORES,
    Candidate,
    Situation,
    choose,
    free_capacity_weighted,
    least_loaded,
    prefill_work,
    relative_load_weighted,
)
from megatron.core.inference.coordinator.hashing import pack_hashes
from megatron.core.inference.coordinator.policies import PrefixCachingCostPolicy, routes_on_prefix

RELATIVE = PrefixCachingCostPolicy.RELATIVE_LOAD_WEIGHTED
FREE = PrefixCachingCostPolicy.FREE_CAPACITY_WEIGHTED
WORK = PrefixCachingCostPolicy.PREFILL_WORK
A, B = 0, 1


def situation(candidates, *, blocks=4, max_requests=64, alpha=0.5, beta=1.0):
    mean = sum(c.load for c in candidates) / len(candidates)
    return Situation(blocks, mean, max_requests, alpha, beta)


def winner(policy, *candidates, deterministic=False, **values):
    chosen = choose(
        candidates, policy, situation(candidates, **values), deterministic=deterministic
    )
    return chosen.rank


# --- the behaviour table of the design -----------------------------------------------------------

LOADS = [[32, 32], [20, 10], [8, 2], [4, 0], [0, 0]]
PLACES = [8, 16, 32, 64]
TABLE = [
    *((RELATIVE, 4, 64, loads, rank) for loads, rank in zip(LOADS, [A, A, B, B, A], strict=True)),
    *((FREE, 4, places, loads, A) for places in PLACES for loads in LOADS),
    *((RELATIVE, 2, 64, loads, rank) for loads, rank in zip(LOADS, [A, B, B, B, A], strict=True)),
]


def two_ranks(loads, held_blocks, max_requests=64, **values):
    """Rank A holds the first blocks of the prompt, B holds nothing; both have these loads."""
    fleet = Fleet(register={"max_requests": max_requests}, **values)
    fleet.join()
    _, request_id = fleet.ask(tokens(held_blocks))
    fleet.answer(request_id)
    fleet.load_up(A, loads[A])
    fleet.join()
    fleet.load_up(B, loads[B])
    assert fleet.loads == loads
    return fleet


@pytest.mark.parametrize(("cost", "held_blocks", "max_requests", "loads", "rank"), TABLE)
def test_the_behaviour_table_through_the_core(cost, held_blocks, max_requests, loads, rank):
    fleet = two_ranks(loads, held_blocks, max_requests, cost_policy=cost)
    assert fleet.route(tokens(4)) == rank


@pytest.mark.parametrize(("cost", "held_blocks", "max_requests", "loads", "rank"), TABLE)
def test_the_behaviour_table_of_the_pure_choice(cost, held_blocks, max_requests, loads, rank):
    candidates = [Candidate(A, loads[A], held_blocks / 4), Candidate(B, loads[B])]
    assert winner(cost, *candidates, max_requests=max_requests) == rank


@pytest.mark.parametrize("loads", [[1, 0], [3, 1]])
def test_a_tie_of_cache_against_load_goes_to_the_less_loaded_rank(loads):
    holder, idle = Candidate(A, loads[A], 1.0), Candidate(B, loads[B])
    now = situation([holder, idle])
    assert relative_load_weighted(holder, now) == relative_load_weighted(idle, now) == 0.5
    assert winner(RELATIVE, holder, idle) == B
    assert two_ranks(loads, 4).route(tokens(4)) == B


# --- scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "fraction", "mean", "beta", "score"),
    [
        (8, 1.0, 5.0, 1.0, 0.4),
        (2, 0.0, 5.0, 1.0, 0.6),
        (10, 1.0, 5.0, 1.0, 0.0),  # twice the mean costs one full prompt
        (10, 1.0, 5.0, 0.5, 0.5),
        (10, 0.25, 5.0, 0.0, 0.25),  # beta 0 ignores load
        (1, 1.0, 0.5, 1.0, 0.5),  # the mean is floored at 1
        (0, 0.0, 0.0, 1.0, 0.0),
    ],
)
def test_relative_load_weighted_scores(load, fraction, mean, beta, score):
    now = Situation(blocks=4, mean_load=mean, max_requests=64, alpha=0.5, beta=beta)
    assert relative_load_weighted(Candidate(0, load, fraction), now) == pytest.approx(score)


@pytest.mark.parametrize(
    ("load", "fraction", "alpha", "max_requests", "score"),
    [
        (0, 1.0, 0.5, 8, 1.0),
        (2, 0.5, 0.5, 8, 0.625),
        (8, 0.0, 0.5, 8, 0.0),
        (80, 1.0, 0.5, 8, 0.5),  # more than full counts as full
        (2, 0.5, 0.0, 8, 0.75),
        (2, 0.5, 1.0, 8, 0.5),
    ],
)
def test_free_capacity_weighted_scores(load, fraction, alpha, max_requests, score):
    now = Situation(4, mean_load=1.0, max_requests=max_requests, alpha=alpha, beta=1.0)
    assert free_capacity_weighted(Candidate(0, load, fraction), now) == score


@pytest.mark.parametrize(
    ("load", "fraction", "blocks", "score"),
    [(0, 0.0, 4, -4), (9, 0.5, 4, -20), (9, 1.0, 4, 0), (2, 0.25, 8, -18)],
)
def test_prefill_work_scores(load, fraction, blocks, score):
    now = Situation(blocks, mean_load=1.0, max_requests=8, alpha=0.5, beta=1.0)
    assert prefill_work(Candidate(0, load, fraction), now) == score


@pytest.mark.parametrize(
    ("cost", "loads", "held_blocks", "rank"),
    [
        (RELATIVE, [8, 2], 4, B),
        (FREE, [8, 2], 4, A),
        (WORK, [8, 2], 4, A),  # nothing left to compute: load is multiplied by 0
        (RELATIVE, [20, 10], 2, B),
        (FREE, [20, 10], 2, A),  # .25 + .5 * 44/64 against .5 * 54/64
        (WORK, [20, 10], 2, A),  # 2 blocks * 21 against 4 blocks * 11
        (RELATIVE, [32, 10], 2, B),
        (FREE, [32, 10], 2, A),  # .25 + .5 * 32/64 against .5 * 54/64
        (WORK, [32, 10], 2, B),  # 2 blocks * 33 against 4 blocks * 11
        (FREE, [64, 10], 2, B),  # .25 against .5 * 54/64
    ],
)
def test_the_three_costs_disagree_as_their_formulas_say(cost, loads, held_blocks, rank):
    assert two_ranks(loads, held_blocks, cost_policy=cost).route(tokens(4)) == rank


def test_without_the_floor_of_the_mean_one_request_would_cost_the_whole_credit():
    # mean .5: with the floor .55 against .45, without it .1 against .9
    assert two_ranks([1, 0], 4, load_beta=0.9).route(tokens(4)) == A


def test_beta_weighs_the_load():
    assert two_ranks([8, 2], 4, load_beta=0.5).route(tokens(4)) == A
    assert two_ranks([8, 2], 4, load_beta=1.0).route(tokens(4)) == B
    assert two_ranks([50, 0], 1, load_beta=0).route(tokens(4)) == A


def test_alpha_weighs_the_cached_share():
    assert two_ranks([8, 2], 4, 8, cost_policy=FREE, routing_alpha=0.4).route(tokens(4)) == B
    assert two_ranks([8, 2], 4, 8, cost_policy=FREE, routing_alpha=0.5).route(tokens(4)) == A
    assert two_ranks([8, 2], 1, 8, cost_policy=FREE, routing_alpha=1).route(tokens(4)) == A


def test_max_requests_is_the_smallest_of_the_live_ranks():
    def fleet_with_one_small_rank():
        fleet = Fleet(cost_policy=FREE, routing_alpha=0.3)
        fleet.join()
        _, request_id = fleet.ask(tokens(4))
        fleet.answer(request_id)
        fleet.load_up(0, 8)
        fleet.load_up(fleet.join(max_requests=8), 7)
        fleet.load_up(fleet.join(), 2)
        assert fleet.loads == [8, 7, 2]
        return fleet

    # of 8 places: .3 against .7 * 6/8
    fleet = fleet_with_one_small_rank()
    assert fleet.core.fleet.ranks.smallest_max_requests == 8
    assert fleet.route(tokens(4)) == 2
    # of 64 places, once the small rank is gone: .3 + .7 * 56/64 against .7 * 62/64
    fleet = fleet_with_one_small_rank()
    fleet.tell(b"1", m.PeerLost())
    assert fleet.core.fleet.ranks.smallest_max_requests == 64
    assert fleet.route(tokens(4)) == 0


# --- ties ----------------------------------------------------------------------------------------


def test_scores_are_rounded_so_that_1_minus_a_third_ties_with_two_thirds():
    # mean 3: 1 - 1/3 is above 2/3 in floats, but not after 9 decimals
    candidates = [Candidate(0, 4, 1.0), Candidate(1, 4), Candidate(2, 1)]
    now = situation(candidates)
    assert relative_load_weighted(candidates[0], now) > relative_load_weighted(candidates[2], now)
    assert winner(RELATIVE, *candidates) == 2

    fleet = Fleet(1)
    _, request_id = fleet.ask(tokens(4))
    fleet.answer(request_id)
    fleet.load_up(0, 4)
    fleet.load_up(fleet.join(), 4)
    fleet.load_up(fleet.join(), 1)
    assert fleet.loads == [4, 4, 1]
    assert fleet.route(tokens(4)) == 2


def test_scores_that_differ_in_the_ninth_decimal_do_not_tie():
    now = Situation(blocks=1, mean_load=1.0, max_requests=8, alpha=0.5, beta=1e-9)
    assert choose([Candidate(0, 2, 1.0), Candidate(1, 1, 1.0)], RELATIVE, now).rank == 1
    richer, lighter = Candidate(0, 1, 0.500000002), Candidate(1, 0, 0.5)
    now = Situation(blocks=1, mean_load=0.5, max_requests=8, alpha=0.5, beta=0.0)
    assert choose([lighter, richer], RELATIVE, now).rank == 0
    nearly = Candidate(0, 1, 0.5000000002)  # less than half of a unit in the ninth decimal
    assert choose([nearly, lighter], RELATIVE, now).rank == 1


@pytest.mark.parametrize("policy", SCORES)
def test_of_equal_scores_the_lower_load_wins(policy):
    # WORK: 2 * 3 = 3 * 2 blocks; the others are told to ignore load
    few, many = Candidate(5, 1, 0.25, last_assigned=9), Candidate(3, 2, 0.5)
    if policy is not WORK:
        few, many = Candidate(5, 1, 0.5, last_assigned=9), Candidate(3, 2, 0.5)
    for deterministic in (False, True):
        values = {"alpha": 1.0, "beta": 0.0, "deterministic": deterministic}
        assert winner(policy, many, few, **values) == 5


@pytest.mark.parametrize("policy", SCORES)
def test_of_equal_scores_and_loads_the_least_recently_assigned_wins(policy):
    late, early = Candidate(0, 2, 0.5, last_assigned=8), Candidate(1, 2, 0.5, last_assigned=7)
    assert winner(policy, late, early) == 1
    assert winner(policy, late, early, deterministic=True) == 0


@pytest.mark.parametrize("policy", SCORES)
def test_never_assigned_counts_as_least_recently_assigned(policy):
    assigned, never = Candidate(0, 2, 0.5, last_assigned=0), Candidate(1, 2, 0.5)
    assert winner(policy, assigned, never) == 1
    assert winner(policy, assigned, never, deterministic=True) == 0


@pytest.mark.parametrize("policy", SCORES)
def test_at_last_the_lowest_number_wins(policy):
    assert winner(policy, *(Candidate(rank, 2, 0.5) for rank in (3, 1, 2))) == 1


def test_ties_among_holders_through_the_core():
    fleet = Fleet(2)
    prompt = tokens(4)
    assert fleet.route(prompt) == 0  # never assigned, both: the lowest number
    assert fleet.route(prompt) == 1  # [1, 0] ties at .5: the lower load
    assert fleet.loads == [1, 1]
    assert fleet.route(prompt) == 0  # equal scores and loads: the least recently assigned
    assert fleet.route(prompt) == 1  # [2, 1]: the lower load
    fleet.answer_all()
    assert fleet.loads == [0, 0]
    assert fleet.route(prompt) == 0
    fleet.answer_all()
    assert fleet.route(prompt) == 1
    fleet.answer_all()
    assert fleet.route() == 0  # the same rule without any hashes


def test_a_rank_that_was_never_assigned_comes_before_lower_numbers():
    fleet = Fleet(2)
    for expected in (0, 1, 0, 1):
        assert fleet.route() == expected
        fleet.answer_all()
    joined = fleet.join()
    assert fleet.route() == joined


def test_free_capacity_departs_from_the_released_tie_rule():
    """Released: of equal scores the most recent holder. Here: the least recently assigned."""
    fleet = Fleet(2, register={"max_requests": 2}, cost_policy=FREE)
    prompt = tokens(4)
    # .5 + .5 against .5; .5 + .25 against .5; then .5 ties with .5, and goes to the lower load
    assert [fleet.route(prompt) for _ in range(3)] == [0, 0, 1]
    fleet.answer_all()
    assert fleet.holders(prompt) == {0: 4, 1: 4}
    assert fleet.route(prompt) == 0


# --- deterministic mode --------------------------------------------------------------------------


def shuffled_fleet(seed, register, peer):
    """12 ranks that register in a random order, in deterministic mode."""
    fleet = Fleet(expected_ranks=12, deterministic=True)
    order = list(range(12))
    random.Random(seed).shuffle(order)
    assert order != sorted(order)
    for dp_rank in order:
        fleet.tell(peer(dp_rank), register(dp_rank))
    return fleet


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("register", "peer"),
    [
        (make_register, lambda dp_rank: b"x%d" % (97 * dp_rank % 13)),
        (lambda dp_rank: stock_register(), lambda dp_rank: b"mp-coord-%d" % dp_rank),
    ],
    ids=["ours", "released"],
)
def test_ranks_are_numbered_by_dp_rank_and_10_comes_after_2(seed, register, peer):
    fleet = shuffled_fleet(seed, register, peer)
    assert [fleet.core.fleet.ranks.of_peer(peer(i)).number for i in range(12)] == list(range(12))
    assert [fleet.route() for _ in range(24)] == [*range(12), *range(12)]


def test_ranks_of_several_jobs_are_numbered_job_by_job():
    fleet = Fleet(expected_ranks=4, deterministic=True)
    for job, dp_rank in [("b", 0), ("a", 10), ("a", 2), ("b", 1)]:
        fleet.tell(f"{job}{dp_rank}".encode(), make_register(dp_rank, replica=job))
    peers = [rank.peer for rank in sorted(fleet.core.fleet.ranks, key=lambda rank: rank.number)]
    assert peers == [b"a2", b"a10", b"b0", b"b1"]


def test_deterministic_ties_ignore_who_was_assigned_when():
    fleet = Fleet(2, deterministic=True)
    for _ in range(3):
        assert fleet.route() == 0
        fleet.answer_all()
    relaxed = Fleet(2)
    assert [(relaxed.route(), relaxed.answer_all())[0] for _ in range(3)] == [0, 1, 0]


def test_deterministic_ties_among_holders_go_to_the_lowest_number():
    fleet = Fleet(2, deterministic=True)
    prompt = tokens(4)
    assert [fleet.route(prompt) for _ in range(4)] == [0, 1, 0, 1]
    fleet.answer_all()
    for _ in range(3):
        assert fleet.route(prompt) == 0
        fleet.answer_all()


# --- signals -------------------------------------------------------------------------------------


def test_longest_prefix_gives_every_holder_its_own_depth():
    fleet = Fleet(1, load_beta=0.4)
    prompt = tokens(4)
    _, half = fleet.ask(prompt[: 2 * BLOCK])
    fleet.answer(half)
    fillers = fleet.load_up(0, 10)
    fleet.join()
    assert fleet.route(prompt) == 1  # .5 - .4 against .4, and fewer requests
    fleet.load_up(1, 3)
    fleet.answer(*fillers[1:])
    fleet.join()
    assert fleet.loads == [1, 3, 0]
    assert fleet.holders(prompt) == {0: 2, 1: 4}
    # mean 4/3: .5 + .1 against 1 - .5 and .4; with credit for the deepest only, rank 1 would win
    assert fleet.route(prompt) == 0


def test_first_prefix_block_gives_the_whole_credit_for_the_first_block():
    whole, part = "first_prefix_block", "longest_prefix"
    assert two_ranks([20, 10], 1, coordinator_policy=whole).route(tokens(4)) == A
    assert two_ranks([20, 10], 1, coordinator_policy=part).route(tokens(4)) == B


def test_first_prefix_block_ignores_all_later_blocks():
    fleet = Fleet(1, coordinator_policy="first_prefix_block")
    _, request_id = fleet.ask(tokens(4))
    assert len(fleet.core.fleet.index) == 1
    fleet.answer(request_id)
    assert fleet.holders(tokens(1)) == {0: 1}


def test_load_balanced_reads_no_hashes():
    fleet = two_ranks([2, 0], 4, coordinator_policy="load_balanced")
    assert [fleet.route(tokens(4)) for _ in range(2)] == [B, B]
    assert len(fleet.core.fleet.index) == 0


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (PrefixCachingCoordinatorPolicy.LONGEST_PREFIX, True),
        (PrefixCachingCoordinatorPolicy.FIRST_PREFIX_BLOCK, True),
        (PrefixCachingCoordinatorPolicy.LOAD_BALANCED, False),
        ("longest_prefix", True),
        ("first_prefix_block", True),
        ("load_balanced", False),
        (None, False),
    ],
)
def test_routes_on_prefix(policy, expected):
    assert routes_on_prefix(policy) is expected


def test_routes_on_prefix_refuses_a_string_that_names_no_policy():
    with pytest.raises(ValueError, match="nearest_rank"):
        routes_on_prefix("nearest_rank")


# --- fall-backs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cost", SCORES)
@pytest.mark.parametrize("prompt", [[1] * (BLOCK - 1), tokens(4, name=7), None])
def test_no_full_block_no_hit_or_no_hash_goes_to_the_least_loaded_rank(cost, prompt):
    fleet = two_ranks([3, 1], 4, cost_policy=cost)
    assert fleet.route(prompt) == B


def test_without_prefix_caching_routing_is_least_loaded():
    fleet = two_ranks([1, 0], 4, prefix_caching=False, block_size_tokens=None, load_beta=0)
    assert fleet.route(tokens(4)) == B
    assert len(fleet.core.fleet.index) == 0
    wrong = m.SubmitRequest("x", 16, b"", b"", pack_hashes([1, 1]))
    effects = fleet.tell(b"client", wrong)
    assert [type(effect) for effect in effects] == [m.Send]  # and nobody minds wrong hashes


def test_a_rank_with_hits_competes_only_with_the_least_loaded_one():
    idle_but_empty = [Candidate(1, 5), Candidate(2, 4), Candidate(3, 6)]
    holder = Candidate(0, 6, 0.5)
    everyone = [holder, *idle_but_empty]
    now = situation(everyone)
    for policy in SCORES:
        assert choose(everyone, policy, now) == choose([holder, idle_but_empty[1]], policy, now)


@pytest.mark.parametrize("policy", SCORES)
def test_nobody_to_choose_from_is_an_error_of_the_caller(policy):
    now = Situation(1, 0.0, 8, 0.5, 1.0)
    with pytest.raises(ValueError, match="empty"):
        choose([], policy, now)
    with pytest.raises(ValueError, match="empty"):
        least_loaded([])


# --- properties ----------------------------------------------------------------------------------

BLOCKS = 8
FRACTIONS = st.integers(0, BLOCKS).map(lambda held: held / BLOCKS)
POLICIES = st.sampled_from(list(SCORES))
BETAS, ALPHAS = st.sampled_from([0.0, 0.3, 0.5, 1.0, 2.0]), st.sampled_from([0.0, 0.3, 0.5, 1.0])
MAX_REQUESTS = st.sampled_from([1, 8, 16, 40])


@st.composite
def fleets(draw):
    ranks = draw(st.permutations(range(draw(st.integers(1, 6)))))
    # One counter numbers all assignments, so no two ranks share a number.
    recency = draw(st.permutations(range(len(ranks))))
    never = draw(st.integers(-1, len(ranks)))
    return [
        Candidate(
            rank, draw(st.integers(0, 40)), draw(FRACTIONS), -1 if latest <= never else latest
        )
        for rank, latest in zip(ranks, recency, strict=True)
    ]


def reference_score(policy, candidate, everyone, max_requests, alpha, beta):
    """The formulas of the design in exact arithmetic."""
    held, load = round(candidate.fraction * BLOCKS), candidate.load
    alpha, beta = Fraction(str(alpha)), Fraction(str(beta))
    if policy is RELATIVE:
        mean = Fraction(sum(c.load for c in everyone), len(everyone))
        return Fraction(held, BLOCKS) - beta * (load - mean) / max(mean, Fraction(1))
    if policy is FREE:
        places = Fraction(max_requests - load, max_requests) if load < max_requests else 0
        return alpha * Fraction(held, BLOCKS) + (1 - alpha) * places
    return Fraction(-(BLOCKS - held) * (load + 1))


def reference_choice(policy, everyone, max_requests, alpha, beta, deterministic):
    """The best by looking at every pair, one rule after the other."""

    def beats(a, b):
        if any(c.fraction for c in everyone):
            score_a = reference_score(policy, a, everyone, max_requests, alpha, beta)
            score_b = reference_score(policy, b, everyone, max_requests, alpha, beta)
            if score_a != score_b:
                return score_a > score_b
        if a.load != b.load:
            return a.load < b.load
        if not deterministic and a.last_assigned != b.last_assigned:
            return a.last_assigned < b.last_assigned
        return a.rank < b.rank

    (best,) = (a for a in everyone if all(a is b or beats(a, b) for b in everyone))
    return best


@given(fleets(), POLICIES, MAX_REQUESTS, ALPHAS, BETAS, st.booleans())
def test_the_choice_is_that_of_a_brute_force_reference(
    everyone, policy, max_requests, alpha, beta, deterministic
):
    now = situation(everyone, blocks=BLOCKS, max_requests=max_requests, alpha=alpha, beta=beta)
    expected = reference_choice(policy, everyone, max_requests, alpha, beta, deterministic)
    assert choose(everyone, policy, now, deterministic=deterministic) == expected


@given(fleets(), POLICIES, MAX_REQUESTS, ALPHAS, BETAS, st.booleans())
def test_the_winner_holds_something_or_is_the_least_loaded(
    everyone, policy, max_requests, alpha, beta, deterministic
):
    now = situation(everyone, blocks=BLOCKS, max_requests=max_requests, alpha=alpha, beta=beta)
    chosen = choose(everyone, policy, now, deterministic=deterministic)
    lightest = least_loaded(everyone, deterministic=deterministic)
    assert chosen.fraction > 0 or chosen == lightest
    few = [c for c in everyone if c.fraction > 0 or c == lightest]
    assert choose(few, policy, now, deterministic=deterministic) == chosen


@given(POLICIES, FRACTIONS, st.integers(0, 60), st.floats(0, 60), MAX_REQUESTS, ALPHAS, BETAS)
def test_no_score_rises_with_load(policy, fraction, load, mean, max_requests, alpha, beta):
    now = Situation(BLOCKS, mean, max_requests, alpha, beta)
    score = SCORES[policy]
    assert score(Candidate(0, load + 1, fraction), now) <= score(Candidate(0, load, fraction), now)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("policy", SCORES)
def test_a_session_of_many_requests_goes_where_the_reference_says(policy, deterministic):
    """5 ranks, prompts from a small tree, answers in random order; everything is recounted."""
    rng = random.Random(f"{policy} {deterministic}")
    fleet = Fleet(5, cost_policy=policy, deterministic=deterministic)
    held = [set() for _ in range(5)]
    flying = {}
    last_assigned = [-1] * 5
    for turn in range(600):
        if flying and rng.random() < 0.45:
            request_id = rng.choice(list(flying))
            fleet.answer(request_id)
            del flying[request_id]
            continue
        prompt = [t for _ in range(BLOCKS) for t in [rng.randrange(2)] * BLOCK]
        whole = tuple(prompt)
        everyone = []
        for rank in range(5):
            depths = [d for d in range(BLOCKS + 1) if not d or whole[: d * BLOCK] in held[rank]]
            load = sum(where == rank for where in flying.values())
            everyone.append(Candidate(rank, load, max(depths) / BLOCKS, last_assigned[rank]))
        expected = reference_choice(policy, everyone, 64, 0.5, 1.0, deterministic).rank
        got, request_id = fleet.ask(prompt)
        assert got == expected, (turn, everyone)
        flying[request_id] = got
        last_assigned[got] = turn
        held[got] |= {whole[: d * BLOCK] for d in range(1, BLOCKS + 1)}


def test_a_stock_engine_counts_like_any_other():
    fleet = Fleet(max_requests=64, eviction=LRU)
    fleet.tell(b"mp-coord-0", stock_register())
    fleet.tell(b"mp-coord-1", stock_register())
    assert fleet.tell(b"client", submission(1, tokens(2)))[-1].peer == b"mp-coord-0"
    assert fleet.tell(b"client", submission(2))[-1].peer == b"mp-coord-1"
    assert fleet.tell(b"client", submission(3, tokens(2)))[-1].peer == b"mp-coord-0"
