"""One HTTP front end: a process with its own inference client, listening socket and event loop."""

import asyncio
import contextlib
import inspect
import logging
import multiprocessing
import os
import pickle
import resource
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import uvicorn

from megatron.core.inference.coordinator.runtime.http.app import build_app
from megatron.core.inference.coordinator.runtime.http.ports import listening_socket

logger = logging.getLogger(__name__)

BACKLOG = 2**14
"""Connections that may wait to be accepted; the system's own limit may be lower."""

KEEP_ALIVE_S = 30
"""Seconds that a connection may be idle between requests."""

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
        logging.basicConfig(level=logging.INFO if settings.verbose else logging.WARNING)
        asyncio.run(_serve(settings, index, report))
    except BaseException as error:
        if report.closed:
            logger.critical("http_frontend_failed replica=%d", index, exc_info=error)
        else:
            details = "".join(traceback.format_exception(error))
            report.send(Report("failed", f"{type(error).__name__}: {error}", details))
        raise SystemExit(1) from None


async def _serve(settings: ReplicaSettings, index: int, report: Connection) -> None:
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
        vocab_size=settings.vocab_size,
    )
    report.send(Report("doing", "opening its socket"))
    sock = listening_socket(settings.family, settings.address)
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        interface="asgi3",
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        access_log=settings.verbose,
        log_config=None,
        log_level=logging.INFO if settings.verbose else logging.ERROR,
    )
    await _Server(config, report).serve(sockets=[sock])


async def _started_client(settings: ReplicaSettings) -> Any:
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
    """Reports once it listens, and leaves the signals as they are."""

    def __init__(self, config: uvicorn.Config, report: Connection):
        super().__init__(config)
        self._report = report

    async def startup(self, sockets: list | None = None) -> None:
        await super().startup(sockets)
        self._report.send(Report("ready"))
        self._report.close()

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def _prepare_process() -> None:
    """Makes this a process that ends when told to, and with its parent.

    Ctrl-C reaches all processes of a terminal: the parent stops its front ends, so they ignore it.
    SIGTERM ends them at once. A thread waits for the parent's end, however it ends, because the
    event loop may be busy or not have begun.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    torch.set_num_threads(1)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(0)
