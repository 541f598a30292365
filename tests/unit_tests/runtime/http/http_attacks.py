"""Requests that no client should send: bodies of `http_bodies`, and heads and framing to match."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from http_bodies import bodies
from hypothesis import strategies as st

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

_FAILURES = ["overflow", "overloaded", "no_replica", "replica_lost", "fleet_paused"]
OUTCOMES = [*["ok"] * 6, *["tool call"] * 3, "odd tool call", *_FAILURES]
"""What may become of an engine request."""

_ROUGH = [*["none"] * 12, "body", "head", "short", "long"]
"""What is wrong with a request's bytes, whatever is wrong with its fields."""

_SCRAPS = [
    *[b"", b"\xff", b"\xc3\x28", b"\0", b"\x80" * 9, b"\r\n", b"\r\n\r\n", b": ", b"0\r\n\r\n"],
    *[b'"', b"{", b"]", b"1e999", b"\\ud800", b"9" * 5000, b"NaN", b"GET / HTTP/1.1\r\n"],
]
_PATHS = [
    *["/chat/completions", "/completions", "/v1/models", "/models/x", "/health", "/v1/health"],
    *["/start_profile", "/v1/stop_profile", "/", "//", "/v1//completions", "/v1/completions/"],
    *["*", "?x", "a:1", "http://a/health", "/v1/completions;x", "/%", "/v1/models/\u00e9"],
    *["/v1/models/%ff%00", "/v1/models/..%2f..", "/" + "x" * 3000, "/health?" + "a=b&" * 200],
]
_METHODS = ["GET", "HEAD", "OPTIONS", "DELETE", "PUT", "CONNECT", "TRACE", "X-Y"]
_VALUES = {
    "Content-Type": ["application/json", "text/plain", "\xff", 'a/b; c="', "multipart/form-data"],
    "Content-Length": ["0", "5", "-1", "9" * 19, "1e3"],
    "Content-Encoding": ["gzip"],
    "Transfer-Encoding": ["gzip"],
    "Connection": ["close", "Upgrade"],
    "Upgrade": ["websocket"],
    "Expect": ["100-continue"],
    "Authorization": ["Bearer none", "Bearer", "Basic x", "\xe9" * 9, ""],
    "Host": ["a", "[::1", "a:b:c", "\xff", "a" * 300, "%%", ""],
    "Cookie": ["session=x; \xff=;;"],
    "Range": ["bytes=0-"],
    "X-Forwarded-For": ["%"],
    "X": ["y" * 9000],
    "": ["x"],
}
_headers = st.lists(
    st.sampled_from([(name, value) for name, values in _VALUES.items() for value in values]),
    max_size=3,
)
_places = st.lists(st.floats(0, 1), max_size=3)
_edits = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 40), st.sampled_from(_SCRAPS)), min_size=1, max_size=3
)


@dataclass(frozen=True)
class Attack:
    """What a hostile client does on one connection.

    Attributes:
        pieces: The bytes it sends, piece by piece.
        whole: Whether they are a request in full, which must be answered.
        outcomes: What becomes of the engine requests, in their order; then they go well.
        app: Which of the applications it talks to.
    """

    pieces: tuple[bytes, ...]
    whole: bool
    outcomes: tuple[str, ...]
    app: int


@st.composite
def attacks(draw: Any, apps: tuple[int, ...]) -> Attack:
    """Anything from a good request to rubbish; `apps` are those to attack."""
    path = draw(st.sampled_from([CHAT, COMPLETIONS] if draw(st.integers(0, 5)) else _PATHS))
    method = "POST" if draw(st.integers(0, 9)) else draw(st.sampled_from(_METHODS))
    rough = draw(st.sampled_from(_ROUGH))
    data = draw(bodies("chat" in path))
    if rough == "body":
        data = _edited(data, draw(_edits))
    headers = [] if draw(st.integers(0, 2)) else list(draw(_headers))
    if all(name != "Content-Type" for name, _ in headers):
        headers.append(("Content-Type", "application/json"))
    framed_twice = any(name == "Content-Length" for name, _ in headers)
    framing, data = draw(_framed(data, rough))
    lines = [f"{method} {path} HTTP/1.1", "Host: test"]
    lines += [f"{name}: {value}" for name, value in [*headers, framing]]
    head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
    if rough == "head":
        head = _edited(head, draw(_edits))
    return Attack(
        pieces=_cut(head + data, draw(_places)),
        whole=rough in ("none", "body") and not framed_twice,
        outcomes=tuple(draw(st.lists(st.sampled_from(OUTCOMES), max_size=2))),
        app=draw(st.sampled_from(apps)),
    )


@st.composite
def _framed(draw: Any, data: bytes, rough: str) -> tuple[tuple[str, str], bytes]:
    """A header that says where the body ends, and the body; one that is rough ends elsewhere."""
    if draw(st.integers(0, 3)):
        length = len(data) + (40 if rough == "short" else 0)
        return ("Content-Length", str(length)), data + (b"rubbish" * 3 if rough == "long" else b"")
    size = draw(st.sampled_from([1, 7, 1000])) if len(data) < 2000 else 1000
    data = _chunked(data, size)
    return ("Transfer-Encoding", "chunked"), data[:-5] if rough in ("short", "long") else data


def _chunked(data: bytes, size: int) -> bytes:
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in pieces) + b"0\r\n\r\n"


def _edited(data: bytes, edits: list[tuple[float, int, bytes]]) -> bytes:
    for place, removed, scrap in edits:
        start = int(place * len(data))
        data = data[:start] + scrap + data[start + removed :]
    return data


def _cut(data: bytes, places: list[float]) -> tuple[bytes, ...]:
    cuts = sorted({0, len(data), *(int(place * len(data)) for place in places)})
    return tuple(data[start:end] for start, end in pairwise(cuts))
