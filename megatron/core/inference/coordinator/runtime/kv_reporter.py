"""What an engine's cache holds, watched from outside and told as numbered events.

The reporter also gives weight epochs their meaning in the engine: blocks are registered under keys
that differ from epoch to epoch (`hashing.rekeyed`), so that KV of old weights is never found by a
request that came after the update. Events name block hashes, not keys.
"""

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.inference.config import AsyncScheduleMode

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.hashing import rekeyed
from megatron.core.inference.coordinator.kv_events import CLEARED, pack_events


class KvReporter:
    """Watches one engine's block allocator.

    Args:
        context: The engine's context, with prefix caching on.

    Attributes:
        epoch: The weight epoch in force.
        key_epoch: Epoch of the keys that are being registered: that of the request at hand.
    """

    def __init__(self, context: Any):
        self.epoch = self.key_epoch = 0
        self._context = context
        self._allocator = context.kv_block_allocator
        self._next = 0
        self._pending: list[int] = [CLEARED]
        self._epoch_of: dict[int, int] = {}  # of every registered key
        self._computing: dict[int, int] = {}  # key -> step that computes its block
        # With asynchronous scheduling the next step is prepared before this one is through.
        ahead = context.config.async_sched_mode is AsyncScheduleMode.ASYNC
        self._steps_ahead = 1 if ahead else 0
        self._watch()

    @property
    def event_number(self) -> int:
        """How many events there have been, those not told yet included."""
        return self._next + len(self._pending)

    def flush(self) -> m.KvEvents | None:
        """The events since the last flush; None if there are none.

        A block counts as stored once the forward pass that computes it is through: it is
        registered when its request is scheduled, and the engine counts steps after the pass.
        """
        through = self._context.step_count - self._steps_ahead
        done = [key for key, step in self._computing.items() if step < through]
        for key in done:
            del self._computing[key]
        self._pending += rekeyed(done, self.epoch)
        if not self._pending:
            return None
        events, self._pending = self._pending, []
        first, self._next = self._next, self._next + len(events)
        return m.KvEvents(self.epoch, first, len(events), pack_events(events))

    def resync(self) -> None:
        """Tell the whole table next, instead of what has changed."""
        held = [
            key
            for key, epoch in self._epoch_of.items()
            if epoch == self.epoch and key not in self._computing
        ]
        self._restart(rekeyed(held, self.epoch))

    def begin_epoch(self, epoch: int) -> None:
        """From now on blocks belong to other weights; cached blocks that nobody uses go at once.

        What requests still use stays with them, under its old key. Removals of an older epoch are
        not told: the coordinator has forgotten them already.
        """
        if epoch == self.epoch:
            return
        self._computing.clear()
        self._restart([])
        self.epoch = epoch
        allocator = self._allocator
        idle = (allocator.block_ref_counts == 0) & (allocator.block_hashes != -1)
        allocator._deregister_blocks(torch.nonzero(idle, as_tuple=True)[0])

    def _restart(self, held: list[int]) -> None:
        """Events that were not told yet are void; a clear, and what is held, says it all."""
        self._next += len(self._pending)
        self._pending = [CLEARED, *held]

    def _watch(self) -> None:
        """Hear of every change, before whoever listens already."""
        allocator = self._allocator
        register, reset = allocator.register_kv_block_hashes, allocator.reset
        listener = allocator.on_blocks_deregistered

        def register_and_note(block_ids: list, keys: list, parents: list | None = None) -> None:
            register(block_ids, keys, parents)
            self._note_registered(keys)

        def reset_and_note() -> None:
            reset()
            self._note_cleared()

        def note_and_pass_on(block_ids: list, keys: set) -> None:
            self._note_deregistered(keys)
            if listener is not None:
                listener(block_ids, keys)

        allocator.register_kv_block_hashes = register_and_note
        allocator.reset = reset_and_note
        allocator.on_blocks_deregistered = note_and_pass_on

    def _note_registered(self, keys: Iterable[int]) -> None:
        for key in keys:
            if key not in self._epoch_of:
                self._epoch_of[key] = self.key_epoch
                if self.key_epoch == self.epoch:
                    self._computing[key] = self._context.step_count

    def _note_deregistered(self, keys: Iterable[int]) -> None:
        for key in keys:
            epoch = self._epoch_of.pop(key, None)
            never_told = self._computing.pop(key, None) is not None
            if epoch == self.epoch and not never_told:
                self._pending += [-block for block in rekeyed([key], epoch)]

    def _note_cleared(self) -> None:
        self._epoch_of.clear()
        self._computing.clear()
        self._restart([])
