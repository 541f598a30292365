"""How clients and engines of the data plane speak, with each of the processes between them.

Every request is known by its slot, a number that ends its sampling parameters: engines read it
there without unpacking anything, and only what is measured does any work on a prompt.
"""

from collections.abc import Sequence
from typing import Any

import zmq

from coordinator_bench import frames

_SLOT_BYTES = 8
_SAMPLING = frames.pack({**frames.SAMPLING, "slot": bytes(_SLOT_BYTES)})[:-_SLOT_BYTES]
"""Sampling parameters up to the last bytes. A number would not do: it is packed anew on its way."""

Request = tuple[int, Any]
"""What an engine got: the slot, and what it must give back with the answer."""


def sampling(slot: int) -> bytes:
    """The sampling parameters of a slot's requests."""
    return _SAMPLING + slot.to_bytes(_SLOT_BYTES, "big")


class OurDialect:
    """Our coordinator's frames; engines tell what they store."""

    name = "ours"
    tells = True

    def __init__(self, block: int, body: bytes):
        self._block, self._answer = block, body

    def engine_hello(self, rank: int, capacity: int) -> frames.Frames:
        """What an engine says first."""
        return frames.register(rank, self._block, 1024, capacity)

    def client_hello(self) -> frames.Frames:
        """What a client says first; it is answered."""
        return frames.connect()

    def request(
        self, slot: int, tokens: int, body: bytes, mark: bytes, hashes: bytes
    ) -> list[bytes]:
        """A request; big frames are handed over without a copy."""
        return [frames.pack([20, slot, tokens]), sampling(slot), body, hashes]

    def receive(self, socket: zmq.Socket) -> Request | None:
        """The next request of an engine; None for any other message.

        Raises:
            zmq.Again: There is nothing to receive.
            RuntimeError: The coordinator does not believe this engine's events.
        """
        head = socket.recv(zmq.NOBLOCK)
        if not socket.getsockopt(zmq.RCVMORE):
            if head[1] == 34:
                socket.send_multipart(frames.pong(frames.int_at(head, 2)))
            if head[1] == 37:
                raise RuntimeError("an engine is not believed any more")
            return None
        slot = int.from_bytes(socket.recv()[-_SLOT_BYTES:], "big")
        socket.recv(copy=False)
        return slot, frames.int_at(head, 2)

    def replies(self, answered: Sequence[tuple[Request, int]], seen: int) -> list[bytes]:
        """The answers of one step, with the tokens that were cached for each."""
        answers = [(back, cached, seen) for (_, back), cached in answered]
        return frames.replies(answers, [self._answer] * len(answers))

    def answered(self, socket: zmq.Socket) -> int | None:
        """The slot of the next answer that a client gets; None for any other message.

        Raises:
            zmq.Again: There is nothing to receive.
            RuntimeError: It is an error.
        """
        head = socket.recv(zmq.NOBLOCK)
        if not socket.getsockopt(zmq.RCVMORE):
            if head[1] == 33:
                raise RuntimeError(f"a request failed: {head!r}")
            return None
        socket.recv()
        return frames.int_at(head, 2)


class LimitDialect(OurDialect):
    """The same frames through the bare forwarder; engines name the client in every answer."""

    name = "limit"

    def engine_hello(self, rank: int, capacity: int) -> frames.Frames:
        """What an engine says first."""
        return [b"hello"]

    def client_hello(self) -> frames.Frames:
        """What a client says first; it is answered."""
        return [b"hello"]

    def receive(self, socket: zmq.Socket) -> Request | None:
        """The next request of an engine; None for any other message."""
        client = socket.recv(zmq.NOBLOCK)
        if not socket.getsockopt(zmq.RCVMORE):
            return None
        head = socket.recv()
        slot = int.from_bytes(socket.recv()[-_SLOT_BYTES:], "big")
        socket.recv(copy=False)
        return slot, (client, head)

    def replies(self, answered: Sequence[tuple[Request, int]], seen: int) -> list[bytes]:
        """The answers of one step."""
        return [
            frame
            for (slot, (client, _)), _ in answered
            for frame in (client, frames.pack([21, slot]), self._answer)
        ]


class ReleasedDialect:
    """The released coordinator's frames: everything in one."""

    name = "released"
    tells = False

    def __init__(self, block: int, body: bytes):
        pass

    def engine_hello(self, rank: int, capacity: int) -> frames.Frames:
        """What an engine says first."""
        return [b""]

    def client_hello(self) -> frames.Frames:
        """What a client says first; it is answered."""
        return frames.released_connect()

    def request(
        self, slot: int, tokens: int, body: bytes, mark: bytes, hashes: bytes
    ) -> list[bytes]:
        """A request; its first block tells its conversation from all others."""
        header = frames.array_header(tokens)
        rest = memoryview(body)[len(header) + len(mark) :]
        head = b"\x94\x14" + frames.pack(slot) + header
        return [b"".join((head, mark, rest, sampling(slot)))]

    def receive(self, socket: zmq.Socket) -> Request | None:
        """The next request of an engine."""
        frame = socket.recv(zmq.NOBLOCK, copy=False).buffer
        slot = int.from_bytes(frame[-_SLOT_BYTES:], "big")
        return slot, frames.int_at(frame, 2)

    def replies(self, answered: Sequence[tuple[Request, int]], seen: int) -> list[bytes]:
        """The answers of one step."""
        return frames.released_replies([back for (_, back), _ in answered], range(300, 316))

    def answered(self, socket: zmq.Socket) -> int | None:
        """The slot of the next answer that a client gets."""
        return frames.int_at(socket.recv(zmq.NOBLOCK), 2)


DIALECTS: dict[str, Any] = {
    dialect.name: dialect for dialect in (OurDialect, ReleasedDialect, LimitDialect)
}
