"""CURVE keys of the data plane: made by the bench, and handed to both ends."""

from dataclasses import dataclass
from typing import Any

import zmq

Pair = tuple[bytes, bytes]
"""Public and secret key."""


@dataclass(frozen=True, slots=True)
class Keys:
    """One pair for the process in the middle, and one for each kind of its peers."""

    server: Pair
    engine: Pair
    client: Pair

    @classmethod
    def generate(cls) -> "Keys":
        """New keys."""
        return cls(zmq.curve_keypair(), zmq.curve_keypair(), zmq.curve_keypair())

    def serve(self, router: Any) -> None:
        """Let a ROUTER, not bound yet, speak CURVE and nothing else."""
        router.curve_server = True
        router.curve_publickey, router.curve_secretkey = self.server

    def apply(self, dealer: Any, own: Pair) -> None:
        """Let a DEALER, not connected yet, speak CURVE to it."""
        dealer.curve_serverkey = self.server[0]
        dealer.curve_publickey, dealer.curve_secretkey = own
