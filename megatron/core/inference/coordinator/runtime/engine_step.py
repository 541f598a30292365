"""What an engine does under the coordinator: take messages, run, answer.

These functions take the place of the released engine's methods (`patching.py`). The released
engine takes all requests of a drain before any control signal, mixes transport with its stepping,
and asserts on input that it cannot run. Here one drain is handled in order, a step takes no more
requests than it has time for, and what cannot be run is answered with an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine
from megatron.core.inference.inference_request import DynamicInferenceRequest, Status
from megatron.core.inference.sampling_params import SamplingParams

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.hashing import block_hashes
from megatron.core.inference.coordinator.lifecycle import Signal
from megatron.core.inference.coordinator.runtime import admission, prompts, released, text, wire
from megatron.core.inference.coordinator.runtime.engine_end import EngineEnd
from megatron.core.inference.coordinator.runtime.engine_endings import (
    drop_requests,
    drop_what_is_due,
    leave,
)
from megatron.core.inference.coordinator.runtime.engine_signals import apply_signal, is_due

_TOKENS_A_STEP = 131_072
_TOKENS_A_REQUEST = 2_048
"""How much one step may take into the engine: the tokens of prompts, and so many more a request
for what it costs beside them. That is 3 to 6 ms, a part of a decode step, or 15 where ids are of
mixed widths. Not seconds, since the ranks of a model-parallel group must take the same."""

_released_bookkeep = DynamicInferenceEngine.async_bookkeep
_released_handle_failed = DynamicInferenceEngine._handle_failed_request


def schedule_requests(self: Any) -> int:
    """Take what has arrived and handle it in order.

    All ranks of a model-parallel group must call it at the same step. A change of state that
    must wait for the one before it holds back everything behind it. Requests beyond what a step may
    take wait in a queue, and signals pass them, as they pass what waits in the engine.

    Returns:
        How many messages arrived.
    """
    end: EngineEnd = self._prefix_routing
    drained = end.drain()
    for frames in drained:
        _open(end, frames)
    room = _take_queued(self, end, _TOKENS_A_STEP)
    while end.inbox:
        message = end.inbox[0]
        if isinstance(message, m.Control) and not is_due(self, message.signal):
            break
        end.inbox.popleft()
        if isinstance(message, m.EngineRequest):
            _queue(self, end, message)
            room = _take_queued(self, end, room)
        else:
            _handle(self, end, message)
    _take_queued(self, end, room)  # those that a suspended engine could not take
    end.tell_events()
    if end.drained and not end.queue and (end.drop_due or not self.requests):
        leave(self, end)
    return len(drained)


def _open(end: EngineEnd, frames: list[bytes]) -> None:
    """Put a message into the inbox; a ping only asks whether somebody reads, and is answered."""
    try:
        message = wire.decode_from_coordinator(frames)
    except wire.WireError as error:
        end.events.write(m.Log("message_refused", {"reason": str(error)}, warning=True))
        return
    if not isinstance(message, m.Ping):
        end.inbox.append(message)
    elif end.link is not None:
        end.link.send(m.Pong(message.number))


def _queue(engine: Any, end: EngineEnd, message: m.EngineRequest) -> None:
    request_id = message.request_id
    if request_id in engine.requests or request_id in end.queue:
        _refuse(end, request_id, f"request {request_id} is already running")
    else:
        end.queue[request_id] = message


def _take_queued(engine: Any, end: EngineEnd, room: int) -> int:
    """Take requests in order while there is room; the last may be larger. Returns what is left."""
    while end.queue and room > 0 and not end.drop_due:
        _, message = end.queue.popitem(last=False)
        room -= prompts.size(message.prompt) + _TOKENS_A_REQUEST
        _take_request(engine, end, message)
    return room


def _handle(engine: Any, end: EngineEnd, message: m.FromCoordinator) -> None:
    match message:
        case m.Control():
            _take_signal(engine, end, message)
        case m.RegisterAgain():
            end.forsaken = True
            end.register_again(engine.state)
        case m.RegisterAck(weight_epoch=weight_epoch, state=state, kept=kept):
            end.asked_again_at = None
            end.generation = message.generation
            end.reply_again(kept)
            drop_requests(engine, end, kept)
            end.forsaken = False
            end.cache.begin_epoch(engine, weight_epoch)
            end.cache.resync()
            end.catch_up(engine.state, state)
        case m.DrainAck():
            end.drained = True
            if end.forsaken:  # it does not register again, so others get what it has
                drop_requests(engine, end)
        case m.Resync():
            end.cache.resync()


def _take_request(engine: Any, end: EngineEnd, message: m.EngineRequest) -> None:
    """Add a request to the engine, or answer why it cannot be run."""
    request_id = message.request_id
    try:
        sampling = wire.unpack(message.sampling)
        vocab_size = engine.controller.vocab_size
        backend = engine.context.config.sampling_backend
        params = admission.checked_sampling(sampling, vocab_size, backend)
        salt = admission.checked_salt(sampling.get(released.CACHE_SALT, 0))
        admission.check_log_probs(params, engine.materialize_only_last_token_logits)
        prompt = prompts.unpack(message.prompt)
        words = prompt if isinstance(prompt, str) else None
        tokens = prompt if words is None else _tokenized(engine, words, params.add_BOS)
        for word in params.stop_words or ():
            _tokenized(engine, word)  # the engine does it again, and an error there would end it
        tokens = admission.checked_tokens(tokens, vocab_size)
    except (wire.WireError, admission.RequestRefused) as error:
        _refuse(end, request_id, str(error))
        return
    if sampling.get(released.DETOKENIZE):
        end.wants_text.add(request_id)
    request = _request(engine, request_id, tokens, params, words)
    engine._add_request(request)
    if request.status is not Status.FAILED:  # else it is answered already
        end.cache.take(request, salt, whole=admission.wants_prompt_log_probs(params))


def _request(
    engine: Any, request_id: int, tokens: np.ndarray, params: SamplingParams, words: str | None
) -> DynamicInferenceRequest:
    """The engine's own request.

    The released `add_request` makes a tensor on the GPU, which is copied back to be hashed, and
    again, chunk by chunk, into the context's tables: these are in the memory of the host. Each such
    copy would wait until the GPU has done all that it was given.
    """
    size = engine.context.block_size_tokens
    # Skipped tokens have no log probabilities, and those of generated ones would take their places.
    cached = engine.context.enable_prefix_caching and not admission.wants_prompt_log_probs(params)
    return DynamicInferenceRequest(
        request_id=request_id,
        prompt=words,
        prompt_tokens=torch.from_numpy(tokens),
        sampling_params=params,
        block_size_tokens=size,
        enable_prefix_caching=cached,
        precomputed_block_hashes=block_hashes(tokens, size) if cached else [],
    )


def _tokenized(engine: Any, words: str, add_bos: bool = False) -> list[int]:
    try:
        return text.tokenize(engine.controller.tokenizer, words, add_bos)
    except Exception as error:  # no text that a client sends may end the engine
        raise admission.RequestRefused(
            f"{words[:40]!r} cannot be tokenized ({type(error).__name__}: {error})"
        ) from None


def _refuse(end: EngineEnd, request_id: int, reason: str) -> None:
    end.events.write(m.Log("request_refused", {"reason": reason}, warning=True, peer=b""))
    reply = released.failed_reply(reason, request_id=request_id, transient=False)
    body = wire.pack(reply)
    end.reply([m.Answer(request_id, Status.FAILED.name, 0, end.cache.epoch, body)])


def _take_signal(engine: Any, end: EngineEnd, message: m.Control) -> None:
    signal, args = message.signal, message.args
    match signal.name:
        case "SET_GENERATION_EPOCH":
            generation_epoch, weight_epoch = args
            end.cache.begin_epoch(engine, weight_epoch)
            _stamp(engine, generation_epoch)
        case "START_CUDA_PROFILER" | "STOP_CUDA_PROFILER" if not torch.cuda.is_available():
            fields = {"signal": signal.name, "reason": "there is no GPU"}
            end.events.write(m.Log("signal_ignored", fields, warning=True))
        case "START_CUDA_PROFILER":
            torch.cuda.cudart().cudaProfilerStart()
        case "STOP_CUDA_PROFILER":
            torch.cuda.cudart().cudaProfilerStop()
        case _:
            if not apply_signal(engine, signal):
                fields = {"signal": signal.name, "state": engine.state.name}
                end.events.write(m.Log("signal_ignored", fields, warning=True))
                return
            if signal is Signal.RESUME:
                drop_what_is_due(engine, end)
            if args:  # RESUME tells the weight epoch that begins with it
                end.cache.begin_epoch(engine, *args)


def _stamp(engine: Any, generation_epoch: int) -> None:
    """Note in every request from which of its tokens on the new generation epoch holds."""
    engine._generation_epoch = generation_epoch
    for entry in engine.requests.values():
        request = entry.record[-1]
        last = len(request.prompt_tokens) + len(request.generated_tokens) - 1
        for name in ("policy_epoch", "kv_cache_epoch"):
            stamps = getattr(request, name)
            if stamps is None:
                setattr(request, name, [(0, generation_epoch)])
            else:
                stamps.append((last, generation_epoch))


# --- answering ---------------------------------------------------------------------------------


async def async_bookkeep(
    self: Any, step_result: dict | None, context_state: dict, step_time: float
) -> dict:
    """The released bookkeeping of a step; finished requests are sent in our own format.

    Args:
        self: The engine.
        step_result: What the step produced, or None.
        context_state: State of the context around the step.
        step_time: Seconds that the step took.

    Returns:
        What the released method returns.
    """
    with _released_replies_muted(self):
        result = await _released_bookkeep(self, step_result, context_state, step_time)
    if self.use_coordinator:
        end: EngineEnd = self._prefix_routing
        end.tell_events()  # first, so that what an answer leaves behind is known when it comes
        records = result["finished_request_records"]
        end.reply([_answer(self, end, r) for r in records if r[-1].status is not Status.FAILED])
    return result


def handle_failed_request(self: Any, request_id: int) -> None:
    """Answer at once a request that the engine could not add."""
    record = self.requests[request_id].record
    with _released_replies_muted(self):
        _released_handle_failed(self, request_id)
    if self.use_coordinator:
        end: EngineEnd = self._prefix_routing
        end.reply([_answer(self, end, record)])


@contextmanager
def _released_replies_muted(engine: Any) -> Iterator[None]:
    """The released methods reply from the first rank of a group only: let no rank be it."""
    is_first = getattr(engine, "is_mp_coordinator", False)
    engine.is_mp_coordinator = False
    try:
        yield
    finally:
        engine.is_mp_coordinator = is_first


def _answer(engine: Any, end: EngineEnd, record: Any) -> m.Answer:
    """The reply of one finished record."""
    request_id = record.request_id
    found, epoch = end.cache.leave(request_id), end.cache.epoch
    wants_text = request_id in end.wants_text
    end.wants_text.discard(request_id)
    if end.link is None:
        return m.Answer(request_id, "", found.skipped, epoch, b"")
    reply = record.merge().serialize()
    reply["num_cached_tokens"] = found.skipped
    if wants_text and reply.get("generated_text") is None:
        try:
            reply["generated_text"] = text.generated_text(engine.controller.tokenizer, reply)
        except Exception as error:  # nor may tokens that the tokenizer does not know
            fields = {"error": str(error)}
            end.events.write(m.Log("reply_without_text", fields, warning=True, peer=b""))
    body = wire.pack(reply)
    # One that was not to find anything says nothing about how well its cache is known.
    told = -1 if found.whole else found.skipped
    return m.Answer(request_id, reply["status"], told, epoch, body, found.event_number)
