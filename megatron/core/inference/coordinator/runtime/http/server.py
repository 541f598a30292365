"""Starts and stops the HTTP front ends: processes that share one port, each with its own socket."""

import contextlib
import logging
import os
import pickle
import socket
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from megatron.core.inference.coordinator.runtime.fork_server import sigint_held, warm_up
from megatron.core.inference.coordinator.runtime.http.access import (
    ApiKeys,
    is_loopback,
    keys_from_environment,
)
from megatron.core.inference.coordinator.runtime.http.app import DEFAULT_MODEL_NAME
from megatron.core.inference.coordinator.runtime.http.limits import HttpSettings
from megatron.core.inference.coordinator.runtime.http.ports import DEFAULT_HOST, hold_port, url_of
from megatron.core.inference.coordinator.runtime.http.replica import (
    LEAVE,
    ClientFactory,
    ReplicaSettings,
    run_replica,
)
from megatron.core.inference.coordinator.runtime.keys import KeyRing, Role, known

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0
"""Importing megatron-core can take 20 s on a cold machine, and every front end may have to."""

_END_S = 1.5  # a front end that was told to end and has not by then is killed


class FrontEndError(RuntimeError):
    """A front end did not start."""


@dataclass(slots=True)
class _Replica:
    """A front-end process.

    Attributes:
        index: Which one.
        process: The process.
        report: What it says about its start.
        doing: Its last word on that.
    """

    index: int
    process: BaseProcess
    report: Connection
    doing: str = "starting its process"

    def failure(self, reason: str, details: str = "") -> FrontEndError:
        error = FrontEndError(
            f"HTTP front end {self.index} (pid {self.process.pid}) {reason} while {self.doing}"
        )
        if details:
            error.add_note(details)
        return error

    def hear(self) -> bool:
        """Takes its next report; whether it is ready now.

        Raises:
            FrontEndError: It failed.
        """
        try:
            kind, text, details = self.report.recv()
        except (EOFError, OSError):
            self.process.join(_END_S)
            raise self.failure(f"ended with exit code {self.process.exitcode}") from None
        if kind == "failed":
            raise self.failure(f"failed ({text})", details)
        self.doing = text
        return kind == "ready"


@dataclass(slots=True)
class _FrontEnds:
    """Front ends on one port.

    Attributes:
        holder: Keeps the port.
        replicas: Those started so far.
    """

    holder: socket.socket
    replicas: list[_Replica] = field(default_factory=list)

    @property
    def url(self) -> str:
        return url_of(self.holder.getsockname())

    @property
    def alive(self) -> bool:
        return any(replica.process.is_alive() for replica in self.replicas)

    def start(self, settings: ReplicaSettings, count: int) -> None:
        context = warm_up()
        pickled = pickle.dumps(settings)
        for index in range(count):
            report, reporter = context.Pipe(duplex=False)
            process = context.Process(
                target=run_replica,
                args=(pickled, index, reporter),
                name=f"http-front-end-{index}",
                daemon=True,
            )
            with reporter, sigint_held():
                _start(process)
            self.replicas.append(_Replica(index, process, report))

    def await_ready(self, timeout: float) -> None:
        """Waits until all accept connections.

        Raises:
            FrontEndError: One failed, or took longer than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        starting: dict[Any, _Replica] = {replica.report: replica for replica in self.replicas}
        while starting:
            spoken = wait(list(starting), max(0.0, deadline - time.monotonic()))
            if not spoken:
                late = next(iter(starting.values()))
                raise late.failure(f"was not ready after {timeout:g} s")
            for report in spoken:
                if starting[report].hear():
                    starting.pop(report).report.close()

    def drain(self, seconds: float) -> bool:
        """Lets all processes answer what they have and end; whether they did within the time."""
        ends = set()  # not process.sentinel: it tells of the fork server, which may end first
        for replica in self.replicas:
            with contextlib.suppress(ProcessLookupError):
                pid = replica.process.pid or 0
                ends.add(os.pidfd_open(pid))
                os.kill(pid, LEAVE)
        left, deadline = set(ends), time.monotonic() + seconds
        while left and (over := wait(list(left), max(0.0, deadline - time.monotonic()))):
            left.difference_update(over)
        for end in ends:
            os.close(end)
        return not left

    def stop(self) -> None:
        """Ends all processes and frees the port."""
        for replica in self.replicas:
            replica.process.terminate()
        deadline = time.monotonic() + _END_S
        for replica in self.replicas:
            replica.process.join(max(0.0, deadline - time.monotonic()))
            if replica.process.is_alive():
                replica.process.kill()
                replica.process.join()
            replica.report.close()
        self.holder.close()


_running: _FrontEnds | None = None


def start_text_gen_server(
    coordinator_addr: str,
    tokenizer: Any,
    rank: int,
    server_port: int,
    parsers: list[str] | None = None,
    verbose: bool = False,
    num_replicas: int = 4,
    hostname: str | None = None,
    sock: socket.socket | None = None,
    *,
    model_name: str = DEFAULT_MODEL_NAME,
    vocab_size: int | None = None,
    max_sequence_tokens: int | None = None,
    start_timeout: float = START_TIMEOUT_S,
    client_factory: ClientFactory | None = None,
    api_keys: ApiKeys | None = None,
    limits: HttpSettings | None = None,
) -> str:
    """Starts the front ends and returns once all of them accept connections.

    Args:
        coordinator_addr: Where the coordinator listens; it must be up.
        tokenizer: A megatron-core tokenizer; it must pickle.
        rank: This process's rank, for the log.
        server_port: Port to serve on; 0 lets the system choose one.
        parsers: Names of megatron-core's response parsers, applied in order.
        verbose: Log every request and reply.
        num_replicas: Number of front-end processes.
        hostname: Address or name to serve on. None: that of `sock`, else 127.0.0.1, so that other
            machines are served only when asked for ("0.0.0.0": all interfaces).
        sock: A bound socket whose port is used instead of `server_port`; it is closed.
        model_name: The one model that /v1/models lists and that answers name.
        vocab_size: Token ids in requests must be below it. None: the tokenizer's own; a model whose
            vocabulary is padded may answer with ids beyond, which then cannot be sent back.
        max_sequence_tokens: Longest sequence of the model: longer prompts are refused here, before
            they take time and memory. None: unknown.
        start_timeout: Seconds to wait for the front ends.
        client_factory: Makes each front end's inference client; it must pickle. None: our own.
        api_keys: Keys that requests must present. None: those of the environment, if any.
        limits: How much and how slowly a client may send. None: the defaults.

    Returns:
        The base URL, e.g. `http://127.0.0.1:5000`; where all interfaces are served, with the
        loopback address. If front ends run already, theirs: nothing is started.

    Raises:
        PortInUseError: Somebody has the port.
        OSError: It cannot be bound for another reason.
        FrontEndError: A front end did not start; the message holds its own last error.
        SettingsError: The environment variable for API keys is set and holds none.
    """
    global _running
    if _running is not None and _running.alive:
        logger.warning("http_frontends_already_running url=%s", _running.url)
        return _running.url
    stop_text_gen_server()
    if num_replicas < 1:
        raise ValueError(f"num_replicas is {num_replicas}; at least one front end is needed")
    api_keys = keys_from_environment() if api_keys is None else api_keys
    began = time.monotonic()
    front_ends = _FrontEnds(_held_port(server_port, hostname, sock))
    settings = ReplicaSettings(
        coordinator_addr=coordinator_addr,
        tokenizer=tokenizer,
        family=front_ends.holder.family,
        address=front_ends.holder.getsockname(),
        parsers=parsers,
        verbose=verbose,
        model_name=model_name,
        vocab_size=vocab_size,
        client_factory=client_factory,
        api_keys=api_keys,
        limits=limits or HttpSettings(),
        keys=_weakest(known(coordinator_addr)),
        max_sequence_tokens=max_sequence_tokens,
        loopback_host=_loopback_host(front_ends.holder.getsockname()[0], hostname),
    )
    try:
        front_ends.start(settings, num_replicas)
        front_ends.await_ready(start_timeout)
    except BaseException:
        front_ends.stop()
        raise
    _running = front_ends
    logger.info(
        "http_frontends_started rank=%d url=%s replicas=%d seconds=%.1f",
        *(rank, front_ends.url, num_replicas, time.monotonic() - began),
    )
    return front_ends.url


def drain_text_gen_server(seconds: float) -> bool:
    """Lets the front ends, if any, answer what they have; they accept nothing more.

    `stop_text_gen_server` has still to be called.

    Args:
        seconds: How long to wait for them.

    Returns:
        Whether everything was answered in time.
    """
    return _running is None or _running.drain(seconds)


def stop_text_gen_server() -> None:
    """Ends the front ends, if any, within 2 seconds; requests in flight are cut off."""
    global _running
    front_ends, _running = _running, None
    if front_ends is not None:
        front_ends.stop()
        logger.info("http_frontends_stopped replicas=%d", len(front_ends.replicas))


def _start(process: BaseProcess) -> None:
    try:
        process.start()
    except (EOFError, ConnectionError) as error:
        raise FrontEndError(
            "the fork server of the HTTP front ends ended; what it wrote to stderr says why"
        ) from error


def _held_port(port: int, hostname: str | None, sock: socket.socket | None) -> socket.socket:
    """Reserves the port that was asked for; a socket that was given makes way for it."""
    if sock is None:
        return hold_port(hostname or DEFAULT_HOST, port)
    with sock:
        host, port = sock.getsockname()[:2]
    if not port:
        raise ValueError("sock must be bound to a port before it is passed")
    return hold_port(hostname or host, port)


def _loopback_host(address: str, hostname: str | None) -> str | None:
    """What requests may call a server that only this machine reaches; None for others."""
    return (hostname or address).lower() if is_loopback(address) else None


def _weakest(ring: KeyRing | None) -> KeyRing | None:
    """What front ends need: they only submit requests."""
    return None if ring is None else ring.only(Role.SUBMIT)
