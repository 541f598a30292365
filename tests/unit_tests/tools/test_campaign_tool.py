"""tools/campaign: that it counts what it must count, and a tiny campaign against stand-ins."""

import asyncio
import gc
import json
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from campaign.account import Account
from campaign.command import make_parser, options_of
from campaign.coordinator_log import CoordinatorLog
from campaign.faults import KINDS
from campaign.prompts import checksum, make_prompts
from campaign.relay import Relay
from campaign.stand_in import PLACES, SECONDS, Work
from campaign.verdict import Options, broken_promises

TOOLS = Path(__file__).parents[3] / "tools"
DONE = "COMPLETED"
RIGHT = [[1, 2], [3, 4]]
DEADLINE = 10.0


def options(*flags: str) -> Options:
    return options_of(make_parser(None).parse_args(flags))


@pytest.fixture
def account():
    made = Account(RIGHT, DEADLINE)
    made.send((0, 0), 0, 100.0)
    made.send((1, 0), 1, 101.0)
    yield made
    made.check_integrity()


def test_what_gets_an_answer_or_an_error_is_neither_lost_nor_twice(account):
    account.answer((0, 0), DONE, [1, 2], 100.5)
    account.error((1, 0), "replica_lost")
    account.expire(1000.0)
    assert (account.sent, account.answered, account.errored) == (2, 1, 1)
    assert (account.lost, account.twice, account.wrong, account.in_flight) == (0, 0, 0, 0)
    assert account.errors == {"replica_lost": 1}
    assert account.latency(0.5) == 0.5


def test_what_gets_nothing_is_lost_at_its_deadline_and_stays_so(account):
    account.answer((0, 0), DONE, [1, 2], 100.5)
    account.expire(101.0 + DEADLINE)
    assert account.lost == 0
    account.expire(101.1 + DEADLINE)
    assert account.lost == 1
    account.answer((1, 0), DONE, [3, 4], 130.0)
    assert (account.lost, account.late, account.answered, account.twice) == (1, 1, 1, 0)


@pytest.mark.parametrize("first", ["answer", "error"])
@pytest.mark.parametrize("second", ["answer", "error"])
def test_a_second_answer_or_error_is_counted(account, first, second):
    for what in (first, second):
        if what == "answer":
            account.answer((0, 0), DONE, [1, 2], 100.5)
        else:
            account.error((0, 0), "replica_lost")
    assert account.twice == 1
    assert account.answered + account.errored == 1


def test_an_answer_that_nobody_asked_for_is_counted(account):
    account.answer((0, 77), DONE, [1, 2], 100.5)
    assert account.twice == 1


def test_another_engines_answer_is_wrong_and_a_failed_one_an_error(account):
    account.answer((0, 0), DONE, [3, 4], 100.5)
    account.answer((1, 0), "FAILED", [], 100.5)
    assert (account.answered, account.wrong) == (1, 1)
    assert account.errors == {"FAILED": 1}


def test_a_client_that_lost_its_connection_has_told_whoever_waits(account):
    account.fail_client(1, "not_connected")
    assert account.errors == {"not_connected": 1}
    assert account.in_flight == 1


def test_a_name_is_used_once(account):
    account.error((0, 0), "replica_lost")
    for key in ((0, 0), (1, 0)):
        with pytest.raises(ValueError, match="before"):
            account.send(key, 0, 102.0)


GOOD = {
    "lost": 0,
    "twice": 0,
    "wrong": 0,
    "ended": 0,
    "exceptions": 0,
    "died": [],
    "all_back": True,
    "faults": dict.fromkeys(KINDS, 1),
    "descriptors": [25, 25],
    "rss_mib": [40.0, 50.0],
}


@pytest.mark.parametrize(
    ("worse", "said"),
    [
        ({"lost": 1}, "neither an answer nor an error"),
        ({"twice": 1}, "had ended"),
        ({"wrong": 2}, "undisturbed"),
        ({"ended": 1}, "by themselves"),
        ({"exceptions": 1}, "exceptions"),
        ({"died": [{"how": "the coordinator ended with 1"}]}, "ended with 1"),
        ({"all_back": False}, "came back"),
        ({"faults": {"kill": 1}}, "no time for"),
        ({"descriptors": [25, 26]}, "26 descriptors"),
        ({"rss_mib": [40.0, 72.1]}, "grew from 40 to 72.1"),
    ],
)
def test_every_broken_promise_is_said(worse, said):
    assert broken_promises(GOOD, options()) == []
    (text,) = broken_promises(GOOD | worse, options())
    assert said in text


def test_flags_that_make_no_sense_are_refused():
    assert options("--faults=kill,cut").faults == ("kill", "cut")
    with pytest.raises(ValueError, match="no kind is called flood"):
        options("--faults=kill,flood")
    with pytest.raises(ValueError, match="--every"):
        options("--every=0")


def test_the_coordinators_log_is_read_while_it_grows(tmp_path):
    path = tmp_path / "log"
    log = CoordinatorLog(path)
    at = "2030-01-01 00:00:00,000 coordinator"
    path.write_text(f"{at} INFO ranks_registered registered=3 expected=3\n{at} WARNING rank_lost r")
    assert log.live() == 3
    with path.open("a") as file:
        file.write("ank=0 cause='its connection broke' requests=7\nTraceback (most recent …):\n")
    assert log.live() == 2
    with path.open("a") as file:
        file.write("  Traceback (most recent …):\n")  # in the log, where its lines are indented
        file.write(f"{at} INFO stopped rank_lost=1 reply_dropped=2\n")
    assert log.totals() == {"rank_lost": 1, "reply_dropped": 2}
    assert (log.taken_back, log.exceptions) == (7, 2)


def test_a_replica_that_is_away_is_not_there_until_it_is_back_or_another_comes(tmp_path):
    path = tmp_path / "log"
    log = CoordinatorLog(path)
    at = "2030-01-01 00:00:00,000 coordinator"
    seen = []
    for line in (
        "INFO ranks_registered registered=3 expected=3",
        "WARNING rank_away rank=1 requests=2",
        "WARNING rank_away rank=0 requests=0",
        "INFO rank_back rank=1 requests=2 lost=0",
        "INFO rank_back rank=2 requests=0 lost=0",  # it had not been missed
        "WARNING rank_lost rank=0 cause='its connection broke' requests=1",
        "INFO ranks_registered registered=3 expected=3",
    ):
        with path.open("a") as file:
            file.write(f"{at} {line}\n")
        seen.append(log.live())
    assert seen == [3, 2, 1, 2, 2, 2, 3]


def test_a_stand_in_answers_what_it_was_asked_in_its_time_and_not_in_a_pause():
    work = Work()
    for number in range(PLACES + 1):
        work.add(number, b"prompt %d" % number)
    assert work.finished(0.0) == []
    work.paused = True
    assert work.finished(2 * SECONDS) == []
    work.paused = False
    done = work.finished(2 * SECONDS)
    assert done == [(n, checksum(b"prompt %d" % n)) for n in range(PLACES)]
    assert work.finished(4 * SECONDS) == [(PLACES, checksum(b"prompt %d" % PLACES))]


def test_prompts_of_a_conversation_share_their_prefix():
    prompts = make_prompts(1)
    assert prompts == make_prompts(1) != make_prompts(2)
    assert prompts[3][: len(prompts[2])] == prompts[2]
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)


def test_a_cut_link_carries_nothing_and_everything_when_it_is_mended():
    async def run() -> None:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while piece := await reader.read(100):
                writer.write(piece)
            writer.close()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        relay = Relay(server.sockets[0].getsockname()[1])
        await relay.open()
        port = int(relay.address.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"one")
        assert await asyncio.wait_for(reader.readexactly(3), 5) == b"one"
        relay.cut()
        writer.write(b"two")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(3), 0.2)
        relay.mend()
        assert await asyncio.wait_for(reader.readexactly(3), 5) == b"two"
        writer.close()
        assert await asyncio.wait_for(reader.read(), 5) == b""
        await relay.close()
        server.close()

    asyncio.run(run())


@pytest.mark.parametrize("steps", range(8))
def test_a_link_that_closes_while_it_accepts_closes_everything(steps, monkeypatch):
    """An asyncio.Server would raise where nobody can catch it, and keep the connections."""
    ignored: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: ignored.append(found.exc_value))

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: ignored.append(context.get("exception")))
        relay = Relay(9)  # nobody needs to listen there
        await relay.open()
        port = int(relay.address.rsplit(":", 1)[1])
        peers = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
        for _ in range(steps):
            await asyncio.sleep(0)
        await relay.close()
        for peer in peers:
            peer.setblocking(False)
            with peer, suppress(ConnectionResetError):
                assert await asyncio.wait_for(loop.sock_recv(peer, 1), 5) == b""

    asyncio.run(run())
    gc.collect()
    assert ignored == []


def campaign(*flags: str) -> tuple[int, dict]:
    ended = subprocess.run(
        [sys.executable, TOOLS / "campaign", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return ended.returncode, json.loads(ended.stdout.splitlines()[-1])


def test_a_tiny_campaign_loses_nothing():
    status, figures = campaign(
        *("--engines=stub", "--minutes=0.15", "--every=2", "--hung-timeout=3"),
        *("--faults=kill,cut,client,pause", "--rate=100", "--retries=3"),
    )
    assert status == 0, figures
    assert figures["sent"] > 300
    assert figures["answered"] + figures["errored"] == figures["sent"]
    assert set(figures["faults"]) == {"kill", "cut", "client", "pause"}
    assert figures["abandoned"] > 0
    assert figures["ranks_lost"] >= figures["faults"]["kill"]


def test_without_retries_the_errors_are_counted():
    """The control: what a replica had when it was killed is told, not hidden."""
    status, figures = campaign(
        *("--engines=stub", "--minutes=0.1", "--every=2", "--faults=kill", "--retries=0"),
        "--rate=300",
    )
    assert status == 0, figures
    assert figures["errors"]["replica_lost"] > 0
    assert figures["lost"] == figures["twice"] == 0
