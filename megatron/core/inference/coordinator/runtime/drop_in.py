"""The coordinator under the released class's name and entry point, for code that starts it."""

from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

from megatron.core.inference.config import PrefixCachingCoordinatorPolicy

from megatron.core.inference.coordinator.runtime.process import ProcessSettings, run
from megatron.core.inference.coordinator.settings import CoordinatorSettings, RoutingSettings


class DataParallelInferenceCoordinator:
    """Our coordinator process behind the released `entrypoint`."""

    @classmethod
    def entrypoint(
        cls,
        pipe_connection: Connection,
        ready_event: Event,
        data_parallel_size: int,
        tokenizer: Any,
        max_requests: int,
        inference_coordinator_port: int | None = None,
        deterministic_mode: bool = False,
        block_size_tokens: int | None = None,
        enable_prefix_caching: bool = False,
        prefix_caching_coordinator_policy: PrefixCachingCoordinatorPolicy = (
            PrefixCachingCoordinatorPolicy.LONGEST_PREFIX
        ),
        prefix_caching_routing_alpha: float = 0.5,
        schedule_output_path: str | None = None,
        hostname: str | None = None,
    ) -> None:
        """Run a coordinator in this process until it is stopped.

        Args:
            pipe_connection: Gets the address, as text, once the coordinator listens.
            ready_event: Set together with that.
            data_parallel_size: Ranks to wait for before requests are routed.
            tokenizer: For replies of released engines.
            max_requests: Places of a rank.
            inference_coordinator_port: Port to bind; None or 0 lets the system choose.
            deterministic_mode: Break ties by load and rank number only.
            block_size_tokens: Tokens in a cache block.
            enable_prefix_caching: Whether engines cache prefixes.
            prefix_caching_coordinator_policy: The signal policy.
            prefix_caching_routing_alpha: Weight of the cached share in
                `free_capacity_weighted`.
            schedule_output_path: Where to write every decision at the end.
            hostname: Address to bind; 127.0.0.1 by default.
        """
        routing = RoutingSettings(
            coordinator_policy=prefix_caching_coordinator_policy,
            routing_alpha=prefix_caching_routing_alpha,
        )
        core = CoordinatorSettings(
            routing=routing,
            expected_ranks=data_parallel_size,
            prefix_caching=enable_prefix_caching,
            block_size_tokens=block_size_tokens,
            max_requests=max_requests,
            deterministic=deterministic_mode,
        )
        settings = ProcessSettings(
            core,
            hostname or "127.0.0.1",
            inference_coordinator_port or 0,
            schedule_output_path,
            insists_on_port=False,
        )
        run(settings, tokenizer, _ReleasedPipe(pipe_connection, ready_event))  # type: ignore[arg-type]


class _ReleasedPipe:
    """Turns what our process reports into what the released parent waits for."""

    def __init__(self, pipe: Connection, ready: Event):
        self._pipe = pipe
        self._ready = ready

    def send(self, report: tuple[str, str]) -> None:
        """Pass an address on; an error shows as the end of the process."""
        kind, text = report
        if kind == "listening":
            self._pipe.send(text)
            self._pipe.close()
            self._ready.set()
