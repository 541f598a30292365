"""One engine's prefix cache: keys and events, and what each request found in it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.inference.engines.dynamic_engine import EngineState

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.hashing import rekeyed
from megatron.core.inference.coordinator.runtime.kv_reporter import KvReporter


@dataclass(slots=True)
class Found:
    """What one request found in the cache.

    Attributes:
        key_epoch: Weight epoch of the keys that its blocks are looked up and registered under.
        skipped: Prompt tokens whose prefill was skipped.
        event_number: How many cache events there had been when it was scheduled; -1 before.
    """

    key_epoch: int
    skipped: int = 0
    event_number: int = -1


class EngineCache:
    """Watches an engine's context.

    Args:
        context: The engine's context.

    Attributes:
        found: What each request of the engine found, by request id.
        epoch: The weight epoch in force.
    """

    def __init__(self, context: Any):
        self.epoch = 0
        self.found: dict[int, Found] = {}
        self._context = context
        self._reporter = KvReporter(context) if context.enable_prefix_caching else None
        self._add_request = type(context).add_request
        context.add_request = self._add_and_note

    def take(self, request: Any) -> None:
        """A request is new in the engine: give its hashes the keys of the present epoch."""
        self.found[request.request_id] = Found(self.epoch)
        request.precomputed_block_hashes = rekeyed(request.precomputed_block_hashes, self.epoch)

    def leave(self, request_id: int) -> Found:
        """A request has ended: what it found."""
        return self.found.pop(request_id, None) or Found(self.epoch)

    def begin_epoch(self, engine: Any, epoch: int) -> None:
        """The weights are others now.

        Requests that hold no block yet are re-keyed; those that do keep their key, for later
        chunks as well: their KV is of both epochs, and of no use to anybody else.
        """
        if epoch == self.epoch:
            return
        self.epoch = epoch
        for request in _without_blocks(engine):
            found = self.found.setdefault(request.request_id, Found(epoch))
            hashes = rekeyed(request.precomputed_block_hashes, found.key_epoch)
            request.precomputed_block_hashes = rekeyed(hashes, epoch)
            found.key_epoch = epoch
        if self._reporter is not None:
            self._reporter.begin_epoch(epoch)

    def events(self) -> m.KvEvents | None:
        """The cache events since the last call; None if there are none."""
        return self._reporter.flush() if self._reporter is not None else None

    def resync(self) -> None:
        """Let the next events tell the whole table."""
        if self._reporter is not None:
            self._reporter.resync()

    def _add_and_note(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """The context's `add_request`, which schedules a request's next chunk."""
        context, reporter = self._context, self._reporter
        found = self.found.setdefault(request.request_id, Found(self.epoch))
        if reporter is not None:
            found.event_number = reporter.event_number
            reporter.key_epoch = found.key_epoch
        before = context.prefix_cache_prefill_skipped_tokens
        self._add_request(context, request, *args, **kwargs)
        found.skipped += context.prefix_cache_prefill_skipped_tokens - before


def _without_blocks(engine: Any) -> Iterator[Any]:
    """Requests whose first chunk has not been scheduled."""
    waiting = list(engine.waiting_request_ids)
    if engine.state in (EngineState.SUSPENDING, EngineState.SUSPENDED):
        waiting += engine.resume_request_ids or ()
    for request_id in waiting:
        request = engine.get_request(request_id)
        if request.finished_chunk_token_count == 0:
            yield request
