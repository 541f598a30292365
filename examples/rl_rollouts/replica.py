"""One rank: the model, the engine that serves it, its front end, and the weight update."""

import argparse
import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from megatron.core.inference.config import PrefixCachingCoordinatorPolicy
from megatron.core.inference.engines.dynamic_engine import EngineState
from megatron.core.inference.sampling_params import SamplingParams

from megatron.core.inference.coordinator.runtime import model as models
from megatron.core.inference.coordinator.runtime.gathering import gathered

Result = TypeVar("Result")

_HOST = "127.0.0.1"
_START_SECONDS = 120.0


class Replica:
    """A rank's model and engine. Every rank calls every method, at the same point of the run.

    Args:
        args: Megatron's arguments, see options.py.

    Attributes:
        model: The model; the engine computes with these very weights.
        urls: Where the front ends of all ranks serve, once it has started.
    """

    def __init__(self, args: argparse.Namespace):
        models.initialize(args)
        self._args = args
        self._tokenizer = models.build_tokenizer(args)
        self.model = models.build_model(args)
        self._engine = models.build_engine(self.model, self._tokenizer, self._config())
        self.rank = torch.distributed.get_rank()
        self.urls: list[str] = []
        self._client: Any = None

    def _config(self) -> Any:
        overrides = {}
        if self._args.released:
            policy = PrefixCachingCoordinatorPolicy.FIRST_PREFIX_BLOCK
            overrides["prefix_caching_coordinator_policy"] = policy
        return models.build_inference_config(self._args, self.model, **overrides)

    async def start(self, schedule: Path) -> None:
        """Register with the coordinator, serve, and learn where the others serve.

        Args:
            schedule: File that the coordinator writes its decisions to when it ends.
        """
        address = await self._engine.start_listening_to_data_parallel_coordinator(
            hostname=_HOST, coordinator_schedule_output_path=str(schedule)
        )
        # No client before the last engine. The engine runs by now: no collective may hold it up.
        await asyncio.to_thread(gathered, None)
        url = await asyncio.to_thread(_start_front_end, address, self._tokenizer, self.rank)
        self.urls = await asyncio.to_thread(gathered, url)
        if self.rank == 0:
            # Imported here: before patch() it would be the released client.
            from megatron.core.inference.inference_client import InferenceClient

            self._client = InferenceClient(address)
            self._client.start()

    async def paused(self) -> None:
        """Let all engines finish what they compute, and hold."""
        await self._signal("pause_engines", EngineState.PAUSED)

    async def update(self, epoch: int, change: Callable[[], Result]) -> Result:
        """Change the weights of paused engines, and let them go on.

        Args:
            epoch: Number of the weights that `change` makes.
            change: Changes them, together with the other ranks.

        Returns:
            What `change` returns.
        """
        await self._signal("suspend_engines", EngineState.SUSPENDED)
        result = change()
        if self._client is not None:
            self._client.set_generation_epoch(epoch)
        await self._signal("resume_engines", EngineState.RESUMED)
        await self._signal("unpause_engines", EngineState.RUNNING)
        return result

    async def stop(self) -> None:
        """End front ends, engines and coordinator, which then writes its decisions."""
        from megatron.core.inference.text_generation_server import dynamic_text_gen_server as http

        await self.paused()  # the other ranks wait here until the first one is done
        await asyncio.to_thread(http.stop_text_gen_server)
        if self._client is not None:
            self._client.stop_engines()
        await self._engine.engine_loop_task
        if self._client is not None:
            self._client.shutdown_coordinator()
            process = self._engine.inference_coordinator_process
            await asyncio.to_thread(process.join, 10)
            self._client.stop()

    def served(self) -> int:
        """Requests that this rank's engine has finished."""
        return self._engine.finished_request_count

    def answers_of_a_fresh_engine(
        self, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[list[int]]:
        """The greedy answers of a new engine with the present weights and without any caching."""
        config = models.build_inference_config(
            self._args, self.model, enable_prefix_caching=False, buffer_size_gb=0.25
        )
        engine = models.build_engine(self.model, self._tokenizer, config)
        greedy = SamplingParams(num_tokens_to_generate=max_tokens, top_k=1, termination_id=-1)
        records = engine.generate([list(prompt) for prompt in prompts], greedy)
        return [list(record.merge().generated_tokens) for record in records]

    async def _signal(self, name: str, state: EngineState) -> None:
        """Rank 0 tells all engines, and every rank waits for its own.

        Raises:
            Exception: Whatever ended the engine meanwhile.
        """
        if self._client is not None:
            getattr(self._client, name)()
        reached = asyncio.create_task(self._engine.wait_until(state))
        loop = self._engine.engine_loop_task
        await asyncio.wait({reached, loop}, return_when=asyncio.FIRST_COMPLETED)
        if not reached.done():
            reached.cancel()
            loop.result()
            raise RuntimeError(f"the engine ended before it was {state.name.lower()}")


def _start_front_end(address: str, tokenizer: Any, rank: int) -> str:
    """One HTTP front end on a port that the system chooses; returns its URL."""
    from megatron.core.inference.text_generation_server import dynamic_text_gen_server as http

    sock = socket.socket()
    sock.bind((_HOST, 0))
    port = sock.getsockname()[1]
    http.start_text_gen_server(
        address, tokenizer, rank, port, num_replicas=1, hostname=_HOST, sock=sock
    )
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            socket.create_connection((_HOST, port), timeout=1).close()
            return f"http://{_HOST}:{port}"
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
