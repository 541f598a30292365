"""The released coordinator without its sockets: the one place that knows its attributes.

Its constructor binds a socket and waits for engines, so an object is made without it and given what
the handlers read. Everything that decides, hashes and packs is its own code.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
from megatron.core.inference.config import PrefixCachingCoordinatorPolicy
from megatron.core.inference.data_parallel_inference_coordinator import (
    HANDLERS,
    CoordinatorState,
    DataParallelInferenceCoordinator,
)
from megatron.core.inference.headers import Headers

from coordinator_bench import frames
from coordinator_bench.frames import Frames
from coordinator_bench.prompts import Conversation
from coordinator_bench.traffic import CLIENT, Delivery, Placement, engine, rank_of


class Silent:
    """A tokenizer that costs nothing, so that no time of the comparison is the tokenizer's."""

    def detokenize(self, tokens: list[int]) -> str:
        """No text."""
        return ""


class _Sent(list):
    """Takes the place of the socket: what would be sent is kept."""

    send_multipart = list.append


class Released:
    """The released coordinator's handlers, with engines registered.

    Args:
        ranks: Engines.
        block: Tokens in a block.

    Attributes:
        coordinator: The released object itself.
    """

    def __init__(self, ranks: int, block: int):
        self._sent = _Sent()
        self.coordinator = _without_sockets(ranks, block, self._sent)
        self.deliver(CLIENT, frames.released_connect())

    def deliver(self, peer: bytes, received: Frames) -> Delivery:
        """What its loop does with a message."""
        payload = msgpack.unpackb(received[0], raw=False)
        handler = self.coordinator._handlers[Headers(payload[0])]
        handler(self.coordinator, peer, payload)
        sent = [(identity, [frame]) for identity, frame in self._sent]
        self._sent.clear()
        return sent

    def idle(self) -> None:
        """It puts nothing off."""

    def collect_as_in_its_process(self) -> None:
        """It leaves the garbage collector as it is."""

    def submission(self, request: int, conversation: Conversation, blocks: int) -> Frames:
        """The frame of a request for a conversation's first blocks."""
        return frames.released_submit(request, conversation.body(blocks))

    def short_submission(self, request: int) -> Frames:
        """The frame of a request without one full block."""
        return frames.released_submit(request, b"\x91\xcd\x01\x00")

    def placement(self, sent: Delivery) -> Placement:
        """Where a submitted request went."""
        ((peer, (frame,)),) = sent
        return Placement(rank_of(peer), frames.int_at(frame, 2))

    def hold(self, rank: int, chains: Sequence[np.ndarray]) -> None:
        """A rank has served these prompts; as its submit handler notes it."""
        for chain in chains:
            self.coordinator._update_rank_hashes(engine(rank), chain.tolist())

    def news(self, rank: int, stored: Sequence[np.ndarray]) -> list[tuple[bytes, Frames]]:
        """Nothing: its engines do not tell."""
        return []

    def replies(
        self, rank: int, request_ids: Sequence[int], generated: Sequence[int] = range(300, 316)
    ) -> tuple[bytes, Frames]:
        """One engine's answers of one step."""
        return engine(rank), frames.released_replies(request_ids, generated)


def _without_sockets(ranks: int, block: int, socket: Any) -> Any:
    """What `__init__` would have made, with another socket."""
    made: Any = DataParallelInferenceCoordinator.__new__(DataParallelInferenceCoordinator)
    # Its index of a rank is the place in this list; sorted by name 10 would come before 2.
    identities = [engine(rank) for rank in range(ranks)]
    made.router_socket = socket
    made.data_parallel_size = ranks
    made.identities_of_data_parallel_ranks = deque(identities)
    made.identity_to_rank_index = {identity: n for n, identity in enumerate(identities)}
    made._identities_list = list(identities)
    made._pending_counts = np.zeros(ranks, dtype=np.int32)
    made.request_id_to_client_id = {}
    made.request_id_to_client_request_id = {}
    made.request_id_to_rank = {}
    made.next_request_id = 0
    made.tokenizer = Silent()
    made.state = CoordinatorState.RUNNING
    made.block_size_tokens = block
    made.enable_prefix_caching = True
    made.prefix_caching_coordinator_policy = PrefixCachingCoordinatorPolicy.LONGEST_PREFIX
    made.prefix_caching_routing_alpha = 0.5
    made.max_requests = 1024
    made.schedule_records = None
    made._hash_table = {}
    made._hash_assignment_counter = 0
    made.known_clients = set()
    made._handlers = dict(HANDLERS)
    return made
