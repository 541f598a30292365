"""One record per request: what may change it, and a random walk beside a naive model."""

import builders  # noqa: F401 (loads the hypothesis profile)
import pytest
from builders import submission
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.ledger import REQUEST_IDS, Ledger, LedgerError

ANN, BOB = b"ann", b"bob"


def ledger_with(*clients):
    ledger = Ledger()
    records = [ledger.admit(client, submission(f"r{i}")) for i, client in enumerate(clients)]
    ledger.check_integrity()
    return ledger, records


def test_an_admitted_request_waits_and_knows_what_the_client_sent():
    ledger = Ledger()
    message = m.SubmitRequest("mine", 12, b"s", b"p", b"")
    record = ledger.admit(ANN, message)
    assert (record.request_id, record.client, record.client_request_id) == (0, ANN, "mine")
    assert (record.message, record.prompt_tokens, record.rank) == (message, 12, None)
    assert (record.size, record.attempts, record.lease) == (2, 0, None)
    assert ledger.waiting == [record]
    assert ledger.first_waiting is record
    assert list(ledger) == [record]
    assert (len(ledger), ledger.assigned, ledger.load(0)) == (1, 0, 0)


def test_numbers_are_never_used_again():
    ledger, records = ledger_with(ANN, ANN)
    ledger.finish(0)
    ledger.finish(1)
    assert [r.request_id for r in records] == [0, 1]
    assert ledger.admit(ANN, submission("r")).request_id == 2


def test_two_requests_of_one_client_may_have_the_same_name():
    ledger = Ledger()
    first, second = (ledger.admit(ANN, submission("same")) for _ in range(2))
    ledger.assign(first.request_id, 0)
    ledger.finish(first.request_id)
    assert ledger.waiting == [second]
    ledger.check_integrity()


def test_an_assigned_request_is_load_of_its_rank():
    ledger, records = ledger_with(ANN, BOB, ANN)
    ledger.assign(0, 7)
    ledger.assign(2, 7)
    assert (ledger.load(7), ledger.load(0), ledger.assigned) == (2, 0, 2)
    assert ledger.waiting == [records[1]]
    assert records[0].rank == 7
    assert [ledger.held_by(0, 7), ledger.held_by(0, 0), ledger.held_by(1, 7)] == [
        True,
        False,
        False,
    ]
    ledger.check_integrity()


def test_bodies_are_counted_from_admission_to_the_end():
    ledger = Ledger()
    assert ledger.size == 0
    ledger.admit(ANN, m.SubmitRequest("a", 1, bytes(3), bytes(4), bytes(8)))
    ledger.admit(ANN, m.SubmitRequest("b", 1, bytes(30), bytes(40)))
    assert ledger.size == 85
    ledger.assign(0, 7)
    assert ledger.size == 85
    ledger.finish(0)
    assert ledger.size == 70
    ledger.lose_client(ANN)
    assert ledger.size == 0
    ledger.check_integrity()


def test_who_waits_longest_is_first():
    ledger, records = ledger_with(ANN, BOB, ANN)
    assert ledger.first_waiting is records[0]
    ledger.assign(1, 3)
    assert ledger.first_waiting is records[0]
    ledger.assign(0, 3)
    assert ledger.first_waiting is records[2]
    ledger.finish(2)
    assert ledger.first_waiting is None


def test_a_finished_request_is_nobodys():
    ledger, records = ledger_with(ANN)
    ledger.assign(0, 7)
    assert ledger.finish(0) is records[0]
    assert (len(ledger), ledger.load(7), ledger.held_by(0, 7)) == (0, 0, False)
    assert ledger.lose_client(ANN) == 0
    ledger.check_integrity()


def test_a_waiting_request_can_be_finished():
    ledger, records = ledger_with(ANN, BOB)
    ledger.finish(0)
    assert ledger.waiting == [records[1]]
    ledger.check_integrity()


@pytest.mark.parametrize("request_id", [0, 1, 99, -1])
def test_assigning_what_does_not_wait_is_an_error(request_id):
    ledger, _ = ledger_with(ANN, ANN)
    ledger.assign(0, 3)
    ledger.finish(1)
    with pytest.raises(LedgerError, match=f"request {request_id} is not waiting"):
        ledger.assign(request_id, 3)
    assert ledger.load(3) == 1
    ledger.check_integrity()


def test_finishing_an_unknown_or_finished_request_is_an_error():
    ledger, _ = ledger_with(ANN)
    with pytest.raises(LedgerError, match="request 5 is unknown or finished"):
        ledger.finish(5)
    ledger.finish(0)
    with pytest.raises(LedgerError, match="request 0 is unknown or finished"):
        ledger.finish(0)


def test_a_lost_client_leaves_what_runs_and_takes_what_waits():
    ledger, records = ledger_with(ANN, ANN, BOB, ANN)
    ledger.assign(0, 1)
    ledger.assign(3, 2)
    assert ledger.lose_client(ANN) == 2
    assert ledger.waiting == [records[2]]
    assert [r.client for r in ledger] == [None, BOB, None]
    assert [r.message is None for r in records] == [True, True, False, True]  # nobody wants them
    assert (ledger.load(1), ledger.load(2)) == (1, 1)
    ledger.check_integrity()
    ledger.finish(0)
    assert (ledger.load(1), ledger.lose_client(ANN)) == (0, 0)
    ledger.check_integrity()


def test_the_requests_of_a_rank_come_in_the_order_of_their_assignment():
    ledger, records = ledger_with(ANN, BOB, ANN)
    for request_id, rank in [(2, 1), (0, 1), (1, 0)]:
        ledger.assign(request_id, rank)
    assert ledger.of_rank(1) == [records[2], records[0]]
    assert ledger.of_rank(99) == []
    ledger.finish(2)
    assert ledger.of_rank(1) == [records[0]]
    ledger.finish(0)
    assert ledger.of_rank(1) == []


def test_a_requeued_request_waits_again_behind_the_others_and_under_a_new_number():
    ledger, records = ledger_with(ANN, BOB, ANN)
    record = records[0]
    ledger.assign(0, 1)
    record.lost_with = (7,)
    ledger.requeue(record)
    assert (record.request_id, record.rank, record.lease) == (3, None, None)
    assert (record.client, record.client_request_id, record.attempts) == (ANN, "r0", 1)
    assert ledger.waiting == [records[1], records[2], record]
    assert list(ledger) == [records[1], records[2], record]
    assert (len(ledger), ledger.assigned, ledger.load(1)) == (3, 0, 0)
    assert ledger.size == sum(r.size for r in records)
    assert not ledger.held_by(0, 1)
    ledger.check_integrity()
    with pytest.raises(LedgerError, match="request 0 is unknown or finished"):
        ledger.finish(0)
    ledger.assign(3, 2)
    assert ledger.held_by(3, 2)
    assert ledger.finish(3) is record
    assert ledger.lose_client(ANN) == 0
    ledger.check_integrity()


def test_a_requeued_request_is_lost_with_its_client():
    ledger, records = ledger_with(ANN)
    ledger.assign(0, 1)
    ledger.requeue(records[0])
    assert ledger.lose_client(ANN) == 0
    assert (len(ledger), ledger.size, ledger.waiting) == (0, 0, [])
    ledger.check_integrity()


def test_requeueing_what_waits_or_is_finished_is_an_error():
    ledger, records = ledger_with(ANN, ANN)
    with pytest.raises(LedgerError, match="request 0 has no rank"):
        ledger.requeue(records[0])
    ledger.assign(1, 3)
    ledger.finish(1)
    with pytest.raises(LedgerError, match="request 1 is unknown or finished"):
        ledger.requeue(records[1])
    assert (len(ledger), ledger.load(3)) == (1, 0)
    ledger.check_integrity()


def test_the_integrity_check_notices_a_changed_record():
    ledger, records = ledger_with(ANN)
    records[0].rank = 3
    with pytest.raises(AssertionError):
        ledger.check_integrity()
    ledger, records = ledger_with(ANN)
    records[0].client = BOB
    with pytest.raises(AssertionError):
        ledger.check_integrity()
    ledger, records = ledger_with(ANN)
    records[0].size += 1
    with pytest.raises(AssertionError):
        ledger.check_integrity()
    ledger, records = ledger_with(ANN)
    records[0].request_id = 9
    with pytest.raises(AssertionError):
        ledger.check_integrity()


# --- a random walk beside a naive model ----------------------------------------------------------


class LedgerBesideModel(RuleBasedStateMachine):
    """The model is a list of [id, client, rank or None], in the order of the ids."""

    ids = Bundle("ids")

    def __init__(self):
        super().__init__()
        self.ledger = Ledger()
        self.rows = []
        self.order = []  # of assignments
        self.admitted = 0

    def row(self, request_id):
        return next((row for row in self.rows if row[0] == request_id), None)

    @rule(target=ids, client=st.sampled_from([ANN, BOB, b""]), name=st.integers(0, 2))
    def admit(self, client, name):
        record = self.ledger.admit(client, submission(name))
        assert (record.request_id, record.client_request_id) == (self.admitted, name)
        self.rows.append([record.request_id, client, None])
        self.admitted += 1
        return record.request_id

    @rule(target=ids, stranger=st.integers(-1, 50))
    def invent(self, stranger):
        return stranger if stranger >= self.admitted or stranger < 0 else multiple()

    @rule(request_id=ids, rank=st.integers(0, 2))
    def assign(self, request_id, rank):
        row = self.row(request_id)
        if row is None or row[2] is not None:
            with pytest.raises(LedgerError):
                self.ledger.assign(request_id, rank)
        else:
            self.ledger.assign(request_id, rank)
            row[2] = rank
            self.order.append(request_id)

    @rule(request_id=ids)
    def finish(self, request_id):
        row = self.row(request_id)
        if row is None:
            with pytest.raises(LedgerError):
                self.ledger.finish(request_id)
        else:
            record = self.ledger.finish(request_id)
            assert [record.request_id, record.client, record.rank] == row
            self.rows.remove(row)

    @rule(client=st.sampled_from([ANN, BOB, b"", b"nobody"]))
    def lose_client(self, client):
        theirs = [row for row in self.rows if row[1] == client]
        assert self.ledger.lose_client(client) == sum(row[2] is not None for row in theirs)
        self.rows = [row for row in self.rows if row not in theirs or row[2] is not None]
        for row in theirs:
            row[1] = None

    @rule(request_id=ids, target=ids)
    def requeue(self, request_id):
        row = self.row(request_id)
        record = next((r for r in self.ledger if r.request_id == request_id), None)
        if row is None:
            assert record is None
            return multiple()
        if row[2] is None:
            with pytest.raises(LedgerError):
                self.ledger.requeue(record)
            return multiple()
        self.ledger.requeue(record)
        assert record.request_id == self.admitted
        self.rows.remove(row)
        self.rows.append([self.admitted, row[1], None])
        self.admitted += 1
        return record.request_id

    @rule(rank=st.integers(0, 3))
    def of_rank(self, rank):
        theirs = [i for i in self.order if (row := self.row(i)) is not None and row[2] == rank]
        assert [record.request_id for record in self.ledger.of_rank(rank)] == theirs

    @invariant()
    def agrees_with_the_model(self):
        ledger = self.ledger
        ledger.check_integrity()
        assert [[r.request_id, r.client, r.rank] for r in ledger] == self.rows
        assert [r.request_id for r in ledger.waiting] == [r[0] for r in self.rows if r[2] is None]
        assert len(ledger) == len(self.rows)
        assert ledger.first_waiting is next(iter(ledger.waiting), None)
        assert ledger.size == 14 * len(self.rows)
        assert ledger.assigned == sum(row[2] is not None for row in self.rows)
        for rank in range(4):
            assert ledger.load(rank) == sum(row[2] == rank for row in self.rows)
            for request_id in range(-1, self.admitted + 1):
                row = self.row(request_id)
                assert ledger.held_by(request_id, rank) == (row is not None and row[2] == rank)


LedgerBesideModel.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestLedgerBesideModel = LedgerBesideModel.TestCase


def test_numbers_begin_anywhere_and_again_at_the_end_past_those_that_are_taken():
    """Engines keep them in 32 bits."""
    ledger = Ledger(first_id=REQUEST_IDS - 2)
    first, *_ = records = [ledger.admit(ANN, submission(f"r{n}")) for n in range(3)]
    assert [r.request_id for r in records] == [REQUEST_IDS - 2, REQUEST_IDS - 1, 0]
    ledger._next_id = REQUEST_IDS - 2
    ledger.assign(0, 1)
    ledger.requeue(records[2])
    assert records[2].request_id == 1
    ledger.finish(first.request_id)
    ledger._next_id = REQUEST_IDS - 1
    assert ledger.admit(ANN, submission("last")).request_id == 0
    assert [r.arrival for r in ledger.waiting] == [1, 2, 3]
    ledger.check_integrity()
