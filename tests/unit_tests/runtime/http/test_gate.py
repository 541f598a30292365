"""The gate before the application, over the protocol and without sockets."""

import asyncio
import hashlib
import logging

import pytest
from http_line import Line, request

from megatron.core.inference.coordinator.runtime.http import gate
from megatron.core.inference.coordinator.runtime.http.access import ApiKeys
from megatron.core.inference.coordinator.runtime.http.logs import Throttle

KEY = {"Authorization": "Bearer sesame"}


@pytest.fixture(autouse=True)
def linger(monkeypatch):
    monkeypatch.setattr(gate, "LINGER_S", 0.01)


class App:
    """Answers "{}" and notes which paths it was asked for; "/fault…" fails."""

    def __init__(self):
        self.asked = []
        self.keeps = None

    async def __call__(self, scope, receive, send):
        self.asked.append(scope["path"])
        self.scope = scope
        if scope["path"] == "/reads":
            while (message := await receive()).get("more_body"):
                pass
            if message["type"] == "http.disconnect":
                return
            if self.keeps is not None:
                await self.keeps.wait()
        if scope["path"] == "/fault":
            raise KeyError("secret")
        start = {"type": "http.response.start", "status": 200, "headers": []}
        await send({**start, "headers": [(b"content-length", b"2")]})
        if scope["path"] == "/faulty":
            raise KeyError("secret")
        await send({"type": "http.response.body", "body": b"{}", "more_body": False})


def ask(path, headers=None, body=None, *, keys=("sesame",), method="POST", sent=None, host=None):
    """The answer, the application and the line; `sent` replaces the request's bytes."""
    app = App()

    async def talk():
        line = Line(gate.Gate(app, ApiKeys(keys), 1000, 3, loopback_host=host))
        await line.send(sent or request(path, body, headers=headers, method=method))
        await line.settle()
        answers = line.answers([method])
        await line.hang_up()
        return answers, line

    answers, line = asyncio.run(talk())
    return (answers[0] if answers else None), app, line


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer"}, {"Authorization": "Bearer wrong"}, {"X-Api-Key": "sesame"}],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/start_profile", "/unknown"])
def test_who_has_no_key_learns_how_to_send_one(path, headers):
    answer, app, _ = ask(path, headers, {"prompt": "x"})
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-frontend-replica"] == "3"
    assert answer.body == {
        "error": {
            "message": "This server asks for an API key; send one of its keys as "
            "'Authorization: Bearer <key>'.",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_api_key",
        }
    }
    assert app.asked == []


def test_who_has_one_passes():
    answer, app, _ = ask("/v1/completions", KEY, {"prompt": "x"})
    assert (answer.status, app.asked) == (200, ["/v1/completions"])
    assert answer.headers.get("connection") != "close"


def test_the_application_learns_which_key_it_was():
    _, app, _ = ask("/v1/completions", KEY, keys=["sesame", "other"])
    digest = hashlib.sha256(b"sesame").digest()
    assert app.scope["api_key_id"] == hashlib.sha256(digest).hexdigest()[:16]
    assert (
        ask("/v1/completions", {"Authorization": "Bearer x"}, keys=[])[1].scope["api_key_id"] == ""
    )


JSON_TYPES = ["application/json", "Application/JSON; charset=utf-8", "application/vnd.x+json"]
OTHER_TYPES = ["", "text/plain", "text/json", "multipart/form-data", "application/jsonx"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/start_profile"])
def test_what_any_page_may_post_is_refused_where_no_key_is_asked_for(path):
    for kind in OTHER_TYPES:
        answer, app, line = ask(path, {"Content-Type": kind}, b"{}", keys=[])
        assert (answer.status, app.asked) == (415, []), kind
        assert "Content-Type: application/json" in answer.body["error"]["message"]
        assert line.transport.closing
        assert ask(path, {"Content-Type": kind} | KEY, b"{}")[0].status == 200
    for kind in JSON_TYPES:
        assert ask(path, {"Content-Type": kind}, b"{}", keys=[])[0].status == 200, kind


HERE = ["localhost", "LOCALHOST.:5000", "127.0.0.1:5000", "127.9.9.9", "[::1]:5000", "[::1]", ""]
ELSEWHERE = ["evil.example", "evil.example:5000", "10.0.0.1", "[::2]:80", "localhost.evil", "\xff"]


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/completions"), ("GET", "/v1/models")])
def test_a_name_that_somebody_gave_this_machine_is_refused_where_no_key_is_asked_for(method, path):
    for host in [*HERE, "my-name:80"]:
        answer, *_ = ask(path, {"Host": host}, keys=[], host="my-name", method=method)
        assert answer.status == 200, host
    for host in ELSEWHERE:
        headers = {"Host": host}
        answer, app, _ = ask(path, headers, keys=[], host="my-name", method=method)
        assert (answer.status, app.asked) == (403, []), host
        assert answer.body["error"]["code"] == "forbidden"
        assert ask(path, headers | KEY, host="my-name", method=method)[0].status == 200
        assert ask(path, headers, keys=[], method=method)[0].status == 200  # served to others
        assert ask("/health", headers, keys=[], host="my-name", method="GET")[0].status == 200
    sent = f"{method} {path} HTTP/1.0\r\nContent-Type: application/json\r\n\r\n".encode()
    assert ask(path, sent=sent, keys=[], host="my-name", method=method)[0].status == 200


BODY = 4 * gate.LARGE_BODY
PIECES = [b"x" * (BODY // 16)] * 15


class Lines:
    """Connections to one gate that has room for two bodies of `BODY`."""

    def __init__(self):
        self.app = App()
        self._gate = gate.Gate(self.app, ApiKeys(), BODY, body_budget=BODY * 2 + 1)

    async def sent(self, *pieces, headers=None):
        line = Line(self._gate)
        headers = headers or {"Content-Length": str(BODY)}
        await line.send([request("/reads", headers=headers), *pieces])
        return line

    async def short(self):
        """One that sends all but a sixteenth of a body."""
        return await self.sent(*PIECES)

    async def status(self, line):
        await line.settle()
        [answer] = line.answers()
        return answer.status


def test_large_bodies_wait_for_room_and_small_ones_do_not():
    async def talk():
        lines = Lines()
        first, second = await lines.short(), await lines.short()
        waiting = [asyncio.ensure_future(lines.sent(*PIECES, PIECES[0])) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert not any(each.done() for each in waiting)
        small = await lines.sent(b"x" * 9, headers={"Content-Length": "9"})
        assert await lines.status(small) == 200
        await first.send(PIECES[0])  # it has kept its room, and gives it to the next
        assert await lines.status(first) == 200
        await second.hang_up()
        for each in waiting:
            assert await lines.status(await each) == 200
        assert lines._gate._budget._left == BODY * 2 + 1

    asyncio.run(talk())


@pytest.mark.parametrize("gone", [False, True])
def test_a_large_body_that_finds_no_room_is_refused_and_takes_none(gone, monkeypatch):
    monkeypatch.setattr(gate, "ROOM_WAIT_S", 0.05)

    async def talk():
        lines = Lines()
        kept = [await lines.short() for _ in range(2)]
        chunks = [b"10000\r\n" + b"x" * 0x10000 + b"\r\n"] * 2
        refused = await lines.sent(*chunks, headers={"Transfer-Encoding": "chunked"})
        if gone:
            await refused.hang_up()
        else:
            async with asyncio.timeout(10):
                while not refused.transport.closing:
                    await asyncio.sleep(0.01)
            [answer] = refused.answers()
            assert (answer.status, answer.body["error"]["code"]) == (503, "no_memory")
            assert answer.headers["retry-after"] == "1"
            assert (answer.headers["connection"], refused.transport.closing) == ("close", True)
        for line in kept:
            await line.hang_up()
        assert lines._gate._budget._left == BODY * 2 + 1

    asyncio.run(talk())


def test_a_body_s_room_is_free_once_the_application_is_done_with_it():
    async def talk():
        lines = Lines()
        lines.app.keeps = asyncio.Event()
        whole = [await lines.sent(*PIECES, PIECES[0]) for _ in range(2)]
        await asyncio.sleep(0.05)
        assert lines._gate._budget._left == 1
        for line in whole:
            lines.app.scope["body_is_done"]()
            assert not line.answers()
        assert lines._gate._budget._left == BODY + 1  # the second time does nothing
        lines.app.keeps.set()
        for line in whole:
            assert await lines.status(line) == 200
        assert lines._gate._budget._left == BODY * 2 + 1

    asyncio.run(talk())


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/health/live", "/v1/health/live"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_health_needs_no_key(path, method):
    answer, app, _ = ask(path, method=method)
    assert (answer.status, app.asked) == (200, [path])


@pytest.mark.parametrize("path", ["/health/", "//health", "/healthx", "/v1/health/x", "/Health"])
def test_nothing_else_passes_for_health(path):
    assert ask(path)[0].status == 401


def test_a_body_that_is_announced_too_large_is_not_read():
    head = request("/", headers=KEY | {"Content-Length": str(10**12)})
    answer, app, line = ask("/", sent=head)
    assert answer.status == 413
    assert answer.body["error"]["code"] == "request_too_large"
    assert answer.headers["connection"] == "close"
    assert app.asked == []
    assert line.transport.closing


@pytest.mark.parametrize("headers", [{}, KEY | {"Content-Length": str(10**12)}])
def test_a_refused_body_is_left_where_it_is(headers):
    async def talk():
        line = Line(gate.Gate(App(), ApiKeys(["sesame"]), 1000))
        await line.send(request("/", b"x" * 100, headers={"Content-Length": str(10**6)} | headers))
        sent = 0
        while line.transport.reading and not line.transport.closing:
            await line.send(b"x" * 10_000)
            sent += 10_000
        while not line.transport.closing:
            await asyncio.sleep(0)
        return sent, len(line.answers())

    sent, answers = asyncio.run(talk())
    assert answers == 1
    assert sent < 200_000  # what fits uvicorn's own buffer


def test_a_refused_client_has_a_moment_to_read_the_answer(monkeypatch):
    monkeypatch.setattr(gate, "LINGER_S", 0.2)

    async def talk():
        line = Line(gate.Gate(App(), ApiKeys(["sesame"]), 1000))
        await line.send(request("/", headers={"Content-Length": "500"}))
        for _ in range(20):
            await asyncio.sleep(0)
        early = line.answers()[0].status, line.transport.closing
        await asyncio.sleep(0.3)
        return early, line.transport.closing

    assert asyncio.run(talk()) == ((401, False), True)


@pytest.mark.parametrize("target", ["?x", "*", "a:1"])
def test_a_target_without_a_path_is_unknown(target):
    answer, app, _ = ask(target, KEY, method="OPTIONS")
    assert (answer.status, answer.body["error"]["code"]) == (404, "unknown_url")
    assert app.asked == []


def test_what_the_application_lets_escape_is_answered_and_logged(caplog):
    answer, _, _ = ask("/fault", KEY)
    assert (answer.status, answer.body["error"]["code"]) == (500, "internal_error")
    assert b"secret" not in answer.data
    assert "http_request_failed path='/fault'" in caplog.text


def test_an_answer_that_breaks_off_ends_the_connection(caplog):
    async def talk():
        line = Line(gate.Gate(App(), ApiKeys(), 1000))
        await line.send(request("/faulty", b"x"))
        await line.settle()
        return line.transport.closing

    assert asyncio.run(talk())
    assert "http_request_failed" in caplog.text


def test_a_client_cannot_fill_the_log():
    throttle, said = Throttle(), []
    for _ in range(1000):
        record = logging.LogRecord("x", logging.ERROR, "f.py", 7, "bad %s", ("request",), None)
        said += [record.getMessage()] if throttle.filter(record) else []
    assert said[:20] == ["bad request"] * 20
    assert said[20:] == [f"bad request (times={2**n})" for n in range(5, 10)]
    other = logging.LogRecord("x", logging.ERROR, "f.py", 8, "another", (), None)
    assert throttle.filter(other)
    info = logging.LogRecord("x", logging.INFO, "f.py", 7, "told", (), None)
    assert all(throttle.filter(info) for _ in range(100))
