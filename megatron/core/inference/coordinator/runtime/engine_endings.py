"""How an engine under the coordinator drops requests, leaves and ends.

The functions that take `self` take the place of the released engine's methods (`patching.py`).
"""

import asyncio
from collections.abc import Collection
from typing import Any

import torch
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine, EngineState
from megatron.core.inference.inference_request import Status

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.lifecycle import Signal
from megatron.core.inference.coordinator.runtime import released, wire
from megatron.core.inference.coordinator.runtime.engine_end import EngineEnd
from megatron.core.inference.coordinator.runtime.engine_mending import forget_pending_logits

_released_step = DynamicInferenceEngine.async_step
_released_reset = DynamicInferenceEngine.reset
_released_shutdown = DynamicInferenceEngine.shutdown

_KEPT_OVER_A_RESET = (
    "use_coordinator",
    "state",
    "_state_events",
    "_cond",
    "_generation_epoch",
    "request_counter",
)


def drop_requests(engine: Any, end: EngineEnd, kept: Collection[int] = ()) -> None:
    """The coordinator gave requests of this engine to others: do not compute them twice.

    Those in our queue are dropped one by one. The released engine can only be reset, which drops
    all requests and its cache. So where it keeps one of them, the others are computed for nobody;
    where its memory is given back, it drops them at the resume.

    Args:
        engine: The engine.
        end: Its end of the wire.
        kept: Ids of requests that nobody else was given.
    """
    kept = frozenset(kept)
    for request_id in end.queue.keys() - kept:
        del end.queue[request_id]
    if not engine.requests or not end.cache.found.keys().isdisjoint(kept):
        return
    if engine.state in (EngineState.SUSPENDING, EngineState.SUSPENDED):
        end.drop_due = True
        return
    fields = {"requests": len(engine.requests)}
    end.events.write(m.Log("requests_dropped", fields, warning=True))
    forsaken, end.forsaken = end.forsaken, True  # nobody waits for an answer
    reset(engine)
    end.forsaken = forsaken


def drop_what_is_due(engine: Any, end: EngineEnd) -> None:
    """An engine has its memory back: drop what it could not drop without it."""
    if end.drop_due:
        end.drop_due = False
        drop_requests(engine, end, kept=end.queue)


def leave(engine: Any, end: EngineEnd) -> None:
    """End the engine's loop: no request is left and none will come.

    All ranks of a model-parallel group are here at the same step. Those of an expert-parallel group
    compute together as long as one of them has a request, so they agree first, as for a pause.

    Raises:
        CancelledError: The loop ends.
    """
    if engine.ep_world_size == 1:
        raise asyncio.CancelledError
    if not end.stopping:
        end.stopping = True
        end.inbox.extend([m.Control(Signal.PAUSE), m.Control(Signal.STOP)])


async def async_step(self: Any) -> Any:
    """The released step; a reset that came in its middle is made up for at its end."""
    end: EngineEnd | None = getattr(self, "_prefix_routing", None)
    if end is None:
        return await _released_step(self)
    end.stepping = True
    try:
        return await _released_step(self)
    finally:
        end.stepping = False
        if end.reset_due:
            end.reset_due = False
            reset(self)


def reset(self: Any) -> None:
    """The released reset; under a coordinator, what is in flight is answered with an error.

    The released one keeps what asynchronous scheduling forwarded last; that is dropped, too.

    The engine stays what the coordinator told it to be, and its cache is told to be empty. Requests
    in our queue stay there, as those do that have not arrived. In the middle of a step it takes
    effect when the step is through.
    """
    end: EngineEnd | None = getattr(self, "_prefix_routing", None)
    if end is None or not self.use_coordinator:
        forget_pending_logits(self)
        _released_reset(self)
        return
    if end.stepping:
        end.reset_due = True
        return
    kept = {name: getattr(self, name) for name in _KEPT_OVER_A_RESET}
    for request_id in list(self.requests):
        end.cache.leave(request_id)
        end.wants_text.discard(request_id)
        if not end.forsaken:  # else somebody else has it
            reply = released.failed_reply("the engine was reset", request_id=request_id)
            body = wire.pack(reply)
            end.reply([m.Answer(request_id, Status.FAILED.name, 0, end.cache.epoch, body)])
        self.requests[request_id].future.cancel()
    forget_pending_logits(self)
    with torch.inference_mode():
        _released_reset(self)
    vars(self).update(kept)
    end.tell_events()


async def shutdown(self: Any) -> None:
    """The released shutdown, after our own good-bye."""
    end: EngineEnd | None = getattr(self, "_prefix_routing", None)
    if end is not None and end.link is not None:
        if not end.link.socket.closed:
            end.link.send(m.Disconnect())
        end.link.close()
    await _released_shutdown(self)
