"""One HTTP front end: a process with its own inference client, listening socket and event loop."""

import asyncio
import contextlib
import inspect
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import uvicorn

from megatron.core.inference.coordinator.runtime.eventlog import log_to_stderr
from megatron.core.inference.coordinator.runtime.http.access import ApiKeys
from megatron.core.inference.coordinator.runtime.http.app import bounds_of, build_app
from megatron.core.inference.coordinator.runtime.http.gate import Gate
from megatron.core.inference.coordinator.runtime.http.limits import HttpSettings
from megatron.core.inference.coordinator.runtime.http.logs import Throttle
from megatron.core.inference.coordinator.runtime.http.planning import Desk, Planner, start_beside
from megatron.core.inference.coordinator.runtime.http.ports import listening_socket
from megatron.core.inference.coordinator.runtime.http.protocol import Protocol
from megatron.core.inference.coordinator.runtime.keys import KeyRing, remember
from megatron.core.inference.coordinator.runtime.sockets import raise_descriptor_limit

logger = logging.getLogger(__name__)

BACKLOG = 2**14
"""Connections that may wait to be accepted; the system's own limit may be lower."""

LEAVE = signal.SIGUSR1
"""Tells a front end to answer what it has and end."""

_TICKS = 10  # of uvicorn, between two looks at all connections: about a second

ClientFactory = Callable[..., Any]
"""Called as `factory(coordinator_addr, deserialize=False, tokenizer=tokenizer)`."""


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """What all front ends of one server share. Pickles.

    Attributes:
        coordinator_addr: Where the coordinator listens.
        tokenizer: A megatron-core tokenizer.
        family: Address family of the shared port.
        address: The shared address, as `getsockname` gives it.
        parsers: Names of megatron-core's response parsers.
        verbose: Log every request and reply.
        model_name: The one model that is served.
        vocab_size: Token ids in requests must be below it; None: the tokenizer's.
        client_factory: Makes the inference client; None: the coordinator's own.
        api_keys: Keys that requests must present; none: anybody may send requests.
        limits: How much and how slowly a client may send.
        keys: For the coordinator; None where it speaks in plain.
        max_sequence_tokens: Longest sequence of the model; None: unknown.
        loopback_host: The name or address that is served, if only this machine can reach it.
    """

    coordinator_addr: str
    tokenizer: Any
    family: int
    address: tuple
    parsers: list[str] | None
    verbose: bool
    model_name: str
    vocab_size: int | None
    client_factory: ClientFactory | None
    api_keys: ApiKeys
    limits: HttpSettings
    keys: KeyRing | None = None
    max_sequence_tokens: int | None = None
    loopback_host: str | None = None

    @property
    def max_body_bytes(self) -> int:
        """The largest body of a request."""
        return self.limits.largest_body(self.max_sequence_tokens)

    @property
    def planner(self) -> Planner:
        """How requests are planned."""
        bounds = bounds_of(
            self.tokenizer,
            self.vocab_size,
            self.max_sequence_tokens,
            self.limits.max_request_tokens,
        )
        return Planner(self.tokenizer, bounds)


class Report(NamedTuple):
    """What a front end says about its start.

    Attributes:
        kind: "doing", "ready" or "failed".
        text: What it does, or why it failed.
        details: The traceback of a failure.
    """

    kind: str
    text: str = ""
    details: str = ""


def run_replica(pickled_settings: bytes, index: int, report: Connection) -> None:
    """Serves until the process is ended; the process's main function.

    Args:
        pickled_settings: `ReplicaSettings`.
        index: Which replica this is, from 0.
        report: Takes a `Report` before each step of the start, and one of its outcome.
    """
    _prepare_process()
    try:
        report.send(Report("doing", "loading the tokenizer"))
        settings: ReplicaSettings = pickle.loads(pickled_settings)
        log_to_stderr(logging.BASIC_FORMAT, logging.INFO if settings.verbose else logging.WARNING)
        for handler in logging.getLogger().handlers:
            handler.addFilter(Throttle())
        desk = Desk(settings.planner, start_beside(settings.planner))
        asyncio.run(_serve(settings, index, desk, report))
    except BaseException as error:
        if report.closed:
            logger.critical("http_frontend_failed replica=%d", index, exc_info=error)
        else:
            details = "".join(traceback.format_exception(error))
            report.send(Report("failed", f"{type(error).__name__}: {error}", details))
        raise SystemExit(1) from None


async def _serve(settings: ReplicaSettings, index: int, desk: Desk, report: Connection) -> None:
    address = settings.coordinator_addr
    report.send(Report("doing", f"connecting to the coordinator at {address}"))
    client = await _started_client(settings)
    app = build_app(
        client,
        settings.tokenizer,
        parsers=settings.parsers,
        verbose=settings.verbose,
        model_name=settings.model_name,
        replica=index,
        max_body_bytes=settings.max_body_bytes,
        body_timeout=settings.limits.body_timeout,
        may_control=settings.keys is None,  # else they are for submitting alone
        desk=desk,
    )
    gate = Gate(
        app,
        settings.api_keys,
        settings.max_body_bytes,
        index,
        body_budget=settings.limits.body_budget(settings.max_sequence_tokens),
        loopback_host=settings.loopback_host,
    )
    report.send(Report("doing", "opening its socket"))
    sock = listening_socket(settings.family, settings.address)
    config = server_config(gate, settings.limits, settings.verbose)
    server = _Server(config, settings.limits, report)
    asyncio.get_running_loop().add_signal_handler(LEAVE, server.leave)
    await server.serve(sockets=[sock])


def server_config(app: Gate, limits: HttpSettings, verbose: bool = False) -> uvicorn.Config:
    """How uvicorn serves an application."""
    return uvicorn.Config(
        app,
        http=Protocol,
        lifespan="off",
        ws="none",
        interface="asgi3",
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=limits.idle_timeout,
        h11_max_incomplete_event_size=limits.max_header_bytes,
        access_log=verbose,
        log_config=None,
        log_level=logging.INFO if verbose else logging.ERROR,
    )


async def _started_client(settings: ReplicaSettings) -> Any:
    if settings.keys is not None:
        remember(settings.coordinator_addr, settings.keys)
    factory = settings.client_factory
    if factory is None:
        from megatron.core.inference.coordinator.runtime.client import InferenceClient

        factory = InferenceClient
    client = factory(settings.coordinator_addr, deserialize=False, tokenizer=settings.tokenizer)
    started = client.start()
    if inspect.isawaitable(started):
        await started
    return client


class _Server(uvicorn.Server):
    """Reports once it listens, ends long waits for clients, and leaves the signals as they are."""

    def __init__(self, config: uvicorn.Config, limits: HttpSettings, report: Connection):
        super().__init__(config)
        self._limits = limits
        self._report = report

    async def startup(self, sockets: list | None = None) -> None:
        await super().startup(sockets)
        self._report.send(Report("ready"))
        self._report.close()

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS == 0:
            now = time.monotonic()
            for connection in list(self.server_state.connections):
                connection.enforce(self._limits, now)
        return await super().on_tick(counter)

    def leave(self) -> None:
        """Accept nothing more, answer what there is, and end."""
        self.should_exit = True

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def _prepare_process() -> None:
    """Makes this a process that ends when told to, and with its parent.

    Ctrl-C reaches all processes of a terminal, and torchrun signals whole process groups: the
    parent stops its front ends, so they ignore the one and leave the other. SIGTERM ends them at
    once. A thread waits for the parent's end, however it ends, because the event loop may be busy
    or not have begun.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    torch.set_num_threads(1)
    raise_descriptor_limit()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(0)
