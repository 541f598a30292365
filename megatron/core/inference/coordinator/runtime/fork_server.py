"""The fork server that the coordinator and the HTTP front ends come from.

It imports megatron-core once, for all of them; each import costs 5 to 6 s. None of them computes,
so none sees a GPU: Transformer Engine asks the device when it is imported, and each process that
does takes some 500 MB of its memory.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

_PRELOAD = [
    "megatron.core.inference.coordinator.runtime.http.replica",
    "megatron.core.inference.coordinator.runtime.client",
    "megatron.core.inference.coordinator.runtime.process",
]
"""Not the main module: forking is safe only from a process without threads or CUDA, and who knows
what a main module imports."""

_GPUS = "CUDA_VISIBLE_DEVICES"
_lock = threading.Lock()

_LOST_CODE = 255  # what multiprocessing makes up for a process whose fork server is gone
_REAP_S = 1.0  # the fork server needs a moment to tell how a process ended


def warm_up() -> ForkServerContext:
    """Let the imports begin now, in the background; returns at once.

    Call it before the model is built, and what is started later finds them done. Without effect
    where this process runs a fork server already; where that has died, it gets another one.

    Returns:
        The context to start processes from. They see no GPU.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with sigint_held(), _without_gpus():
        forkserver.ensure_running()
    return context


def end() -> None:
    """End this process's fork server at once, if there is one.

    Left alone it ends when this process does, but takes seconds to go.
    """
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Child:
    """A process from the fork server, as its parent sees it.

    multiprocessing hears of its end from the fork server alone, and takes the fork server's own end
    for the end of all its processes. Here a pipe tells, whose other end only the process holds.

    Args:
        target: Its main function; it must pickle, as must the arguments.
        args: The function's arguments.
        name: Its name.

    Attributes:
        process: multiprocessing's handle.

    Raises:
        EOFError, ConnectionError: The fork server ended meanwhile.
    """

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], name: str):
        context = warm_up()
        self._life, theirs = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_live, args=(theirs, target, args), name=name, daemon=True
        )
        try:
            with theirs, sigint_held():
                self.process.start()
        except BaseException:
            self._life.close()
            raise

    def fileno(self) -> int:
        """A descriptor that is readable once the process has ended."""
        return self._life.fileno()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid or 0

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return not self.join(0)

    @property
    def exit_code(self) -> int | None:
        """How it ended; None while it runs, and where nobody is left who could tell."""
        if self.alive:
            return None
        self.process.join(_REAP_S)
        code = self.process.exitcode
        return None if code == _LOST_CODE else code

    @property
    def cause(self) -> str:
        """How it ended, in words."""
        code = self.exit_code
        if code is None:
            return "it ended, and with the fork server whoever knows how"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"it exited with {code}"

    def join(self, seconds: float) -> bool:
        """Wait for its end; returns whether it has ended."""
        return self._life.closed or bool(wait([self._life], seconds))

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def stop(self, seconds: float) -> None:
        """End it: politely, then by force. Calling it again does nothing."""
        self.send_signal(signal.SIGTERM)
        if not self.join(seconds):
            self.send_signal(signal.SIGKILL)
            self.join(seconds)
        self.process.join(_REAP_S)


def _live(life: Connection, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """A process's main function; `life` stays open as long as the process lives."""
    target(*args)


@contextmanager
def _without_gpus() -> Iterator[None]:
    """What is started meanwhile sees no GPU from its first import on."""
    with _lock:
        before = os.environ.get(_GPUS)
        os.environ[_GPUS] = ""
        try:
            yield
        finally:
            if before is None:
                del os.environ[_GPUS]
            else:
                os.environ[_GPUS] = before


@contextmanager
def sigint_held() -> Iterator[None]:
    """Hold Ctrl-C back: processes started meanwhile never get it, and this one afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
