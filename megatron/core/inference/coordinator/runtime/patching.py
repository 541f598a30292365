"""Putting the plugin in the place of megatron-core's released coordinator."""

import logging
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from megatron.core.inference.coordinator.settings import RoutingSettings

logger = logging.getLogger(__name__)

SUPPORTED = "0.19"
"""The minor version of megatron-core whose internals this plugin fits into."""

_INFERENCE = "megatron.core.inference"
_SERVER = f"{_INFERENCE}.text_generation_server.dynamic_text_gen_server"

_RESUME = "resume_paused_requests"
_INITIALIZE = "initialize_all_tensors"
_COLLECT = "_collect_commit_data"
_START = "start_listening_to_data_parallel_coordinator"

_replaced: list[tuple[Any, str, Any]] = []
_announced: tuple[str, str] | None = None


class UnsupportedMegatronCore(RuntimeError):
    """The installed megatron-core is none that the plugin knows; the text names both."""


def check_megatron_core() -> None:
    """Do nothing beside a supported megatron-core.

    Raises:
        UnsupportedMegatronCore: The installed one is another.
    """
    try:
        installed = version("megatron-core")
    except PackageNotFoundError:
        installed = "none with package metadata"
    if not installed.startswith(SUPPORTED + "."):
        raise UnsupportedMegatronCore(
            f"megatron-prefix-routing fits megatron-core {SUPPORTED}.x, and {installed} is "
            f"installed; install megatron-core=={SUPPORTED}.2"
        )


def patch(settings: RoutingSettings | None = None) -> None:
    """Swap the released coordinator, client, engine methods and HTTP server for ours.

    Call it in every process that runs an engine or a client, before they are made. Entry points
    that know nothing of this plugin, such as `MegatronAsyncLLM`, then use it unchanged. Modules
    that have imported a released name already get ours as well, unless they gave it another name
    (`import ... as`). Calling it again only replaces the settings.

    Args:
        settings: How to route. None takes Megatron's parsed arguments where there are any, else
            the defaults of `RoutingSettings`.

    Raises:
        UnsupportedMegatronCore: The installed megatron-core is no 0.19.x.
    """
    global _announced
    check_megatron_core()
    from megatron.core.inference.coordinator.runtime import engine_start

    engine_start.choose_settings(settings)
    chosen = engine_start.routing_settings()
    if not _replaced:
        # All are found before the first is replaced: a missing one leaves everything as it was.
        found = [
            (holder, name, ours)
            for owner, name, ours in _replacements()
            for holder in _holders(owner, name)
        ]
        _replaced.extend([(owner, name, getattr(owner, name)) for owner, name, _ in found])
        for owner, name, ours in found:
            setattr(owner, name, ours)
    policies = chosen.coordinator_policy.value, chosen.cost_policy.value
    if policies != _announced:
        logger.info("prefix_routing policy=%s cost_policy=%s", *policies)
        _announced = policies


def unpatch() -> None:
    """Put everything back as it was released."""
    global _announced
    _announced = None
    while _replaced:
        owner, name, original = _replaced.pop()
        setattr(owner, name, original)


def _holders(owner: Any, name: str) -> list[Any]:
    """The owner, and the modules that imported the name from there.

    Scripts import Megatron's modules, e.g. `megatron.rl`, before they parse arguments. A released
    client that such a module holds would wait forever for a coordinator that asks for keys.
    """
    if not isinstance(owner, str):
        return [owner]
    module = import_module(owner)
    original = getattr(module, name)
    loaded = [each for each in list(sys.modules.values()) if isinstance(each, ModuleType)]
    others = [each for each in loaded if vars(each).get(name) is original and each is not module]
    return [module, *others]


def _replacements() -> list[tuple[Any, str, Any]]:
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
    from megatron.core.inference.contexts.mamba_slot_allocator import MambaSlotAllocator
    from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine

    from megatron.core.inference.coordinator.runtime import (
        client,
        engine_endings,
        engine_mending,
        engine_start,
        engine_step,
    )
    from megatron.core.inference.coordinator.runtime.drop_in import DataParallelInferenceCoordinator

    coordinator = "DataParallelInferenceCoordinator"
    released = f"{_INFERENCE}.data_parallel_inference_coordinator"
    return [
        (released, coordinator, DataParallelInferenceCoordinator),
        (f"{released}.coordinator", coordinator, DataParallelInferenceCoordinator),
        (f"{_INFERENCE}.engines.dynamic_engine", coordinator, DataParallelInferenceCoordinator),
        (f"{_INFERENCE}.inference_client", "InferenceClient", client.InferenceClient),
        (f"{_SERVER}.text_generation_server", "InferenceClient", client.InferenceClient),
        (DynamicInferenceEngine, _START, engine_start.start_listening_to_data_parallel_coordinator),
        (DynamicInferenceEngine, "schedule_requests", engine_step.schedule_requests),
        (DynamicInferenceEngine, "async_bookkeep", engine_step.async_bookkeep),
        (DynamicInferenceEngine, "_handle_failed_request", engine_step.handle_failed_request),
        (DynamicInferenceEngine, "async_step", engine_endings.async_step),
        (DynamicInferenceEngine, "reset", engine_endings.reset),
        (DynamicInferenceEngine, "shutdown", engine_endings.shutdown),
        (DynamicInferenceEngine, "suspend", engine_mending.suspend),
        (DynamicInferenceContext, _RESUME, engine_mending.resume_paused_requests),
        (DynamicInferenceContext, _INITIALIZE, engine_mending.initialize_all_tensors),
        (DynamicInferenceContext, "reset", engine_mending.reset_context),
        (MambaSlotAllocator, _COLLECT, engine_mending.collect_commit_data),
        *_http_replacements(),
    ]


def _http_replacements() -> list[tuple[Any, str, Any]]:
    """None where the packages of an HTTP server are missing: who has no server needs none."""
    try:
        from megatron.core.inference.coordinator.runtime import http
    except ImportError:
        return []
    return [
        (module, name, getattr(http, name))
        for module in (_SERVER, f"{_SERVER}.text_generation_server")
        for name in ("start_text_gen_server", "stop_text_gen_server")
    ]
