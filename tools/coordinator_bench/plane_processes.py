"""What the data plane is measured through: our coordinator, the released one, a bare forwarder."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

from coordinator_bench.plane_keys import Keys
from coordinator_bench.workers import fork_server

HOST = "127.0.0.1"
_START_SECONDS = 120
_SMALL = 8192
"""Bytes up to which a frame is copied, which is cheaper."""


class Target:
    """A running process with one socket that clients and engines connect to.

    Attributes:
        address: Of its socket.
        pid: Of the process.
    """

    def __init__(self, address: str, pid: int, ready: Any = None):
        self.address, self.pid = address, pid
        self._ready = ready

    def wait(self) -> None:
        """Wait until it would understand a client; its engines must have registered.

        Raises:
            RuntimeError: It does not come up.
        """
        if self._ready is not None and not self._ready.wait(_START_SECONDS):
            raise RuntimeError("the released coordinator did not come up")


@contextmanager
def running(name: str, ranks: int, block: int, keys: Keys | None = None) -> Iterator[Target]:
    """A process of this kind, ended afterwards.

    Args:
        name: "ours", "released" or "limit".
        ranks: Engines that will register.
        block: Tokens in a block.
        keys: Those that it and its peers have; None to speak in plain, as "released" always does.

    Raises:
        RuntimeError: It does not come up.
    """
    context = fork_server()
    pipe, theirs = context.Pipe()
    ready = context.Event() if name == "released" else None
    runs: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
        "ours": (run_ours, (theirs, ranks, block, keys)),
        "released": (run_released, (theirs, ready, ranks, block)),
        "limit": (run_forwarder, (theirs, keys)),
    }
    run, arguments = runs[name]
    process = context.Process(target=run, args=arguments, daemon=True)
    process.start()
    theirs.close()
    try:
        if not pipe.poll(_START_SECONDS):
            raise RuntimeError(f"{name} did not come up")
        said = pipe.recv()
        # Ours says what it tells: that it listens, or why it died.
        address = said[1] if name == "ours" else said
        yield Target(address, process.pid or 0, ready)
        if not process.is_alive():
            raise RuntimeError(f"{name} ended with {process.exitcode}")
    finally:
        process.kill()  # at SIGTERM the released one prints its stack
        process.join()


def run_ours(pipe: Connection, ranks: int, block: int, keys: Keys | None) -> None:
    """Our coordinator process, as `CoordinatorProcess` runs it.

    Its parent's handle on it is left out: importing that costs the bench's main process seconds.
    """
    from megatron.core.inference.coordinator.runtime.keys import KeyRing, Lock, Pair, Role
    from megatron.core.inference.coordinator.runtime.process import ProcessSettings, run
    from megatron.core.inference.coordinator.settings import CoordinatorSettings

    core = CoordinatorSettings(expected_ranks=ranks, block_size_tokens=block)
    lock = None
    if keys is not None:
        own, engine, client = (
            Pair(public.decode(), secret.decode())
            for public, secret in (keys.server, keys.engine, keys.client)
        )
        lock = Lock(own, KeyRing(own.public, {Role.ENGINE: engine, Role.SUBMIT: client}))
    run(ProcessSettings(core, HOST, log_level=logging.ERROR, lock=lock), None, pipe)


def run_released(pipe: Connection, ready: Any, ranks: int, block: int) -> None:
    """The released coordinator's own entry point, with prefix routing."""
    from megatron.core.inference.config import PrefixCachingCoordinatorPolicy
    from megatron.core.inference.data_parallel_inference_coordinator import (
        DataParallelInferenceCoordinator,
    )

    from coordinator_bench.released import Silent

    DataParallelInferenceCoordinator.entrypoint(
        pipe,
        ready,
        ranks,
        Silent(),
        1024,
        block_size_tokens=block,
        enable_prefix_caching=True,
        prefix_caching_coordinator_policy=PrefixCachingCoordinatorPolicy.LONGEST_PREFIX,
        hostname=HOST,
    )


def run_forwarder(pipe: Connection, keys: Keys | None) -> None:
    """A ROUTER that passes frames on and decides nothing: what pyzmq itself can do.

    What it gets says where it belongs: a hello of one frame makes a client or an engine known; a
    request of four frames goes to the next engine, without its hashes and with its client's name;
    two frames are cache events, which nobody reads; any other number are replies of three frames
    each, the first naming a client.
    """
    router = zmq.Context().socket(zmq.ROUTER)
    for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
        router.setsockopt(option, 0)
    if keys is not None:
        keys.serve(router)
    port = router.bind_to_random_port(f"tcp://{HOST}")
    pipe.send(f"tcp://{HOST}:{port}")
    engines: list[bytes] = []
    turn = 0
    while True:
        peer, *frames = _received(router)
        if len(frames) == 4:
            engine = engines[turn % len(engines)]
            turn += 1
            router.send_multipart([engine, peer, *frames[:3]], copy=False)
        elif len(frames) == 1:
            if peer.startswith(b"engine"):
                engines.append(peer)
            router.send_multipart([peer, *frames])
        elif len(frames) > 2:
            for start in range(0, len(frames), 3):
                router.send_multipart(frames[start : start + 3])


def _received(router: Any) -> list[Any]:
    """A message, its large frames where they lie: copying them takes most of the time at 128k."""
    frames: list[Any] = []
    while True:
        frame = router.recv(copy=False)
        frames.append(frame if len(frame) > _SMALL else frame.bytes)
        if not frame.more:
            return frames


def processor_ns(pid: int) -> tuple[int, int]:
    """Nanoseconds of processor time of a process: its main thread's, and all its threads'."""
    threads = Path(f"/proc/{pid}/task")
    used = {thread: _ran(threads / thread / "schedstat") for thread in os.listdir(threads)}
    return used[str(pid)], sum(used.values())


def _ran(schedstat: Path) -> int:
    return int(schedstat.read_text().split()[0])
