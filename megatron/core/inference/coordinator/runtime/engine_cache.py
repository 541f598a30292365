"""One engine's prefix cache: keys and events, and what each request found in it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.inference.engines.dynamic_engine import EngineState

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.hashing import block_hashes, masked, rekeyed
from megatron.core.inference.coordinator.runtime.kv_reporter import KvReporter, watch


@dataclass(slots=True)
class Found:
    """What one request found in the cache.

    Attributes:
        request: The engine's request; another one once it was preempted and starts anew.
        key_epoch: Weight epoch of the keys that its blocks are looked up and registered under.
        skipped: Prompt tokens whose prefill was skipped.
        event_number: How many cache events there had been when it was scheduled for the first
            time; -1 before.
        salt: What its block hashes are masked with, so that only requests with the same find them.
        whole: It computes its whole prompt, whatever is cached.
    """

    key_epoch: int
    request: Any = None
    skipped: int = 0
    event_number: int = -1
    salt: int = 0
    whole: bool = False


class EngineCache:
    """Watches an engine's context.

    Args:
        context: The engine's context.
        keeps_generated: Whether the blocks that requests generate are cached as well.

    Attributes:
        found: What each request found that was taken and has not left, by request id.
        epoch: The weight epoch in force.
        spares_prefill: See the function of that name.
    """

    def __init__(self, context: Any, *, keeps_generated: bool = False):
        self.epoch = 0
        self.found: dict[int, Found] = {}
        self._context = context
        self._reporter = KvReporter(context) if context.enable_prefix_caching else None
        self._keeps_generated = keeps_generated and self._reporter is not None
        self.spares_prefill = spares_prefill(context)
        watch(context, "add_request", self._add_and_note)
        if self._reporter is not None:
            watch(context, "release_memory_blocks_from_request_indexes", self._keep_and_release)

    def take(self, request: Any, salt: int = 0, *, whole: bool = False) -> None:
        """A request is new in the engine: give its hashes the keys of the present epoch.

        Args:
            request: The engine's request.
            salt: See `Found`.
            whole: See `Found`.
        """
        self.found[request.request_id] = Found(self.epoch, request, salt=salt, whole=whole)
        hashes = masked(request.precomputed_block_hashes, salt)
        request.precomputed_block_hashes = rekeyed(hashes, self.epoch)

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
            found = self.found.get(request.request_id)
            if found is None:
                continue  # it came past the coordinator, and has keys of no epoch
            hashes = rekeyed(request.precomputed_block_hashes, found.key_epoch)
            request.precomputed_block_hashes = rekeyed(hashes, epoch)
            found.key_epoch = epoch
        if self._reporter is not None:
            self._reporter.begin_epoch(epoch)

    def events(self) -> m.KvEvents | None:
        """The cache events since the last call; None if there are none."""
        events = self._reporter.flush() if self._reporter is not None else None
        return events if self.spares_prefill else None

    def resync(self) -> None:
        """Let the next events tell the whole table."""
        if self._reporter is not None:
            self._reporter.resync()

    def _add_and_note(self, add: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        """The context's `add_request`, which schedules a request's next chunk."""
        context, reporter = self._context, self._reporter
        found = self.found.get(request.request_id) or Found(key_epoch=0)
        if found.request is not None and found.request is not request:
            # Preempted, or resumed without its KV: it has no hashes, and computes everything anew.
            found.request, found.key_epoch = request, self.epoch
        if reporter is not None:
            if found.event_number < 0:  # later, its own first chunks are among the events
                found.event_number = reporter.event_number
            reporter.key_epoch = found.key_epoch
        before = context.prefix_cache_prefill_skipped_tokens
        add(request, *args, **kwargs)
        found.skipped += context.prefix_cache_prefill_skipped_tokens - before

    def _keep_and_release(self, release: Any, rows: Any) -> None:
        """The context's release of blocks; what was generated stays to be found, as prompts do.

        At this point the forward pass of the step is through, and its sampled token is not part
        of the request yet: every token of the request has its KV. A request whose weights were
        updated on the way is left out, since its KV is of both epochs.
        """
        if self._keeps_generated:
            ids = self._context.request_ids[rows].tolist()
            for row, request_id in zip(rows.tolist(), ids, strict=True):
                found = self.found.get(request_id)
                if found is not None and found.key_epoch == self.epoch:
                    self._keep_generated(row, found)
        release(rows)

    def _keep_generated(self, row: int, found: Found) -> None:
        """Register every full block of a request that nobody has registered.

        The prompt's are among them where it had no hashes, or they were evicted while it was
        preempted. The engine rests on a registered block's ancestors being registered as well.
        """
        request = found.request
        context, size = self._context, self._context.block_size_tokens
        computed = int(context.request_kv_length_offsets[row] + context.request_query_lengths[row])
        tokens = [*request.prompt_tokens.tolist(), *request.generated_tokens][:computed]
        keys = rekeyed(masked(block_hashes(tokens, size), found.salt), self.epoch)
        registered = context.kv_block_allocator.kv_hash_to_block_id
        new = [n for n, key in enumerate(keys) if key not in registered]
        blocks = context.request_to_kv_block_ids[row].tolist()
        assert self._reporter is not None
        self._reporter.key_epoch = self.epoch
        context.kv_block_allocator.register_kv_block_hashes(
            [blocks[n] for n in new],
            [keys[n] for n in new],
            [keys[n - 1] if n else 0 for n in new],
        )


def spares_prefill(context: Any) -> bool:
    """Whether an engine computes less of a prompt that it has in its cache.

    A hybrid model needs the states of its Mamba layers as well. Where the engine keeps none,
    cached blocks save memory and no work.
    """
    hybrid = context.is_hybrid_model and context.mamba_slot_allocator is None
    return bool(context.enable_prefix_caching and not hybrid)


def _without_blocks(engine: Any) -> Iterator[Any]:
    """Requests whose first chunk has not been scheduled."""
    waiting = list(engine.waiting_request_ids)
    if engine.state in (EngineState.SUSPENDING, EngineState.SUSPENDED):
        waiting += engine.resume_request_ids or ()
    for request_id in waiting:
        request = engine.get_request(request_id)
        if request.finished_chunk_token_count == 0:
            yield request
