"""The fork server that the coordinator and the HTTP front ends come from.

It imports megatron-core once, for all of them; each import costs 5 to 6 s.
"""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

_PRELOAD = [
    "megatron.core.inference.coordinator.runtime.http.replica",
    "megatron.core.inference.coordinator.runtime.client",
    "megatron.core.inference.coordinator.runtime.process",
]
"""Not the main module: forking is safe only from a process without threads or CUDA, and who knows
what a main module imports."""


def warm_up() -> ForkServerContext:
    """Let the imports begin now, in the background; returns at once.

    Call it before the model is built, and what is started later finds them done. Without effect
    where this process runs a fork server already.

    Returns:
        The context to start processes from.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with sigint_held():
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


@contextmanager
def sigint_held() -> Iterator[None]:
    """Hold Ctrl-C back: processes started meanwhile never get it, and this one afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
