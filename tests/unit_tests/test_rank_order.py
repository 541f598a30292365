"""Ranks in an order: their keys, and where values begin (`test_standing.py` compares the order)."""

from megatron.core.inference.coordinator.rank_order import RankOrder, number_of, value_of


def order_of(*ranks):
    order = RankOrder()
    for number, value, last in ranks:
        order.put(number, value, last)
    return order


def test_a_key_has_the_value_and_the_number():
    order = order_of((65_535, 2**80 + 3, 2**47), (7, 0, -1))
    assert [(value_of(key), number_of(key)) for key in order.sorted] == [
        (0, 7),
        (2**80 + 3, 65_535),
    ]


def test_a_rank_is_in_it_once_and_may_be_removed_twice():
    order = order_of((1, 5, 0), (2, 6, 0), (1, 7, 0))
    assert [number_of(key) for key in order.sorted] == [2, 1]
    order.remove(2)
    order.remove(2)
    assert order.sorted == [order.keys[1]]
    assert order.keys.keys() == {1}


def test_where_a_value_begins():
    order = order_of((1, 5, 9), (2, 5, 3), (3, 8, 0))
    assert [order.index_from(value) for value in (0, 5, 6, 8, 9)] == [0, 0, 2, 2, 3]
    assert order.index_from(0, start=1) == 1
