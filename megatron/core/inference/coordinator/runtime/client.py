"""The client of a coordinator: submits requests, receives answers, sends control signals."""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.utils import get_asyncio_loop

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.hashing import packed_block_hashes
from megatron.core.inference.coordinator.lifecycle import Signal
from megatron.core.inference.coordinator.policies import routes_on_prefix
from megatron.core.inference.coordinator.runtime import prompts, released, text, wire
from megatron.core.inference.coordinator.runtime.client_link import (
    ClientLink,
    CoordinatorUnreachable,
)

__all__ = [
    "CoordinatorUnreachable",
    "Disconnected",
    "InferenceClient",
    "Overloaded",
    "Prepared",
    "RequestFailed",
]

logger = logging.getLogger(__name__)

_RETRYABLE = frozenset(
    {
        m.ErrorCode.NO_REPLICA,
        m.ErrorCode.REPLICA_LOST,
        m.ErrorCode.OVERLOADED,
        m.ErrorCode.FLEET_PAUSED,
    }
)


class RequestFailed(RuntimeError):
    """The coordinator answered a request with an error.

    Attributes:
        code: An `ErrorCode`.
        retryable: Whether the same request may succeed when it is sent again.
    """

    def __init__(self, code: str, text: str):
        super().__init__(text)
        self.code = code
        self.retryable = code in _RETRYABLE


class Overloaded(RequestFailed):
    """The fleet has as many requests as it may hold; the text says how many. Try again later."""


class Disconnected(RequestFailed):
    """There is no connection to the coordinator at present, or it broke before the answer came.

    The client connects again by itself.
    """

    def __init__(self, text: str):
        super().__init__(m.ErrorCode.NOT_CONNECTED, f"{text}; send the request again")
        self.retryable = True


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt as it travels, made once for several requests; see `InferenceClient.prepare`.

    Attributes:
        tokens: How many it has; -1 for a text that nobody has tokenized.
        packed: The prompt.
        text: The text that was tokenized, if any.
        block_size: Tokens in the blocks that are hashed; 0 where none are.
        hashes: Packed block hashes; None where none are needed.
        owner: Whom the client asks for; empty: for itself.
        salt: What the hashes are masked with, here and in the engine.
    """

    tokens: int
    packed: bytes
    text: str | None = None
    block_size: int = 0
    hashes: bytes | None = None
    owner: str = ""
    salt: int = 0


class InferenceClient:
    """Submits requests to a coordinator, for use inside an asyncio event loop.

    It hashes prompts when the coordinator routes on prefixes, so that the coordinator needs not
    look into them. Not thread-safe: call it from the thread that runs the loop.

    When its connection breaks, requests without an answer fail, as do new ones until it has
    connected again, which it tries without an end.

    Args:
        inference_coordinator_address: The coordinator's, e.g. tcp://127.0.0.1:5000.
        deserialize: Answers are `DynamicInferenceRequest` objects instead of dicts.
        tokenizer: With a Megatron tokenizer, text prompts are tokenized here, as the engine
            would, and routed on their prefix. Without one they travel as text and are routed to
            the least loaded rank, and the engine's end detokenizes.
        connect_timeout: Seconds to wait for the coordinator in `start`.

    Raises:
        ValueError: The address is none, or the key file cannot be used.
    """

    def __init__(
        self,
        inference_coordinator_address: str,
        deserialize: bool = False,
        tokenizer: Any = None,
        *,
        connect_timeout: float = 60.0,
    ):
        self.address = inference_coordinator_address
        self.deserialize = deserialize
        self.tokenizer = tokenizer
        self.connect_timeout = connect_timeout
        self._link = ClientLink(self.address, tokenizer is None, self._receive, self._lose)
        self.completion_futures: dict[int, asyncio.Future] = {}
        self.request_submission_times: dict[int, float] = {}
        self.next_request_id = 0
        self.unhashed_requests = 0
        self._prompt_texts: dict[int, str] = {}
        self._started = False
        self._hashed = False
        self._block_size = 0
        self._fleet = m.Serving(True)

    # --- connecting --------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Connect to the coordinator and begin to receive answers.

        Args:
            loop: The event loop that answers arrive on; the running one by default.

        Raises:
            CoordinatorUnreachable: Nothing, or something else than our coordinator, answered.
        """
        self._link.open(get_asyncio_loop(loop), self.connect_timeout)
        self._started = True

    def stop(self) -> None:
        """Cancel what is unanswered and close the connection. Calling it again does nothing."""
        if self._link.closed:
            return
        for future in list(self.completion_futures.values()):
            future.cancel()
        self.completion_futures.clear()
        self._link.close()

    @property
    def unavailable(self) -> str | None:
        """Why requests would not be served at present; None if they would, as far as is known.

        A request may be sent nevertheless: for a replica it waits for a while.
        """
        if self._link.trouble is not None:
            return self._link.trouble
        if self._fleet.serving:
            return None
        return f"the coordinator at {self.address} {self._fleet.reason or 'has no replica'}"

    # --- requests ----------------------------------------------------------------------------

    def prepare(
        self,
        prompt: str | list[int] | np.ndarray,
        add_bos: bool = False,
        *,
        owner: str = "",
        salt: int = 0,
    ) -> Prepared:
        """Tokenize, pack and hash a prompt that several requests have in common.

        Args:
            prompt: Text, or token ids of shape [n].
            add_bos: Whether a text begins with a BOS token.
            owner: Whom they are for: the places of a full fleet are shared between owners.
            salt: 0 to 2^63 - 1. Requests find only cached prefixes of requests with the same.

        Returns:
            What `add_request` takes instead of the prompt. It does not change with the prompt.

        Raises:
            TypeError: The token ids are no flat sequence of whole numbers.
            OverflowError: One takes more than 64 bits.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                return Prepared(-1, wire.pack(prompt), owner=owner, salt=salt)
            tokens = text.tokenize(self.tokenizer, prompt, add_bos)
            return self._hash(tokens, prompt, owner, salt)
        return self._hash(prompt, None, owner, salt)

    def add_request(
        self,
        prompt: str | list[int] | np.ndarray | Prepared,
        sampling_params: SamplingParams,
    ) -> asyncio.Future:
        """Submit a request.

        Args:
            prompt: Text, or token ids of shape [n], or what `prepare` made of them.
            sampling_params: How to sample. Whether a text begins with a BOS token was settled when
                it was prepared.

        Returns:
            A future of the answer: a dict, or a `DynamicInferenceRequest` with `deserialize`.
            It raises `RequestFailed` when the coordinator answers with an error. Cancelling it
            drops the answer.

        Raises:
            RuntimeError: No event loop is running, or `start` was not called.
            TypeError: The token ids are no flat sequence of whole numbers.
            OverflowError: One takes more than 64 bits.
        """
        if not self._started:
            raise RuntimeError("call start() before add_request()")
        future = asyncio.get_running_loop().create_future()
        if self._link.trouble is not None:
            future.set_exception(Disconnected(self._link.trouble))
            return future
        request_id = self.next_request_id
        self.next_request_id += 1
        self._link.send(self._submission(request_id, prompt, sampling_params))
        self.completion_futures[request_id] = future
        self.request_submission_times[request_id] = time.perf_counter()
        future.add_done_callback(lambda done: self._forget(request_id))
        return future

    def _submission(
        self,
        request_id: int,
        prompt: str | list[int] | np.ndarray | Prepared,
        sampling_params: SamplingParams,
    ) -> m.SubmitRequest:
        sampling = sampling_params.serialize()
        if not isinstance(prompt, Prepared):
            prompt = self.prepare(prompt, bool(sampling.get("add_BOS")))
        elif prompt.block_size != self._hashed_block_size and prompt.tokens >= 0:
            # The coordinator has been replaced since by another that routes otherwise.
            tokens = prompts.unpack(prompt.packed)
            prompt = self._hash(tokens, prompt.text, prompt.owner, prompt.salt)
        if prompt.text is not None:
            self._prompt_texts[request_id] = prompt.text
        if self.tokenizer is None:
            sampling[released.DETOKENIZE] = True
        if prompt.salt:
            sampling[released.CACHE_SALT] = prompt.salt
        if prompt.tokens < 0:
            self._count_unhashed()
        return m.SubmitRequest(
            request_id,
            prompt.tokens,
            wire.pack(sampling),
            prompt.packed,
            prompt.hashes,
            prompt.owner,
        )

    def _hash(
        self, prompt: list[int] | np.ndarray, given: str | None, owner: str, salt: int
    ) -> Prepared:
        """Tokens as they travel; `given` is the text that they were made of."""
        block_size = self._hashed_block_size
        tokens = prompts.as_array(prompt)
        hashes = packed_block_hashes(tokens, block_size, salt) if block_size else None
        return Prepared(len(tokens), prompts.pack(tokens), given, block_size, hashes, owner, salt)

    @property
    def _hashed_block_size(self) -> int:
        return self._block_size if self._hashed else 0

    def _count_unhashed(self) -> None:
        self.unhashed_requests += 1
        if self._hashed and self.unhashed_requests == 1:
            logger.warning(
                "text_prompt_not_hashed: this client has no tokenizer, so its text prompts are "
                "routed by load alone; give InferenceClient a tokenizer"
            )

    def _forget(self, request_id: int) -> None:
        self.completion_futures.pop(request_id, None)
        self.request_submission_times.pop(request_id, None)
        self._prompt_texts.pop(request_id, None)

    # --- receiving ---------------------------------------------------------------------------

    def _receive(self, message: m.FromCoordinator) -> None:
        match message:
            case m.Reply():
                self._resolve(message)
            case m.ConnectAck(signal=signal, block_size=block_size):
                self._block_size = block_size
                self._hashed = routes_on_prefix(signal) and block_size > 0
                self._fleet = m.Serving(True)  # else it says so next
            case m.Serving():
                self._fleet = message
            case m.RequestError():
                future = self.completion_futures.get(message.client_request_id)
                if future is not None and not future.done():
                    kind = Overloaded if message.code == m.ErrorCode.OVERLOADED else RequestFailed
                    future.set_exception(kind(message.code, message.text))

    def _lose(self, reason: str) -> None:
        for future in list(self.completion_futures.values()):
            if not future.done():
                future.set_exception(Disconnected(reason))

    def _resolve(self, message: m.Reply) -> None:
        request_id = message.client_request_id
        future = self.completion_futures.get(request_id)
        if future is None or future.done():
            return  # cancelled; whoever asked does not want it any more
        try:
            future.set_result(self._answer(request_id, message.body))
        except Exception as error:  # nobody else would ever tell who waits
            future.set_exception(error)

    def _answer(self, request_id: int, body: m.Body) -> Any:
        reply = wire.unpack(body)
        reply["latency"] = time.perf_counter() - self.request_submission_times[request_id]
        if request_id in self._prompt_texts:
            reply["prompt"] = self._prompt_texts[request_id]
        if self.tokenizer is not None and reply.get("generated_text") is None:
            reply["generated_text"] = text.generated_text(self.tokenizer, reply)
        return DynamicInferenceRequest.deserialize(reply) if self.deserialize else reply

    # --- control signals ---------------------------------------------------------------------

    def pause_engines(self) -> None:
        """Let all engines finish their step and wait. Await `engine.paused` for confirmation.

        The pause is this client's to end: if it is gone for too long, requests get errors.
        """
        self._link.send(m.Control(Signal.PAUSE))

    def unpause_engines(self) -> None:
        """Let paused engines go on."""
        self._link.send(m.Control(Signal.UNPAUSE))

    def suspend_engines(self) -> None:
        """Let paused engines give their memory back."""
        self._link.send(m.Control(Signal.SUSPEND))

    def resume_engines(self) -> None:
        """Let suspended engines take their memory again; they are paused then."""
        self._link.send(m.Control(Signal.RESUME))

    def stop_engines(self) -> None:
        """End paused or suspended engines; the coordinator stays."""
        self._link.send(m.Control(Signal.STOP))

    def set_generation_epoch(self, generation_epoch: int) -> None:
        """Stamp what is in flight with a generation epoch; a new one begins a weight epoch."""
        self._link.send(m.Control(Signal.SET_GENERATION_EPOCH, (generation_epoch,)))

    def start_cuda_profiler(self) -> None:
        """Let all engines start the CUDA profiler."""
        self._link.send(m.Control(Signal.START_CUDA_PROFILER))

    def stop_cuda_profiler(self) -> None:
        """Let all engines stop the CUDA profiler."""
        self._link.send(m.Control(Signal.STOP_CUDA_PROFILER))

    def shutdown_coordinator(self) -> None:
        """End the coordinator; the engines are not told."""
        self._link.send(m.Shutdown())
