"""The fleet's states and what each control signal does in them, as one literal table.

The diagram in docs/architecture.md is generated from this table (`mermaid`).
"""

from enum import IntEnum, StrEnum


class FleetState(StrEnum):
    """What the engines were last told to be."""

    RUNNING = "running"
    PAUSED = "paused"
    SUSPENDED = "suspended"


class Signal(IntEnum):
    """Control signals, by their number on the wire."""

    PAUSE = 40
    UNPAUSE = 41
    SUSPEND = 42
    RESUME = 43
    SET_GENERATION_EPOCH = 44
    STOP = 45
    START_CUDA_PROFILER = 46
    STOP_CUDA_PROFILER = 47


_RUNNING, _PAUSED, _SUSPENDED = FleetState.RUNNING, FleetState.PAUSED, FleetState.SUSPENDED

TRANSITIONS: dict[tuple[FleetState, Signal], FleetState] = {
    (_RUNNING, Signal.PAUSE): _PAUSED,
    (_PAUSED, Signal.UNPAUSE): _RUNNING,
    (_PAUSED, Signal.SUSPEND): _SUSPENDED,
    (_SUSPENDED, Signal.RESUME): _PAUSED,
    # The engines end; the coordinator stays for those that come next, which start running.
    (_PAUSED, Signal.STOP): _RUNNING,
    (_SUSPENDED, Signal.STOP): _RUNNING,
}
"""What moves the fleet. A signal that is neither here nor below is refused in that state."""

STATELESS = frozenset(
    {Signal.SET_GENERATION_EPOCH, Signal.START_CUDA_PROFILER, Signal.STOP_CUDA_PROFILER}
)
"""Signals that are passed on in every state and change none."""

OWNING = frozenset(Signal) - {Signal.START_CUDA_PROFILER, Signal.STOP_CUDA_PROFILER}
"""Signals that make their sender the owner of a pause (`pause.py`)."""

EPOCH_SIGNALS = frozenset({Signal.RESUME, Signal.SET_GENERATION_EPOCH})
"""Signals that (may) begin a weight epoch; to engines they end with its number."""

REDUNDANT = frozenset(
    {
        (_PAUSED, Signal.PAUSE),
        (_SUSPENDED, Signal.PAUSE),
        (_RUNNING, Signal.UNPAUSE),
        (_SUSPENDED, Signal.SUSPEND),
    }
)
"""What asks for a state that the fleet is in already: ignored, and no reason to warn."""


def advance(state: FleetState, signal: Signal) -> FleetState | None:
    """The state after a signal, or None when the signal has no place in this state."""
    if signal in STATELESS:
        return state
    return TRANSITIONS.get((state, signal))


def mermaid() -> str:
    """The state diagram, in mermaid's notation."""
    lines = ["stateDiagram-v2", f"    [*] --> {FleetState.RUNNING}"]
    lines += [f"    {a} --> {b}: {signal.name}" for (a, signal), b in TRANSITIONS.items()]
    return "\n".join(lines) + "\n"
