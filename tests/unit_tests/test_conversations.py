"""Which conversations fill the ranks' caches: who goes on, who is given up, and what it steers."""

import random
from collections import Counter

import pytest
from builders import BLOCK, CLIENT, Fleet, hashes, tokens

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.conversations import FULL, Conversations
from megatron.core.inference.coordinator.hashing import pack_hashes
from megatron.core.inference.coordinator.kv_events import CLEARED, pack_events
from megatron.core.inference.coordinator.lifecycle import Signal

CAPACITY = 1000


def chain_of(name, size):
    """The hash of the last block of a prompt: eight bytes."""
    return (b"%s%d" % (name, size)).ljust(8, b".")


class Told:
    """Conversations, and prompts told shortly: by a name and their tokens."""

    def __init__(self, ranks=1, capacity=CAPACITY, answer_blocks=0):
        self.conversations = Conversations(answer_blocks)
        for rank in range(ranks):
            self.conversations.add_rank(rank, capacity)

    def begin(self, name, size, *, held=0, new=None, rank=0, now=0.0):
        self.conversations.begin(
            rank, chain_of(name, size), held=chain_of(name, held) if held else b"", now=now,
            new=size - held if new is None else new, tokens=size,
        )  # fmt: skip

    def end(self, name, size, *, rank=0, now=0.0):
        self.conversations.end(rank, chain_of(name, size), now)

    def taken(self, rank=0):
        return self.conversations._tokens[rank]


@pytest.mark.parametrize(
    ("taken", "level"),
    [(0, 0), (600, 0), (640, 0), (650, 1), (800, 4), (999, 7), (1000, FULL), (9000, FULL)],
)
def test_the_level_rises_when_conversations_take_more_than_three_fifths(taken, level):
    told = Told()
    told.begin(b"a", taken)
    assert told.conversations.level(0) == level


@pytest.mark.parametrize("capacity", [None, 0])
def test_a_cache_of_unknown_size_is_never_full(capacity):
    told = Told(capacity=capacity)
    told.begin(b"a", 10**9)
    assert told.conversations.level(0) == 0


def test_a_conversation_that_goes_on_takes_what_it_has_grown_to():
    told = Told()
    told.begin(b"a", 300)
    told.end(b"a", 300, now=1.0)
    told.begin(b"a", 450, held=300, now=5.0)
    assert told.taken() == 450
    told.end(b"a", 450, now=6.0)
    told.begin(b"a", 500, held=0, now=9.0)  # thrown out meanwhile: computed anew, as another one
    assert told.taken() == 950


def test_what_many_share_counts_once():
    told = Told()
    told.begin(b"root", 400)
    for name in (b"a", b"b", b"c"):
        told.begin(name, 450, new=50)
    assert told.taken() == 400 + 3 * 50


def test_equal_prompts_are_one_until_they_go_apart():
    told = Told()
    for new in (300, 16, 16):  # of what is being computed one block is computed again
        told.begin(b"a", 300, new=new)
    assert told.taken() == 300
    told.end(b"a", 300, now=1.0)
    told.begin(b"a", 340, held=300, now=2.0)  # the others are still being answered
    assert told.taken() == 340
    told.end(b"a", 300, now=3.0)
    told.end(b"a", 300, now=3.0)
    told.begin(b"a", 350, held=300, now=4.0)
    assert told.taken() == 40 + 350


def test_who_pauses_is_counted_until_it_comes_back_or_is_given_up():
    told = Told(ranks=2)
    pausing = told.conversations.pausing
    for name in (b"a", b"b"):
        told.begin(name, 300)
        assert pausing(0) == 0 + (name == b"b")
        told.end(name, 300, now=1.0)
    assert (pausing(0), pausing(1)) == (2, 0)
    told.begin(b"a", 400, held=300, now=2.0)
    assert pausing(0) == 1
    told.begin(b"b", 300, held=300, now=2.0)  # the same again
    assert pausing(0) == 0
    told.end(b"a", 400, now=3.0)
    assert pausing(0) == 1
    told.conversations.expire(1e6)
    assert pausing(0) == 0


def test_where_a_prompt_s_conversation_pauses():
    told = Told(ranks=3)
    for rank in range(3):
        told.begin(b"a", 300, rank=rank)
    told.end(b"a", 300, rank=1)
    told.end(b"a", 300, rank=2)
    where = told.conversations.paused_before
    assert where(chain_of(b"a", 200) + chain_of(b"a", 300)) == [1, 2]
    assert where(chain_of(b"a", 300) + chain_of(b"a", 316)) == []  # an answer, and none is cached
    assert where(b"") == []


def test_where_answers_are_cached_a_conversation_is_known_after_some_blocks_of_one():
    told = Told(answer_blocks=2)
    told.begin(b"a", 300)
    told.end(b"a", 300, now=1.0)
    answer = [chain_of(b"a", size) for size in (300, 316, 332, 348)]
    assert told.conversations.paused_before(b"".join(answer[:3])) == [0]
    assert told.conversations.paused_before(b"".join(answer)) == []
    told.conversations.begin(
        0, chain_of(b"a", 400), held=b"".join(answer[:3]), new=68, tokens=400, now=2.0
    )
    assert told.taken() == 400  # the answer of 32 tokens as well
    assert told.conversations.pausing(0) == 0


def test_who_pauses_for_four_times_as_long_as_others_is_given_up():
    told = Told(ranks=2)
    now = 0.0
    told.begin(b"a", 10)
    for size in range(20, 12_000, 10):  # 10 s again and again: that is learned
        told.end(b"a", size - 10, now=now)
        now += 10.0
        told.begin(b"a", size, held=size - 10, now=now)
    told.begin(b"b", 500, rank=1, now=now)
    told.begin(b"c", 200, rank=1, now=now)
    told.end(b"b", 500, rank=1, now=now)
    assert told.conversations.expire(now + 39.0) == set()
    assert told.taken(1) == 700
    assert told.conversations.expire(now + 41.0) == {1}
    assert told.taken(1) == 200  # those that run are never given up
    assert told.taken(0) == 11_990


def talk(told, turns, pause, now=0.0):
    """A conversation of so many turns; when its last one has ended."""
    told.begin(b"a", 10, now=now)
    for turn in range(1, turns):
        told.end(b"a", 10 * turn, now=now)
        now += pause
        told.begin(b"a", 10 * (turn + 1), held=10 * turn, now=now)
    told.end(b"a", 10 * turns, now=now)
    return now


def test_requests_that_are_tried_again_teach_no_pause_below_zero():
    told = Told()
    talk(told, 1000, -1000.0)  # each came before what it goes on from had ended
    told.begin(b"b", 10, now=0.0)
    told.end(b"b", 10, now=1000.0)
    assert told.conversations.expire(1000.0) == {0}  # of the year before
    assert told.conversations.pausing(0) == 1


def test_nobody_is_waited_for_longer_than_five_minutes():
    told = Told()
    now = talk(told, 1000, 3600.0)  # an hour each time
    assert told.conversations.expire(now + 299.0) == set()
    assert told.conversations.expire(now + 301.0) == {0}


def test_who_pauses_ten_seconds_is_waited_for_after_many_that_hardly_do():
    """Those that are given up teach nothing: too short a wait would stay so."""
    told = Told()
    now = talk(told, 1000, 0.5)
    assert told.conversations.expire(now + 19.0) == set()
    told.begin(b"a", 10_010, held=10_000, now=now + 19.0)
    told.end(b"a", 10_010, now=now + 19.0)
    assert told.conversations.expire(now + 40.0) == {0}


def test_the_same_prompt_again_teaches_no_pause():
    """Questions shorter than a block after the same beginning are the same to a cache."""
    told = Told()
    for now in range(1000):
        told.begin(b"a", 10, held=10, new=1, now=float(now))
        told.end(b"a", 10, now=float(now))
    assert told.conversations.expire(999.0 + 119.0) == set()  # as before any pause is known


def test_what_was_refused_is_not_waited_for_and_takes_nothing():
    told = Told()
    told.begin(b"a", 300)
    told.begin(b"a", 300)
    told.conversations.end(0, chain_of(b"a", 300), 1.0, completed=False)
    assert told.taken() == 300  # the other one runs
    told.conversations.end(0, chain_of(b"a", 300), 1.0, completed=False)
    assert (told.taken(), told.conversations.pausing(0)) == (0, 0)
    told.conversations.check_integrity({})


def test_a_conversation_that_goes_elsewhere_is_waited_for_no_more():
    told = Told(ranks=2)
    told.begin(b"a", 300)
    told.end(b"a", 300)
    told.conversations.leave(0, chain_of(b"a", 300))
    assert (told.taken(), told.conversations.pausing(0)) == (0, 0)
    assert told.conversations.paused_before(chain_of(b"a", 300)) == []
    told.conversations.check_integrity({})


def test_what_runs_at_an_update_of_the_weights_does_not_come_back_to_what_is_cached():
    told = Told()
    for name in (b"a", b"b"):
        told.begin(name, 300)
    told.conversations.clear()
    told.begin(b"b", 300)  # with the new weights
    told.end(b"a", 300)
    assert told.conversations.pausing(0) == 0
    told.end(b"b", 300)
    told.end(b"b", 300)
    assert told.conversations.pausing(0) == 1
    told.conversations.check_integrity({})


def test_a_lost_rank_has_none_and_answers_of_its_last_life_are_nothing():
    told = Told(ranks=2)
    told.begin(b"a", 300)
    told.begin(b"b", 300)
    told.end(b"b", 300, now=1.0)
    told.conversations.drop_rank(0)
    told.end(b"a", 300, now=2.0)
    told.conversations.add_rank(0, CAPACITY)
    told.end(b"a", 300, now=2.0)
    assert told.taken() == 0
    assert told.conversations.expire(1e6) == set()
    told.conversations.check_integrity({})


@pytest.mark.parametrize("seed", range(5))
def test_counts_follow_the_requests_whatever_comes(seed):
    rng = random.Random(seed)
    told, running, now = Told(ranks=3), Counter(), 0.0
    for _ in range(2000):
        now += rng.expovariate(1.0)
        rank, name = rng.randrange(3), rng.choice([b"a", b"b", b"c"])
        match rng.randrange(20):
            case 0:
                told.conversations.drop_rank(rank)
                told.conversations.add_rank(rank, CAPACITY)
                running = Counter({k: n for k, n in running.items() if k[0] != rank})
            case 1 | 2:
                told.conversations.expire(now)
            case kind if kind < 12:
                size = rng.randrange(1, 9) * 50
                held = rng.choice([0, size, size - 50])
                told.begin(name, size, held=held, new=rng.randrange(60), rank=rank, now=now)
                running[rank, chain_of(name, size)] += 1
            case _ if running:
                rank, chain = rng.choice(sorted(running))
                told.conversations.end(rank, chain, now)
                running = running - Counter([(rank, chain)])
        told.conversations.check_integrity(running)


# --- in a fleet ----------------------------------------------------------------------------------


def by_delay(ranks, register=None, **settings):
    return Fleet(ranks, register, cost_policy="added_delay", **settings)


def events(first, numbers):
    return m.KvEvents(0, first, len(numbers), pack_events(numbers))


def level(fleet, rank):
    fleet.core.check_integrity()
    return fleet.core.fleet.router._by_delay._conversations.level(rank)


def test_new_conversations_go_where_others_leave_them_room():
    """Both ranks are idle, and the first would be asked first: it was idle longer."""
    fleet = by_delay(2, {"total_blocks": 100})
    first, request = fleet.ask(tokens(90, name=1))
    fleet.answer(request)
    second, request = fleet.ask(tokens(10, name=2))
    fleet.answer(request)
    assert (first, second) == (0, 1)
    assert (level(fleet, 0), level(fleet, 1)) == (6, 0)
    assert fleet.route(tokens(60, name=3)) == 1


def test_a_conversation_that_is_over_makes_room_after_a_while():
    fleet = by_delay(2, {"total_blocks": 100})
    for size, name in ((90, 1), (10, 2)):
        fleet.answer(fleet.ask(tokens(size, name=name))[1])
    fleet.now += 130.0  # four times the half minute that is taken for granted at first
    assert fleet.route(tokens(60, name=3)) == 0
    assert level(fleet, 0) == 0


def test_new_weights_end_what_conversations_take():
    fleet = by_delay(1, {"total_blocks": 100})
    _, request = fleet.ask(tokens(45, name=1))
    fleet.answer(request)
    _, request = fleet.ask(tokens(50, name=2))  # still being answered
    assert level(fleet, 0) == 6
    fleet.tell(CLIENT, m.Control(Signal.SET_GENERATION_EPOCH, (1,)))
    assert level(fleet, 0) == 0
    fleet.answer(request)
    assert level(fleet, 0) == 0
    fleet.ask(tokens(90, name=1))
    assert level(fleet, 0) == 6


def test_conversations_that_pause_are_spread_and_come_back_to_where_they_were():
    """They never run at the same time: by load alone the first rank would get all of them."""
    fleet = by_delay(2, deterministic=True)
    where = {}
    for name in range(6):
        where[name], request = fleet.ask(tokens(4, name=name))
        fleet.answer(request)
    assert sorted(where.values()) == [0, 0, 0, 1, 1, 1]
    for name, rank in where.items():
        again, request = fleet.ask(tokens(4, name=name) + tokens(1, name=70 + name))
        assert again == rank
        fleet.answer(request)
    fleet.core.check_integrity()


def test_a_short_conversation_comes_back_although_it_is_cheaper_elsewhere_by_who_pauses():
    """One block to compute again, against all that counts for others that pause there."""
    fleet = by_delay(2)
    rank, request = fleet.ask(tokens(1, name=1))
    fleet.answer(request)
    assert fleet.route(tokens(1, name=1) + tokens(1, name=2)) == rank


@pytest.mark.parametrize("kept", [False, True])
def test_a_conversation_goes_on_whether_its_answer_is_cached_or_not(kept):
    fleet = by_delay(1, generated_tokens=kept)
    first, answered, asked = tokens(4, name=1), tokens(3, name=2), tokens(2, name=3)
    fleet.tell(b"0", events(0, [CLEARED]))
    _, request = fleet.ask(first)
    whole = hashes(first + answered)
    stored = whole if kept else whole[:4]
    fleet.tell(b"0", events(1, stored))
    fleet.answer(request)
    conversations = fleet.core.fleet.router._by_delay._conversations
    assert conversations.pausing(0) == 1
    fleet.ask(first + answered + asked)
    assert fleet.holders(first + answered)[0] == 7
    assert conversations.pausing(0) == 0
    assert conversations._tokens[0] == BLOCK * 9


def test_where_only_first_blocks_are_read_nobody_is_waited_for():
    """Nobody can tell what goes on with what: each turn would leave one more."""
    fleet = by_delay(2, coordinator_policy="first_prefix_block")
    for turn in range(1, 10):
        fleet.answer(fleet.ask(tokens(turn, name=1))[1])
    conversations = fleet.core.fleet.router._by_delay._conversations
    assert (conversations.pausing(0), conversations.pausing(1)) == (0, 0)


def test_a_session_that_is_moved_is_waited_for_where_it_went():
    fleet = by_delay(2)
    prompt = tokens(4, name=1)
    rank, request = fleet.ask(prompt)
    fleet.answer(request)
    for name in range(2, 12):
        other, request = fleet.ask(tokens(300, name=name))
        if other != rank:
            fleet.answer(request)  # the first one stays busy
    moved, request = fleet.ask(prompt + tokens(1, name=50))
    assert moved != rank
    conversations = fleet.core.fleet.router._by_delay._conversations
    assert conversations.paused_before(pack_hashes(hashes(prompt))) == []


def test_a_rank_that_keeps_nothing_is_never_full_and_nobody_comes_back_to_it():
    fleet = by_delay(2, {"total_blocks": 100, "eviction": "ref_zero"})
    _, request = fleet.ask(tokens(95, name=1))
    assert level(fleet, 0) == 0
    fleet.answer(request)
    fleet.core.check_integrity()
    assert fleet.core.fleet.router._by_delay._conversations.pausing(0) == 0


def test_a_lost_rank_takes_its_conversations_with_it():
    fleet = by_delay(2, {"total_blocks": 100})
    fleet.ask(tokens(97, name=1))
    fleet.tell(b"0", m.PeerLost())
    fleet.core.check_integrity()
    assert level(fleet, 1) == 7  # its request was given to the other one
    assert fleet.core.fleet.router._by_delay._conversations._tokens[1] == BLOCK * 97
