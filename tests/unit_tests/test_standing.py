"""The order of ranks: beside a plain sort, at every step."""

import random

import pytest

from megatron.core.inference.coordinator.standing import Standing


def standing_of(*ranks, deterministic=False):
    standing = Standing(deterministic)
    for number, load, last in ranks:
        standing.update(number, load, last)
    return standing


def test_the_lower_load_comes_first():
    assert standing_of((0, 2, -1), (1, 1, 9), (2, 3, -1)).first() == 1


def test_of_equal_load_the_rank_assigned_longest_ago_and_never_is_longest():
    assert standing_of((0, 1, 5), (1, 1, 4), (2, 1, 6)).first() == 1
    assert standing_of((0, 1, 0), (1, 1, -1)).first() == 1


def test_then_the_lower_number():
    assert standing_of((7, 0, -1), (3, 0, -1), (5, 0, -1)).first() == 3


def test_deterministic_order_knows_no_recency():
    assert standing_of((0, 1, 5), (1, 1, 4), deterministic=True).first() == 0


def test_no_rank_is_first_where_there_is_none():
    with pytest.raises(IndexError):
        Standing().first()
    standing = standing_of((0, 1, 1))
    standing.remove(0)
    standing.remove(0)
    assert len(standing) == 0


def test_the_first_of_some_ranks_and_of_those_that_are_accepted():
    standing = standing_of((0, 0, 1), (1, 1, 2), (2, 1, 3), (3, 2, 0))
    assert standing.first_of([3, 2, 1]) == 1
    asked = []
    assert standing.first_where(lambda rank: asked.append(rank) or rank >= 2) == 2
    assert asked == [0, 1, 2]
    with pytest.raises(KeyError):
        standing.first_of([0, 9])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_the_order_is_that_of_a_plain_sort(seed, deterministic):
    rng = random.Random(seed)
    standing = Standing(deterministic)
    ranks = {}
    for step in range(3000):
        number = rng.randrange(65_536) if rng.random() < 0.1 else rng.randrange(20)
        if rng.random() < 0.1:
            standing.remove(number)
            ranks.pop(number, None)
        else:
            last = rng.choice([-1, step, step, 2**40 + step])
            ranks[number] = (rng.choice([0, 1, 2, rng.randrange(5000)]), last)
            standing.update(number, *ranks[number])
        order = sorted(ranks, key=lambda n: (ranks[n][0], 0 if deterministic else ranks[n][1], n))
        assert len(standing) == len(ranks)
        if not order:
            continue
        assert standing.first() == order[0]
        assert all(standing.load(n) == ranks[n][0] for n in ranks)
        some = set(rng.sample(order, rng.randint(1, len(order))))
        expected = next(n for n in order if n in some)
        assert standing.first_of(some) == standing.first_where(some.__contains__) == expected
