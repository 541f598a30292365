"""Cache events: their form, and what is believed of them, through the socketless core."""

import hashlib
import random
import struct
from dataclasses import dataclass, field

import pytest
from builders import CLIENT, Fleet, logs, make_register, sends, tokens
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.inference.coordinator import kv_events
from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.accuracy import Accuracy
from megatron.core.inference.coordinator.hashing import (
    block_hashes,
    epoch_mask,
    pack_hashes,
    rekeyed,
)
from megatron.core.inference.coordinator.kv_events import (
    BREAK,
    CLEARED,
    Change,
    EventStream,
    pack_events,
    segments,
)
from megatron.core.inference.coordinator.lifecycle import Signal

BLOCK = 4
PROMPT = tokens(3)
HASHES = block_hashes(PROMPT, BLOCK)


def told(first: int, *events: int, epoch: int = 0) -> m.KvEvents:
    return m.KvEvents(epoch, first, len(events), pack_events(events))


def depth(fleet: Fleet, rank: int = 0) -> int:
    index = fleet.core.fleet.index
    return index.depth(rank, index.match(pack_hashes(HASHES)))


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
    fleet.now = 60.0
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
    fleet.tell(b"0", told(4, *(-block for block in HASHES)))
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


# --- segments ------------------------------------------------------------------------------------

STORED, REMOVED = Change.STORED, Change.REMOVED


def split(*events: int) -> list[tuple[Change, list[int]]] | None:
    """The segments of these events, unpacked."""
    parts = segments(pack_events(events), len(events))
    assert parts is not None
    return [(change, list(struct.unpack(f"<{len(p) // 8}q", p))) for change, p in parts]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], []),
        ([CLEARED], [(Change.CLEARED, [])]),
        ([5], [(STORED, [5])]),
        ([-5], [(REMOVED, [5])]),
        ([5, 6, 7], [(STORED, [5, 6, 7])]),
        ([-5, -6, -7], [(REMOVED, [5, 6, 7])]),
        ([CLEARED, 5, 6], [(Change.CLEARED, []), (STORED, [5, 6])]),
        ([5, BREAK, 6], [(STORED, [5]), (STORED, [6])]),
        ([-7, BREAK, -5, -6], [(REMOVED, [7]), (REMOVED, [5, 6])]),
        ([5, -5, 6], [(STORED, [5]), (REMOVED, [5]), (STORED, [6])]),
        ([5, CLEARED, 6], [(STORED, [5]), (Change.CLEARED, []), (STORED, [6])]),
        # What nobody should write, and anybody could.
        ([BREAK], []),
        ([BREAK, BREAK, 5, BREAK], [(STORED, [5])]),
        ([5, BREAK, -6], [(STORED, [5]), (REMOVED, [6])]),
        ([CLEARED, CLEARED], [(Change.CLEARED, [])]),
        ([2**63 - 1, -(2**63 - 1)], [(STORED, [2**63 - 1]), (REMOVED, [2**63 - 1])]),
    ],
)
def test_a_batch_is_split_into_its_chains(events, expected):
    assert split(*events) == expected
    # The same among so many events that numpy looks for them.
    chain = list(range(1000, 1200))
    assert split(*chain, CLEARED, BREAK, *events) == [
        (STORED, chain),
        (Change.CLEARED, []),
        *expected,
    ]


def by_the_rules(events: list[int]) -> list[tuple[Change, list[int]]]:
    parts: list[tuple[Change, list[int]]] = []
    before = None
    for event in events:
        change = None if event == BREAK else Change((event > 0) - (event < 0))
        if change is not None and change is not before:
            parts.append((change, []))
        if event not in (BREAK, CLEARED):
            parts[-1][1].append(abs(event))
        before = change
    return parts


EVENT = (
    st.sampled_from([CLEARED, BREAK, 1, -1, 2**63 - 1, -(2**63) + 1, 2**56, -(2**56)])
    | st.integers(1, 2**63 - 1)
    | st.integers(-(2**63) + 1, -1)
)
EVENTS = st.lists(EVENT, max_size=200)


@given(EVENTS)
def test_any_events_are_split_by_the_rules(events):
    assert split(*events) == by_the_rules(events)


@pytest.mark.parametrize("length", [79, 80, 81, 5000])
def test_many_events_are_split_by_the_rules(length):
    source = random.Random(length)
    events = []
    while len(events) < length:
        sign = source.choice([1, 1, -1, -1, 0])
        events += [sign * source.randrange(1, 2**63) for _ in range(source.randrange(1, 30))]
        events += [BREAK] * source.randrange(2)
    assert split(*events[:length]) == by_the_rules(events[:length])


@given(st.binary(max_size=1000), st.integers(-1, 130))
def test_any_bytes_are_segments_or_none(packed, count):
    parts = segments(packed, count)
    assert (parts is None) == (len(packed) != 8 * count)
    for change, blocks in parts or ():
        assert type(blocks) is bytes
        assert (blocks == b"") == (change is Change.CLEARED)
        assert all(h > 0 for h in struct.unpack(f"<{len(blocks) // 8}q", blocks))


# --- what has changed ----------------------------------------------------------------------------


def take(stream: EventStream, first: int, *events: int) -> bool:
    return stream.take(first, len(events), pack_events(events))


def changed(stream: EventStream, since: int, until: int, held: list[int], lacking: list[int]):
    return stream.changed(since, until, pack_hashes(held), pack_hashes(lacking))


def test_only_what_contradicts_a_belief_is_a_change():
    stream = EventStream()
    take(stream, 0, CLEARED, 5, 6)
    take(stream, 3, 7, -5)
    assert not changed(stream, 3, 3, [5], [7])
    assert changed(stream, 3, 4, [5], [7])  # 7 was stored, and was believed not to be
    assert not changed(stream, 3, 4, [7], [])  # it counted as held already
    assert changed(stream, 3, 5, [5], [])  # 5 was removed, and was believed to be held
    assert not changed(stream, 3, 5, [7], [5])
    assert changed(stream, 0, 1, [99], [])  # a clear concerns everybody
    assert changed(stream, 0, 1, [], [])
    assert not changed(stream, 3, 5, [], [])


def test_the_ends_of_a_belief_tell_of_all_of_it():
    """The tail of a chain is removed with its last block, and a chain is stored from its first."""
    stream = EventStream()
    take(stream, 0, CLEARED, 1, 2, 3)
    take(stream, 4, -2, -3)
    assert changed(stream, 4, 6, [1, 2, 3], [])
    assert not changed(stream, 4, 6, [1], [2, 3])
    take(stream, 6, 2, 3)
    assert changed(stream, 6, 8, [1], [2, 3])


def test_what_is_not_remembered_any_more_counts_as_changed():
    stream = EventStream()
    take(stream, 0, CLEARED)
    take(stream, 1, *range(1, 10_000))
    assert changed(stream, 100, 110, [10**9], [])
    assert not changed(stream, 9_990, 10_000, [10**9], [])
    assert not changed(stream, 10_000 - 4096, 10_000, [10**9], [])
    assert changed(stream, 10_000 - 4096, 10_000, [], [10_000 - 4096])


def test_what_was_missed_counts_as_changed():
    stream = EventStream()
    take(stream, 0, CLEARED, *range(1, 100))
    take(stream, 500, CLEARED, 7)
    for number in (50, 99, 100, 450, 499, 500):
        assert changed(stream, number, number + 1, [10**9], [])
    assert not changed(stream, 501, 502, [10**9], [])


def test_what_is_remembered_is_bounded():
    stream = EventStream()
    take(stream, 0, CLEARED)
    batch = pack_events(range(1, 301))
    for number in range(100):
        assert stream.take(1 + 300 * number, 300, batch)
        assert len(stream._recent) <= 8 * 2 * 4096
    assert stream.next == 1 + 300 * 100
    stream.take(stream.next, 100_000, pack_events(range(100_000)))
    assert len(stream._recent) == 8 * 4096


def test_parts_of_two_events_are_not_mistaken_for_one():
    """Read from its second byte on, this pair shows the event that is looked for."""
    stream = EventStream()
    block = int.from_bytes(b"abcdefgh", "little")
    pair = struct.unpack("<qq", b".abcdefgh.......")
    take(stream, 0, CLEARED, *pair, 9)
    assert not changed(stream, 1, 4, [], [block])
    take(stream, 4, block)
    assert changed(stream, 1, 5, [], [block])
    zeros = struct.unpack("<qq", b"." + bytes(8) + b".......")
    take(stream, 5, *zeros)
    assert not changed(stream, 5, 7, [], [])


class Numbered:
    """An event stream as its docstring has it, with every event kept."""

    def __init__(self):
        self.next, self.trusted, self.asked = 0, False, False
        self.events: dict[int, int] = {}

    def take(self, first: int, *events: int) -> bool:
        if events[:1] == (CLEARED,):
            self.trusted, self.asked, self.events = True, False, {}
        elif not self.trusted or first != self.next:
            self.trusted = False
            return False
        self.next = first + len(events)
        self.events |= dict(enumerate(events, first))
        return True


BATCHES = st.lists(
    st.tuples(st.sampled_from([0, 0, 0, 0, 0, 0, 1, -1, 50]), st.lists(EVENT, max_size=6))
)


@given(BATCHES)
def test_a_stream_follows_the_numbers(batches):
    stream, model = EventStream(), Numbered()
    for skip, events in batches:
        first = model.next + skip
        stream.asked = model.asked = not model.trusted
        assert take(stream, first, *events) == model.take(first, *events)
        assert (stream.next, stream.trusted) == (model.next, model.trusted)
        assert stream.asked == model.asked


@dataclass
class Forest:
    """An engine's cache that stores and removes at random, by the rules.

    Block n > 0 extends block (n - 1) // 3; block 0 is the root, which is no block.
    """

    source: random.Random
    held: set[int] = field(default_factory=set)

    @staticmethod
    def path(block: int) -> list[int]:
        path = []
        while block > 0:
            path.append(block)
            block = (block - 1) // 3
        return path[::-1]

    def store(self) -> list[int]:
        """A chain: those of some path that are not there yet."""
        chain = [b for b in self.path(self.source.randrange(1, 1000)) if b not in self.held]
        self.held.update(chain)
        return chain

    def remove(self) -> list[int]:
        """The tail of a chain."""
        parents = {(block - 1) // 3 for block in self.held}
        leaves = sorted(self.held - parents)
        if not leaves:
            return []
        tail = [self.source.choice(leaves)]
        while tail[0] > 3 and self.source.random() < 0.7:
            parent = (tail[0] - 1) // 3
            if len({3 * parent + i for i in (1, 2, 3)} & self.held) > 1:
                break
            tail.insert(0, parent)
        self.held.difference_update(tail)
        return [-block for block in tail]

    def batch(self) -> list[int]:
        events: list[int] = []
        for _ in range(self.source.randrange(1, 6)):
            if self.source.random() < 0.02:
                self.held.clear()
                events.append(CLEARED)
                continue
            segment = self.store() if self.source.random() < 0.5 else self.remove()
            if events and segment and (events[-1] > 0) == (segment[0] > 0) and events[-1]:
                events.append(BREAK)
            events += segment
        return events


@pytest.mark.parametrize("seed", range(20))
def test_a_change_of_a_prompts_depth_is_seen_at_the_ends_of_the_belief(seed, monkeypatch):
    """Looking for two blocks finds what looking for all of the prompt's would."""
    monkeypatch.setattr(kv_events, "_REMEMBERED", 40)
    source = random.Random(seed)
    forest, stream = Forest(source), EventStream()
    events = [CLEARED]
    take(stream, 0, CLEARED)
    past: list[tuple[int, set[int]]] = [(1, set())]  # number of events, and what was held then
    for _ in range(300):
        batch = forest.batch()
        assert take(stream, len(events), *batch)
        events += batch
        past.append((len(events), set(forest.held)))
        since, held_then = source.choice(past[-12:])
        prompt = forest.path(source.randrange(1, 1000))
        held = [block for block in prompt if block in held_then]
        lacking = prompt[len(held) :]
        until = source.randrange(since, len(events) + 1)
        while until < len(events) and max(events[until - 1 : until + 1]) < 0:
            until += 1  # no request is scheduled in the middle of a tail
        window = set(events[since:until])
        expected = not window.isdisjoint({*lacking, *(-b for b in held), CLEARED})
        answer = changed(stream, since, until, held, lacking)
        if since >= len(events) - 40 and CLEARED not in events[since:]:
            assert answer == expected
        else:  # it may be forgotten, and then counts as changed
            assert answer or not expected


# --- keys of weight epochs -----------------------------------------------------------------------

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
    digest = hashlib.sha256(struct.pack("<q", 7)).digest()
    assert epoch_mask(7) == struct.unpack("<Q", digest[:8])[0] & (2**63 - 1)
    assert epoch_mask(0) == 0
