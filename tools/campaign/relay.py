"""A link between a replica and the coordinator that can be cut, without root."""

import asyncio
import socket
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

_PIECE = 65536


class Relay:
    """A TCP port that leads to another one.

    While it is cut nothing passes, in either direction, and no end of a connection is told, as
    with a cable that was pulled: what is on its way arrives afterwards, if somebody still listens.

    Args:
        port: Where it leads, on this machine.

    Attributes:
        address: Where to connect to instead.
    """

    address: str

    def __init__(self, port: int):
        self._port = port
        self._whole = asyncio.Event()
        self._whole.set()
        self._running: set[asyncio.Task] = set()

    async def open(self) -> None:
        """Listen."""
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setblocking(False)
        self.address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        self._run(self._accept(listening))

    def cut(self) -> None:
        """Let nothing pass."""
        self._whole.clear()

    def mend(self) -> None:
        """Let everything pass again."""
        self._whole.set()

    async def close(self) -> None:
        """End all connections."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _accept(self, listening: socket.socket) -> None:
        # By hand: an asyncio.Server that is closed just when it has accepted somebody throws up
        # (Python 3.12, 3.13: its waiters are woken a second time), and keeps that connection.
        with listening:
            while True:
                accepted, _ = await asyncio.get_running_loop().sock_accept(listening)
                self._run(self._connect(accepted))

    async def _connect(self, accepted: socket.socket) -> None:
        to_near = to_far = None
        try:
            near, to_near = await asyncio.open_connection(sock=accepted)
            await self._whole.wait()
            far, to_far = await asyncio.open_connection("127.0.0.1", self._port)
            ways = [self._carry(near, to_far), self._carry(far, to_near)]
            tasks = [asyncio.ensure_future(way) for way in ways]
            try:
                # One end is enough: ZeroMQ never closes half a connection.
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in tasks:
                    each.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # the coordinator is gone, or the campaign is over
        finally:
            for writer in (to_near, to_far):
                if writer is not None:
                    writer.close()

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await source.read(_PIECE):
                await self._whole.wait()
                target.write(piece)
                await target.drain()
