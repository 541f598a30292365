"""Ending a rank in time: orderly if it can, at once if it cannot."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module

_ORDERLY_SECONDS = 3.5
EXIT_CODE = 130
"""What a shell calls "ended by Ctrl-C"."""


class StopSignal:
    """Ctrl-C and SIGTERM, noticed in a thread of its own.

    A Python signal handler waits for the main thread, which may be in the middle of a long step
    or a collective that will never end; the thread does not. Until `on_stop` is called there is
    nothing to put in order, and the process ends at once; after that it gets some seconds.
    Further signals change nothing: torchrun may deliver them twice.
    """

    def __init__(self):
        # On import the released coordinator has stacks dumped at these signals: import it first.
        import_module("megatron.core.inference.data_parallel_inference_coordinator")
        self._callback: Callable[[], None] | None = None
        self._stopped = False
        self._reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._writer = writer  # keeps its descriptor open
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._watch, name="stop-signal", daemon=True).start()

    def on_stop(self, callback: Callable[[], None]) -> None:
        """From now on a signal calls this, in the watching thread."""
        self._callback = callback

    def exit_if_stopped(self) -> None:
        """End the process, after an orderly stop, without the seconds that torch takes to go."""
        if self._stopped:
            _exit()

    def _watch(self) -> None:
        while self._reader.recv(1)[0] not in (signal.SIGINT, signal.SIGTERM):
            pass  # some other signal with a Python handler
        self._stopped = True
        if self._callback is not None:
            self._callback()
            time.sleep(_ORDERLY_SECONDS)
        _exit()


def _exit() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_CODE)
