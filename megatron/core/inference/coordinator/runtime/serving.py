"""A server on one rank: coordinator, engine loop and HTTP front ends, from start to end."""

import argparse
import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from megatron.core.inference.coordinator.runtime import fork_server, http, private_files
from megatron.core.inference.coordinator.runtime.gathering import gathered
from megatron.core.inference.coordinator.runtime.http import access
from megatron.core.inference.coordinator.runtime.http.limits import HttpSettings
from megatron.core.inference.coordinator.settings import RoutingSettings, advice, unused_options

_AFTERWARDS_SECONDS = 3.5
"""To end what is left after the time for requests is over."""


@dataclass(slots=True)
class Setup:
    """A rank, ready to serve.

    Attributes:
        args: Megatron's parsed arguments, the server's own among them.
        settings: How requests are routed.
        engine: The engine.
        rank: This process's rank.
    """

    args: argparse.Namespace
    settings: RoutingSettings
    engine: Any
    rank: int

    @property
    def hosts_front_ends(self) -> bool:
        """Whether this rank serves HTTP."""
        asked_for = self.args.frontend_replicas != 0
        return asked_for and (self.rank == 0 or self.args.frontend_on_all_ranks)

    @property
    def joins(self) -> str | None:
        """Address of a coordinator that runs already; None if the job has one of its own."""
        address: str | None = self.args.inference_coordinator_address
        return address

    @property
    def replicas(self) -> str:
        """How many replicas there are, in words."""
        return _count(self.args.data_parallel_size, "replica")

    def say(self, text: str) -> None:
        """Tell the user something, once for all ranks."""
        if self.rank == 0:
            print(f"[server] {text}", flush=True)


class Server:
    """One rank's life: startup, main loop, shutdown.

    Args:
        setup: The rank, ready to serve.
    """

    def __init__(self, setup: Setup):
        self._setup = setup
        self._stopping = asyncio.Event()
        self._leaving = False

    async def serve(self, on_stop: Callable[..., None]) -> None:
        """Serve until a signal comes or the engine ends.

        Args:
            on_stop: Registers what a signal calls (`stop_signal.StopSignal.on_stop`).

        Raises:
            Exception: Whatever ended the engine, e.g. that the coordinator died.
        """
        loop = asyncio.get_running_loop()
        on_stop(lambda: self._begin_to_stop(loop))
        try:
            await self.startup()
            if self._setup.joins is not None:
                seconds = self._setup.args.inference_coordinator_drain_seconds
                on_stop(lambda: self._begin_to_leave(loop), seconds + _AFTERWARDS_SECONDS, 0)
            await self.main_loop()
            if self._leaving:
                await self.leave()
        finally:
            await self.shutdown()

    async def startup(self) -> None:
        """Coordinator, registration, front ends; then tell where they are."""
        setup, args = self._setup, self._setup.args
        options = {"hostname": args.inference_coordinator_host}
        if setup.joins is not None:
            setup.say(f"joining the coordinator at {setup.joins}")
            options["coordinator_address"] = setup.joins
        else:
            setup.say(f"waiting for the coordinator, and for {setup.replicas} to register")
            options["coordinator_schedule_output_path"] = args.coordinator_schedule_output
        address = await setup.engine.start_listening_to_data_parallel_coordinator(
            args.inference_coordinator_port, **options
        )
        url, failure = await asyncio.to_thread(self._try_to_start_front_ends, address)
        urls = await asyncio.to_thread(_gather, url, failure)
        if setup.rank == 0:
            self._announce(urls)

    async def main_loop(self) -> None:
        """The engine's loop runs as a task; wait for it, for a signal, or for front ends to fail.

        Raises:
            FrontEndError: No front end can be kept alive: nobody would be served any more.
        """
        stopping = asyncio.create_task(self._stopping.wait())
        engine = self._setup.engine.engine_loop_task
        waited: set[asyncio.Future] = {stopping, engine}
        if (front_ends := http.supervision()) is not None:
            waited.add(asyncio.wrap_future(front_ends))
        done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        for each in done:
            if not each.cancelled():
                each.result()

    async def leave(self) -> None:
        """Nothing new: what engine and front ends have is answered, as far as the time goes.

        The engine's loop ends by itself, on all ranks of a model-parallel group at the same step.
        """
        setup, seconds = self._setup, self._setup.args.inference_coordinator_drain_seconds
        setup.say(f"leaving: no new requests, and up to {seconds:g} s for those at hand")
        engine = setup.engine
        front_ends = asyncio.to_thread(http.drain_text_gen_server, seconds)
        await asyncio.wait(
            {asyncio.create_task(front_ends), engine.engine_loop_task}, timeout=seconds
        )
        if not engine.engine_loop_task.done():
            queued = len(engine._prefix_routing.queue)
            count = _count(len(engine.requests) + queued, "request")
            setup.say(f"{count} not answered in time: the coordinator gives them to others")

    async def shutdown(self) -> None:
        """Front ends first, so that nothing new comes; then the engine, then the coordinator."""
        self._setup.say("stopping")
        await asyncio.to_thread(http.stop_text_gen_server)
        engine = self._setup.engine
        task = getattr(engine, "engine_loop_task", None)
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task})
        end = getattr(engine, "_prefix_routing", None)
        if end is not None and end.process is not None:
            await asyncio.to_thread(end.process.stop)
        fork_server.end()

    def _begin_to_leave(self, loop: asyncio.AbstractEventLoop) -> None:
        self._leaving = True
        self._setup.engine._prefix_routing.leaving = True
        # This loop stands still while a rank waits for its group's first rank, which may be gone.
        seconds = self._setup.args.inference_coordinator_drain_seconds
        limit = threading.Timer(seconds, self._begin_to_stop, (loop,))
        limit.daemon = True
        limit.start()
        self._wake(loop)

    def _begin_to_stop(self, loop: asyncio.AbstractEventLoop) -> None:
        end = getattr(self._setup.engine, "_prefix_routing", None)
        if end is not None:
            end.ending = True
        self._wake(loop)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended already
            loop.call_soon_threadsafe(self._stopping.set)

    def _try_to_start_front_ends(self, address: str) -> tuple[str | None, Exception | None]:
        try:
            return self._start_front_ends(address), None
        except Exception as failure:
            return None, failure

    def _start_front_ends(self, coordinator_address: str) -> str | None:
        setup, args = self._setup, self._setup.args
        if not setup.hosts_front_ends:
            return None
        count = args.frontend_replicas
        if count == -1:
            count = 4 if args.frontend_on_all_ranks else max(args.data_parallel_size, 4)
        everywhere = " on every rank" if args.frontend_on_all_ranks else ""
        setup.say(f"starting {_count(count, 'HTTP front end')}{everywhere}")
        url = http.start_text_gen_server(
            coordinator_address,
            setup.engine.controller.tokenizer,
            setup.rank,
            0 if args.frontend_on_all_ranks else args.port,
            parsers=args.parsers,
            verbose=args.inference_text_gen_server_logging,
            num_replicas=count,
            hostname=args.host,
            model_name=args.model_name,
            vocab_size=setup.engine.controller.vocab_size,
            max_sequence_tokens=setup.engine.context.max_sequence_length,
            api_keys=access.keys_from_args(args),
            limits=HttpSettings.from_mapping(vars(args)),
        )
        if args.host in ("0.0.0.0", "::"):  # all interfaces: name the one that others can reach
            url = f"http://{setup.engine._prefix_routing.host}:{urlsplit(url).port}"
        return url

    def _announce(self, urls: list[str]) -> None:
        setup, routing = self._setup, self._setup.settings
        caching = setup.args.inference_dynamic_batching_enable_prefix_caching
        policy = routing.coordinator_policy.value if caching else "load_balanced"
        weighed = f" weighed by {routing.cost_policy.value}" if policy != "load_balanced" else ""
        how = f"{policy}{weighed}" if setup.joins is None else f"part of {setup.joins}"
        setup.say(f"ready: {setup.replicas}, {how}")
        notes = unused_options(routing) if setup.joins is None else []
        if setup.joins is None and caching:
            notes += advice(routing)
        for note in [*notes, *(access.notes(setup.args) if urls else [])]:
            setup.say(f"note: {note}")
        for url in urls:
            setup.say(f"serving at {url}/v1")
        if urls:
            self._show_a_request(urls[0])
        if setup.args.url_file is not None:
            content = json.dumps({"urls": urls}) + "\n"
            private_files.write(setup.args.url_file, content, private_files.PUBLIC)

    def _show_a_request(self, url: str) -> None:
        setup = self._setup
        setup.say("try:")
        body = json.dumps({"model": setup.args.model_name, "prompt": "Hello", "max_tokens": 16})
        headers = "-H 'Content-Type: application/json'"
        if len(access.keys_from_args(setup.args)):
            headers += ' -H "Authorization: Bearer $KEY"'
        print(f"  curl {url}/v1/completions {headers} -d '{body}'", flush=True)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _gather(url: str | None, failure: Exception | None) -> list[str]:
    """Every rank's base URL, in the order of ranks.

    Raises:
        Exception: This rank's own failure.
        SystemExit: Another rank failed, which tells why itself.
    """
    found = gathered((url, failure is not None))
    if failure is not None:
        raise failure
    if any(failed for _, failed in found):
        sys.exit(1)
    return [each for each, _ in found if each is not None]
