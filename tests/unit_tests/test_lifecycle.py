"""The fleet's states as a table, and the diagram that is generated from it."""

import re
from pathlib import Path

import pytest
from megatron.core.inference.data_parallel_inference_coordinator.state import (
    CONTROL_TRANSITIONS,
    CoordinatorState,
)
from megatron.core.inference.headers import Headers

from megatron.core.inference.coordinator.lifecycle import (
    REDUNDANT,
    STATELESS,
    TRANSITIONS,
    FleetState,
    Signal,
    advance,
    mermaid,
)

RUNNING, PAUSED, SUSPENDED = FleetState.RUNNING, FleetState.PAUSED, FleetState.SUSPENDED
ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"

TABLE = {
    Signal.PAUSE: {RUNNING: PAUSED},
    Signal.UNPAUSE: {PAUSED: RUNNING},
    Signal.SUSPEND: {PAUSED: SUSPENDED},
    Signal.RESUME: {SUSPENDED: PAUSED},
    Signal.STOP: {PAUSED: RUNNING, SUSPENDED: RUNNING},
    Signal.SET_GENERATION_EPOCH: {state: state for state in FleetState},
    Signal.START_CUDA_PROFILER: {state: state for state in FleetState},
    Signal.STOP_CUDA_PROFILER: {state: state for state in FleetState},
}


@pytest.mark.parametrize("state", FleetState)
@pytest.mark.parametrize("signal", Signal)
def test_each_signal_leads_where_the_table_says(state, signal):
    assert advance(state, signal) == TABLE[signal].get(state)


def test_a_pair_is_a_transition_or_redundant_but_not_both():
    assert not TRANSITIONS.keys() & REDUNDANT
    assert not {signal for _, signal in TRANSITIONS} & STATELESS
    assert {
        (RUNNING, Signal.UNPAUSE),
        (PAUSED, Signal.PAUSE),
        (SUSPENDED, Signal.SUSPEND),
    } <= REDUNDANT


@pytest.mark.parametrize("signal", Signal)
def test_the_numbers_are_those_of_the_released_headers(signal):
    assert Headers(int(signal)).name == signal.name


@pytest.mark.parametrize("signal", Signal)
def test_signals_are_passed_on_where_the_released_coordinator_does(signal):
    rule = CONTROL_TRANSITIONS.get(Headers(int(signal)))
    if rule is None:
        assert signal in STATELESS  # the profiler's, which have no rule in the released table
        return
    for state in FleetState:
        passed_on = advance(state, signal) is not None
        assert passed_on == (CoordinatorState[state.name] in rule.allowed_from)


def test_the_diagram_has_every_transition_and_nothing_else():
    first, start, *arrows = mermaid().splitlines()
    assert (first, start) == ("stateDiagram-v2", "    [*] --> running")
    found = [re.fullmatch(r"    (\w+) --> (\w+): (\w+)", arrow).groups() for arrow in arrows]
    assert len(found) == len(TRANSITIONS)
    drawn = {(FleetState(a), Signal[name]): FleetState(b) for a, b, name in found}
    assert drawn == TRANSITIONS


def test_the_architecture_page_shows_the_generated_diagram():
    if not ARCHITECTURE.exists():
        pytest.skip(f"{ARCHITECTURE} is not written yet")
    assert mermaid() in ARCHITECTURE.read_text()
