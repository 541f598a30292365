"""Cache events through the socketless core: what is believed, and when it is asked for again."""

import pytest
from builders import CLIENT, Fleet, logs, make_register, sends, tokens
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.accuracy import Accuracy
from megatron.core.inference.coordinator.hashing import block_hashes, epoch_mask, rekeyed
from megatron.core.inference.coordinator.kv_events import (
    CLEARED,
    EventStream,
    pack_events,
    unpack_events,
)
from megatron.core.inference.coordinator.lifecycle import Signal

BLOCK = 4
PROMPT = tokens(3)
HASHES = block_hashes(PROMPT, BLOCK)


def told(first: int, *events: int, epoch: int = 0) -> m.KvEvents:
    return m.KvEvents(epoch, first, len(events), pack_events(events))


def depth(fleet: Fleet, rank: int = 0) -> int:
    return fleet.core.fleet.index.depth(rank, HASHES)


def trusting(**values) -> Fleet:
    """A coordinator with one engine that has told its (empty) table."""
    fleet = Fleet(1, **values)
    assert fleet.tell(b"0", told(0, CLEARED)) == []
    return fleet


def test_what_an_engine_stores_is_held_and_what_it_removes_is_not():
    fleet = trusting()
    assert fleet.tell(b"0", told(1, *HASHES)) == []
    assert depth(fleet) == 3
    fleet.tell(b"0", told(4, -HASHES[2]))
    assert depth(fleet) == 2
    fleet.tell(b"0", told(5, CLEARED))
    assert depth(fleet) == 0


def test_an_engines_word_outlasts_the_ttl_and_replaces_history():
    fleet = Fleet(1, ttl_seconds=10)
    fleet.ask(PROMPT)
    fleet.answer(0)
    assert depth(fleet) == 3  # as history has it
    fleet.tell(b"0", told(0, CLEARED, *HASHES[:2]))
    assert depth(fleet) == 2  # as the engine says
    fleet.now = 1000.0
    fleet.tick()
    assert depth(fleet) == 2


def test_a_just_routed_prompt_counts_at_once_and_is_withdrawn_if_it_is_never_stored():
    fleet = trusting()
    fleet.ask(PROMPT)
    assert depth(fleet) == 3
    fleet.answer(0)
    assert depth(fleet) == 0


def test_a_routed_prompt_that_was_stored_stays():
    fleet = trusting()
    fleet.ask(PROMPT)
    fleet.tell(b"0", told(1, *HASHES))
    fleet.answer(0)
    assert depth(fleet) == 3


@pytest.mark.parametrize(
    "broken",
    [
        told(3, HASHES[2]),  # a gap
        told(1, HASHES[0]),  # a duplicate
        told(2, HASHES[2], epoch=1),  # an epoch that is yet to come
        m.KvEvents(0, 2, 2, pack_events([HASHES[2]])),  # fewer than it says
        m.KvEvents(0, 2, 1, b"short"),
    ],
)
def test_what_does_not_follow_makes_a_rank_untrusted_until_it_has_told_its_table(broken):
    fleet = trusting()
    fleet.tell(b"0", told(1, HASHES[0]))
    effects = fleet.tell(b"0", broken)
    assert [e for e in effects if isinstance(e, m.Send)] == [m.Send(b"0", m.Resync())]
    assert [e.event for e in effects if isinstance(e, m.Log)] == ["rank_untrusted"]
    assert depth(fleet) == 0
    assert fleet.tell(b"0", told(4, HASHES[1])) == []  # asked already
    assert m.Send(b"0", m.Resync()) in fleet.tick()  # but not forgotten
    assert fleet.tell(b"0", told(70, CLEARED, *HASHES)) == []
    assert depth(fleet) == 3
    assert fleet.tell(b"0", told(74, -HASHES[2])) == []
    assert depth(fleet) == 2
    assert m.Send(b"0", m.Resync()) not in fleet.tick()


def test_an_untrusted_rank_is_scored_by_the_history_of_its_requests():
    fleet = trusting()
    fleet.tell(b"0", told(1, HASHES[0]))
    fleet.tell(b"0", told(9, HASHES[0]))
    fleet.ask(PROMPT)
    fleet.answer(0)
    assert depth(fleet) == 3


def test_events_of_an_older_epoch_are_counted_and_not_applied():
    fleet = trusting()
    fleet.tell(b"0", told(1, HASHES[0]))
    fleet.tell(CLIENT, m.Control(Signal.SET_GENERATION_EPOCH, (1,)))
    assert depth(fleet) == 0
    assert fleet.tell(b"0", told(2, HASHES[1])) == []
    assert depth(fleet) == 0
    assert fleet.tell(b"0", told(3, CLEARED, HASHES[0], epoch=1)) == []
    assert depth(fleet) == 1


def test_events_of_a_stranger_and_of_a_client_are_refused():
    fleet = trusting()
    assert [e.message for e in sends(fleet.tell(b"who", told(0, CLEARED)))] == [m.RegisterAgain()]
    assert fleet.tell(CLIENT, told(0, CLEARED)) == [
        m.Log("events_from_client", warning=True, peer=CLIENT)
    ]


def test_events_are_not_kept_where_nobody_routes_on_prefixes():
    fleet = Fleet(1, coordinator_policy="load_balanced")
    fleet.tell(b"0", told(0, CLEARED, *HASHES))
    assert len(fleet.core.fleet.index) == 0


def test_a_prompt_whose_request_lost_its_blocks_counts_as_held_no_more():
    """The engine evicts a running request for room, and then the blocks that it had."""
    fleet = trusting(trace=True)
    fleet.ask(PROMPT)
    fleet.tell(b"0", told(1, *HASHES))
    fleet.tell(b"0", told(4, *(-block for block in reversed(HASHES))))
    assert depth(fleet) == 0
    fleet.ask(PROMPT)  # with the first still in flight; it will be computed anew
    assert depth(fleet) == 3
    reply = m.Answer(1, "COMPLETED", 0, 0, b"", 7)
    (trace,) = [e for e in fleet.tell(b"0", m.EngineReply((reply,))) if isinstance(e, m.Trace)]
    assert (trace.predicted_tokens, trace.in_window) == (0, False)
    fleet.answer(0)
    assert depth(fleet) == 0


def test_a_lost_block_that_is_stored_again_counts_again():
    fleet = trusting()
    fleet.ask(PROMPT)
    fleet.tell(b"0", told(1, *HASHES))
    fleet.tell(b"0", told(4, -HASHES[2]))
    assert depth(fleet) == 2
    fleet.tell(b"0", told(5, HASHES[2]))
    assert depth(fleet) == 3


def test_a_burst_ends_when_its_prompt_is_stored():
    fleet = Fleet(2, burst_cap=8)
    assert [fleet.route(PROMPT) for _ in range(3)] == [0, 0, 0]
    fleet.tell(b"0", told(0, CLEARED, *HASHES))
    assert fleet.route(PROMPT) == 1  # by the formula again: load 3 against 0


def test_prediction_errors_are_kept_apart_from_what_nobody_could_know():
    fleet = trusting(trace=True)
    fleet.tell(b"0", told(1, *HASHES))
    fleet.ask(PROMPT)
    # Between routing and scheduling the engine evicted the last block.
    fleet.tell(b"0", told(4, -HASHES[2]))
    reply = m.Answer(0, "COMPLETED", 8, 0, b"", 5)
    (trace,) = [e for e in fleet.tell(b"0", m.EngineReply((reply,))) if isinstance(e, m.Trace)]
    assert trace.in_window
    accuracy = fleet.core.fleet.router.accuracy[0]
    assert (accuracy.replies, accuracy.in_window, accuracy.wrong) == (1, 1, 0)

    fleet.ask(PROMPT)  # predicted: 2 blocks
    reply = m.Answer(1, "COMPLETED", 4, 0, b"", 5)
    fleet.tell(b"0", m.EngineReply((reply,)))
    assert (accuracy.replies, accuracy.in_window, accuracy.wrong) == (2, 1, 1)
    assert (accuracy.mean_error, accuracy.worst_error) == (4.0, 4)


def test_only_what_contradicts_a_belief_is_a_change():
    stream = EventStream()
    stream.take(0, [CLEARED, 5, 6])
    stream.take(3, [7, -5])
    assert not stream.changed(3, 3, [5], [7])
    assert stream.changed(3, 4, [5], [7])  # 7 was stored, and was believed not to be
    assert not stream.changed(3, 4, [7], [])  # it counted as held already
    assert stream.changed(3, 5, [5], [])  # 5 was removed, and was believed to be held
    assert not stream.changed(3, 5, [7], [5])
    assert stream.changed(0, 1, [99], [])  # a clear concerns everybody


def test_what_is_not_remembered_any_more_counts_as_changed():
    stream = EventStream()
    stream.take(0, [CLEARED])
    stream.take(1, list(range(1, 6000)))
    assert stream.changed(100, 110, [10**9], [])
    assert not stream.changed(5990, 6000, [10**9], [])


def test_members_of_a_group_are_not_in_the_window_of_their_shared_prompt():
    """What the first of them stores was predicted when the second was routed."""
    fleet = trusting()
    fleet.ask(PROMPT)
    fleet.ask(PROMPT)
    fleet.tell(b"0", told(1, *HASHES))
    for number, cached in enumerate([0, 8]):
        reply = m.Answer(number, "COMPLETED", cached, 0, b"", 1 + 3 * number)
        fleet.tell(b"0", m.EngineReply((reply,)))
    accuracy = fleet.core.fleet.router.accuracy[0]
    assert (accuracy.replies, accuracy.in_window, accuracy.wrong) == (2, 0, 0)


def test_ref_zero_under_a_prefix_aware_policy_is_advised_against_once():
    fleet = Fleet(1, register={"eviction": "ref_zero"})
    assert "nothing_kept_between_turns" not in logs(fleet.tell(b"1", make_register(1)))
    fresh = Fleet(0)
    effects = fresh.tell(b"0", make_register(0, eviction="ref_zero"))
    (advice,) = [e for e in effects if getattr(e, "event", "") == "nothing_kept_between_turns"]
    assert advice.fields["set"].endswith("eviction-policy lru")
    unaware = Fleet(0, coordinator_policy="load_balanced")
    effects = unaware.tell(b"0", make_register(0, eviction="ref_zero"))
    assert logs(effects) == ["ranks_registered"]


def test_accuracy_of_nothing_is_no_error():
    assert Accuracy().fields() == {
        "replies": 0,
        "in_window": 0.0,
        "wrong": 0,
        "mean_error": 0.0,
        "worst_error": 0,
    }


EVENTS = st.lists(st.integers(-(2**63) + 1, 2**63 - 1), max_size=20)


@given(EVENTS)
def test_events_survive_the_wire(events):
    assert unpack_events(pack_events(events), len(events)) == events
    assert unpack_events(pack_events(events), len(events) + 1) is None


HASH = st.integers(1, 2**63 - 1)


@given(st.lists(HASH, unique=True), st.integers(0, 2**40))
def test_keys_of_an_epoch_are_a_bijection_on_the_hashes(hashes, epoch):
    keys = rekeyed(hashes, epoch)
    assert rekeyed(keys, epoch) == hashes
    assert len(set(keys)) == len(hashes)
    assert all(1 <= key <= 2**63 - 1 for key in keys)


def test_keys_at_epoch_0_are_the_hashes_and_the_special_values_are_never_masked():
    assert rekeyed([1, 2**63 - 1], 0) == [1, 2**63 - 1]
    mask = epoch_mask(3)
    assert rekeyed([0, -1, mask], 3) == [0, -1, mask]


def test_the_mask_is_the_documented_one():
    import hashlib
    import struct

    digest = hashlib.sha256(struct.pack("<q", 7)).digest()
    assert epoch_mask(7) == struct.unpack("<Q", digest[:8])[0] & (2**63 - 1)
    assert epoch_mask(0) == 0
