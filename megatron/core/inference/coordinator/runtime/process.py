"""The coordinator as a process of its own, and its parent's handle on it."""

import errno
import faulthandler
import logging
import multiprocessing
import secrets
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import zmq

from megatron.core.inference.coordinator.core import Coordinator
from megatron.core.inference.coordinator.ledger import REQUEST_IDS
from megatron.core.inference.coordinator.runtime import garbage, sockets
from megatron.core.inference.coordinator.runtime.eventlog import log_to_stderr, render
from megatron.core.inference.coordinator.runtime.fork_server import Child, warm_up
from megatron.core.inference.coordinator.runtime.keys import Guard, Lock
from megatron.core.inference.coordinator.runtime.loop import CoordinatorLoop
from megatron.core.inference.coordinator.runtime.records import Books
from megatron.core.inference.coordinator.settings import CoordinatorSettings, RecordSettings

logger = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s coordinator %(levelname)s %(message)s"

_START_SECONDS = 120.0
"""A process that imports megatron.core on a busy machine may need a minute."""

_LISTENING, _DIED = "listening", "died"


class CoordinatorDied(RuntimeError):
    """The coordinator process ended; the text holds its last error."""


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """What a coordinator process is started with. Picklable.

    Attributes:
        coordinator: Settings of the core.
        host: Address to bind, a name or a number.
        port: Port to bind; 0 lets the system choose.
        schedule_path: Where to write every decision at the end, or None.
        recording: Whether and where to write every request as it ends.
        log_level: Level of its log, which goes to standard error.
        lock: The keys of its peers; None lets everybody talk to it, in plain.
        insists_on_port: Whether a port in use is an error; else the system chooses another.
    """

    coordinator: CoordinatorSettings = field(default_factory=CoordinatorSettings)
    host: str = "127.0.0.1"
    port: int = 0
    schedule_path: str | None = None
    recording: RecordSettings = field(default_factory=RecordSettings)
    log_level: int = logging.INFO
    lock: Lock | None = None
    insists_on_port: bool = True


def bind(router: zmq.Socket, host: str, port: int) -> str:
    """Bind a ROUTER and return its address.

    Raises:
        OSError: The port is in use, or the host is none of this machine's; says what to do.
    """
    try:
        number = socket.gethostbyname(host)
        router.bind(f"tcp://{number}:{port or '*'}")
    except (zmq.ZMQError, OSError) as error:
        if error.errno == errno.EADDRINUSE:
            raise OSError(
                errno.EADDRINUSE,
                f"port {port} on {host} is in use: name another with "
                "--inference-coordinator-port, or leave it out and the system chooses one",
            ) from None
        raise OSError(
            error.errno, f"cannot bind the coordinator to {host}:{port} ({error.strerror})"
        ) from None
    address: str = router.getsockopt_string(zmq.LAST_ENDPOINT)
    return address


def _bind_or_choose(router: zmq.Socket, settings: ProcessSettings) -> str:
    try:
        return bind(router, settings.host, settings.port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or settings.insists_on_port:
            raise
        address = bind(router, settings.host, 0)
        fields = {"port": settings.port, "address": address}
        logger.warning("%s", render("port_in_use", fields))
        return address


def run(settings: ProcessSettings, tokenizer: Any, pipe: Connection | None) -> None:
    """Run a coordinator until it is told to stop or its parent is gone.

    Args:
        settings: What it is started with.
        tokenizer: See `CoordinatorLoop`.
        pipe: Gets its address once it listens, and its last error if it dies; may be None.
    """
    faulthandler.enable()
    # Ctrl-C reaches the whole terminal group; the parent ends us in its own order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log_to_stderr(LOG_FORMAT, settings.log_level)
    try:
        serve(settings, tokenizer, lambda address: _tell(pipe, address))
    except BaseException as error:
        if pipe is not None:
            pipe.send((_DIED, f"{type(error).__name__}: {error}"))
        if not isinstance(error, OSError):
            logger.critical("coordinator_failed", exc_info=error)
        raise SystemExit(1) from None


def _tell(pipe: Connection | None, address: str) -> None:
    if pipe is not None:
        pipe.send((_LISTENING, address))


def serve(
    settings: ProcessSettings,
    tokenizer: Any = None,
    listening: Callable[[str], None] = lambda address: None,
    signals: Sequence[int] = (signal.SIGTERM,),
) -> None:
    """Coordinate, in this process's main thread, until told to stop or the parent is gone.

    Args:
        settings: What it is started with.
        tokenizer: See `CoordinatorLoop`.
        listening: Called with the address once it listens.
        signals: Signals that stop it.

    Raises:
        OSError: See `bind`; or a file that was asked for cannot be written.
    """
    connections = sockets.raise_descriptor_limit()
    context = zmq.Context()
    router = sockets.router(context, settings.coordinator.fleet.max_frame_bytes)
    guard = None
    books = Books(settings.coordinator, settings.schedule_path, settings.recording)
    if settings.lock is not None:
        guard = settings.lock.guard(context)
        settings.lock.apply(router)
    try:
        address = _bind_or_choose(router, settings)
        loop = _make_loop(settings, router, tokenizer, guard, books)
        for number in signals:
            loop.stop_at(number)
        logger.info("%s", render("listening", _start(settings, address, connections)))
        listening(address)
        garbage.spare_the_old()
        loop.run()
        _report(loop)
        books.flush(loop.core)
    finally:
        books.close()
        router.close(linger=200)  # a last message to engines may still be on its way
        if guard is not None:
            guard.stop()
        context.term()


def _make_loop(
    settings: ProcessSettings,
    router: zmq.Socket,
    tokenizer: Any,
    guard: Guard | None,
    books: Books,
) -> CoordinatorLoop:
    parent = multiprocessing.parent_process()
    rights = {} if guard is None else {"rights_of": guard.rights}

    core = Coordinator(
        replace(
            settings.coordinator,
            trace=books.kept,
            first_request_id=secrets.randbelow(REQUEST_IDS),
        )
    )

    def each_tick() -> None:
        garbage.freeze()
        books.flush(core)

    return CoordinatorLoop(
        core,
        router,
        tokenizer,
        parent.sentinel if parent else None,
        each_tick=each_tick,
        traced=books.add,
        **rights,
    )


def _report(loop: CoordinatorLoop) -> None:
    for number, accuracy in sorted(loop.core.fleet.router.accuracy.items()):
        fields = {"rank": number, **accuracy.fields()}
        logger.info("%s", render("prediction_accuracy", fields))
    logger.info("%s", render("stopped", loop.events.summary()))


def _start(settings: ProcessSettings, address: str, connections: int) -> dict[str, Any]:
    """What the log says of the start."""
    said = {"address": address} | _policy(settings) | {"descriptors": connections}
    path = settings.recording.record
    return said | {"record": path} if path else said


def _policy(settings: ProcessSettings) -> dict[str, Any]:
    core = settings.coordinator
    return {"policy": core.signal.value, "cost_policy": core.routing.cost_policy.value}


class CoordinatorProcess:
    """A running coordinator process, seen from its parent.

    It is forked from a fork server, a fresh interpreter, so nothing patched here exists there; what
    it needs travels in picklable settings.

    Args:
        settings: What it is started with.
        tokenizer: See `CoordinatorLoop`.

    Attributes:
        process: multiprocessing's handle on it.

    Raises:
        CoordinatorDied: It did not come up; says why.
    """

    def __init__(self, settings: ProcessSettings, tokenizer: Any = None):
        self._pipe, theirs = warm_up().Pipe()
        with theirs:
            self._child = Child(run, (settings, tokenizer, theirs), "coordinator")
        self.process = self._child.process
        self._last_error: str | None = None
        self.address = self._wait_for_address()

    def check(self) -> None:
        """Do nothing while the process runs.

        Raises:
            CoordinatorDied: It does not; the text holds its last error.
        """
        if self._child.alive:
            return
        self._read_pipe()
        cause = self._last_error or self._child.cause
        raise CoordinatorDied(f"the coordinator process (pid {self._child.pid}) died: {cause}")

    def stop(self, seconds: float = 2.0) -> None:
        """End it: politely, then by force."""
        self._child.stop(seconds)

    def _wait_for_address(self) -> str:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._pipe.poll(0.2) and (address := self._read_pipe()) is not None:
                return address
            self.check()
        self.stop()
        raise CoordinatorDied(f"the coordinator did not come up within {_START_SECONDS:.0f} s")

    def _read_pipe(self) -> str | None:
        """What it said: an address is returned, an error is remembered."""
        try:
            while self._pipe.poll():
                kind, text = self._pipe.recv()
                if kind == _LISTENING:
                    return str(text)
                self._last_error = str(text)
        except EOFError:
            pass
        return None
