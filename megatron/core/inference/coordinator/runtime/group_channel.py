"""What the first rank of a model-parallel group received, handed to the other ranks of the group.

All ranks of a group must see the same messages at the same step. A subscriber that has not joined
yet would miss the first ones, and the group would hang; so the publisher is an XPUB socket, which
is told of every subscription, and it publishes nothing before all have joined.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import zmq

from megatron.core.inference.coordinator.runtime import wire

_JOIN_SECONDS = 120.0
_GIVE_UP_MS = 100


class GroupPublisher:
    """The first rank's end.

    Args:
        context: Where the socket lives.
        host: Address of this machine that the others can reach.
        others: How many other ranks the group has.
    """

    def __init__(self, context: zmq.Context, host: str, others: int):
        self._others = others
        self.socket = context.socket(zmq.XPUB)
        # Or equal subscriptions, and their ends, are told once.
        self.socket.setsockopt(zmq.XPUB_VERBOSER, 1)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        port = self.socket.bind_to_random_port(f"tcp://{host}")
        self.address = f"tcp://{host}:{port}"

    def wait_for_subscribers(self) -> None:
        """Return when every other rank of the group has joined.

        Raises:
            TimeoutError: Some did not.
        """
        deadline = time.monotonic() + _JOIN_SECONDS
        joined = 0
        while joined < self._others or self.socket.poll(0):
            if not self.socket.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError(
                    f"{joined} of {self._others} model-parallel workers joined {self.address} "
                    f"within {_JOIN_SECONDS:g} s"
                )
            joined += 1 if self.socket.recv()[0] else -1  # 0: it left, or its connection broke

    def publish(self, messages: Sequence[Sequence[bytes]]) -> None:
        """Hand over the messages of one drain, frames kept apart."""
        if self._others:
            counts = wire.pack([len(frames) for frames in messages])
            self.socket.send_multipart([counts, *(f for frames in messages for f in frames)])


class GroupSubscriber:
    """Another rank's end.

    Args:
        context: Where the socket lives.
        address: The publisher's.
    """

    def __init__(self, context: zmq.Context, address: str):
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(address)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")

    def receive(self, give_up: Callable[[], bool]) -> list[list[bytes]]:
        """Wait for the messages of the next drain, each as its frames.

        Args:
            give_up: Asked now and then while nothing comes.

        Raises:
            CancelledError: It said yes.
        """
        while not self.socket.poll(_GIVE_UP_MS):
            if give_up():
                raise asyncio.CancelledError
        counts, *frames = self.socket.recv_multipart()
        rest = iter(frames)
        return [[next(rest) for _ in range(count)] for count in wire.unpack(counts)]
