"""The command-line flags, on Megatron's real parser."""

import argparse

import pytest

from megatron.core.inference.coordinator.arguments import (
    add_prefix_routing_args,
    routing_settings_from_args,
)
from megatron.core.inference.coordinator.options import SettingsError
from megatron.core.inference.coordinator.settings import (
    FleetSettings,
    RoutingSettings,
    options,
)
from megatron.training.arguments import add_megatron_arguments

PREFIX = "--inference-dynamic-batching-prefix-caching-"
DEST = "inference_dynamic_batching_prefix_caching_"
FLEET_PREFIX, FLEET_DEST = "--inference-coordinator-", "inference_coordinator_"


@pytest.fixture(scope="module")
def parser():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    assert add_prefix_routing_args(parser) is parser
    return parser


def settings_of(parser, *argv):
    return routing_settings_from_args(parser.parse_args(list(argv)))


def action(parser, name):
    return parser._option_string_actions[PREFIX + name]


def test_without_flags_the_settings_are_our_defaults(parser):
    args = parser.parse_args([])
    assert routing_settings_from_args(args) == RoutingSettings()
    assert vars(args)[DEST + "coordinator_policy"] == "longest_prefix"
    assert vars(args)[DEST + "routing_alpha"] == 0.5


def test_every_option_is_a_flag_whose_dest_is_the_flag_with_underscores(parser):
    for name in options():
        assert action(parser, name.replace("_", "-")).dest == DEST + name


def test_every_flag_is_read(parser):
    settings = settings_of(
        parser,
        *(PREFIX + "coordinator-policy", "first_prefix_block"),
        *(PREFIX + "cost-policy", "free_capacity_weighted"),
        *(PREFIX + "load-beta", "0.25"),
        *(PREFIX + "routing-alpha", "0.75"),
        *(PREFIX + "ttl-seconds", "12.5"),
        *(PREFIX + "burst-cap", "7"),
    )
    assert settings == RoutingSettings(
        coordinator_policy="first_prefix_block",
        cost_policy="free_capacity_weighted",
        load_beta=0.25,
        routing_alpha=0.75,
        ttl_seconds=12.5,
        burst_cap=7,
    )


def test_flags_that_megatron_has_are_adjusted_and_not_added_twice(parser):
    for name in ("coordinator-policy", "routing-alpha"):
        found = [a for a in parser._actions if PREFIX + name in a.option_strings]
        assert len(found) == 1
    policy = action(parser, "coordinator-policy")
    assert policy.choices == ["longest_prefix", "first_prefix_block", "load_balanced"]
    assert policy.default == "longest_prefix"


def test_adding_the_flags_again_changes_nothing():
    parser = argparse.ArgumentParser()
    for _ in range(2):
        add_prefix_routing_args(parser)
    assert len([a for a in parser._actions if a.dest.startswith(DEST)]) == len(options())
    ours = [FLEET_DEST + name for name in FleetSettings.options()]
    assert [a.dest for a in parser._actions if a.dest in ours] == ours
    assert settings_of(parser) == RoutingSettings()


def fleet_of(parser, *argv):
    return FleetSettings.from_mapping(vars(parser.parse_args(list(argv))))


def test_without_flags_the_fleet_has_our_defaults(parser):
    assert fleet_of(parser) == FleetSettings()


def test_every_option_of_the_fleet_is_a_flag_of_its_own(parser):
    for name in FleetSettings.options():
        found = [a for a in parser._actions if a.dest == FLEET_DEST + name]
        assert [a.option_strings for a in found] == [[FLEET_PREFIX + name.replace("_", "-")]]


def test_every_flag_of_the_fleet_is_read(parser):
    settings = fleet_of(
        parser,
        *(FLEET_PREFIX + "max-retries", "3"),
        *(FLEET_PREFIX + "replica-wait", "2.5"),
        *(FLEET_PREFIX + "hung-timeout", "30"),
        *(FLEET_PREFIX + "first-answer-timeout", "300"),
        *(FLEET_PREFIX + "max-inflight-requests", "10"),
        *(FLEET_PREFIX + "max-inflight-bytes", "1000"),
        *(FLEET_PREFIX + "max-frame-bytes", "70000"),
        *(FLEET_PREFIX + "max-rank-requests", "512"),
    )
    assert settings == FleetSettings(
        max_retries=3,
        replica_wait=2.5,
        hung_timeout=30.0,
        first_answer_timeout=300.0,
        max_inflight_requests=10,
        max_inflight_bytes=1000,
        max_frame_bytes=70_000,
        max_rank_requests=512,
    )


def test_help_of_the_fleet_tells_default_and_range(parser):
    formatter = argparse.HelpFormatter("tool")
    ends = {
        "max_retries": "until the answer; 0 keeps none. Must be 0 or more. Default: 1.",
        "retry_deadline": "it was tried. Must be 0 or more. Default: 600.0.",
        "return_wait": "and others get them. Must be 0 or more. Default: 3.0.",
        "replica_wait": "answered with an error. Must be 0 or more. Default: 60.0.",
        "pause_wait": "client lets it run. Must be 0 or more. Default: 300.0.",
        "hung_timeout": "paused or suspended. Must be 3 or more. Default: 120.0.",
        "first_answer_timeout": "where it is longer. Must be 0 or more. Default: 600.0.",
        "max_inflight_requests": "others are there. Must be 1 or more. Default: 100000.",
        "max_inflight_bytes": "and parameters. Must be 1 or more. Default: 8589934592.",
        "max_frame_bytes": "its connection. Must be 65536 or more. Default: 268435456.",
        "max_rank_requests": "(docs/choosing-a-policy.md). Must be 0 or more. Default: 0.",
    }
    actions = {name: parser._option_string_actions[FleetSettings.flag(name)] for name in ends}
    texts = {name: formatter._expand_help(action) for name, action in actions.items()}
    assert {name: texts[name][-len(ends[name]) :] for name in FleetSettings.options()} == ends


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max-retries", "-1", "is -1; give a whole number 0 or more"),
        ("replica-wait", "nan", "is nan; give a number 0 or more"),
        ("hung-timeout", "0", "is 0.0; give a number 3 or more: .*"),
        ("max-inflight-requests", "0", "is 0; give a whole number 1 or more"),
        ("max-inflight-bytes", "0", "is 0; give a whole number 1 or more"),
        ("max-frame-bytes", "9", "is 9; give a whole number 65536 or more"),
        ("max-rank-requests", "-1", "is -1; give a whole number 0 or more"),
    ],
)
def test_a_value_of_the_fleet_out_of_range_stops_with_one_sentence(parser, name, value, message):
    with pytest.raises(SettingsError, match=f"^{FLEET_PREFIX}{name} {message}$"):
        fleet_of(parser, f"{FLEET_PREFIX}{name}={value}")


@pytest.mark.parametrize(
    ("name", "value"), [("max-retries", "1.5"), ("replica-wait", "x"), ("max-inflight-bytes", "8G")]
)
def test_what_is_no_value_of_the_fleet_is_refused_by_the_parser(parser, name, value, capsys):
    with pytest.raises(SystemExit):
        parser.parse_args([FLEET_PREFIX + name, value])
    assert f"argument {FLEET_PREFIX}{name}: invalid" in capsys.readouterr().err


def test_they_work_without_megatrons_own_flags():
    parser = add_prefix_routing_args(argparse.ArgumentParser())
    assert settings_of(parser, PREFIX + "cost-policy", "prefill_work").cost_policy == "prefill_work"


def test_help_tells_default_and_range(parser):
    # Megatron's help as a whole cannot be formatted: it has a bare % in another flag's text.
    formatter = argparse.HelpFormatter("tool")
    texts = {
        name: formatter._expand_help(action(parser, name.replace("_", "-"))) for name in options()
    }
    ends = {
        "coordinator_policy": "the least loaded rank gets the request). Default: longest_prefix.",
        "cost_policy": "over an idle fleet. Default: relative_load_weighted.",
        "load_beta": "0 ignores load. Must be 0 or more. Default: 1.0.",
        "routing_alpha": "no other cost policy reads it. Must be between 0 and 1. Default: 0.5.",
        "ttl_seconds": "Must be 0.001 or more. Default: 300.0.",
        "burst_cap": "0 leaves it to the cost policy. Must be 0 or more. Default: 0.",
        "generated_tokens": "compute the answer again; needs lru eviction. Default: off.",
    }
    assert {name: text[-len(ends[name]) :] for name, text in texts.items()} == ends


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("load-beta", "-1", "is -1.0; give a number 0 or more"),
        ("load-beta", "inf", "is inf; give a number 0 or more"),
        ("routing-alpha", "1.5", "is 1.5; give a number between 0 and 1"),
        ("ttl-seconds", "0", "is 0.0; give a number 0.001 or more"),
        ("burst-cap", "-2", "is -2; give a whole number 0 or more"),
    ],
)
def test_a_value_out_of_range_stops_with_one_sentence(parser, name, value, message):
    with pytest.raises(SettingsError, match=f"^{PREFIX}{name} {message}$"):
        settings_of(parser, f"{PREFIX}{name}={value}")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("load-beta", "much"),
        ("burst-cap", "1.5"),
        ("cost-policy", "x"),
        ("coordinator-policy", "x"),
    ],
)
def test_what_is_no_value_is_refused_by_the_parser(parser, name, value, capsys):
    with pytest.raises(SystemExit):
        parser.parse_args([PREFIX + name, value])
    assert f"argument {PREFIX}{name}: invalid" in capsys.readouterr().err


def test_a_burst_cap_contradicts_load_balanced(parser):
    flags = [PREFIX + "burst-cap", "2", PREFIX + "coordinator-policy", "load_balanced"]
    with pytest.raises(SettingsError) as error:
        settings_of(parser, *flags)
    assert str(error.value) == (
        f"{PREFIX}burst-cap has no effect with {PREFIX}coordinator-policy load_balanced, under "
        "which no prompt is compared with another; leave one of them out"
    )
    assert settings_of(parser, *flags[2:]).burst_cap == 0
    assert settings_of(parser, *flags[:2]).burst_cap == 2
