"""The broadcast inside a model-parallel group: every worker sees every drain, frame by frame."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import zmq

from megatron.core.inference.coordinator.runtime import group_channel
from megatron.core.inference.coordinator.runtime.group_channel import (
    GroupPublisher,
    GroupSubscriber,
)

WORKERS = 3


def never() -> bool:
    return False


class Group:
    """A publisher, and workers in threads of their own, each with its own context."""

    def __init__(self, pool: ThreadPoolExecutor, context: zmq.Context, workers: int):
        self._pool = pool
        self.publisher = GroupPublisher(context, "127.0.0.1", workers)

    def worker(self, drains: int, start: threading.Event | None = None) -> Future:
        """A worker's future: what it gets in so many drains. It joins after `start`."""
        return self._pool.submit(self._work, drains, start)

    def _work(self, drains: int, start: threading.Event | None) -> list[list[list[bytes]]]:
        if start is not None:
            assert start.wait(10)
        with subscribing(self.publisher.address) as subscriber:
            return [subscriber.receive(never) for _ in range(drains)]


@contextmanager
def subscribing(address: str) -> Iterator[GroupSubscriber]:
    context = zmq.Context()
    subscriber = GroupSubscriber(context, address)
    try:
        yield subscriber
    finally:
        context.destroy(linger=0)


@contextmanager
def grouped(workers: int = WORKERS) -> Iterator[Group]:
    context = zmq.Context()
    try:
        with ThreadPoolExecutor(workers + 1) as pool:
            yield Group(pool, context, workers)
    finally:
        context.destroy(linger=0)


def test_nothing_is_published_before_the_last_worker_has_joined():
    late = threading.Event()
    with grouped() as group:
        workers = [group.worker(1), group.worker(1), group.worker(1, start=late)]
        waiting = group._pool.submit(group.publisher.wait_for_subscribers)
        time.sleep(0.2)  # the first two have joined by now
        assert not waiting.done()
        late.set()
        waiting.result(10)
        group.publisher.publish([[b"first"]])
        assert [worker.result(10) for worker in workers] == [[[[b"first"]]]] * WORKERS


def test_frames_are_kept_apart_also_empty_ones_and_empty_drains():
    drains = [
        [[b"one"], [b"one", b"two"], [b"one", b"two", b"three"]],
        [],
        [[b""]],
        [[b"", b""], [b"", b"x", b""], [b""]],
        [],
        [[b"\xff" * 100_000, b""]],
    ]
    with grouped() as group:
        workers = [group.worker(len(drains)) for _ in range(WORKERS)]
        group.publisher.wait_for_subscribers()
        for drain in drains:
            group.publisher.publish(drain)
        assert [worker.result(10) for worker in workers] == [drains] * WORKERS


def test_a_thousand_drains_keep_their_order_for_workers_of_any_speed():
    drains = [[[b"%d" % n, b"x" * (n % 7)]] * (n % 3) for n in range(1000)]
    with grouped() as group:
        workers = [group.worker(len(drains)) for _ in range(WORKERS)]
        group.publisher.wait_for_subscribers()
        for drain in drains:  # far ahead of the workers: nothing may be dropped on the way
            group.publisher.publish(drain)
        assert [worker.result(20) for worker in workers] == [drains] * WORKERS


def test_a_worker_that_does_not_come_is_an_error_that_counts_those_that_did(monkeypatch):
    monkeypatch.setattr(group_channel, "_JOIN_SECONDS", 0.3)
    with grouped() as group, subscribing(group.publisher.address):
        expected = rf"^1 of 3 model-parallel workers joined {group.publisher.address} within 0\.3 s"
        with pytest.raises(TimeoutError, match=expected):
            group.publisher.wait_for_subscribers()


class Told:
    """Stands in for a publisher's socket: it is told of these subscriptions, then of nothing."""

    def __init__(self, *subscriptions: bytes):
        self._waiting = list(subscriptions)

    def poll(self, timeout: float) -> bool:
        return bool(self._waiting)

    def recv(self) -> bytes:
        return self._waiting.pop(0)


def test_a_worker_that_leaves_has_not_joined():
    joins, leaves = b"\x01", b"\x00"
    with grouped(workers=2) as group:
        real, group.publisher.socket = group.publisher.socket, Told(joins, joins, leaves)
        with pytest.raises(TimeoutError, match=r"^1 of 2 "):
            group.publisher.wait_for_subscribers()
        group.publisher.socket = Told(joins, leaves, joins, joins)
        group.publisher.wait_for_subscribers()
        real.close(linger=0)


def test_a_group_of_one_has_nobody_to_wait_for_or_to_tell():
    with grouped(workers=0) as group:
        group.publisher.wait_for_subscribers()
        group.publisher.publish([[b"nobody hears it"]])


def test_a_worker_stops_waiting_when_the_job_ends():
    with grouped(workers=1) as group, subscribing(group.publisher.address) as subscriber:
        group.publisher.wait_for_subscribers()
        asked = []

        def give_up() -> bool:
            asked.append(time.monotonic())
            return len(asked) == 2

        began = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            subscriber.receive(give_up)
        assert time.monotonic() - began < 1
        assert len(asked) == 2


def test_a_worker_that_could_stop_still_takes_what_has_come():
    with grouped(workers=1) as group, subscribing(group.publisher.address) as subscriber:
        group.publisher.wait_for_subscribers()
        group.publisher.publish([[b"last"]])
        assert subscriber.receive(lambda: False) == [[b"last"]]
