"""Worker processes that hold one side each, and rounds that alternate between the sides.

A side of its own process has its own heap: the collector and the allocator see there what they
would see in a real coordinator, and nothing of the other side.
"""

import logging
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

_IMPORTED_ONCE = [
    "megatron.core.inference.coordinator.runtime.process",
    "megatron.core.inference.data_parallel_inference_coordinator",
]
"""Each import of megatron.core costs 5 to 6 s; the fork server pays it for every process."""

_BEGAN = time.monotonic()


class WorkerFailed(RuntimeError):
    """A worker raised; the text holds its traceback."""


def say(text: str) -> None:
    """Tell on standard error how far the run is."""
    print(f"[{time.monotonic() - _BEGAN:6.1f} s] {text}", file=sys.stderr, flush=True)


def fork_server() -> ForkServerContext:
    """The context that every process of the bench starts from."""
    context = multiprocessing.get_context("forkserver")
    # Without effect once it runs: a fleet started by the plugin itself shares it.
    context.set_forkserver_preload(_IMPORTED_ONCE)
    return context


class Worker:
    """An object in a process of its own.

    Args:
        factory: Makes the object there; it and its arguments must be picklable.
        arguments: What it gets.

    Raises:
        WorkerFailed: The factory raised.
    """

    def __init__(self, factory: Callable[..., Any], *arguments: Any):
        context = fork_server()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, factory, arguments), daemon=True
        )
        self.process.start()
        theirs.close()
        self._result()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object and wait for its result.

        Raises:
            WorkerFailed: It raised, or its process ended.
        """
        self._pipe.send((method, arguments))
        return self._result()

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self.process.kill()  # it holds gigabytes at times: giving them back politely takes long
        self.process.join()

    def _result(self) -> Any:
        try:
            worked, result = self._pipe.recv()
        except EOFError:
            self.process.join()
            raise WorkerFailed(f"a worker ended with {self.process.exitcode}") from None
        if not worked:
            raise WorkerFailed(result)
        return result


def _serve(pipe: Connection, factory: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    logging.getLogger().setLevel(logging.ERROR)  # the released coordinator warns of what is meant
    try:
        subject = factory(*arguments)
        pipe.send((True, None))
        while True:
            method, values = pipe.recv()
            pipe.send((True, getattr(subject, method)(*values)))
    except EOFError:  # whoever asked is gone
        return
    except Exception:
        pipe.send((False, traceback.format_exc()))


@contextmanager
def workers(**made: tuple[Any, ...]) -> Iterator[dict[str, Worker]]:
    """Workers by name, ended in any case.

    Args:
        made: For each name the factory and its arguments.
    """
    running: dict[str, Worker] = {}
    try:
        for name, (factory, *arguments) in made.items():
            running[name] = Worker(factory, *arguments)
        yield running
    finally:
        for worker in running.values():
            worker.close()


def alternate(
    rounds: int, sides: Mapping[str, Callable[[int], Any]], about: str
) -> dict[str, list[Any]]:
    """Let the sides take turns, so that what drifts meets all of them alike.

    Args:
        rounds: Turns of each side.
        sides: What measures one round of each side, given its number.
        about: What is measured, for the progress line.

    Returns:
        The results of every side, in order.
    """
    results: dict[str, list[Any]] = {name: [] for name in sides}
    for number in range(rounds):
        say(f"{about}: round {number + 1} of {rounds}")
        for name, measure in sides.items():
            results[name].append(measure(number))
    return results
