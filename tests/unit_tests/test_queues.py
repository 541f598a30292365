"""Queues of prefill: what is computed when, as answers and events tell."""

from builders import hashes, tokens

from megatron.core.inference.coordinator.hashing import pack_hashes
from megatron.core.inference.coordinator.kv_events import pack_events
from megatron.core.inference.coordinator.queues import PrefillQueues


def test_what_is_routed_before_is_prefilled_before_and_freed_once():
    queues = PrefillQueues()
    a, b = (pack_hashes(hashes(tokens(2, name=name))) for name in (1, 2))
    for request, chain in ((1, a[-8:]), (2, None), (3, b[-8:])):
        queues.begin(0, request, 100, chain)
    assert queues.tokens(0) == 300
    assert queues.stored(0, [a], 16)
    assert queues.tokens(0) == 200
    queues.finish(0, 1)
    assert queues.tokens(0) == 200
    assert queues.stored(0, [b], 16)
    assert queues.tokens(0) == 0
    queues.finish(0, 3)
    queues.check_integrity({})


def test_what_is_refused_leaves_the_others_waiting():
    queues = PrefillQueues()
    for request in (1, 2, 3):
        queues.begin(0, request, 100, None)
    queues.drop(0, 2)
    queues.drop(0, 2)
    assert queues.tokens(0) == 200
    queues.check_integrity({1: 0, 3: 0})
    queues.finish(0, 2)
    queues.finish(0, 3)
    queues.check_integrity({})


def test_a_long_prompt_waits_less_with_every_chunk():
    queues = PrefillQueues()
    chain = pack_hashes(hashes(tokens(6, name=1)))
    queues.begin(0, 1, 96, chain[-8:])
    queues.begin(0, 2, 50, None)
    assert queues.stored(0, [chain[:16]], 16)
    assert queues.tokens(0) == 64 + 50
    # Two blocks more than were left of it: those are of the next one.
    assert queues.stored(0, [chain[16:], pack_hashes([7, 8])], 16)
    assert queues.tokens(0) == 50 - 32
    assert queues.stored(0, [pack_hashes([9, 10, 11])], 16)  # e.g. of answers: none is owed
    assert queues.tokens(0) == 0
    assert not queues.stored(0, [pack_hashes([12])], 16)
    queues.check_integrity({1: 0, 2: 0})
    queues.finish(0, 2)
    queues.check_integrity({})


def test_packed_chains_of_other_requests_do_not_end_a_prefill():
    queues = PrefillQueues()
    chain = pack_hashes(hashes(tokens(3)))
    queues.begin(0, 1, 100, chain[-8:])
    shifted = b"\1" + chain + b"\1" * 7
    assert queues.stored(0, [shifted, pack_events([5])], 16)
    assert queues.tokens(0) == 100 - 5 * 16
    assert not queues.stored(1, [chain], 16)
