"""The cost policy added_delay: its formula, queues of prefill, the search beside a plain one."""

import random

import pytest
from builders import BLOCK, Fleet, hashes, tokens

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.conversations import FULL
from megatron.core.inference.coordinator.delays import (
    HELD_UP,
    RECOMPUTED,
    REQUEST_TOKENS,
    STANDSTILL,
    Delays,
    added_delay,
    number_of,
)
from megatron.core.inference.coordinator.hashing import pack_hashes
from megatron.core.inference.coordinator.kv_events import CLEARED, pack_events

# --- the formula ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("new", "queued", "load", "mean_load", "evicted", "delay"),
    [
        (0, 0, 0, 0, 0, 0),
        (300, 0, 0, 0, 0, 300),  # its own prefill
        (320, 500, 1, 0, 0, 1620),  # and what is before it; one other shares its steps
        (320, 500, 1, 2, 0, 1740),  # two others stand still, which counts three eighths as much
        (320, 500, 1, 32, 0, 3540),
        (320, 500, 1, 64, 0, 5460),
        (320, 500, 1, 99, 0, 5460),  # more than 64 do not stand still the longer
        (320, 500, 1, 0, 100, 2120),  # somebody computes 100 tokens again
    ],
)
def test_the_formula(new, queued, load, mean_load, evicted, delay):
    assert (HELD_UP, STANDSTILL, REQUEST_TOKENS, RECOMPUTED) == (64, 3 / 16, 800, 5)
    assert added_delay(new, queued, load, mean_load, evicted) == delay


def delays_of(*ranks, deterministic=False):
    """From (load, queued tokens, last assigned, level) of each rank."""
    delays = Delays(deterministic)
    for number, (load, queued, last, *level) in enumerate(ranks):
        if queued:
            delays.begin(number, 100 + number, queued, None)
        delays.update(number, load, last, *level)
    return delays


def test_an_empty_queue_is_worth_more_requests():
    delays = delays_of((1, 900, -1), (2, 0, -1))
    assert number_of(delays.best(500)) == 1  # 1700 before it against 1600
    assert number_of(delays_of((1, 600, -1), (2, 0, -1)).best(500)) == 0


def test_a_long_prompt_does_not_wait_where_few_are_held_up():
    """By its own load the first would be best, with 16 held up by 8000 tokens instead of 24."""
    delays = delays_of((16, 8000, -1), (24, 0, -1))
    assert number_of(delays.best(8000)) == 1


def test_where_queues_are_long_their_work_counts_and_not_how_many_wait():
    """Else short prompts gather on some ranks, and long ones queue ever longer on others."""
    delays = delays_of((60, 760_000, -1), (250, 600_000, -1))
    assert number_of(delays.best(77_000)) == 1


def test_a_prompt_goes_where_it_throws_nobody_out():
    fuller, emptier = (0, 0, -1, FULL // 2), (1, 0, -1, 0)
    assert number_of(delays_of(fuller, emptier).best(600)) == 1  # 5 * 225 against 800
    assert number_of(delays_of(fuller, emptier).best(300)) == 0  # one request is dearer
    assert number_of(delays_of(fuller, emptier).best_of([0, 1], 600)) == 1


def test_where_all_are_full_nothing_is_charged():
    """Somebody is thrown out wherever it goes."""
    delays = delays_of((0, 0, -1, FULL), (1, 0, -1, FULL))
    assert number_of(delays.best(10_000)) == 0
    assert delays.best(10_000)[0] == added_delay(10_000, 0, 0, 0.5)


@pytest.mark.parametrize(
    ("ranks", "best"),
    [
        ([(0, 0, 5, 2), (0, 0, 6, 1)], 1),  # the same with nothing new: the lower level
        ([(0, 0, 5), (0, 0, 4)], 1),  # the one assigned longest ago
        ([(0, 0, -1), (0, 0, -1)], 0),  # the lower number
    ],
)
def test_ties(ranks, best):
    assert number_of(delays_of(*ranks).best(0)) == best
    assert number_of(delays_of(*ranks).best_of([1, 0], 0)) == best


def test_deterministic_ties_know_no_recency():
    assert number_of(delays_of((0, 0, 5), (0, 0, 4), deterministic=True).best(0)) == 0


@pytest.mark.parametrize("seed", range(5))
def test_the_search_finds_what_a_plain_one_does(seed):
    rng = random.Random(seed)
    for _ in range(400):
        count = rng.randint(1, 12)
        ranks = [
            (rng.randint(bool(queued), 12), queued, last, rng.choice([0, 0, 1, 5, FULL]))
            for last in rng.sample(range(count), count)
            for queued in [rng.choice([0, 0, 50, 1000, 4000, rng.randrange(9000)])]
        ]
        delays = delays_of(*ranks)
        new, limit = rng.choice([0, 5, 300, 20_000]), rng.choice([0, 0, 1, 4])
        some = set(rng.sample(range(count), rng.randint(1, count)))

        def order(number, new=new, ranks=ranks):
            load, queued, last, level = ranks[number]
            mean_load = sum(each[0] for each in ranks) / len(ranks)
            room = FULL * len(ranks) - sum(each[3] for each in ranks)
            evicted = new * level * room // (FULL * FULL * len(ranks))
            delay = added_delay(new, 0, 0, mean_load, evicted) + queued + REQUEST_TOKENS * load
            return delay, level, queued + REQUEST_TOKENS * load, last

        for among in (some, set(range(count))):
            open_ = [n for n in among if not limit or ranks[n][0] < limit]
            expected = min(open_, key=order, default=None)
            for found in (
                delays.best(new, limit, among.__contains__),
                delays.best_of(among, new, limit),
            ):
                assert (None if found is None else number_of(found)) == expected


# --- queues --------------------------------------------------------------------------------------


def test_what_is_routed_before_is_prefilled_before_and_freed_once():
    delays = Delays()
    a, b = (pack_hashes(hashes(tokens(2, name=name))) for name in (1, 2))
    for request, chain in ((1, a[-8:]), (2, None), (3, b[-8:])):
        delays.begin(0, request, 100, chain)
    assert delays.queued(0) == 300
    assert delays.stored(0, [a], 16)
    assert delays.queued(0) == 200
    delays.finish(0, 1)
    assert delays.queued(0) == 200
    assert delays.stored(0, [b], 16)
    assert delays.queued(0) == 0
    delays.finish(0, 3)
    delays.check_integrity({}, {})


def test_a_long_prompt_waits_less_with_every_chunk():
    delays = Delays()
    chain = pack_hashes(hashes(tokens(6, name=1)))
    delays.begin(0, 1, 96, chain[-8:])
    delays.begin(0, 2, 50, None)
    assert delays.stored(0, [chain[:16]], 16)
    assert delays.queued(0) == 64 + 50
    # Two blocks more than were left of it: those are of the next one.
    assert delays.stored(0, [chain[16:], pack_hashes([7, 8])], 16)
    assert delays.queued(0) == 50 - 32
    assert delays.stored(0, [pack_hashes([9, 10, 11])], 16)  # e.g. of answers: none is owed
    assert delays.queued(0) == 0
    assert not delays.stored(0, [pack_hashes([12])], 16)
    delays.check_integrity({1: 0, 2: 0}, {})
    delays.finish(0, 2)
    delays.check_integrity({}, {})


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
        fleet.core.fleet.router._by_delay._delays.queued(n)
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
    assert fleet.core.fleet.router._by_delay._delays.queued(rank) == 0


def test_without_hashes_or_lengths_it_goes_by_queue_and_load():
    fleet = by_delay(2)
    assert [fleet.route() for _ in range(4)] == [0, 1, 0, 1]


def test_with_load_balanced_signal_nothing_is_queued():
    fleet = by_delay(2, coordinator_policy="load_balanced")
    assert fleet.core.fleet.router._by_delay is None
    assert [fleet.route(tokens(4)) for _ in range(3)] == [0, 1, 0]


def test_packed_chains_of_other_requests_do_not_end_a_prefill():
    delays = Delays()
    chain = pack_hashes(hashes(tokens(3)))
    delays.begin(0, 1, 100, chain[-8:])
    shifted = b"\1" + chain + b"\1" * 7
    assert delays.stored(0, [shifted, pack_events([5])], 16)
    assert delays.queued(0) == 100 - 5 * 16
    assert not delays.stored(1, [chain], 16)
