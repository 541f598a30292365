"""The front-end processes of one port, and the thread that replaces those that end."""

import logging
import pickle
import signal
import socket
import threading
import time
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from typing import Any

from megatron.core.inference.coordinator.runtime.fork_server import Child, warm_up
from megatron.core.inference.coordinator.runtime.http.ports import url_of
from megatron.core.inference.coordinator.runtime.http.replica import (
    LEAVE,
    ReplicaSettings,
    run_replica,
)

logger = logging.getLogger(__name__)

_END_S = 1.5  # a front end that was told to end and has not by then is killed

_RESTART_S = 0.25
"""From a front end's end to its next start; twice as long after each start that fails."""

_LONGEST_RESTART_S = 8.0

_TRIES = 5
"""When this many starts in a row have failed, of every front end, they are given up."""


class FrontEndError(RuntimeError):
    """A front end did not start, or none can be kept alive."""


class _FrontEnd:
    """A front end: a process, and another one after its end.

    Args:
        index: Which one.
        pickled_settings: See `run_replica`.
        start_timeout: Seconds that a start may take.

    Attributes:
        child: The process.
        ready: Whether it accepts connections.
        failures: Starts in a row that failed.
        due: When to look after it although nothing became readable.
    """

    def __init__(self, index: int, pickled_settings: bytes, start_timeout: float):
        self._index = index
        self._settings = pickled_settings
        self._start_timeout = start_timeout
        self._report: Connection | None = None
        self._doing = ""
        self.child: Child | None = None
        self.ready = False
        self.failures = 0
        self.due = 0.0

    @property
    def signs(self) -> list[Any]:
        """What becomes readable when it is to be looked after."""
        return [each for each in (self._report or self.child,) if each is not None]

    def look_after(self) -> None:
        """Start its process if that is due, and see how it is.

        Raises:
            FrontEndError: It ended, failed, or takes too long to start.
        """
        if self.child is None:
            if time.monotonic() >= self.due:
                self._start()
        elif self._report is not None and self._report.poll():
            self._hear(self._report)
        elif self.ready and not self.child.alive:
            raise self._failure(f"ended ({self.child.cause})")
        elif time.monotonic() >= self.due:
            raise self._failure(f"was not ready after {self._start_timeout:g} s")

    def end(self) -> None:
        """Have no process any more."""
        child, report = self.child, self._report
        self.child, self._report, self.ready = None, None, False
        if child is not None:
            child.stop(_END_S)
        if report is not None:
            report.close()

    def restart(self) -> float:
        """Have another process in a while; returns the seconds until then."""
        self.failures += not self.ready
        self.end()
        seconds = min(_RESTART_S * 2**self.failures, _LONGEST_RESTART_S)
        self.due = time.monotonic() + seconds
        return seconds

    def _start(self) -> None:
        self._doing = "starting its process"
        self.due = time.monotonic() + self._start_timeout
        self._report, reporter = warm_up().Pipe(duplex=False)
        arguments = self._settings, self._index, reporter
        try:
            with reporter:
                self.child = Child(run_replica, arguments, f"http-front-end-{self._index}")
        except (EOFError, ConnectionError) as error:
            raise FrontEndError(
                "the fork server of the HTTP front ends ended; what it wrote to stderr says why"
            ) from error

    def _hear(self, report: Connection) -> None:
        assert self.child is not None
        try:
            kind, text, details = report.recv()
        except (EOFError, OSError):
            self.child.join(_END_S)
            raise self._failure(f"ended ({self.child.cause})") from None
        if kind == "failed":
            error = self._failure(f"failed ({text})")
            error.add_note(details)
            raise error
        self._doing = text
        if kind == "ready":
            report.close()
            self._report, self.ready, self.failures = None, True, 0
            self.due, self._doing = float("inf"), "serving"

    def _failure(self, reason: str) -> FrontEndError:
        assert self.child is not None
        return FrontEndError(
            f"HTTP front end {self._index} (pid {self.child.pid}) {reason} while {self._doing}"
        )


class FrontEnds:
    """Front ends on one port; one that ends is replaced, until `drain` or `stop`.

    Args:
        holder: Keeps the port; it is closed at the end.
        settings: What they share.
        count: How many.
        start_timeout: Seconds that the start of one may take.

    Attributes:
        given_up: Gets a `FrontEndError` when none can be kept alive.

    Raises:
        FrontEndError: One did not start.
    """

    def __init__(
        self, holder: socket.socket, settings: ReplicaSettings, count: int, start_timeout: float
    ):
        self.given_up: Future[None] = Future()
        self._holder = holder
        self._front_ends: list[_FrontEnd] = []
        self._restarts = 0
        self._ending = threading.Event()
        self._woken, self._wake = socket.socketpair()
        self._supervisor = threading.Thread(target=self._supervise, name="front-ends", daemon=True)
        try:
            pickled = pickle.dumps(settings)
            self._front_ends += (_FrontEnd(i, pickled, start_timeout) for i in range(count))
            while not all(front_end.ready for front_end in self._front_ends):
                self._wait()
                for front_end in self._front_ends:
                    front_end.look_after()
        except BaseException:
            self.stop()
            raise
        self._supervisor.start()

    @property
    def url(self) -> str:
        """Their base URL."""
        return url_of(self._holder.getsockname())

    @property
    def alive(self) -> bool:
        """Whether they serve, or will again."""
        return self._supervisor.is_alive() and not self._over

    @property
    def replicas(self) -> list[Child]:
        """Their processes."""
        return [each.child for each in self._front_ends if each.child is not None]

    def drain(self, seconds: float) -> bool:
        """Let all processes answer what they have and end; whether they did within the time."""
        deadline = time.monotonic() + seconds
        self._end_supervision()
        replicas = self.replicas
        for replica in replicas:
            replica.send_signal(LEAVE)
        left = [each for each in replicas if not each.join(max(0.0, deadline - time.monotonic()))]
        return not left

    def stop(self) -> None:
        """End all processes and free the port."""
        self._end_supervision()
        for replica in self.replicas:
            replica.send_signal(signal.SIGTERM)
        for front_end in self._front_ends:
            front_end.end()
        self._holder.close()

    # --- supervision -------------------------------------------------------------------------

    def _wait(self) -> None:
        """Return when a front end is to be looked after, or supervision ends."""
        signs = [sign for front_end in self._front_ends for sign in front_end.signs]
        seconds = min(front_end.due for front_end in self._front_ends) - time.monotonic()
        wait([*signs, self._woken], None if seconds == float("inf") else max(0.0, seconds))

    @property
    def _over(self) -> bool:
        return self._ending.is_set() or self.given_up.done()

    def _supervise(self) -> None:
        while not self._over:
            self._wait()
            for front_end in self._front_ends:
                if self._over:
                    break
                try:
                    front_end.look_after()
                except FrontEndError as error:
                    self._replace(front_end, error)
        for front_end in self._front_ends:
            if not front_end.ready:  # `stop` may have come while its process was being made
                front_end.end()

    def _replace(self, front_end: _FrontEnd, error: FrontEndError) -> None:
        self._restarts += 1
        seconds = front_end.restart()
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        if min(each.failures for each in self._front_ends) < _TRIES:
            again = "http_frontend_restarts count=%d seconds=%g reason=%s"
            logger.warning(again, self._restarts, seconds, text)
            return
        logger.critical("http_frontends_given_up restarts=%d reason=%s", self._restarts, text)
        self.given_up.set_exception(
            FrontEndError(
                f"none of the HTTP front ends can be kept alive: {_TRIES} starts of each failed in "
                f"a row; the last one: {error}"
            )
        )

    def _end_supervision(self) -> None:
        self._ending.set()
        self._wake.send(b"!")
        if self._supervisor.is_alive():
            # It may be waiting for the imports of a new fork server, and ends what it gets then.
            self._supervisor.join(_END_S)
