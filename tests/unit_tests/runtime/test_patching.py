"""Patching: nothing before it, every name during it, everything as it was after it."""

import logging
import sys
from argparse import Namespace
from collections.abc import Iterator
from importlib import import_module
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import pytest
from megatron.core.inference.config import PrefixCachingCoordinatorPolicy

from megatron.core.inference import coordinator
from megatron.core.inference.coordinator.policies import PrefixCachingCostPolicy
from megatron.core.inference.coordinator.runtime import engine_start, patching
from megatron.core.inference.coordinator.runtime.fork_server import warm_up
from megatron.core.inference.coordinator.settings import FLAG_PREFIX, RoutingSettings
from megatron.training import global_vars

INFERENCE = "megatron.core.inference"
SERVER = f"{INFERENCE}.text_generation_server.dynamic_text_gen_server"
OURS = "megatron.core.inference.coordinator"

# What other entry points reach for, by where they reach for it: owner, then name. An owner is a
# module, or a class in one.
NAMES = [
    (f"{INFERENCE}.data_parallel_inference_coordinator", "DataParallelInferenceCoordinator"),
    (
        f"{INFERENCE}.data_parallel_inference_coordinator.coordinator",
        "DataParallelInferenceCoordinator",
    ),
    (f"{INFERENCE}.engines.dynamic_engine", "DataParallelInferenceCoordinator"),
    (f"{INFERENCE}.inference_client", "InferenceClient"),
    (f"{SERVER}.text_generation_server", "InferenceClient"),
    (f"{SERVER}.text_generation_server", "start_text_gen_server"),
    (f"{SERVER}.text_generation_server", "stop_text_gen_server"),
    (SERVER, "start_text_gen_server"),
    (SERVER, "stop_text_gen_server"),
    (
        f"{INFERENCE}.engines.dynamic_engine:DynamicInferenceEngine",
        "start_listening_to_data_parallel_coordinator",
    ),
    (f"{INFERENCE}.engines.dynamic_engine:DynamicInferenceEngine", "schedule_requests"),
    (f"{INFERENCE}.engines.dynamic_engine:DynamicInferenceEngine", "async_step"),
    (f"{INFERENCE}.engines.dynamic_engine:DynamicInferenceEngine", "reset"),
    (f"{INFERENCE}.engines.dynamic_engine:DynamicInferenceEngine", "async_bookkeep"),
    (f"{INFERENCE}.engines.dynamic_engine:DynamicInferenceEngine", "_handle_failed_request"),
    (f"{INFERENCE}.engines.dynamic_engine:DynamicInferenceEngine", "shutdown"),
    (f"{INFERENCE}.engines.dynamic_engine:DynamicInferenceEngine", "suspend"),
    (f"{INFERENCE}.contexts.dynamic_context:DynamicInferenceContext", "resume_paused_requests"),
    (f"{INFERENCE}.contexts.dynamic_context:DynamicInferenceContext", "initialize_all_tensors"),
    (f"{INFERENCE}.contexts.dynamic_context:DynamicInferenceContext", "reset"),
    (f"{INFERENCE}.contexts.mamba_slot_allocator:MambaSlotAllocator", "_collect_commit_data"),
]


def current() -> dict[tuple[str, str], Any]:
    """What all the names stand for now."""
    found = {}
    for owner, name in NAMES:
        module, _, inner = owner.partition(":")
        holder = import_module(module)
        found[owner, name] = getattr(getattr(holder, inner) if inner else holder, name)
    return found


def ours(values: dict[tuple[str, str], Any]) -> list[bool]:
    return [value.__module__.startswith(OURS) for value in values.values()]


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    coordinator.unpatch()
    yield
    coordinator.unpatch()
    engine_start.choose_settings(None)


@pytest.fixture
def megatron_args(monkeypatch) -> Namespace:
    """Megatron's parsed arguments, of which a test sets some."""
    args = Namespace()
    monkeypatch.setattr(global_vars, "get_args", lambda: args)
    return args


@pytest.fixture
def no_megatron_args(monkeypatch) -> None:
    def get_args() -> None:
        raise AssertionError("args is not initialized.")

    monkeypatch.setattr(global_vars, "get_args", get_args)


# --- the names -----------------------------------------------------------------------------------


def _tell_what_is_ours(pipe: Connection) -> None:
    pipe.send(ours(current()))


def test_importing_the_package_patches_nothing():
    context = warm_up()  # its processes have imported all of our package, and nothing else
    mine, theirs = context.Pipe()
    process = context.Process(target=_tell_what_is_ours, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    assert mine.poll(50)
    assert mine.recv() == [False] * len(NAMES)
    process.join(10)


def test_patch_replaces_every_name_and_unpatch_restores_the_very_objects():
    before = current()
    assert not any(ours(before))
    coordinator.patch()
    during = current()
    assert all(ours(during)), during
    coordinator.unpatch()
    after = current()
    assert all(after[key] is before[key] for key in before)


def test_names_are_what_is_replaced():
    """The list above is no other than the plugin's own."""
    replaced = [(owner, name) for owner, name, _ in patching._replacements()]
    spelled = [
        (o if isinstance(o, str) else f"{o.__module__}:{o.__qualname__}", n) for o, n in replaced
    ]
    assert sorted(spelled) == sorted(NAMES)


def test_no_module_of_megatron_keeps_a_released_object_under_another_name():
    for name in ("apis", "engines", "text_generation_server"):
        import_module(f"{INFERENCE}.{name}")
    released = [v for (owner, _), v in current().items() if ":" not in owner]
    coordinator.patch()
    kept = [
        f"{module}.{name}"
        for module, loaded in list(sys.modules.items())
        if module.startswith("megatron.") and not module.startswith(OURS)
        for name, value in vars(loaded).items()
        if any(value is each for each in released)
    ]
    assert kept == []


def test_modules_that_imported_a_name_before_get_ours(monkeypatch):
    """As megatron.rl does at the top of a script, which parses arguments and patches later."""
    script = ModuleType("a_script")
    source = f"""
from {INFERENCE}.inference_client import InferenceClient
from {INFERENCE}.inference_client import InferenceClient as Released
from {SERVER} import start_text_gen_server
"""
    exec(source, vars(script))
    monkeypatch.setitem(sys.modules, script.__name__, script)
    client, start = script.InferenceClient, script.start_text_gen_server
    coordinator.patch()
    assert script.InferenceClient is current()[f"{INFERENCE}.inference_client", "InferenceClient"]
    assert script.start_text_gen_server is current()[SERVER, "start_text_gen_server"]
    assert all(ours(current()))
    assert script.Released is client
    coordinator.unpatch()
    assert (script.InferenceClient, script.start_text_gen_server) == (client, start)
    assert not any(ours(current()))


def test_patching_twice_is_as_patching_once():
    before = current()
    coordinator.patch()
    once = current()
    coordinator.patch()
    assert current() == once
    coordinator.unpatch()
    assert current() == before
    coordinator.unpatch()
    assert current() == before


def test_patching_again_after_unpatching_works():
    coordinator.patch()
    first = current()
    coordinator.unpatch()
    coordinator.patch()
    assert current() == first


def test_a_name_that_is_missing_leaves_everything_as_it_was(monkeypatch):
    before = current()
    wrong = [*patching._replacements(), (f"{INFERENCE}.inference_client", "no_such_name", None)]
    monkeypatch.setattr(patching, "_replacements", lambda: wrong)
    with pytest.raises(AttributeError, match="no_such_name"):
        coordinator.patch()
    assert current() == before
    monkeypatch.undo()
    coordinator.patch()
    assert all(ours(current()))


# --- the settings --------------------------------------------------------------------------------


def test_without_arguments_the_defaults_are_ours_and_not_the_released_ones(no_megatron_args):
    coordinator.patch()
    assert engine_start.routing_settings() == RoutingSettings()
    assert engine_start.routing_settings().coordinator_policy == "longest_prefix"


def test_megatron_s_parsed_arguments_are_taken_where_there_are_any(megatron_args):
    setattr(megatron_args, FLAG_PREFIX + "coordinator_policy", "first_prefix_block")
    setattr(megatron_args, FLAG_PREFIX + "load_beta", 0.25)
    coordinator.patch()
    expected = RoutingSettings(
        coordinator_policy=PrefixCachingCoordinatorPolicy.FIRST_PREFIX_BLOCK, load_beta=0.25
    )
    assert engine_start.routing_settings() == expected


def test_arguments_parsed_after_patching_count_too(no_megatron_args, monkeypatch):
    coordinator.patch()
    args = Namespace(**{FLAG_PREFIX + "cost_policy": "prefill_work"})
    monkeypatch.setattr(global_vars, "get_args", lambda: args)
    assert engine_start.routing_settings().cost_policy is PrefixCachingCostPolicy.PREFILL_WORK


def test_settings_chosen_in_code_win_over_arguments(megatron_args):
    setattr(megatron_args, FLAG_PREFIX + "cost_policy", "prefill_work")
    chosen = RoutingSettings(coordinator_policy="load_balanced", ttl_seconds=7)
    coordinator.patch(chosen)
    assert engine_start.routing_settings() is chosen


def test_patching_again_replaces_the_settings(megatron_args):
    setattr(megatron_args, FLAG_PREFIX + "burst_cap", 3)
    coordinator.patch(RoutingSettings(burst_cap=5))
    coordinator.patch(RoutingSettings(burst_cap=6))
    assert engine_start.routing_settings().burst_cap == 6
    coordinator.patch()
    assert engine_start.routing_settings().burst_cap == 3


def test_a_bad_argument_is_an_error_that_names_the_flag(megatron_args):
    setattr(megatron_args, FLAG_PREFIX + "load_beta", -1)
    with pytest.raises(coordinator.SettingsError, match="caching-load-beta is -1"):
        coordinator.patch()
    assert not any(ours(current()))


# --- what is said --------------------------------------------------------------------------------


def lines(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == patching.logger.name]


def test_the_policy_in_force_is_logged_once_and_again_when_it_changes(no_megatron_args, caplog):
    with caplog.at_level(logging.INFO, patching.logger.name):
        coordinator.patch()
        coordinator.patch()
        coordinator.patch(RoutingSettings())
        assert lines(caplog) == [
            "prefix_routing policy=longest_prefix cost_policy=relative_load_weighted"
        ]
        coordinator.patch(RoutingSettings(coordinator_policy="load_balanced"))
        coordinator.patch(RoutingSettings(coordinator_policy="load_balanced"))
        assert lines(caplog)[1:] == [
            "prefix_routing policy=load_balanced cost_policy=relative_load_weighted"
        ]
        coordinator.unpatch()
        coordinator.patch(RoutingSettings(coordinator_policy="load_balanced"))
        assert len(lines(caplog)) == 3


# --- the version ---------------------------------------------------------------------------------


@pytest.mark.parametrize("installed", ["0.18.4", "0.20.0", "1.19.0", "0.190.1", "0.19"])
def test_another_megatron_core_is_refused_with_a_message_that_names_it(monkeypatch, installed):
    before = current()
    monkeypatch.setattr(patching, "version", lambda package: installed)
    with pytest.raises(patching.UnsupportedMegatronCore) as refused:
        coordinator.patch()
    assert str(refused.value) == (
        f"megatron-prefix-routing fits megatron-core 0.19.x, and {installed} is installed; "
        "install megatron-core==0.19.2"
    )
    assert current() == before


def test_one_without_metadata_is_refused(monkeypatch):
    def version(package: str) -> str:
        raise patching.PackageNotFoundError(package)

    monkeypatch.setattr(patching, "version", version)
    with pytest.raises(patching.UnsupportedMegatronCore, match="none with package metadata is in"):
        coordinator.patch()


@pytest.mark.parametrize("installed", ["0.19.0", "0.19.2", "0.19.17rc1"])
def test_any_0_19_is_taken(monkeypatch, installed):
    monkeypatch.setattr(patching, "version", lambda package: installed)
    patching.check_megatron_core()
