"""What an engine's cache holds, watched from outside and told as numbered events.

The reporter also gives weight epochs their meaning in the engine: blocks are registered under keys
that differ from epoch to epoch (`hashing.rekeyed`), so that KV of old weights is never found by a
request that came after the update. Events name block hashes, not keys.

Blocks are told in chains (`kv_events.py`), so that whoever listens holds, after any of them, no
block without the one that it extends. That rests on two habits of the engine: a block is registered
after its parent, and deregistered no later than it.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from megatron.core.inference.config import AsyncScheduleMode

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.hashing import rekeyed
from megatron.core.inference.coordinator.kv_events import BREAK, CLEARED, pack_events


class _Watch(partial):
    """A method of ours that stands for another one, which is its first argument."""


def watch(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Call `ours(method, ...)` wherever an object's method would be called.

    An earlier watch of ours is replaced, so that an engine that starts again is watched once.

    Args:
        owner: The object.
        name: Its method.
        ours: Takes the method, then the method's arguments.
    """
    method = getattr(owner, name)
    if isinstance(method, _Watch):
        (method,) = method.args
    setattr(owner, name, _Watch(ours, method))


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
        # Registered keys of this epoch -> (running number, key of the parent; 0: none)
        self._registered: dict[int, tuple[int, int]] = {}
        self._registrations = 0
        # Those that are not told yet -> step that computes their block. Steps never fall.
        self._computing: dict[int, int] = {}
        # With asynchronous scheduling the next step is prepared before this one is through.
        ahead = context.config.async_sched_mode is AsyncScheduleMode.ASYNC
        self._steps_ahead = 1 if ahead else 0
        self._deregister_idle()  # what was cached before has no history that could be told
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
        done = takewhile(lambda computed: computed[1] < through, self._computing.items())
        stored = [key for key, _ in done]
        for key in stored:
            del self._computing[key]
        self._tell_stored(stored)
        if not self._pending:
            return None
        events, self._pending = self._pending, []
        first, self._next = self._next, self._next + len(events)
        return m.KvEvents(self.epoch, first, len(events), pack_events(events))

    def resync(self) -> None:
        """Tell the whole table next, instead of what has changed."""
        self._restart()
        self._tell_stored(key for key in self._registered if key not in self._computing)

    def begin_epoch(self, epoch: int) -> None:
        """From now on blocks belong to other weights; cached blocks that nobody uses go at once.

        What requests still use stays with them, under its old key. Removals of an older epoch are
        not told: the coordinator has forgotten them already.
        """
        if epoch == self.epoch:
            return
        self._note_cleared()
        self.epoch = epoch
        self._deregister_idle()

    @torch.inference_mode()  # capturing CUDA graphs leaves the allocator an inference tensor
    def _deregister_idle(self) -> None:
        allocator = self._allocator
        idle = (allocator.block_ref_counts == 0) & (allocator.block_hashes != -1)
        allocator._deregister_blocks(torch.nonzero(idle, as_tuple=True)[0])

    def _restart(self) -> None:
        """Events that were not told yet are void: a clear comes first, and what is told then."""
        self._next += len(self._pending)
        self._pending = [CLEARED]

    def _watch(self) -> None:
        """Hear of every change.

        The allocator's own slot for a listener is left alone: a hybrid model's cache of Mamba
        states sits there, and takes it again after each resume that recomputes.
        """
        watch(self._allocator, "register_kv_block_hashes", self._register_and_note)
        watch(self._allocator, "_deregister_blocks", self._deregister_and_note)
        watch(self._allocator, "reset", self._reset_and_note)

    def _register_and_note(
        self, register: Any, block_ids: list, keys: list, parents: list | None = None
    ) -> None:
        register(block_ids, keys, parents)
        self._note_registered(keys, parents or [0] * len(keys))

    def _deregister_and_note(self, deregister: Any, block_ids: torch.Tensor) -> None:
        keys = self._allocator.block_hashes[block_ids.to(torch.int64)].tolist()
        deregister(block_ids)
        self._note_deregistered(set(keys))

    def _reset_and_note(self, reset: Any) -> None:
        reset()
        self._note_cleared()

    def _note_registered(self, keys: Iterable[int], parents: Iterable[int]) -> None:
        if self.key_epoch != self.epoch:
            return  # KV of older weights, which is of no use to anybody else
        registered = self._registered
        for key, parent in zip(keys, parents, strict=True):
            # What extends an unknown block cannot be told in order.
            if key not in registered and (parent == 0 or parent in registered):
                registered[key] = (self._registrations, parent)
                self._registrations += 1
                self._computing[key] = self._context.step_count

    def _note_deregistered(self, keys: set[int]) -> None:
        known = [key for key in keys if key in self._registered]
        self._tell_removed(key for key in known if key not in self._computing)
        for key in known:
            del self._registered[key]
            self._computing.pop(key, None)

    def _note_cleared(self) -> None:
        self._registered.clear()
        self._computing.clear()
        self._restart()

    def _tell_stored(self, keys: Iterable[int]) -> None:
        for chain in self._chains(keys):
            _, parent = self._registered[chain[0]]
            parent, *blocks = rekeyed([parent, *chain], self.epoch)
            if self._pending and self._pending[-1] > 0 and self._pending[-1] != parent:
                self._pending.append(BREAK)
            self._pending += blocks

    def _tell_removed(self, keys: Iterable[int]) -> None:
        for tail in reversed(self._chains(keys)):
            if self._pending and self._pending[-1] < 0:
                self._pending.append(BREAK)
            self._pending += [-block for block in rekeyed(tail, self.epoch)]

    def _chains(self, keys: Iterable[int]) -> list[list[int]]:
        """Split registered keys into chains, each as long as it can be.

        A chain that branches off another comes after it. So these are chains to store, in order,
        and tails to remove, in reverse: the branches of a block go before it does.
        """
        chains: list[list[int]] = []
        ending_with: dict[int, list[int]] = {}
        for key in sorted(keys, key=self._registered.__getitem__):
            _, parent = self._registered[key]
            chain = ending_with.pop(parent, None)
            if chain is None:
                chain = []
                chains.append(chain)
            chain.append(key)
            ending_with[key] = chain
        return chains
