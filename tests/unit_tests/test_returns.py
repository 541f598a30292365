"""Ranks that cannot be reached for a while and come back with what they have: exact effects."""

import random

import pytest
from builders import (
    BODY,
    CLIENT,
    Fleet,
    answer,
    engine_request,
    logs,
    lost,
    make_register,
    none_left,
    replies,
    sends,
    submission,
    tokens,
)

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.lifecycle import FleetState, Signal

RUNNING = FleetState.RUNNING
WAIT = 3.0
BROKE = "its connection broke"


def make_fleet(ranks: int = 2, **values) -> Fleet:
    return Fleet(ranks, **{"return_wait": WAIT} | values)


def away(rank: int, requests: int) -> m.Log:
    return m.Log("rank_away", {"rank": rank, "requests": requests}, warning=True)


def back(rank: int, requests: int, missing: int = 0) -> m.Log:
    return m.Log("rank_back", {"rank": rank, "requests": requests, "lost": missing})


def resumption(rank: int, *requests: int, generation: int = 1) -> m.Register:
    return make_register(rank, generation=generation, requests=list(requests))


def acknowledged(rank: int, *kept: int, generation: int = 1) -> m.RegisterAck:
    return m.RegisterAck(rank, generation, 0, RUNNING, list(kept))


# --- back in time --------------------------------------------------------------------------------


def test_a_rank_that_cannot_be_reached_keeps_its_requests_and_gets_no_more():
    fleet = make_fleet()
    fleet.submit("a", "b")
    assert fleet.tell(b"0", m.PeerLost()) == [away(0, 1)]
    assert fleet.tell(b"0", m.PeerLost()) == []  # the next ping
    assert [sent.peer for sent in sends(fleet.submit("c", "d"))] == [b"1", b"1"]
    assert fleet.core.fleet.ledger.load(0) == 1


def test_it_comes_back_over_another_connection_with_what_it_has():
    fleet = make_fleet()
    fleet.submit("a", "b", "c")
    fleet.tell(b"0", m.PeerLost())
    assert fleet.tell(b"0 again", resumption(0, 0, 2)) == [
        m.Send(b"0 again", acknowledged(0, 0, 2)),
        back(0, 2),
    ]
    assert fleet.loads == [1, 2]  # rank 1 became live first
    assert fleet.tell(b"0 again", replies(0, 2)) == [
        m.Send(CLIENT, m.Reply("a", BODY)),
        m.Send(CLIENT, m.Reply("c", BODY)),
    ]
    assert logs(fleet.tick(100.0)) == []


def test_an_engine_may_notice_first():
    """The coordinator stood still: the engine's new connection comes before any send fails."""
    fleet = make_fleet()
    fleet.submit("a", "b")
    assert fleet.tell(b"0 again", resumption(0, 0)) == [
        m.Send(b"0 again", acknowledged(0, 0)),
        back(0, 1),
    ]
    assert fleet.tell(b"0", m.PeerLost()) == []
    assert fleet.tell(b"0 again", replies(0)) == [m.Send(CLIENT, m.Reply("a", BODY))]


def test_what_was_on_its_way_is_sent_again_and_counts_as_no_try():
    fleet = make_fleet(max_retries=1)
    fleet.submit("a", "b", "c")
    fleet.tell(b"0", m.PeerLost())
    assert fleet.tell(b"0 again", resumption(0, 2, 77)) == [
        m.Send(b"0 again", acknowledged(0, 2)),
        back(0, 1, missing=1),
        m.Send(b"1", engine_request(3)),
    ]
    assert {r.client_request_id: r.attempts for r in fleet.core.fleet.ledger} == dict.fromkeys(
        "abc", 0
    )


def test_what_could_not_be_sent_goes_to_another_at_once():
    fleet = make_fleet()
    fleet.submit("a", "b", "c")
    assert fleet.tell(b"0", m.PeerLost((2,))) == [away(0, 2), m.Send(b"1", engine_request(3))]
    (record,) = (r for r in fleet.core.fleet.ledger if r.client_request_id == "c")
    assert record.attempts == 0


def test_silence_ends_with_any_word_over_the_same_connection():
    """It was stopped, and nothing was lost; but what it stored meanwhile was not counted."""
    fleet = make_fleet()
    assert fleet.route(tokens(4)) == 0
    fleet.tell(b"0", m.PeerLost())
    assert fleet.holders(tokens(4)) == {}
    assert fleet.tell(b"0", m.Pong(1)) == [back(0, 1), m.Send(b"0", m.Resync())]
    assert fleet.tell(b"0", replies(0)) == [m.Send(CLIENT, m.Reply(1, BODY))]
    fleet.submit("a", "b")
    fleet.tell(b"0", m.PeerLost())
    said = fleet.tell(b"0", replies(2))
    assert said == [back(0, 1), m.Send(b"0", m.Resync()), m.Send(CLIENT, m.Reply("b", BODY))]


def test_a_rank_that_drains_and_is_away_for_a_moment_still_drains():
    fleet = make_fleet()
    fleet.submit("a", "b")
    fleet.tell(b"0", m.Drain())
    assert fleet.tell(b"0", m.PeerLost()) == [away(0, 1)]
    assert fleet.tell(b"0", m.Pong(1)) == [back(0, 1)]
    assert [sent.peer for sent in sends(fleet.submit("c", "d"))] == [b"1", b"1"]


def test_another_process_of_the_same_name_does_not_go_on_with_it():
    """It has never been acknowledged, or as another generation: the first one has ended."""
    for register in (make_register(0), resumption(0, 0, generation=2)):
        fleet = make_fleet()
        fleet.submit("a", "b")
        fleet.tell(b"0", m.PeerLost())
        effects = fleet.tell(b"new", register)
        assert effects[:2] == [
            lost(0, "it registered again", 1),
            m.Send(b"1", engine_request(2)),
        ]
        assert effects[2] == m.Send(b"new", acknowledged(0, generation=2))


# --- lost ----------------------------------------------------------------------------------------


def test_who_does_not_come_back_in_time_is_lost():
    fleet = make_fleet()
    fleet.submit("a", "b")
    fleet.now = 10.0
    fleet.tell(b"0", m.PeerLost())
    assert logs(fleet.tick(12.9)) == []
    assert fleet.tick(13.0)[:2] == [lost(0, BROKE, 1), m.Send(b"1", engine_request(2))]
    assert fleet.tell(b"0", replies(0)) == [
        m.Send(b"0", m.RegisterAgain()),
        m.Log("reply_from_stranger", warning=True, peer=b"0"),
    ]


def test_ranks_that_are_away_together_are_lost_together_and_nothing_goes_round_among_them():
    """Sixteen requests on two ranks: none is given to the other one and counted as a second try."""
    fleet = make_fleet(max_retries=1)
    fleet.submit(*range(16))
    assert fleet.loads == [8, 8]
    assert fleet.tell(b"1", m.PeerLost()) == [away(1, 8)]
    assert fleet.tell(b"0", m.PeerLost()) == [away(0, 8), none_left(waiting=0)]
    assert sends(fleet.tick(WAIT)) == []
    assert [r.attempts for r in fleet.core.fleet.ledger.waiting] == [1] * 16
    fleet.tell(b"new", make_register(7))
    assert fleet.loads == [16]


def test_the_coordinators_own_standstill_takes_nobodys_time():
    fleet = make_fleet()
    fleet.submit("a", "b")
    fleet.tell(b"0", m.PeerLost())
    fleet.now = 60.0
    assert logs(fleet.tell(b"", m.Tick(stood_still=59.0))) == []
    assert fleet.tell(b"0 again", resumption(0, 0))[1] == back(0, 1)


def test_a_pause_does_not_keep_a_lost_rank_in_the_fleet():
    fleet = make_fleet()
    fleet.submit("a", "b")
    fleet.signal(Signal.PAUSE)
    fleet.tell(b"0", m.PeerLost())
    assert fleet.tick(WAIT)[0] == lost(0, BROKE, 1)


def test_while_the_last_rank_is_away_new_requests_wait_for_it():
    fleet = make_fleet(1, replica_wait=0.0)
    fleet.submit("a")
    assert fleet.tell(b"0", m.PeerLost()) == [away(0, 1), none_left(waiting=0)]
    assert fleet.submit("b") == []
    assert fleet.tell(b"0", m.Pong(1))[2:] == [m.Send(b"0", engine_request(1))]
    fleet.tell(b"0", m.PeerLost())
    fleet.submit("c")
    errors = [s.message for s in sends(fleet.tick(WAIT)) if isinstance(s.message, m.RequestError)]
    assert sorted(error.client_request_id for error in errors) == ["a", "b", "c"]


def test_a_released_engine_knows_no_way_back():
    fleet = make_fleet(0)
    fleet.tell(b"mp-coord-0", m.Register(version=None))
    fleet.submit("a")
    assert fleet.tell(b"mp-coord-0", m.PeerLost()) == [lost(0, BROKE, 1), none_left(waiting=1)]


# --- what counts as a try ------------------------------------------------------------------------


def test_a_request_that_kills_whoever_runs_it_ends_two_replicas_at_most():
    fleet = make_fleet(4, max_retries=1)
    fleet.submit("poison")
    ended = []
    for _ in range(6):
        holders = [r.peer for r in fleet.core.fleet.ranks if fleet.core.fleet.ledger.load(r.number)]
        if not holders:
            break
        (killed,) = holders
        ended.append(killed)
        fleet.tell(killed, m.PeerLost())
        effects = fleet.tick(fleet.now + WAIT)
    assert ended == [b"0", b"1"]
    (error,) = [s.message for s in sends(effects) if isinstance(s.message, m.RequestError)]
    assert error.code == "replica_lost"
    assert "try 2 of 2" in error.text


def test_a_rank_that_comes_back_after_all_was_not_ended_by_what_it_had():
    """Each rank stands still in turn for longer than it is waited for: no request is given up."""
    fleet = make_fleet(2, max_retries=1)
    fleet.submit("a")
    (record,) = fleet.core.fleet.ledger
    for number, _ in enumerate(range(8), start=1):
        peer = fleet.core.fleet.ranks.get(record.rank).peer
        rank, generation = record.rank, fleet.core.fleet.ranks.get(record.rank).generation
        fleet.tell(peer, m.PeerLost())
        fleet.tick(fleet.now + WAIT)
        assert record.attempts == 1
        assert record.rank != rank
        effects = fleet.tell(b"%d-%d" % (rank, number), resumption(rank, 0, generation=generation))
        assert sends(effects)[0].message == acknowledged(rank, generation=generation + 1)
        assert record.attempts == 0
    fleet.answer_all()


def test_past_the_deadline_of_retries_a_lost_request_is_an_error():
    fleet = make_fleet(3, max_retries=5, retry_deadline=20.0)
    fleet.submit("a")
    fleet.now = 10.0
    fleet.tell(b"0", m.PeerLost())
    assert sends(fleet.tick(13.0))[0] == m.Send(b"1", engine_request(1))
    fleet.now = 18.0
    fleet.tell(b"1", m.PeerLost())
    (error,) = [s.message for s in sends(fleet.tick(21.0)) if isinstance(s.message, m.RequestError)]
    assert error.code == "replica_lost"


# --- whatever happens ----------------------------------------------------------------------------


class Engines:
    """Three ranks that answer, stand still, break and come back, and what they have."""

    def __init__(self, fleet: Fleet):
        self.fleet = fleet
        self.has: list[set[int]] = [set(), set(), set()]
        self.peers = [b"0", b"1", b"2"]
        self.generations = [1, 1, 1]
        self.answered: list[str] = []
        self.errors: list[str] = []

    def resumption(self, rank: int) -> m.Register:
        return resumption(rank, *self.has[rank], generation=self.generations[rank])

    def take(self, effects: list[m.Effect]) -> None:
        """Deliver what is sent; to a peer that has gone it does not come."""
        unreached: dict[bytes, list[int]] = {}
        for effect in sends(effects):
            match effect.message:
                case m.Reply(client_request_id=name):
                    self.answered.append(name)
                case m.RequestError(client_request_id=name):
                    self.errors.append(name)
                case m.EngineRequest(request_id=number) if effect.peer in self.peers:
                    self.has[self.peers.index(effect.peer)].add(number)
                case m.EngineRequest(request_id=number):
                    unreached.setdefault(effect.peer, []).append(number)
                case m.RegisterAck(generation=generation, kept=kept):
                    rank = self.peers.index(effect.peer)
                    self.generations[rank] = generation
                    self.has[rank] &= set(kept)
        for peer, numbers in unreached.items():
            self.take(self.fleet.tell(peer, m.PeerLost(tuple(numbers))))


@pytest.mark.parametrize("policy", ["relative_load_weighted", "added_delay"])
@pytest.mark.parametrize("seed", range(20))
def test_whatever_breaks_each_request_is_answered_once_and_the_books_agree(seed, policy):
    rng = random.Random(seed)
    fleet = make_fleet(3, cost_policy=policy, max_retries=rng.choice([1, 3]), burst_cap=2)
    engines, asked = Engines(fleet), 0
    for step in range(400):
        fleet.now += rng.choice([0.0, 0.1, 1.0])
        rank = rng.randrange(3)
        peer = engines.peers[rank]
        match rng.randrange(8):
            case 0 | 1 | 2:
                asked += 1
                prompt = tokens(rng.randrange(1, 4), rng.randrange(3))
                engines.take(fleet.tell(CLIENT, submission(f"{asked}", prompt)))
            case 3 | 4 if engines.has[rank]:
                number = rng.choice(sorted(engines.has[rank]))
                engines.has[rank].discard(number)
                engines.take(fleet.tell(peer, m.EngineReply((answer(number),))))
            case 5:
                fleet.tell(peer, m.PeerLost())
            case 6:  # it comes back over another connection, and something never came over the old
                if engines.has[rank] and rng.random() < 0.3:
                    engines.has[rank].pop()
                engines.peers[rank] = b"%d-%d" % (rank, step)
                engines.take(fleet.tell(engines.peers[rank], engines.resumption(rank)))
            case 7:
                engines.take(fleet.tick(fleet.now))
    for rank in range(3):
        engines.peers[rank] = b"%d-last" % rank
        engines.take(fleet.tell(engines.peers[rank], engines.resumption(rank)))
    while any(engines.has):
        for rank, peer in enumerate(engines.peers):
            numbers, engines.has[rank] = sorted(engines.has[rank]), set()
            engines.take(fleet.tell(peer, replies(*numbers)))
    assert len(fleet.core.fleet.ledger) == 0
    done = engines.answered + engines.errors
    assert sorted(done) == sorted(f"{n}" for n in range(1, asked + 1))
