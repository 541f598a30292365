"""Connections that are slow, too large or no HTTP, without sockets and with a made-up clock."""

import asyncio

import pytest
from http_line import Line, request

from megatron.core.inference.coordinator.runtime.http.access import ApiKeys
from megatron.core.inference.coordinator.runtime.http.gate import Gate
from megatron.core.inference.coordinator.runtime.http.limits import HttpSettings

LIMITS = HttpSettings(max_header_kib=1, header_timeout=10.0, body_timeout=60.0, idle_timeout=30.0)


async def answer_all(scope, receive, send):
    """Reads the body and says how long it was; "/unread" does not read it."""
    length, more = 0, scope["path"] != "/unread"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        length += len(message["body"])
        more = message["more_body"]
    body = str(length).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def connect(app=answer_all, limits=LIMITS):
    return Line(Gate(app, ApiKeys(), 10_000), limits)


def talk(*pieces, app=answer_all):
    """The answers to pieces that come one by one, and the line."""

    async def run():
        line = connect(app)
        await line.send(pieces)
        await line.settle()
        return line.answers(), line

    return asyncio.run(run())


def watch(line, seconds, step=1.0, start=0.0):
    """Lets the clock run; when the connection ended, or None."""
    now = start
    while now <= start + seconds:
        line.protocol.enforce(LIMITS, now)
        if line.transport.closing:
            return now - start
        now += step
    return None


# --- what is no HTTP, or too much of it ----------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET / HTTP/1.1\r\n\r\n",  # no Host
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_json_and_the_end(data):
    [answer], line = talk(data)
    assert answer.status in (400, 501)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["connection"] == "close"
    assert answer.body["error"]["message"].startswith("This is no HTTP request that the server")
    assert line.transport.closing


@pytest.mark.parametrize("piece", [64, 2**20], ids=["piece by piece", "at once"])
@pytest.mark.parametrize("ends", [True, False])
def test_a_head_that_is_too_large_is_refused(piece, ends):
    data = request("/", headers={f"x-{n}": "y" * 20 for n in range(2000)})
    data = data if ends else data[:-4]
    pieces = [data[start : start + piece] for start in range(0, len(data), piece)]
    [answer], line = talk(*pieces)
    assert answer.status == 431
    assert answer.body["error"]["code"] == "headers_too_large"
    assert line.transport.closing


def test_a_large_body_in_one_piece_is_no_large_head():
    [answer], line = talk(request("/", b"x" * 9000))
    assert (answer.status, answer.body) == (200, 9000)
    assert not line.transport.closing


def test_requests_one_after_the_other_in_one_piece():
    answers, _ = talk(b"".join(request("/", b"x" * n) for n in (1, 2, 3)) * 2)
    assert [answer.body for answer in answers] == [1, 2, 3, 1, 2, 3]


CHUNKED = b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_body_that_is_no_chunked_one_gets_one_answer():
    head = b"POST / HTTP/1.1\r\nHost: a\r\n" + CHUNKED
    [answer], line = talk(head, b"zz\r\nrubbish\r\n")
    assert answer.status == 400
    assert line.server.tasks == set()


def test_a_bad_chunk_after_the_answer_just_ends_the_connection():
    head = b"POST /unread HTTP/1.1\r\nHost: a\r\n" + CHUNKED
    [answer], line = talk(head, *[b""] * 10, b"zz\r\nrubbish\r\n")
    assert answer.status == 200
    assert line.transport.closing


# --- time ----------------------------------------------------------------------------------------


def test_a_connection_without_a_request_ends_after_the_idle_time():
    async def run():
        return watch(connect(), 100)

    assert asyncio.run(run()) == 30


def test_headers_that_trickle_in_do_not_hold_a_place():
    async def run():
        line = connect()
        now = 0.0
        for byte in request("/", headers={"x": "y" * 500}):
            await line.send(bytes([byte]))
            line.protocol.enforce(LIMITS, now)
            if line.transport.closing:
                break
            now += 1.0
        return now, line.answers()

    seconds, [answer] = asyncio.run(run())
    assert seconds == 10
    assert answer.status == 408
    assert answer.body["error"]["code"] == "request_timeout"
    assert answer.headers["connection"] == "close"


def test_the_second_request_of_a_connection_has_no_more_time_than_the_first():
    async def run():
        line = connect()
        await line.send(request("/", b"x"))
        await line.settle()
        line.protocol.enforce(LIMITS, -1.0)
        await line.send(b"GET / HT")
        return watch(line, 100), line.answers()

    seconds, answers = asyncio.run(run())
    assert seconds == 10
    assert [answer.status for answer in answers] == [200, 408]


def test_many_requests_in_time_are_no_long_one():
    async def run():
        line = connect()
        for now in range(100):
            whole = request("/", b"x")
            await line.send(whole[:10])
            line.protocol.enforce(LIMITS, now)
            await line.send(whole[10:])
            await line.settle()
        return line.answers()

    assert [answer.status for answer in asyncio.run(run())] == [200] * 100


def test_a_body_that_nobody_reads_does_not_hold_a_place():
    async def run():
        line = connect()
        await line.send(request("/unread", headers={"Content-Length": "1000"}))
        await line.settle()
        await line.send(b"x")  # which takes uvicorn's own timer away
        return watch(line, 100), line.answers()

    seconds, [answer] = asyncio.run(run())
    assert (seconds, answer.status) == (10, 200)


def test_an_answer_that_takes_long_to_make_is_waited_for():
    async def never(scope, receive, send):
        await asyncio.Event().wait()

    async def run():
        line = connect(never)
        await line.send(request("/", b"x"))
        return watch(line, 10_000, step=100.0)

    assert asyncio.run(run()) is None


def test_an_answer_that_nobody_takes_is_thrown_away_while_it_is_sent():
    async def run():
        line = connect()
        line.protocol.pause_writing()  # the system's buffer is full
        await line.send(request("/", b"x"))
        return watch(line, 100), line.transport.aborted

    assert asyncio.run(run()) == (60, True)


def test_an_answer_that_nobody_takes_is_thrown_away_after_the_end():
    async def run():
        line = connect()
        line.transport.taken = False
        await line.send(request("/", b"x", headers={"Connection": "close"}))
        await line.settle()
        ends = []
        for now in range(100):
            line.protocol.enforce(LIMITS, now)
            ends += [now] if line.transport.aborted else []
        return line.transport.closing, ends[0]

    assert asyncio.run(run()) == (True, 60)
