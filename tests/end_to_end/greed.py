"""Requests that ask for too much, sent in a loop, and how long others wait meanwhile."""

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit

PHASES, REQUESTS = 4, 25
MIB = 2**20

_GREEDY: dict[str, dict[str, Any]] = {
    "choices": {"prompt": ["x"] * 32, "n": 128, "max_tokens": 8000},
    "1 MB of text": {"prompt": "x" * MIB, "n": 128},
    "4 MB of text": {"prompt": "x" * 4 * MIB, "n": 128},
    "empty lists": {"prompt": "x", "max_tokens": 1, "user": [[]] * (4 * MIB // 3)},
    "21 MB": {"prompt": "x", "user": [0] * (21 * MIB // 2)},
}
_BODIES = {name: json.dumps(body, separators=(",", ":")).encode() for name, body in _GREEDY.items()}
_PAUSE_S = 0.1  # this process and the server share the machine


@dataclass
class Waits:
    """How long small requests took, in seconds.

    Attributes:
        quiet: With nobody else there.
        beside: While greedy requests were being sent.
        greedy: How often which of these was answered how.
    """

    quiet: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    greedy: Counter[tuple[str, int]] = field(default_factory=Counter)

    def summary(self) -> dict[str, Any]:
        """Median and 99th percentile of both, in milliseconds, and the answers."""
        figures: dict[str, Any] = {
            name: [round(1e3 * median(waits)), round(1e3 * p99(waits))]
            for name, waits in (("quiet", self.quiet), ("beside", self.beside))
        }
        return figures | {"greedy": {" ".join(map(str, k)): n for k, n in self.greedy.items()}}


def p99(waits: list[float]) -> float:
    """The 99th percentile."""
    return quantiles(waits, n=100, method="inclusive")[-1]


def wait_beside_greed(url: str) -> Waits:
    """Small requests in phases, every other one of them beside greedy ones."""
    waits = Waits()
    for _ in range(PHASES):
        waits.quiet += [_small(url) for _ in range(REQUESTS)]
        with _greed(url, waits.greedy):
            waits.beside += [_small(url) for _ in range(REQUESTS)]
    return waits


def _small(url: str) -> float:
    began = time.monotonic()
    assert _post(url, b'{"prompt": "hello", "max_tokens": 4}') == 200
    return time.monotonic() - began


@contextmanager
def _greed(url: str, answers: Counter[tuple[str, int]]) -> Iterator[None]:
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            for name, body in _BODIES.items():
                answers[name, _post(url, body)] += 1
                if over.wait(_PAUSE_S):
                    return

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _post(url: str, body: bytes) -> int:
    """The status of the answer."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)
        return connection.getresponse().status
    except ConnectionError:  # it was answered, and let go, before all of it was sent
        return 0
    finally:
        connection.close()
