"""Settings: defaults, ranges, and messages that say what to do."""

import pickle
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
from builders import LRU, REF_ZERO
from megatron.core.inference.config import PrefixCachingCoordinatorPolicy

from megatron.core.inference.coordinator.options import SettingsError
from megatron.core.inference.coordinator.policies import PrefixCachingCostPolicy
from megatron.core.inference.coordinator.settings import (
    FLAG_PREFIX,
    CoordinatorSettings,
    FleetSettings,
    RoutingSettings,
    flag,
    markdown_table,
    options,
)

README = Path(__file__).parents[2] / "README.md"
PREFIX = "--inference-dynamic-batching-prefix-caching-"
FLEET_PREFIX = "--inference-coordinator-"


def test_the_defaults():
    settings = RoutingSettings()
    assert {f.name: getattr(settings, f.name) for f in fields(settings)} == {
        "coordinator_policy": PrefixCachingCoordinatorPolicy.LONGEST_PREFIX,
        "cost_policy": PrefixCachingCostPolicy.RELATIVE_LOAD_WEIGHTED,
        "load_beta": 1.0,
        "routing_alpha": 0.5,
        "ttl_seconds": 300.0,
        "burst_cap": 0,
        "generated_tokens": False,
    }


def test_the_defaults_of_the_fleet():
    settings = FleetSettings()
    assert {f.name: getattr(settings, f.name) for f in fields(settings)} == {
        "max_retries": 1,
        "retry_deadline": 600.0,
        "return_wait": 3.0,
        "replica_wait": 60.0,
        "pause_wait": 300.0,
        "hung_timeout": 120.0,
        "first_answer_timeout": 600.0,
        "max_inflight_requests": 100_000,
        "max_inflight_bytes": 8 * 2**30,
        "max_frame_bytes": 256 * 2**20,
        "max_rank_requests": 0,
    }
    assert CoordinatorSettings().fleet == settings


@pytest.mark.parametrize("kind", [RoutingSettings, FleetSettings])
def test_every_option_has_help_and_a_flag(kind):
    assert list(kind.options()) == [f.name for f in fields(kind)]
    assert all(option.help.endswith(".") for option in kind.options().values())


def test_flags_begin_with_their_prefix():
    assert FleetSettings.flag("max_retries") == FLEET_PREFIX + "max-retries"
    assert flag("load_beta") == PREFIX + "load-beta"
    assert flag("load_beta").removeprefix("--").replace("-", "_") == FLAG_PREFIX + "load_beta"


def test_the_readme_shows_the_table_of_the_options():
    table = markdown_table()
    assert len(table.splitlines()) == 2 + len(options())
    assert "| `…-routing-alpha` | `0.5` (between 0 and 1) | " in table
    assert table in README.read_text()


def test_the_readme_shows_the_table_of_the_fleet():
    table = FleetSettings.markdown_table()
    assert len(table.splitlines()) == 2 + len(FleetSettings.options())
    assert "| `…-hung-timeout` | `120.0` (3 or more) | " in table
    assert table in README.read_text()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("load_beta", "0 or more"),
        ("routing_alpha", "between 0 and 1"),
        ("ttl_seconds", "0.001 or more"),
        ("burst_cap", "0 or more"),
        ("cost_policy", ""),
    ],
)
def test_a_range_in_words(name, text):
    assert options()[name].range_text == text


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        (
            "coordinator_policy",
            "first_prefix_block",
            PrefixCachingCoordinatorPolicy("first_prefix_block"),
        ),
        ("cost_policy", "prefill_work", PrefixCachingCostPolicy.PREFILL_WORK),
        ("cost_policy", PrefixCachingCostPolicy.PREFILL_WORK, PrefixCachingCostPolicy.PREFILL_WORK),
        ("load_beta", 0, 0.0),
        ("load_beta", 250, 250.0),
        ("routing_alpha", 0, 0.0),
        ("routing_alpha", 1, 1.0),
        ("ttl_seconds", 0.001, 0.001),
        ("burst_cap", 4.0, 4),
        ("burst_cap", "4", 4),
        ("load_beta", "0.25", 0.25),
    ],
)
def test_values_in_range_are_taken_and_converted(name, given, value):
    taken = getattr(RoutingSettings(**{name: given}), name)
    assert taken == value
    assert type(taken) is type(value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("load_beta", -0.1, "load-beta is -0.1; give a number 0 or more"),
        ("load_beta", float("nan"), "load-beta is nan; give a number 0 or more"),
        ("load_beta", float("inf"), "load-beta is inf; give a number 0 or more"),
        ("load_beta", "much", "load-beta is 'much'; it must be a number, 0 or more"),
        ("load_beta", [], r"load-beta is \[\]; it must be a number, 0 or more"),
        ("routing_alpha", 1.01, "routing-alpha is 1.01; give a number between 0 and 1"),
        ("routing_alpha", -1, "routing-alpha is -1; give a number between 0 and 1"),
        ("ttl_seconds", 0, "ttl-seconds is 0; give a number 0.001 or more"),
        ("burst_cap", -1, "burst-cap is -1; give a whole number 0 or more"),
        ("burst_cap", 2.5, "burst-cap is 2.5; give a whole number 0 or more"),
        ("burst_cap", float("inf"), "burst-cap is inf; it must be a whole number, 0 or more"),
        ("burst_cap", None, "burst-cap is None; it must be a whole number, 0 or more"),
        (
            "coordinator_policy",
            "nearest",
            "coordinator-policy is 'nearest'; it must be one of longest_prefix, "
            "first_prefix_block, load_balanced",
        ),
        (
            "cost_policy",
            "free",
            "cost-policy is 'free'; it must be one of relative_load_weighted, "
            "free_capacity_weighted, prefill_work, added_delay",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_its_flag_and_what_to_do(name, value, message):
    with pytest.raises(SettingsError, match=f"^{PREFIX}{message}$"):
        RoutingSettings(**{name: value})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("max_retries", "0 or more"),
        ("replica_wait", "0 or more"),
        ("pause_wait", "0 or more"),
        ("hung_timeout", "3 or more"),
        ("first_answer_timeout", "0 or more"),
        ("max_inflight_requests", "1 or more"),
        ("max_inflight_bytes", "1 or more"),
        ("max_frame_bytes", "65536 or more"),
        ("max_rank_requests", "0 or more"),
    ],
)
def test_a_range_of_the_fleet_in_words(name, text):
    assert FleetSettings.options()[name].range_text == text


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("max_retries", 0, 0),
        ("max_retries", "3", 3),
        ("max_retries", 2.0, 2),
        ("replica_wait", 0, 0.0),
        ("replica_wait", "2.5", 2.5),
        ("hung_timeout", 3, 3.0),
        ("hung_timeout", 5, 5.0),
        ("max_inflight_requests", 1, 1),
        ("max_inflight_bytes", 1, 1),
        ("max_inflight_bytes", 2**62, 2**62),
        ("max_frame_bytes", 65_536, 65_536),
        ("max_rank_requests", 0, 0),
        ("max_rank_requests", "512", 512),
    ],
)
def test_values_of_the_fleet_in_range_are_taken_and_converted(name, given, value):
    taken = getattr(FleetSettings(**{name: given}), name)
    assert taken == value
    assert type(taken) is type(value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_retries", -1, "max-retries is -1; give a whole number 0 or more"),
        ("max_retries", 0.5, "max-retries is 0.5; give a whole number 0 or more"),
        ("max_retries", "x", "max-retries is 'x'; it must be a whole number, 0 or more"),
        ("max_retries", None, "max-retries is None; it must be a whole number, 0 or more"),
        ("replica_wait", -0.1, "replica-wait is -0.1; give a number 0 or more"),
        ("replica_wait", float("inf"), "replica-wait is inf; give a number 0 or more"),
        ("replica_wait", float("nan"), "replica-wait is nan; give a number 0 or more"),
        (
            "hung_timeout",
            2.9,
            "hung-timeout is 2.9; give a number 3 or more: replicas are asked for a sign of life "
            "once a second",
        ),
        ("hung_timeout", float("inf"), "hung-timeout is inf; give a number 3 or more: .*"),
        (
            "max_inflight_requests",
            0,
            "max-inflight-requests is 0; give a whole number 1 or more",
        ),
        ("max_inflight_bytes", 0, "max-inflight-bytes is 0; give a whole number 1 or more"),
        ("max_inflight_bytes", -5, "max-inflight-bytes is -5; give a whole number 1 or more"),
        ("max_frame_bytes", 65_535, "max-frame-bytes is 65535; give a whole number 65536 or more"),
        ("max_rank_requests", -1, "max-rank-requests is -1; give a whole number 0 or more"),
        ("max_rank_requests", 1.5, "max-rank-requests is 1.5; give a whole number 0 or more"),
    ],
)
def test_a_wrong_value_of_the_fleet_is_refused_with_its_flag_and_what_to_do(name, value, message):
    with pytest.raises(SettingsError, match=f"^{FLEET_PREFIX}{message}$"):
        FleetSettings(**{name: value})


def test_the_fleets_from_mapping_takes_its_own_names_alone():
    values = {
        "max_retries": 2,
        "inference_coordinator_replica_wait": 5,
        "hung_timeout": 4.0,
        "inference_coordinator_hung_timeout": 7.0,  # the full name counts
        "inference_coordinator_max_rank_requests": None,  # not given
        "inference_coordinator_port": 5000,
        FLAG_PREFIX + "max_inflight_requests": 1,
        "max_requests": 3,
    }
    assert FleetSettings.from_mapping(values) == FleetSettings(
        max_retries=2, replica_wait=5.0, hung_timeout=7.0
    )
    assert FleetSettings.from_mapping({}) == FleetSettings()
    message = "max-retries is -1; give a whole number 0 or more"
    with pytest.raises(SettingsError, match=f"^{FLEET_PREFIX}{message}$"):
        FleetSettings.from_mapping({"max_retries": -1})


def test_from_mapping_takes_names_with_and_without_the_prefix_and_ignores_the_rest():
    values = {
        "cost_policy": "prefill_work",
        FLAG_PREFIX + "burst_cap": 3,
        FLAG_PREFIX + "load_beta": 2.0,
        "load_beta": 7.0,  # the full name counts
        FLAG_PREFIX + "ttl_seconds": None,  # not given
        "hidden_size": 64,
        FLAG_PREFIX + "eviction_policy": "lru",
    }
    assert RoutingSettings.from_mapping(values) == RoutingSettings(
        cost_policy="prefill_work", burst_cap=3, load_beta=2.0
    )
    assert RoutingSettings.from_mapping({}) == RoutingSettings()


def test_from_mapping_refuses_what_the_settings_refuse():
    with pytest.raises(SettingsError, match="routing-alpha is 7; give a number between 0 and 1"):
        RoutingSettings.from_mapping({"routing_alpha": 7})


def test_settings_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        RoutingSettings().burst_cap = 1
    with pytest.raises(FrozenInstanceError):
        CoordinatorSettings().trace = True
    with pytest.raises(FrozenInstanceError):
        FleetSettings().max_retries = 0


def test_settings_survive_pickling():
    settings = CoordinatorSettings(
        routing=RoutingSettings(cost_policy="prefill_work", burst_cap=2),
        fleet=FleetSettings(max_retries=3, max_inflight_bytes=2**40),
        expected_ranks=3,
        eviction=LRU,
        deterministic=True,
    )
    assert pickle.loads(pickle.dumps(settings)) == settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_requests": 0}, "max_requests is 0; it must be 1 or more"),
        ({"expected_ranks": -1}, "expected_ranks is -1; it must be 0 or more"),
        ({"block_size_tokens": None}, "prefix caching needs block_size_tokens of 1 or more"),
        ({"block_size_tokens": 0}, "prefix caching needs block_size_tokens of 1 or more"),
        ({"block_size_tokens": -4}, "prefix caching needs block_size_tokens of 1 or more"),
    ],
)
def test_a_coordinator_is_not_started_with_impossible_settings(values, message):
    with pytest.raises(SettingsError, match=f"^{message}$"):
        CoordinatorSettings(**values)


def test_the_eviction_policy_of_stock_engines_may_be_a_string():
    assert CoordinatorSettings(eviction="lru").eviction is LRU
    assert CoordinatorSettings().eviction is REF_ZERO


@pytest.mark.parametrize(
    ("policy", "prefix_caching", "signal", "hashed"),
    [
        ("longest_prefix", True, "longest_prefix", True),
        ("first_prefix_block", True, "first_prefix_block", True),
        ("load_balanced", True, "load_balanced", False),
        ("longest_prefix", False, "load_balanced", False),
    ],
)
def test_the_signal_in_force(policy, prefix_caching, signal, hashed):
    settings = CoordinatorSettings(
        routing=RoutingSettings(coordinator_policy=policy),
        prefix_caching=prefix_caching,
        block_size_tokens=16 if prefix_caching else None,
    )
    assert settings.signal is PrefixCachingCoordinatorPolicy(signal)
    assert settings.hashed is hashed
