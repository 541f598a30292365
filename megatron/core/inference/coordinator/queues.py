"""What prefill each rank was given and has not done, as far as answers and events tell."""

from collections.abc import Mapping, Sequence

from megatron.core.inference.coordinator.hashing import HASH_BYTES

_MOST_TOKENS = 2**40  # prompt lengths are told by clients


class PrefillQueues:
    """The prompts that wait on each rank, in the order in which they were given to it.

    A request's prefill is queued from its routing until its last full block is stored, or it is
    answered; engines prefill first come first served, so both also end what was routed before.
    """

    def __init__(self):
        self._queues: dict[int, dict[int, tuple[int, bytes | None]]] = {}
        self._tokens: dict[int, int] = {}

    def tokens(self, rank: int) -> int:
        """Tokens of prefill that a rank was given and has not done."""
        return self._tokens.get(rank, 0)

    def begin(self, rank: int, request: int, new: int, chain: bytes | None) -> None:
        """A request is given to a rank.

        Args:
            rank: The rank's number.
            request: The request's.
            new: Tokens that have to be computed for it.
            chain: Packed hash of its last full block; None where nobody will say it is stored.
        """
        new = min(new, _MOST_TOKENS)
        self._queues.setdefault(rank, {})[request] = new, chain
        self._tokens[rank] = self._tokens.get(rank, 0) + new

    def finish(self, rank: int, request: int) -> None:
        """A request's prompt is computed, and with it what was routed there before."""
        queue = self._queues.get(rank, {})
        if request in queue:
            waiting = list(queue)
            for earlier in waiting[: waiting.index(request) + 1]:
                self.drop(rank, earlier)

    def drop(self, rank: int, request: int) -> None:
        """A request left its rank, e.g. refused: what was routed there before waits as it did."""
        queue = self._queues.get(rank, {})
        if request in queue:
            self._tokens[rank] -= queue.pop(request)[0]
            if not queue:
                del self._queues[rank], self._tokens[rank]

    def stored(self, rank: int, chains: Sequence[bytes], block_size: int) -> bool:
        """A rank has stored blocks; returns whether its queue is shorter now.

        What is left of them when the prompts that are done are taken off is of the next one: long
        prompts are computed in chunks.

        Args:
            rank: The rank's number.
            chains: Packed hashes of blocks that follow each other.
            block_size: Tokens.
        """
        queue = self._queues.get(rank)
        if not queue:
            return False
        before = self._tokens[rank]
        for request, (_, chain) in reversed(queue.items()):
            if chain is not None and any(hashes.find(chain) % HASH_BYTES == 0 for hashes in chains):
                self.finish(rank, request)
                break
        done = sum(map(len, chains)) // HASH_BYTES * block_size
        done -= before - self._tokens.get(rank, 0)
        if queue and done > 0:
            request, (new, chain) = next(iter(queue.items()))
            queue[request] = max(0, new - done), chain
            self._tokens[rank] -= min(new, done)
        return self._tokens.get(rank, 0) < before

    def check_integrity(self, ranks: Mapping[int, int]) -> None:
        """Compare what is counted with the requests.

        Args:
            ranks: Of every request in flight, the number of the rank that has it.

        Raises:
            AssertionError: They differ.
        """
        for rank, queue in self._queues.items():
            assert queue, "an empty queue was left behind"
            assert all(ranks.get(request) == rank for request in queue), "a queue of others"
            assert self._tokens[rank] == sum(new for new, _ in queue.values()), "miscounted"
        assert self._tokens.keys() == self._queues.keys(), "tokens of nobody"
