"""The cost policy added_delay: its formula, the search beside a plain one, whole requests."""

import random

import pytest
from builders import BLOCK, Fleet, hashes, tokens

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.conversations import FULL
from megatron.core.inference.coordinator.delays import (
    HELD_UP,
    RECOMPUTED,
    STANDSTILL,
    Delays,
    added_delay,
)
from megatron.core.inference.coordinator.kv_events import CLEARED, pack_events
from megatron.core.inference.coordinator.rank_order import number_of
from megatron.core.inference.coordinator.standing import Standing

# --- the formula ---------------------------------------------------------------------------------


CHARGE = 800
"""Of a request, in these tests."""


@pytest.mark.parametrize(
    ("new", "queued", "load", "mean_load", "more", "delay"),
    [
        (0, 0, 0, 0, {}, 0),
        (300, 0, 0, 0, {}, 300),  # its own prefill
        (320, 500, 1, 0, {}, 1620),  # and what is before it; one other shares its steps
        (320, 500, 1, 2, {}, 1740),  # two others stand still, which counts three eighths as much
        (320, 500, 1, 32, {}, 3540),
        (320, 500, 1, 64, {}, 5460),
        (320, 500, 1, 99, {}, 5460),  # more than 64 do not stand still the longer
        (320, 500, 1, 0, {"pausing": 3}, 2820),  # half of the three will be there
        (320, 500, 1, 0, {"evicted": 100}, 2120),  # somebody computes 100 tokens again
    ],
)
def test_the_formula(new, queued, load, mean_load, more, delay):
    assert (HELD_UP, STANDSTILL, RECOMPUTED) == (64, 3 / 16, 5)
    assert added_delay(new, queued, load, mean_load, CHARGE, **more) == delay


def delays_of(*ranks, deterministic=False):
    """From (load, queued tokens, last assigned, level, pausing) of each rank."""
    standing = Standing(deterministic)
    delays = Delays(standing, deterministic)
    delays.request_charge = CHARGE
    charged = {}
    for number, (load, queued, last, *more) in enumerate(ranks):
        level, pausing = (*more, 0, 0)[:2]
        standing.update(number, load, last)
        delays.update(number, queued, last, level=level, pausing=pausing)
        charged[number] = queued, pausing
    delays.check_integrity(charged)
    return delays


def best(delays, new, **options):
    """The number of the best rank."""
    _, key = delays.best(new, **options)
    return number_of(key)


def best_of(delays, ranks, new):
    _, key = delays.best_of(ranks, new)
    return number_of(key)


def test_an_empty_queue_is_worth_more_requests():
    delays = delays_of((1, 900, -1), (2, 0, -1))
    assert best(delays, 500) == 1  # 1700 before it against 1600
    assert best(delays_of((1, 600, -1), (2, 0, -1)), 500) == 0


def test_conversations_that_pause_count_half_a_request():
    assert best(delays_of((0, 0, -1, 0, 3), (1, 0, -1)), 500) == 1  # 1200 against 800
    assert best(delays_of((0, 0, -1, 0, 1), (1, 0, -1)), 500) == 0


def test_the_request_s_own_conversation_does_not_count():
    delays = delays_of((0, 0, -1, 0, 2), (0, 300, -1))
    assert best_of(delays, [0, 1], 500) == 1  # 1300 against 800
    delay, key = delays.best_own([0], 500)
    assert (delay, number_of(key)) == (900, 0)
    assert delays.best_own([], 500) is None


def test_a_long_prompt_does_not_wait_where_few_are_held_up():
    """By its own load the first would be best, with 16 held up by 8000 tokens instead of 24."""
    delays = delays_of((16, 8000, -1), (24, 0, -1))
    assert best(delays, 8000) == 1


def test_where_queues_are_long_their_work_counts_and_not_how_many_wait():
    """Else short prompts gather on some ranks, and long ones queue ever longer on others."""
    delays = delays_of((60, 760_000, -1), (250, 600_000, -1))
    assert best(delays, 77_000) == 1


def test_a_prompt_goes_where_it_throws_nobody_out():
    fuller, emptier = (0, 0, -1, FULL // 2), (1, 0, -1, 0)
    assert best(delays_of(fuller, emptier), 600) == 1  # 5 * 225 against 800
    assert best(delays_of(fuller, emptier), 300) == 0  # one request is dearer
    assert best_of(delays_of(fuller, emptier), [0, 1], 600) == 1


def test_where_all_are_full_nothing_is_charged():
    """Somebody is thrown out wherever it goes."""
    delays = delays_of((0, 0, -1, FULL), (1, 0, -1, FULL))
    assert best(delays, 10_000) == 0
    assert delays.best(10_000)[0] == added_delay(10_000, 0, 0, 0.5, 0)


@pytest.mark.parametrize(
    ("ranks", "winner"),
    [
        ([(0, 0, 5, 2), (0, 0, 6, 1)], 1),  # the same with nothing new: the lower level
        ([(0, 0, 5), (0, 0, 4)], 1),  # the one assigned longest ago
        ([(0, 0, -1), (0, 0, -1)], 0),  # the lower number
    ],
)
def test_ties(ranks, winner):
    assert best(delays_of(*ranks), 0) == winner
    assert best_of(delays_of(*ranks), [1, 0], 0) == winner


def test_deterministic_ties_know_no_recency():
    assert best(delays_of((0, 0, 5), (0, 0, 4), deterministic=True), 0) == 0


@pytest.mark.parametrize("seed", range(5))
def test_the_search_finds_what_a_plain_one_does(seed):
    rng = random.Random(seed)
    for _ in range(400):
        count = rng.randint(1, 12)
        ranks = [
            (rng.randint(0, 12), queued, last, rng.choice([0, 0, 1, 5, FULL]), rng.choice([0, 2]))
            for last in rng.sample(range(count), count)
            for queued in [rng.choice([0, 0, 50, 1000, 4000, rng.randrange(9000)])]
        ]
        delays = delays_of(*ranks)
        new, limit = rng.choice([0, 5, 300, 20_000]), rng.choice([0, 0, 1, 4])
        some = set(rng.sample(range(count), rng.randint(1, count)))

        def order(number, new=new, ranks=ranks):
            load, queued, last, level, pausing = ranks[number]
            mean_load = sum(each[0] for each in ranks) / len(ranks)
            room = FULL * len(ranks) - sum(each[3] for each in ranks)
            evicted = new * level * room // (FULL * FULL * len(ranks))
            there = queued + CHARGE * load + CHARGE // 2 * pausing
            delay = added_delay(new, 0, 0, mean_load, 0, evicted=evicted) + there
            return delay, level, there, last

        for among in (some, set(range(count))):
            open_ = [n for n in among if not limit or ranks[n][0] < limit]
            expected = min(open_, key=order, default=None)
            for found in (
                delays.best(new, limit, among.__contains__),
                delays.best_of(among, new, limit),
            ):
                assert (None if found is None else number_of(found[1])) == expected


# --- whole requests ------------------------------------------------------------------------------


def by_delay(ranks, **values):
    fleet = Fleet(cost_policy="added_delay", **values)
    for _ in range(ranks):
        fleet.join()
    return fleet


def events(first, numbers):
    return m.KvEvents(0, first, len(numbers), pack_events(numbers))


def queued(fleet):
    fleet.core.check_integrity()
    return [
        fleet.core.fleet.router._by_delay._queues.tokens(n)
        for n in range(len(fleet.core.fleet.ranks))
    ]


def test_a_prompt_waits_until_its_last_block_is_stored_or_it_is_answered():
    fleet = by_delay(2)
    fleet.tell(b"0", events(0, [CLEARED]))
    first, second = tokens(4, name=1), tokens(3, name=2)
    assert fleet.route(first) == 0
    rank, request_id = fleet.ask(second)
    assert rank == 1
    assert queued(fleet) == [4 * BLOCK, 3 * BLOCK]
    fleet.tell(b"0", events(1, hashes(first)[:3]))
    assert queued(fleet) == [BLOCK, 3 * BLOCK]
    fleet.tell(b"0", events(4, hashes(first)[3:]))
    assert queued(fleet) == [0, 3 * BLOCK]
    fleet.answer(request_id)
    assert queued(fleet) == [0, 0]


def test_a_request_that_is_refused_ends_no_other_s_prefill():
    """Engines refuse at once, ahead of what waits."""
    fleet = by_delay(1)
    for name in (1, 2, 3):
        fleet.ask(tokens(100, name=name))
    _, refused = fleet.ask(tokens(50, name=4))
    fleet.tell(b"0", m.EngineReply((m.Answer(refused, "FAILED", 0, 0, b"why"),)))
    assert queued(fleet) == [300 * BLOCK]
    assert fleet.core.fleet.router._by_delay._conversations.pausing(0) == 0


def test_a_holder_computes_less_and_a_lost_rank_waits_for_nothing():
    fleet = by_delay(2)
    prompt = tokens(200)
    rank, request_id = fleet.ask(prompt)
    fleet.answer(request_id)
    fleet.route(tokens(1, name=5))  # goes to the other one, idle longer
    assert fleet.loads == [0, 1]
    assert fleet.route([*prompt, *tokens(8, name=9)]) == rank
    assert queued(fleet)[rank] == 8 * BLOCK
    fleet.tell(b"%d" % rank, m.PeerLost())
    fleet.core.check_integrity()
    assert fleet.core.fleet.router._by_delay._queues.tokens(rank) == 0


def test_without_hashes_or_lengths_it_goes_by_queue_and_load():
    fleet = by_delay(2)
    assert [fleet.route() for _ in range(4)] == [0, 1, 0, 1]


def test_what_a_request_costs_is_learned_from_prompts_and_all_ranks_follow():
    fleet = by_delay(3)
    router = fleet.core.fleet.router._by_delay
    fleet.route(tokens(1000, name=1))
    assert router._delays.request_charge == 880
    for name in range(2, 400):
        fleet.answer(fleet.ask(tokens(4, name=name))[1])
        fleet.core.check_integrity()
    assert router._delays.request_charge < 120


def test_with_load_balanced_signal_nothing_is_queued():
    fleet = by_delay(2, coordinator_policy="load_balanced")
    assert fleet.core.fleet.router._by_delay is None
    assert [fleet.route(tokens(4)) for _ in range(3)] == [0, 1, 0]
