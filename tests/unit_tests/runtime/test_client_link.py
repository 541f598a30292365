"""A client whose connection breaks: what waits fails, and it comes back by itself."""

import asyncio
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq
from live_coordinator import SECONDS, Running
from megatron.core.inference.sampling_params import SamplingParams

from megatron.core.inference.coordinator.runtime import client_link, keys
from megatron.core.inference.coordinator.runtime.client import (
    CoordinatorUnreachable,
    Disconnected,
    InferenceClient,
    RequestFailed,
)
from megatron.core.inference.coordinator.settings import FleetSettings

NOW = FleetSettings(replica_wait=0)
"""With no replica, a request is answered at once: with an error that says so."""


class Restarted:
    """A coordinator that ends and is started again at its address."""

    def __init__(self, **settings: Any):
        self._live = Running(**settings)
        self.address = self._live.address
        self._port = self._live.port

    def end(self) -> None:
        self._live.close()

    def start(self, **settings: Any) -> None:
        self._live = Running(port=self._port, **settings)

    def forget_clients(self) -> None:
        """As if messages to them could not be sent."""
        core = self._live.loop.core
        for peer in list(core._clients):
            core._forget_client(peer)


@contextmanager
def restarted(**settings: Any) -> Iterator[Restarted]:
    coordinator = Restarted(**settings)
    try:
        yield coordinator
    finally:
        coordinator.end()


def connected(address: str) -> InferenceClient:
    client = InferenceClient(address, connect_timeout=SECONDS)
    client.start(asyncio.get_running_loop())
    return client


def ask(client: InferenceClient) -> asyncio.Future:
    return client.add_request([1, 2, 3], SamplingParams(termination_id=-1))


async def failure(future: asyncio.Future) -> BaseException:
    """What a request fails with."""
    with pytest.raises(RequestFailed) as failed:
        await asyncio.wait_for(future, SECONDS)
    return failed.value


async def served_again(client: InferenceClient) -> None:
    """Wait until the coordinator answers requests of the client."""
    deadline = time.monotonic() + SECONDS
    while getattr(await failure(ask(client)), "code", None) != "no_replica":
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def run(main: Callable[[Restarted, InferenceClient], Any], **settings: Any) -> None:
    async def with_client(coordinator: Restarted) -> None:
        client = connected(coordinator.address)
        try:
            await main(coordinator, client)
        finally:
            client.stop()
            client.stop()

    with restarted(**settings) as coordinator:
        asyncio.run(with_client(coordinator))


def test_what_waits_when_the_connection_breaks_fails_and_may_be_sent_again():
    async def main(coordinator: Restarted, client: InferenceClient) -> None:
        waiting = [ask(client) for _ in range(3)]
        await asyncio.sleep(0.1)
        coordinator.end()
        for future in waiting:
            failed = await failure(future)
            assert isinstance(failed, Disconnected)
            assert failed.retryable
            assert str(failed) == (
                f"the connection to the coordinator at {client.address} broke; send the request "
                "again"
            )
        assert isinstance(await failure(ask(client)), Disconnected)  # a new one, at once
        await asyncio.sleep(0)
        assert client.completion_futures == {}

    run(main)


def test_it_connects_again_by_itself_as_often_as_need_be():
    async def main(coordinator: Restarted, client: InferenceClient) -> None:
        await served_again(client)
        for size in (8, 16):
            coordinator.end()
            await asyncio.sleep(0.3)
            coordinator.start(fleet=NOW, block_size_tokens=size)
            await served_again(client)
            assert client._block_size == size  # it may be another coordinator

    run(main, fleet=NOW)


def test_a_prepared_prompt_is_hashed_anew_for_a_coordinator_with_other_blocks():
    async def main(coordinator: Restarted, client: InferenceClient) -> None:
        await served_again(client)
        prepared = client.prepare(list(range(32)))
        coordinator.end()
        await asyncio.sleep(0.3)
        coordinator.start(fleet=NOW, block_size_tokens=16)
        await served_again(client)
        sent = client._submission(0, prepared, SamplingParams())
        assert sent == client._submission(0, list(range(32)), SamplingParams())
        assert len(sent.hashes or b"") == 2 * 8

    run(main, fleet=NOW, block_size_tokens=8)


def test_a_coordinator_that_has_given_it_up_is_connected_with_anew():
    async def main(coordinator: Restarted, client: InferenceClient) -> None:
        await served_again(client)
        coordinator.forget_clients()
        await failure(ask(client))
        await served_again(client)

    run(main, fleet=NOW)


def test_what_was_answered_before_the_connection_broke_is_delivered():
    async def main(coordinator: Restarted, client: InferenceClient) -> None:
        await served_again(client)  # whatever comes with the connection has been taken
        future = ask(client)
        deadline = time.monotonic() + SECONDS
        while not client._link._connection.socket.poll(10):  # it is here, and nobody has looked
            assert time.monotonic() < deadline
        coordinator.end()
        time.sleep(0.3)
        assert (await failure(future)).code == "no_replica"

    run(main, fleet=NOW)


def test_stopping_without_a_connection_is_quick_and_harmless():
    async def main(coordinator: Restarted, client: InferenceClient) -> None:
        coordinator.end()
        await asyncio.sleep(0.2)
        began = time.monotonic()
        client.stop()
        assert time.monotonic() - began < 15

    run(main)


@pytest.mark.parametrize("connects", [True, False])
def test_a_client_that_is_forgotten_hangs_nobody(connects):
    """ZeroMQ's contexts wait, when they are collected, for sockets that are open."""

    async def forget(address: str) -> weakref.ref:
        client = InferenceClient(address, connect_timeout=SECONDS if connects else 0.1)
        if connects:
            client.start(asyncio.get_running_loop())
        else:
            with pytest.raises(CoordinatorUnreachable):
                client.start(asyncio.get_running_loop())
        return weakref.ref(client)

    with restarted() as coordinator:
        if not connects:
            coordinator.end()
        forgotten = asyncio.run(forget(coordinator.address))
        gc.collect()
        assert forgotten() is None


# --- keys ----------------------------------------------------------------------------------------


@pytest.fixture
def ring(monkeypatch) -> Callable[[str, keys.KeyRing | None], None]:
    """`ring(address, keys)`: what this process knows of a coordinator's keys from now on."""
    monkeypatch.setattr(keys, "_rings", {})
    monkeypatch.delenv(keys.KEY_FILE_VARIABLE, raising=False)

    def know(address: str, known: keys.KeyRing | None) -> None:
        keys._rings.pop(address, None)
        if known is not None:
            keys.remember(address, known)

    return know


@pytest.fixture(params=["plain", "other keys"])
def stranger(request) -> keys.KeyRing | None:
    return None if request.param == "plain" else keys.Lock.generate().ring


def test_a_client_that_is_not_let_in_is_told(ring, stranger):
    lock = keys.Lock.generate()

    async def connect(address: str) -> None:
        InferenceClient(address, connect_timeout=1).start(asyncio.get_running_loop())

    with restarted(lock=lock) as coordinator:
        ring(coordinator.address, stranger)
        with pytest.raises(CoordinatorUnreachable, match=f"keys .* {keys.KEY_FILE_VARIABLE} names"):
            asyncio.run(connect(coordinator.address))


def test_keys_that_have_changed_are_read_again(ring, stranger, monkeypatch):
    """Until they are the right ones."""
    monkeypatch.setattr(client_link, "_AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(client_link, "_FAILURES", 2)
    first, second = keys.Lock.generate(), keys.Lock.generate()

    async def connect_and_come_back(coordinator: Restarted) -> None:
        client = connected(coordinator.address)
        await served_again(client)
        coordinator.end()
        ring(coordinator.address, stranger)
        coordinator.start(fleet=NOW, lock=second)
        await asyncio.sleep(1)
        assert isinstance(await failure(ask(client)), Disconnected)
        ring(coordinator.address, second.ring)
        await served_again(client)
        client.stop()

    with restarted(fleet=NOW, lock=first) as coordinator:
        ring(coordinator.address, first.ring)
        asyncio.run(connect_and_come_back(coordinator))


def test_sending_over_a_connection_that_is_refused_waits_for_nobody(ring):
    """A DEALER that was refused has nowhere to put a message."""

    async def send(address: str, other: keys.KeyRing) -> None:
        client = connected(address)
        coordinator.end()
        ring(address, other)
        coordinator.start(lock=second)
        connection = client._link._connection
        deadline = time.monotonic() + SECONDS
        while connection.socket.poll(0, zmq.POLLOUT) or client._link.trouble is None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.002)
        client.pause_engines()
        client.stop()

    first, second = keys.Lock.generate(), keys.Lock.generate()
    stranger = keys.KeyRing(second.own.public, keys.Lock.generate().ring.pairs)
    with restarted(lock=first) as coordinator:
        ring(coordinator.address, first.ring)
        asyncio.run(send(coordinator.address, stranger))
