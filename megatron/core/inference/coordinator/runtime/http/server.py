"""Starts and stops the HTTP front ends: processes that share one port, each with its own socket."""

import logging
import socket
import time
from concurrent.futures import Future
from typing import Any

from megatron.core.inference.coordinator.runtime.http.access import (
    ApiKeys,
    is_loopback,
    keys_from_environment,
)
from megatron.core.inference.coordinator.runtime.http.app import DEFAULT_MODEL_NAME
from megatron.core.inference.coordinator.runtime.http.front_ends import FrontEndError, FrontEnds
from megatron.core.inference.coordinator.runtime.http.limits import HttpSettings
from megatron.core.inference.coordinator.runtime.http.ports import (
    DEFAULT_HOST,
    hold_port,
    take_over,
)
from megatron.core.inference.coordinator.runtime.http.replica import ClientFactory, ReplicaSettings
from megatron.core.inference.coordinator.runtime.keys import KeyRing, Role, known

__all__ = [
    "FrontEndError",
    "drain_text_gen_server",
    "start_text_gen_server",
    "stop_text_gen_server",
    "supervision",
]

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0
"""Importing megatron-core can take 20 s on a cold machine, and every front end may have to."""

_running: FrontEnds | None = None


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
        hostname: Address or name to serve on. None: all interfaces, as with the released one, whose
            users are on other machines.
        sock: A bound socket whose address is used instead of `hostname` and `server_port`; it is
            closed. Other processes may hold it as well, but must not listen on it.
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
    holder = _held_port(server_port, hostname, sock)
    settings = ReplicaSettings(
        coordinator_addr=coordinator_addr,
        tokenizer=tokenizer,
        family=holder.family,
        address=holder.getsockname(),
        parsers=parsers,
        verbose=verbose,
        model_name=model_name,
        vocab_size=vocab_size,
        client_factory=client_factory,
        api_keys=api_keys,
        limits=limits or HttpSettings(),
        keys=_weakest(known(coordinator_addr)),
        max_sequence_tokens=max_sequence_tokens,
        loopback_host=_loopback_host(holder.getsockname()[0], hostname),
    )
    _running = front_ends = FrontEnds(holder, settings, num_replicas, start_timeout)
    logger.info(
        "http_frontends_started rank=%d url=%s replicas=%d seconds=%.1f",
        *(rank, front_ends.url, num_replicas, time.monotonic() - began),
    )
    return front_ends.url


def supervision() -> "Future[None] | None":
    """What fails, with a `FrontEndError`, once no front end can be kept alive; None without any."""
    return None if _running is None else _running.given_up


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
        logger.info("http_frontends_stopped")


def _held_port(port: int, hostname: str | None, sock: socket.socket | None) -> socket.socket:
    """Reserves the port that was asked for."""
    return hold_port(hostname or DEFAULT_HOST, port) if sock is None else take_over(sock)


def _loopback_host(address: str, hostname: str | None) -> str | None:
    """What requests may call a server that only this machine reaches; None for others."""
    return (hostname or address).lower() if is_loopback(address) else None


def _weakest(ring: KeyRing | None) -> KeyRing | None:
    """What front ends need: they only submit requests."""
    return None if ring is None else ring.only(Role.SUBMIT)
