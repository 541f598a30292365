"""Ending a rank in time: orderly if it can, at once if it cannot."""

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module

_ORDERLY_SECONDS = 3.5
_AGAIN_SECONDS = 2.0
EXIT_CODE = 130
"""What a shell calls "ended by Ctrl-C"."""


class StopSignal:
    """Ctrl-C and SIGTERM, noticed in a thread of its own.

    A Python signal handler waits for the main thread, which may be in the middle of a long step
    or a collective that will never end; the thread does not. Until `on_stop` is called there is
    nothing to put in order, and the process ends at once; after that it gets some seconds.
    Signals that follow within 2 seconds change nothing: torchrun may deliver them twice.
    """

    def __init__(self):
        # On import the released coordinator has stacks dumped at these signals: import it first.
        import_module("megatron.core.inference.data_parallel_inference_coordinator")
        self._callback: Callable[[], None] | None = None
        self._orderly = _ORDERLY_SECONDS, EXIT_CODE
        self._stopped = False
        self._reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._writer = writer  # keeps its descriptor open
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._watch, name="stop-signal", daemon=True).start()

    def on_stop(
        self,
        callback: Callable[[], None],
        seconds: float | None = None,
        exit_code: int = EXIT_CODE,
    ) -> None:
        """From now on a signal calls this, in the watching thread.

        Args:
            callback: Begins to put things in order.
            seconds: How long that may take; a few by default.
            exit_code: The process's, where it is through in time and no second signal came.
        """
        self._orderly = _ORDERLY_SECONDS if seconds is None else seconds, exit_code
        self._callback = callback

    def exit_if_stopped(self) -> None:
        """End the process, after an orderly stop, without the seconds that torch takes to go."""
        if self._stopped:
            _exit(self._orderly[1])

    def _watch(self) -> None:
        self._await_signal()
        self._stopped = True
        if self._callback is not None:
            began, (seconds, _) = time.monotonic(), self._orderly
            self._callback()
            again = min(_AGAIN_SECONDS, seconds)
            time.sleep(again)
            self._forget_signals()
            self._await_signal(began + seconds)
        _exit(EXIT_CODE)

    def _await_signal(self, deadline: float | None = None) -> None:
        """Return when a signal comes, or the time is over."""
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._reader], [], [], left)[0]:
                return
            if self._reader.recv(1)[0] in (signal.SIGINT, signal.SIGTERM):
                return  # and not some other signal with a Python handler

    def _forget_signals(self) -> None:
        while select.select([self._reader], [], [], 0)[0]:
            self._reader.recv(64)


def _exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
