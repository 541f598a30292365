"""The front ends as real processes, and megatron-core's own server as the control.

Every process that imports megatron-core costs seconds, so one fork server serves all tests here.
"""

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import msgpack
import psutil
import pytest
import zmq

from megatron.core.inference.coordinator.options import SettingsError
from megatron.core.inference.coordinator.runtime.http.access import ApiKeys
from megatron.core.inference.coordinator.runtime.http.limits import HttpSettings

REQUESTS = 2048
REPLICAS = 8
AT_ONCE = REPLICAS

REPLY = {
    "status": "COMPLETED",
    "events": [],
    "prompt_tokens": [104, 105],
    "prompt_length": 2,
    "generated_text": "ok",
    "generated_tokens": [111, 107],
    "generated_log_probs": None,
    "sampling_params": {"num_tokens_to_generate": 2},
    "policy_epoch": None,
    "kv_cache_epoch": None,
    "routing_indices": None,
    "num_cached_tokens": 0,
}


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
"""How a request begins that is written by hand."""


class Tokenizer:
    vocab_size = 256

    def tokenize(self, text):
        return list(text.encode())

    def detokenize(self, ids):
        return bytes(ids).decode()


class Client:
    """An inference client that answers at once."""

    def __init__(self, coordinator_addr, deserialize, tokenizer):
        assert (deserialize, tokenizer.vocab_size) == (False, 256)
        self.address = coordinator_addr

    def start(self):
        if self.address == "nowhere" or os.path.exists(self.address):
            raise ConnectionError("nobody answers")
        if self.address == "death":
            os._exit(9)
        if self.address == "silence":
            time.sleep(60)

    def add_request(self, prompt, params):
        future = asyncio.get_running_loop().create_future()
        if prompt == [*b"wide"]:
            future.set_result(REPLY | {"generated_text": "x" * 20_000_000})
        elif prompt == [*b"slow"]:
            asyncio.get_running_loop().call_later(0.8, future.set_result, dict(REPLY))
        elif prompt != [*b"wait"]:
            future.set_result(dict(REPLY))
        return future


def log_what_a_client_made_up(file):
    """A front end whose standard error is a file, and in which something goes wrong."""
    from megatron.core.inference.coordinator.runtime.http import replica

    async def fail(settings, index, desk, report):
        report.close()
        logging.getLogger("megatron.core.x").error("path=%s", "/\nERROR:root:forged \x1b[31m")
        raise ValueError("\nERROR:root:forged")

    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), 2)
    replica._serve = fail
    settings = pickle.dumps(SimpleNamespace(verbose=False, planner=None))
    ours, theirs = multiprocessing.Pipe()
    with ours:
        replica.run_replica(settings, 0, theirs)


@pytest.fixture(scope="module")
def server():
    """Our server module; its fork server lives as long as the test process."""
    from megatron.core.inference.coordinator.runtime import fork_server
    from megatron.core.inference.coordinator.runtime.http import server

    fork_server.warm_up()
    return server


@pytest.fixture
def start(server):
    """Starts front ends with the client above, and stops them after the test."""

    def start(address="anywhere", port=0, replicas=2, **options):
        options = {"client_factory": Client, "hostname": "127.0.0.1"} | options
        return server.start_text_gen_server(
            address, Tokenizer(), 0, port, num_replicas=replicas, **options
        )

    yield start
    server.stop_text_gen_server()


def port_of(url):
    return int(url.rpartition(":")[2])


def front_ends():
    return [p for p in multiprocessing.active_children() if p.name.startswith("http-front-end")]


def wait_until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


async def fetch(host, port, body=None, path="/v1/completions"):
    """One request on a connection of its own: status, headers and decoded body."""
    data = json.dumps(body or {"prompt": "hi", "max_tokens": 2}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(host, port)
    with closing(writer):
        writer.write(head.encode() + data)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().strip()
        first, *lines = head.split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        content = await reader.readexactly(int(headers["content-length"]))
    return int(first.split()[1]), headers, json.loads(content)


def ask(url, **body):
    host, port = url.removeprefix("http://").rsplit(":", 1)
    return asyncio.run(fetch(host.strip("[]"), int(port), body))


def flood(port):
    """Sends all requests, at most AT_ONCE at a time; (seconds, headers of every answer)."""

    async def one(gate):
        async with gate:
            status, headers, body = await fetch("127.0.0.1", port)
        assert (status, body["choices"][0]["text"]) == (200, "ok")
        return headers

    async def everything():
        gate = asyncio.Semaphore(AT_ONCE)
        return await asyncio.gather(*(one(gate) for _ in range(REQUESTS)))

    began = time.monotonic()
    headers = asyncio.run(everything())
    return time.monotonic() - began, headers


def report(directory, name, served, seconds, replicas):
    """Keeps a measurement where `pytest -s` and the temporary folder show it."""
    counts = sorted(served.values(), reverse=True)
    least = counts[-1] if len(counts) == replicas else 0
    figures = {
        "server": name,
        "requests": sum(counts),
        "per replica": counts,
        "idle replicas": replicas - len(counts),
        "busiest/quietest": round(counts[0] / least, 2) if least else None,
        "requests/s": round(sum(counts) / seconds),
    }
    print("\nhttp_balance", json.dumps(figures))
    (directory / f"{name}.json").write_text(json.dumps(figures))
    return figures


# --- balance -----------------------------------------------------------------------------------


def test_every_front_end_serves_its_share(start, tmp_path):
    url = start(replicas=REPLICAS)
    seconds, headers = flood(port_of(url))
    served = Counter(each["x-frontend-replica"] for each in headers)
    figures = report(tmp_path, "ours", served, seconds, REPLICAS)
    assert len(served) == REPLICAS
    assert figures["busiest/quietest"] <= 2


class StubCoordinator:
    """Speaks just enough of the released protocol, and counts requests per client."""

    def __init__(self, port):
        self.connected = 0
        self.served = Counter()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(port,))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def _run(self, port):
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.bind(f"tcp://127.0.0.1:{port}")
            while not self._ended.is_set():
                if router.poll(50):
                    client, data = router.recv_multipart()
                    header, *rest = msgpack.unpackb(data)
                    self.connected += header == 0
                    self.served[client] += header == 20
                    answer = [1] if header == 0 else [21, rest[0], REPLY]
                    router.send_multipart([client, msgpack.packb(answer)])


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.mark.skipif(
    multiprocessing.get_start_method() != "fork", reason="it needs fork to inherit its socket"
)
def test_the_released_server_under_the_same_load(tmp_path):
    """The control: one accept queue for all. How uneven it is depends on the machine."""
    from megatron.core.inference.text_generation_server.dynamic_text_gen_server import (
        text_generation_server as released,
    )

    assert released.start_text_gen_server.__module__ == released.__name__, "still patched"
    coordinator, port = free_port(), free_port()
    # It forks this process, so it goes first: the stub's sockets and thread stay out of it.
    released.start_text_gen_server(
        f"tcp://127.0.0.1:{coordinator}",
        Tokenizer(),
        rank=0,
        server_port=port,
        num_replicas=REPLICAS,
        hostname="127.0.0.1",
    )
    try:
        with StubCoordinator(coordinator) as stub:
            wait_until(lambda: stub.connected == REPLICAS, 60)
            time.sleep(1)  # from the connection to the listening socket
            seconds, _ = flood(port)
    finally:
        released.stop_text_gen_server()
    served = +stub.served  # without those that only connected
    figures = report(tmp_path, "released", served, seconds, REPLICAS)
    assert figures["requests"] == REQUESTS


# --- who may send, and how slowly --------------------------------------------------------------


@pytest.fixture(scope="module")
def openai():
    """OpenAI's client: front ends import this module too, and should not wait for it."""
    import openai

    return openai


@pytest.fixture
def openai_client(openai):
    """`openai_client(url, key)`: a client that tries once."""
    return lambda url, key: openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


@pytest.fixture
def keyed(start, monkeypatch):
    """The URL of front ends that ask for a key."""
    monkeypatch.setenv("MEGATRON_API_KEY", "sesame")
    url = start(replicas=1)
    monkeypatch.delenv("MEGATRON_API_KEY")
    return url


def test_a_key_from_the_environment_is_asked_for_and_in_no_process_list(
    keyed, openai, openai_client
):
    with pytest.raises(openai.AuthenticationError, match="asks for an API key"):
        openai_client(keyed, "wrong").models.list()
    [model] = openai_client(keyed, "sesame").models.list()
    assert model.id == "megatron"
    status, headers, _ = ask(keyed, prompt="hi")
    assert (status, headers["www-authenticate"]) == (401, "bearer")
    for process in psutil.Process().children(recursive=True):
        assert "sesame" not in " ".join(process.cmdline())


def test_an_environment_without_a_key_starts_nothing(start, server, monkeypatch):
    monkeypatch.setenv("MEGATRON_API_KEY", " ")
    with pytest.raises(SettingsError, match="MEGATRON_API_KEY holds no key"):
        start()
    assert front_ends() == []


@pytest.mark.parametrize("key", ["wrong", "sesame"])
def test_clients_read_the_refusal_of_what_they_are_still_sending(start, key, openai, openai_client):
    """The rest of it is not read: a server that just closed would break their connection."""
    url = start(replicas=1, api_keys=ApiKeys(["sesame"]), limits=HttpSettings(max_body_mib=1))
    refusal = openai.AuthenticationError if key == "wrong" else openai.APIStatusError
    with pytest.raises(refusal) as refused:
        openai_client(url, key).completions.create(model="x", prompt="x" * 30_000_000)
    assert refused.value.status_code == (401 if key == "wrong" else 413)


@pytest.mark.parametrize(
    ("beginning", "rest"),
    [
        (HEAD + b"X: ", b"y"),
        (HEAD + b"Content-Length: 99\r\n\r\n", b"{"),
    ],
    ids=["headers", "body"],
)
def test_a_client_that_trickles_is_answered_and_let_go(start, beginning, rest):
    url = start(replicas=1, limits=HttpSettings(header_timeout=1, body_timeout=1, idle_timeout=60))
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port_of(url))) as slow:
        slow.sendall(beginning)
        slow.settimeout(0.2)
        answer = b""
        while not answer:
            assert time.monotonic() - began < 60
            slow.sendall(rest)
            with contextlib.suppress(TimeoutError):
                answer = slow.recv(1000)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert ask(url, prompt="hi")[0] == 200
    assert time.monotonic() - began > 1


def test_an_idle_client_is_let_go(start):
    url = start(replicas=1, limits=HttpSettings(idle_timeout=1))
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with (
        socket.create_connection(("127.0.0.1", port_of(url))) as silent,
        socket.create_connection(("127.0.0.1", port_of(url))) as served,
    ):
        served.sendall(request)
        for sock, wanted in ((silent, b""), (served, b"HTTP/1.1 200 ")):
            sock.settimeout(10)
            with sock.makefile("rb") as file:
                assert file.read().startswith(wanted)


def test_a_client_that_does_not_read_is_let_go(start):
    """What a front end keeps for it would stay for ever."""
    url = start(replicas=1, limits=HttpSettings(body_timeout=1))
    prompt = json.dumps({"prompt": "wide", "max_tokens": 2}).encode()
    head = HEAD + b"Content-Length: %d\r\n\r\n" % len(prompt)
    [front_end] = front_ends()
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", port_of(url)))
        deaf.sendall(head + prompt)
        process = psutil.Process(front_end.pid)
        wait_until(lambda: any(_of(deaf, c) for c in process.net_connections("tcp")))
        wait_until(lambda: not any(_of(deaf, c) for c in process.net_connections("tcp")))
        assert ask(url, prompt="hi")[0] == 200


@contextlib.contextmanager
def stopping_short(port, clients, size):
    """Clients that each send all but one byte of a body, or as much of it as is taken."""
    head = HEAD + b"Content-Length: %d\r\n\r\n" % size
    with contextlib.ExitStack() as stack:
        for _ in range(clients):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            sock.settimeout(0.1)
            with contextlib.suppress(ConnectionError, TimeoutError):  # it is not read, or answered
                sock.sendall(head + b" " * (size - 1))
        yield


def memory_of_front_ends():
    """Bytes of this server's HTTP processes, and of those that work for them."""
    processes = [psutil.Process(each.pid) for each in front_ends()]
    processes += [child for each in list(processes) for child in each.children()]
    return sum(each.memory_info().rss for each in processes)


def test_bodies_that_stop_short_take_no_more_memory_than_the_budget(start):
    clients, size, budget = 100, 4 * 2**20, 8 * 2**20
    limits = HttpSettings(max_body_mib=4, body_budget_mib=8)
    url = start(replicas=1, limits=limits)
    large = {"prompt": "hi", "max_tokens": 2, "user": "x" * (size - 1000)}
    assert ask(url, **large)[0] == 200
    before = memory_of_front_ends()
    with stopping_short(port_of(url), clients, size):
        assert ask(url, prompt="hi")[0] == 200
        grown = memory_of_front_ends() - before
    # What asyncio, uvicorn and a growing bytearray keep beside the bytes that count.
    most = 2 * budget + clients * 4 * 2**16 + 16 * 2**20
    print("\nhttp_bodies", json.dumps({"grown_mib": grown >> 20, "most_mib": most >> 20}))
    assert grown <= most < clients * size / 4
    assert ask(url, **large)[0] == 200


SHARE = 0.4  # a twentieth is usual, and 0.6 to 0.9 where the body is read in the front end itself

HEAVY = {
    "lists in an ignored field": lambda size: {"prompt": "hi", "user": [[]] * (size // 3)},
    "lists in a tool": lambda size: {"messages": MESSAGES, "tools": [{"x": [[]] * (size // 3)}]},
    "token ids": lambda size: {"prompt": [[7] * 131072] * (size // 2 // 131072)},
    "keys": lambda size: {"prompt": "hi", "user": dict.fromkeys(map(hex, range(size // 12)), 1)},
    "text": lambda size: {"prompt": "x" * size, "n": 128},
}
MESSAGES = [{"role": "user", "content": "hi"}]


def longest_wait_beside(url, path, data):
    """The longest wait of small requests while a large one is read, as a share of its time."""

    async def talk():
        port = port_of(url)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with closing(writer):
            head = HEAD.replace(b"/v1/completions", path.encode())
            writer.write(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
            began = time.monotonic()
            answered = asyncio.ensure_future(reader.readline())
            waits = []
            while not answered.done():
                asked = time.monotonic()
                assert (await fetch("127.0.0.1", port))[0] == 200
                waits.append(time.monotonic() - asked)
            return max(waits), time.monotonic() - began, answered.result()

    return asyncio.run(talk())


@pytest.mark.parametrize("name", HEAVY)
def test_small_requests_do_not_wait_for_what_a_large_body_holds(start, name):
    """However it ends: the share is that of the time until its first answer line."""
    url = start(replicas=1, limits=HttpSettings(max_body_mib=8), max_sequence_tokens=131072)
    body = HEAVY[name](8 * 2**20 - 1000)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    data = json.dumps(body, separators=(",", ":")).encode()
    found = []
    for _ in range(3):  # the machine may be busy with something else
        wait, whole, line = longest_wait_beside(url, path, data)
        found.append(wait / whole)
        figures = {"wait_ms": round(wait * 1e3), "whole_ms": round(whole * 1e3)}
        print("\nhttp_large_body", name, json.dumps(figures), line.decode().strip())
        if found[-1] < SHARE:
            break
    assert min(found) < SHARE


def _of(sock, connection):
    return bool(connection.raddr) and connection.raddr.port == sock.getsockname()[1]


# --- health ------------------------------------------------------------------------------------


def health(url):
    """Status and details of its health, which need no key."""
    assert get(f"{url}/health/live")[0] == 200
    status, body = get(f"{url}/v1/health")
    return status, body.get("details")


def get(url):
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_health_follows_replicas_and_coordinator(start):
    from megatron.core.inference.coordinator import messages as m
    from megatron.core.inference.coordinator.runtime import sockets, wire
    from megatron.core.inference.coordinator.runtime.process import (
        CoordinatorProcess,
        ProcessSettings,
    )

    coordinator = CoordinatorProcess(ProcessSettings())
    address = coordinator.address
    try:
        url = start(address, client_factory=None, api_keys=ApiKeys(["sesame"]), replicas=1)
        none = (503, f"the coordinator at {address} has no replica")
        wait_until(lambda: health(url) == none)
        with zmq.Context() as context, sockets.dealer(context, address, b"engine") as engine:
            engine.send_multipart(wire.encode(m.Register(1, "job", 0, 0, 8, 256, 100, "lru")))
            wait_until(lambda: health(url) == (200, None))
            engine.send_multipart(wire.encode(m.Disconnect()))
            wait_until(lambda: health(url) == none)
    finally:
        coordinator.stop()
    wait_until(
        lambda: health(url) == (503, f"the connection to the coordinator at {address} broke")
    )


# --- ports -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True], ids=["plain", "reuseport"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use_is_an_error(start, host, shared):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        other.bind((host, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} is in use on 127.0.0.1: stop .* or choose"):
            start(port=port)
    assert front_ends() == []


def test_a_port_that_another_start_holds_is_in_use(server):
    from megatron.core.inference.coordinator.runtime.http import ports

    with ports.hold_port("127.0.0.1", 0) as holder, pytest.raises(ports.PortInUseError):
        ports.hold_port("127.0.0.1", holder.getsockname()[1])


def test_the_same_port_again_right_after_a_stop(start, server):
    url = start(replicas=1)
    for _ in range(2):
        assert ask(url, prompt="hi")[0] == 200
        server.stop_text_gen_server()
        assert start(port=port_of(url), replicas=1) == url


def test_only_the_address_that_is_asked_for_is_served_and_by_default_all(start, server):
    url = start(replicas=1)
    assert url == f"http://127.0.0.1:{port_of(url)}"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port_of(url)))
    server.stop_text_gen_server()
    url = start(replicas=1, hostname=None)
    assert url == f"http://127.0.0.1:{port_of(url)}"
    socket.create_connection(("127.0.0.2", port_of(url))).close()


@pytest.mark.parametrize("hostname", ["::1", "::"])
def test_ipv6(start, hostname):
    try:
        socket.socket(socket.AF_INET6).bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    url = start(replicas=1, hostname=hostname)
    assert url == f"http://[::1]:{port_of(url)}"
    assert ask(url, prompt="hi")[0] == 200


def test_a_socket_fixes_host_and_port_and_is_closed(start):
    sock = socket.socket()
    sock.bind(("127.0.0.3", 0))
    port = sock.getsockname()[1]
    with forked():  # which holds it too
        url = start(sock=sock, port=1, replicas=1)
        assert url == f"http://127.0.0.3:{port}"
        assert sock.fileno() == -1
        assert ask(url, prompt="hi")[0] == 200


def test_a_fork_of_a_server_does_not_keep_its_port(start, server):
    url = start(replicas=1)
    with forked():
        server.stop_text_gen_server()
        assert start(port=port_of(url), replicas=1) == url
        assert ask(url, prompt="hi")[0] == 200


@contextlib.contextmanager
def forked():
    """A fork of this process, which does nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads
        pid = os.fork()
    if not pid:
        signal.pause()
        os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_no_piece_of_an_answer_waits_for_the_one_before_it(host):
    """An acknowledgement may come 40 ms late, and Nagle's algorithm would wait for it."""
    from megatron.core.inference.coordinator.runtime.http import ports

    async def accepted():
        loop = asyncio.get_running_loop()
        first = loop.create_future()
        with ports.hold_port(host, 0) as holder:
            sock = ports.listening_socket(holder.family, holder.getsockname())
        server = await asyncio.start_server(lambda _, writer: first.set_result(writer), sock=sock)
        _, client = await asyncio.open_connection(*sock.getsockname()[:2])
        async with server:
            writer = await first
            with closing(client), closing(writer):
                return writer.get_extra_info("socket").getsockopt(
                    socket.IPPROTO_TCP, socket.TCP_NODELAY
                )

    try:
        assert asyncio.run(accepted())
    except OSError:
        assert host == "::1"
        pytest.skip("no IPv6 here")


def test_a_socket_without_a_port_is_refused(start):
    with pytest.raises(ValueError, match="bound to a port"):
        start(sock=socket.socket())


def test_an_address_of_another_machine_is_refused(start):
    with pytest.raises(OSError, match=r"cannot serve on 192\.0\.2\.1 port 0: Cannot assign"):
        start(hostname="192.0.2.1")


# --- starting and stopping ---------------------------------------------------------------------


def test_no_text_in_the_log_looks_like_a_line_of_its_own(server, tmp_path):
    from megatron.core.inference.coordinator.runtime import fork_server

    file = tmp_path / "stderr"
    process = fork_server.warm_up().Process(target=log_what_a_client_made_up, args=(str(file),))
    process.start()
    process.join(50)
    assert process.exitcode == 1
    bad, failed, *trace = file.read_text().splitlines()
    assert bad == r"ERROR:megatron.core.x:path=/\nERROR:root:forged \x1b[31m"
    assert failed.endswith("replica:http_frontend_failed replica=0")
    assert all(line.startswith("  ") for line in trace)
    assert trace[-1] == "  ERROR:root:forged"


def test_a_second_start_warns_and_changes_nothing(start, caplog):
    url = start(replicas=1)
    before = front_ends()
    assert start(replicas=2) == url
    assert "http_frontends_already_running" in caplog.text
    assert front_ends() == before


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nowhere", r"failed \(ConnectionError: nobody answers\) while connecting .* at nowhere"),
        ("death", r"ended \(it exited with 9\) while connecting to the coordinator at death"),
        ("silence", r"was not ready after 2 s while connecting .* at silence"),
    ],
)
def test_a_front_end_that_does_not_start_gives_its_reason(start, server, address, message):
    port = free_port()
    with pytest.raises(server.FrontEndError, match=message):
        start(address, port=port, start_timeout=2)
    assert front_ends() == []
    assert start(port=port, replicas=1).endswith(f":{port}")


def test_what_does_not_pickle_is_refused_and_the_port_set_free(start):
    port = free_port()
    with pytest.raises(AttributeError, match="local object"):
        start(port=port, client_factory=lambda *_: None)
    assert start(port=port, replicas=1).endswith(f":{port}")


def test_no_front_end_at_all_is_refused(start):
    with pytest.raises(ValueError, match="num_replicas is 0"):
        start(replicas=0)


def test_stop_is_quick_also_with_requests_in_flight(start, server):
    url = start()
    with socket.create_connection(("127.0.0.1", port_of(url))) as waiting:
        body = b'{"prompt": "wait"}'
        waiting.sendall(HEAD + b"Content-Length: 18\r\n\r\n")
        waiting.sendall(body)
        time.sleep(0.2)
        processes = front_ends()
        began = time.monotonic()
        server.stop_text_gen_server()
        assert time.monotonic() - began < 15
        assert [p.exitcode for p in processes] == [-signal.SIGTERM] * 2
    server.stop_text_gen_server()


def test_what_is_asked_before_a_drain_is_answered_and_nothing_else_is_taken(start, server):
    url = start()
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, url, prompt="slow") for _ in range(8)]
        time.sleep(0.3)
        assert not any(each.done() for each in asked)
        processes = front_ends()
        began = time.monotonic()
        assert server.drain_text_gen_server(10) is True
        assert time.monotonic() - began < 25
        assert [each.result()[0] for each in asked] == [200] * 8
    with pytest.raises(ConnectionRefusedError):
        ask(url, prompt="hi")
    server.stop_text_gen_server()
    assert [p.exitcode for p in processes] == [0] * 2


def test_a_drain_ends_when_its_time_is_over(start, server):
    url = start(replicas=1)
    with socket.create_connection(("127.0.0.1", port_of(url))) as waiting:
        head = HEAD + b"Content-Length: 18\r\n\r\n"
        waiting.sendall(head + b'{"prompt": "wait"}')
        time.sleep(0.2)
        began = time.monotonic()
        assert server.drain_text_gen_server(0.5) is False
        server.stop_text_gen_server()
        assert 0.5 <= time.monotonic() - began < 15
    assert server.drain_text_gen_server(0.5) is True  # nobody is left


# --- supervision -------------------------------------------------------------------------------


@pytest.fixture
def at_once(monkeypatch):
    """Front ends are started again without delay."""
    from megatron.core.inference.coordinator.runtime.http import front_ends

    monkeypatch.setattr(front_ends, "_RESTART_S", 0.01)
    monkeypatch.setattr(front_ends, "_LONGEST_RESTART_S", 0.02)


def serves(url):
    try:
        return ask(url, prompt="hi")[0] == 200
    except OSError:  # between two front ends
        return False


def test_front_ends_that_end_are_replaced(start, server, caplog):
    url = start()
    before = {process.pid for process in front_ends()}
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len({p.pid for p in front_ends()} - before) == 2)
    wait_until(lambda: serves(url))
    assert not server.supervision().done()
    said = [r.getMessage() for r in caplog.records if "http_frontend_restarts" in r.getMessage()]
    assert [message.split()[1] for message in said] == ["count=1", "count=2"]
    for pid in before:
        assert sum(f"(pid {pid}) ended (killed by SIGKILL) while serving" in m for m in said) == 1
    server.stop_text_gen_server()
    assert not server.supervision()
    assert front_ends() == []


def test_front_ends_that_cannot_be_started_again_are_given_up_with_the_reason(
    start, server, at_once, caplog, tmp_path
):
    trouble = tmp_path / "trouble"
    url = start(str(trouble))
    failed = server.supervision()
    trouble.touch()
    for process in front_ends():
        os.kill(process.pid, signal.SIGKILL)
    error = failed.exception(60)
    assert isinstance(error, server.FrontEndError)
    assert "none of the HTTP front ends can be kept alive: 5 starts of each failed" in str(error)
    assert "failed (ConnectionError: nobody answers) while connecting" in str(error)
    assert "http_frontends_given_up" in caplog.text
    trouble.unlink()
    assert start(port=port_of(url)) == url  # although those given up may still be ending
    assert serves(url)


def test_one_that_cannot_be_started_again_is_tried_on_while_another_serves(
    start, server, at_once, caplog, tmp_path
):
    trouble = tmp_path / "trouble"
    url = start(str(trouble))
    trouble.touch()
    one, other = front_ends()
    os.kill(one.pid, signal.SIGKILL)
    wait_until(lambda: caplog.text.count("nobody answers") > 6, 60)
    assert serves(url)
    assert not server.supervision().done()
    trouble.unlink()
    wait_until(lambda: all(each.ready for each in server._running._front_ends))
    assert other.is_alive()


def test_signals_to_the_parent_s_group_do_not_reach_front_ends(start):
    """torchrun signals the groups of its processes; they drain their front ends themselves."""
    start()
    assert {os.getpgid(p.pid) for p in front_ends()} == {p.pid for p in front_ends()}


def test_ctrl_c_is_left_to_the_parent(start):
    url = start()
    for process in front_ends():
        os.kill(process.pid, signal.SIGINT)
    time.sleep(0.1)
    assert ask(url, prompt="hi")[0] == 200
    assert all(process.is_alive() for process in front_ends())


PARENT = """
import multiprocessing, time
import test_server
from megatron.core.inference.coordinator.runtime.http import server
url = server.start_text_gen_server(
    "anywhere", test_server.Tokenizer(), 0, 0, num_replicas=2, client_factory=test_server.Client
)
print(url, *(p.pid for p in multiprocessing.active_children()), flush=True)
time.sleep(600)
"""


LOSES_ITS_FORK_SERVERS = """
import os, signal
from multiprocessing import forkserver
from megatron.core.inference.coordinator.runtime.process import CoordinatorProcess, ProcessSettings

def kill(pid):
    os.kill(pid, signal.SIGKILL)

coordinator = CoordinatorProcess(ProcessSettings())
print(coordinator.process.pid, flush=True)
input()
kill(forkserver._forkserver._forkserver_pid)
for replica in server._running.replicas:
    kill(replica.pid)
input()
kill(forkserver._forkserver._forkserver_pid)
print(server.drain_text_gen_server(20), flush=True)
coordinator.check()
coordinator.stop()
server.stop_text_gen_server()
print("stopped", flush=True)
input()
"""


def test_neither_coordinator_nor_front_ends_need_the_fork_server_they_came_from():
    """It is in the parent's group, and ends of a signal to that."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.replace("time.sleep(600)", LOSES_ITS_FORK_SERVERS)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent, parent.stdin, parent.stdout, ThreadPoolExecutor(1) as pool:
        url, *pids = parent.stdout.readline().split()
        coordinator = int(parent.stdout.readline())
        print(file=parent.stdin, flush=True)
        wait_until(lambda: not any(lives(int(pid)) for pid in pids))
        wait_until(lambda: serves(url), 120)  # another fork server has to import everything
        asked = pool.submit(ask, url, prompt="slow")
        time.sleep(0.3)
        children = psutil.Process(parent.pid).children(recursive=True)
        print(file=parent.stdin, flush=True)
        assert parent.stdout.readline() == "True\n"
        assert asked.result()[0] == 200
        assert parent.stdout.readline() == "stopped\n"
        wait_until(lambda: not lives(coordinator))
        print(file=parent.stdin, flush=True)
        assert parent.wait() == 0
        wait_until(lambda: not any(lives(child.pid) for child in children))


def lives(pid):
    """Whether a process runs; the system may take its time to collect one that has ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_front_ends_end_with_a_parent_that_is_killed():
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], env=environment, stdout=subprocess.PIPE, text=True
    )
    with parent, parent.stdout:
        url, *pids = parent.stdout.readline().split()
        assert ask(url, prompt="hi")[0] == 200
        family = psutil.Process(parent.pid).children(recursive=True)
        assert {int(pid) for pid in pids} < {process.pid for process in family}
        parent.kill()
        parent.wait()
        wait_until(lambda: not any(lives(process.pid) for process in family))
