"""What each control signal does to megatron-core's engine, as one literal table."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from megatron.core.inference.engines.dynamic_engine import EngineState

from megatron.core.inference.coordinator.lifecycle import FleetState, Signal, advance

_TRANSIENT = frozenset(
    {
        EngineState.PAUSING,
        EngineState.UNPAUSING,
        EngineState.SUSPENDING,
        EngineState.RESUMING,
    }
)
"""States that the engine's loop leaves by itself: what comes meanwhile waits."""


class _Step(NamedTuple):
    """One signal: where it may be applied, what it leads to, which confirmations it takes back."""

    start: frozenset[EngineState]
    end: EngineState
    clears: tuple[EngineState, ...] = ()
    action: str | None = None


_STEPS = {
    Signal.PAUSE: _Step(
        frozenset({EngineState.RUNNING}), EngineState.PAUSING, (EngineState.RUNNING,)
    ),
    Signal.UNPAUSE: _Step(frozenset({EngineState.PAUSED}), EngineState.UNPAUSING),
    Signal.SUSPEND: _Step(
        frozenset({EngineState.PAUSED}), EngineState.SUSPENDING, (EngineState.RESUMED,), "suspend"
    ),
    Signal.RESUME: _Step(
        frozenset({EngineState.SUSPENDED}), EngineState.RESUMING, (EngineState.SUSPENDED,), "resume"
    ),
    Signal.STOP: _Step(
        frozenset({EngineState.PAUSED, EngineState.SUSPENDED}),
        EngineState.STOPPING,
        (EngineState.SUSPENDED,),
    ),
}


def is_due(engine: Any, signal: Signal) -> bool:
    """Whether a signal can be taken now: a change of state waits for the one before it."""
    return signal not in _STEPS or engine.state not in _TRANSIENT


def apply_signal(engine: Any, signal: Signal) -> bool:
    """Apply a change of state that is due.

    Args:
        engine: A `DynamicInferenceEngine`.
        signal: PAUSE, UNPAUSE, SUSPEND, RESUME or STOP.

    Returns:
        Whether it had a place in the engine's present state; if not, nothing was done.
    """
    step = _STEPS[signal]
    if engine.state not in step.start:
        return False
    for state in step.clears:
        engine._state_events[state].clear()
    if step.action is not None:
        getattr(engine, step.action)()
    engine.state = step.end
    return True


_LADDER = {FleetState.RUNNING: 0, FleetState.PAUSED: 1, FleetState.SUSPENDED: 2}
_RUNGS = {
    EngineState.RUNNING: 0,
    EngineState.UNPAUSING: 0,
    EngineState.PAUSING: 1,
    EngineState.PAUSED: 1,
    EngineState.RESUMING: 1,
    EngineState.SUSPENDING: 2,
    EngineState.SUSPENDED: 2,
}
"""How far up each state is, or will be once the change that it stands for is through."""
_UP, _DOWN = (Signal.PAUSE, Signal.SUSPEND), (Signal.UNPAUSE, Signal.RESUME)


def told_to_be(state: EngineState, signals: Iterable[Signal]) -> FleetState:
    """What the fleet is for an engine in some state that has these signals before it."""
    fleet = list(_LADDER)[_RUNGS.get(state, 0)]
    for signal in signals:
        fleet = advance(fleet, signal) or fleet
    return fleet


def signals_towards(state: EngineState, fleet: FleetState) -> tuple[Signal, ...]:
    """The signals that an engine in some state must take to be what the fleet is."""
    here, there = _RUNGS.get(state, 0), _LADDER[fleet]
    return _UP[here:there] if here < there else _DOWN[there:here][::-1]
