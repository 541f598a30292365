"""Clients of both coordinators that hide nothing: every answer and error is counted, also a second.

`InferenceClient` drops what comes a second time; these are on its link, and do not.
"""

import asyncio
import itertools
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import zmq

from campaign.account import Account
from campaign.prompts import GREEDY
from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.hashing import packed_block_hashes
from megatron.core.inference.coordinator.lifecycle import Signal
from megatron.core.inference.coordinator.runtime import keys, wire
from megatron.core.inference.coordinator.runtime.client_link import ClientLink

_CONNECT_SECONDS = 30.0


class Client:
    """A client of our coordinator.

    Args:
        number: Of the client, in the account.
        address: The coordinator's.
        key_file: Its keys.
        account: Gets what is sent and what comes.
    """

    def __init__(self, number: int, address: str, key_file: str, account: Account):
        keys.remember(address, keys.KeyRing.read(key_file))
        self._number, self._account = number, account
        self._names = itertools.count()
        self._block_size = 0
        self._sampling = wire.pack(GREEDY)
        self._link = ClientLink(address, False, self._receive, self._lose)

    def open(self) -> None:
        """Connect."""
        self._link.open(asyncio.get_running_loop(), _CONNECT_SECONDS)

    def submit(self, prompt: int, tokens: list[int]) -> bool:
        """Ask, unless there is no connection at present; returns whether it was sent."""
        if self._link.trouble is not None:
            return False
        name = next(self._names)
        self._account.send((self._number, name), prompt, time.monotonic())
        hashes = packed_block_hashes(tokens, self._block_size)
        self._link.send(
            m.SubmitRequest(name, len(tokens), self._sampling, wire.pack(tokens), hashes)
        )
        return True

    def control(self, signal: Signal, *args: int) -> None:
        """Send a control signal."""
        self._link.send(m.Control(signal, args))

    def close(self) -> None:
        """Say good-bye."""
        self._link.close()

    def _receive(self, message: m.FromCoordinator) -> None:
        match message:
            case m.ConnectAck(block_size=block_size):
                self._block_size = block_size
            case m.Reply(client_request_id=name, body=packed):
                reply = wire.unpack(packed)
                tokens = list(reply["generated_tokens"] or ())
                status = _name(reply["status"])
                self._account.answer((self._number, name), status, tokens, time.monotonic())
            case m.RequestError(client_request_id=int() as name, code=code):
                self._account.error((self._number, name), code)

    def _lose(self, reason: str) -> None:
        self._account.fail_client(self._number, m.ErrorCode.NOT_CONNECTED)


class ReleasedClient:
    """A client of megatron-core's own coordinator, with the same methods."""

    def __init__(self, number: int, address: str, key_file: str, account: Account):
        self._number, self._account = number, account
        self._names = itertools.count()
        self._socket: Any = zmq.Context().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Connect.

        Raises:
            TimeoutError: Nobody answers.
        """
        self._socket.send(wire.pack([int(m.Header.CONNECT)]))
        if not self._socket.poll(int(_CONNECT_SECONDS * 1000)):
            raise TimeoutError("the released coordinator does not answer a client")
        self._socket.recv()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self._on_readable)

    def submit(self, prompt: int, tokens: list[int]) -> bool:
        """Ask."""
        name = next(self._names)
        self._account.send((self._number, name), prompt, time.monotonic())
        self._send([int(m.Header.SUBMIT_REQUEST), name, tokens, GREEDY])
        return True

    def control(self, signal: Signal, *args: int) -> None:
        """Send a control signal."""
        self._send([int(signal), *args])

    def close(self) -> None:
        """Close the socket; the released client says nothing either."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.FD)
        self._socket.close(linger=100)

    def _send(self, message: list[Any]) -> None:
        self._socket.send(wire.pack(message))
        # Sending may swallow the one signal that something has arrived: look again.
        assert self._loop is not None
        self._loop.call_soon(self._on_readable)

    def _on_readable(self) -> None:
        while not self._socket.closed and self._socket.poll(0):
            header, *items = wire.unpack(self._socket.recv())
            if header == m.Header.ENGINE_REPLY:
                name, reply = items
                key = self._number, name
                tokens = list(reply["generated_tokens"])
                self._account.answer(key, _name(reply["status"]), tokens, time.monotonic())


def _name(status: Any) -> str:
    """A status is a name, or an enum's as it was packed."""
    return str(status).rpartition(".")[2]


KINDS: dict[str, type[Client] | type[ReleasedClient]] = {
    "ours": Client,
    "released": ReleasedClient,
}


def go_lost(
    kind: str, address: str, key_file: str, prompts: list[list[int]], pipe: Connection
) -> None:
    """A client, in a process of its own, that asks and does not wait for the answers.

    It tells how much it has sent. Then it says good-bye if it is told to, else it waits to be
    killed.
    """

    async def run() -> None:
        client = KINDS[kind](0, address, key_file, Account(None, float("inf")))
        client.open()
        for number, tokens in enumerate(prompts):
            client.submit(number, tokens)
        await asyncio.sleep(0.05)  # they leave
        pipe.send(len(prompts))
        await asyncio.to_thread(pipe.recv)
        client.close()
        os._exit(0)

    asyncio.run(run())
