"""Log events: one line each, all counted, and never more than anybody can read."""

import logging

import pytest

from megatron.core.inference.coordinator.messages import Log
from megatron.core.inference.coordinator.runtime.eventlog import EventLog, render


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        self.said.append((record.levelname, record.getMessage()))


@pytest.fixture
def lines():
    return Lines()


@pytest.fixture
def events(lines):
    logger = logging.Logger("test_eventlog")
    logger.addHandler(lines)
    return EventLog(logger)


def test_an_event_is_its_name_and_its_fields():
    assert (
        render("rank_lost", {"rank": 3, "cause": "it left"}) == "rank_lost rank=3 cause='it left'"
    )
    assert render("stopped", {}) == "stopped"


def test_what_a_field_holds_cannot_break_its_line():
    line = render("message_refused", {"reason": "x' rank=3\nstopped \x1b[2J\u2028\u202e"})
    assert line == r'''message_refused reason="x' rank=3\nstopped \x1b[2J\u2028\u202e"'''


def test_information_and_warnings_have_their_level(events, lines):
    events.write(Log("ranks_registered", {"registered": 1, "expected": 2}))
    events.write(Log("rank_lost", {"rank": 0}, warning=True))
    assert lines.said == [
        ("INFO", "ranks_registered registered=1 expected=2"),
        ("WARNING", "rank_lost rank=0"),
    ]


def test_what_no_peer_causes_is_always_said(events, lines):
    for _ in range(100):
        events.write(Log("tick"))
    assert len(lines.said) == 100


def test_what_a_peer_causes_is_said_once_per_peer_and_event(events, lines):
    for _ in range(1000):
        events.write(Log("message_refused", {"reason": "x"}, warning=True, peer=b"\xab"))
        events.write(Log("reply_dropped", warning=True, peer=b"\xab"))
    events.write(Log("message_refused", {"reason": "y"}, warning=True, peer=b"\xcd"))
    assert lines.said == [
        ("WARNING", "message_refused reason='x' peer='ab' times=1"),
        ("WARNING", "reply_dropped peer='ab' times=1"),
        ("WARNING", "message_refused reason='y' peer='cd' times=1001"),
    ]


def test_of_many_peers_the_first_20_and_then_powers_of_2_are_said(events, lines):
    for number in range(1000):
        events.write(Log("request_before_connect", warning=True, peer=b"%d" % number))
    times = [int(text.split("times=")[1]) for _, text in lines.said]
    assert times == [*range(1, 21), 32, 64, 128, 256, 512]


def test_a_log_line_has_no_line_breaks_of_a_peer(events, lines):
    events.write(Log("message_refused", {"reason": "a\nfake line"}, peer=b"\n"))
    assert lines.said == [("INFO", "message_refused reason='a\\nfake line' peer='0a' times=1")]


def test_everything_is_counted(events):
    for number in range(50):
        events.write(Log("reply_dropped", peer=b"same"))
        events.write(Log("rank_lost", {"rank": number}))
    assert events.summary() == {"reply_dropped": 50, "rank_lost": 50}


def test_only_so_many_peers_are_remembered(events):
    for number in range(5000):
        events.write(Log("message_refused", peer=b"%d" % number))
    assert len(events._said) == 4096
    assert events.summary() == {"message_refused": 5000}


def test_a_peer_that_goes_on_is_not_forgotten_for_those_that_come_and_go(events, lines):
    for number in range(5000):
        events.write(Log("reply_dropped", peer=b"steady"))
        events.write(Log("message_refused", peer=b"%d" % number))
    assert sum("peer='737465616479'" in text for _, text in lines.said) == 1


def test_the_fields_of_the_event_are_left_as_they_are(events):
    fields = {"reason": "x"}
    events.write(Log("message_refused", fields, peer=b"p"))
    assert fields == {"reason": "x"}


def test_what_names_no_peer_is_said_a_few_hundred_times_and_then_once_a_second(lines):
    now = [0.0]
    logger = logging.Logger("test_eventlog")
    logger.addHandler(lines)
    events = EventLog(logger, lambda: now[0])
    for _ in range(5000):
        events.write(Log("rank_lost", {"rank": 0}))
    events.write(Log("rank_left", {"rank": 1}))
    assert len(lines.said) == 201
    assert lines.said[-2:] == [("INFO", "rank_lost rank=0"), ("INFO", "rank_left rank=1")]
    now[0] = 1.0
    for _ in range(10):
        events.write(Log("rank_lost", {"rank": 2}))
    assert lines.said[201:] == [("INFO", "rank_lost rank=2 unsaid=4800")]
    assert events.counts["rank_lost"] == 5010
