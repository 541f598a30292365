"""Ctrl-C and SIGTERM end a rank in time, whatever its main thread is doing.

Each rank here is a process of its own, forked from a fork server that has imported all there is.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest

from megatron.core.inference.coordinator.runtime import stop_signal
from megatron.core.inference.coordinator.runtime.fork_server import warm_up

ORDERLY_SECONDS = 0.3
AGAIN_SECONDS = 0.2


def _live(pipe: Connection, main: Callable[[stop_signal.StopSignal, Connection], None]) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # the fork server blocks it
    stop_signal._ORDERLY_SECONDS = ORDERLY_SECONDS
    stop_signal._AGAIN_SECONDS = AGAIN_SECONDS
    main(stop_signal.StopSignal(), pipe)


@contextmanager
def living(main: Callable) -> Iterator[tuple[BaseProcess, Connection]]:
    context = warm_up()
    ours, theirs = context.Pipe()
    process = context.Process(target=_live, args=(theirs, main), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(50)
        assert ours.recv() == "ready"
        yield process, ours
    finally:
        process.kill()
        process.join()


def _blocked(pipe: Connection) -> None:
    """The main thread waits where no Python handler gets a turn."""
    lock = threading.Lock()
    lock.acquire()
    pipe.send("ready")
    while True:
        lock.acquire(timeout=60)


def _without_anything_to_put_in_order(stop: stop_signal.StopSignal, pipe: Connection) -> None:
    _blocked(pipe)


def _with_something_to_put_in_order(stop: stop_signal.StopSignal, pipe: Connection) -> None:
    stop.on_stop(lambda: pipe.send(threading.current_thread().name))
    _blocked(pipe)


def _that_puts_itself_in_order(stop: stop_signal.StopSignal, pipe: Connection) -> None:
    asked = threading.Event()
    stop.on_stop(asked.set)
    stop.exit_if_stopped()  # nobody has asked: it goes on
    pipe.send("ready")
    asked.wait(60)
    pipe.send("in order")
    stop.exit_if_stopped()
    pipe.send("still here")


def _that_takes_its_time(stop: stop_signal.StopSignal, pipe: Connection) -> None:
    asked = threading.Event()
    stop.on_stop(asked.set, 60, 0)
    pipe.send("ready")
    asked.wait(60)
    pipe.send("asked")
    pipe.recv()
    stop.exit_if_stopped()


def _that_gets_other_signals(stop: stop_signal.StopSignal, pipe: Connection) -> None:
    signal.signal(signal.SIGUSR1, lambda *_: None)
    _blocked(pipe)


def seconds_until_end(process: BaseProcess, exit_code: int = stop_signal.EXIT_CODE) -> float:
    began = time.monotonic()
    process.join(10)
    assert process.exitcode == exit_code
    return time.monotonic() - began


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_with_nothing_to_put_in_order_it_ends_at_once(number):
    with living(_without_anything_to_put_in_order) as (process, _):
        os.kill(process.pid, number)
        seconds_until_end(process)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_that_cannot_put_itself_in_order_is_given_some_seconds(number):
    with living(_with_something_to_put_in_order) as (process, pipe):
        for _ in range(2):  # torchrun may deliver it twice
            os.kill(process.pid, number)
        assert pipe.poll(10)
        assert pipe.recv() == "stop-signal"  # not the main thread, which is stuck
        assert seconds_until_end(process) > ORDERLY_SECONDS / 2
        with pytest.raises(EOFError):
            pipe.recv()  # it was asked once


def test_one_that_puts_itself_in_order_ends_then():
    with living(_that_puts_itself_in_order) as (process, pipe):
        os.kill(process.pid, signal.SIGTERM)
        assert pipe.recv() == "in order"
        seconds_until_end(process)
        with pytest.raises(EOFError):
            pipe.recv()


def test_other_signals_do_not_end_it():
    with living(_that_gets_other_signals) as (process, _):
        os.kill(process.pid, signal.SIGUSR1)
        process.join(0.2)
        assert process.is_alive()
        os.kill(process.pid, signal.SIGTERM)
        seconds_until_end(process)


def test_one_that_has_more_time_takes_it_and_may_call_its_end_no_error():
    with living(_that_takes_its_time) as (process, pipe):
        for _ in range(2):  # torchrun may deliver it twice
            os.kill(process.pid, signal.SIGTERM)
        assert pipe.recv() == "asked"
        process.join(2 * ORDERLY_SECONDS)
        assert process.is_alive()
        pipe.send("go on")
        seconds_until_end(process, exit_code=0)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once(second):
    with living(_that_takes_its_time) as (process, pipe):
        os.kill(process.pid, signal.SIGTERM)
        assert pipe.recv() == "asked"
        time.sleep(2 * AGAIN_SECONDS)
        os.kill(process.pid, second)
        seconds_until_end(process)
