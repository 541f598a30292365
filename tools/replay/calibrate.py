"""A profile from measured steps: least squares, no coefficient below zero."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from replay.profiles import Profile

FEWEST_STEPS = 20
"""Measured steps that a fit needs: five for each coefficient."""

TERMS = ("step", "prefill", "decode", "context")
"""The fields of a profile that are fitted."""


class CalibrationError(ValueError):
    """The measured steps do not determine a profile; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step of a real engine.

    Attributes:
        prefill: Tokens of prefill computed in it.
        decoding: Requests that decoded beside it.
        context: Tokens of context of those that decoded, the one they computed included.
        seconds: How long it took, from its begin to the begin of the next.
    """

    prefill: int
    decoding: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Group:
    """Steps that are much alike.

    Attributes:
        prefill: Least and most tokens of prefill among them.
        decoding: Least and most requests that decoded.
        steps: How many there are.
        measured: Mean seconds of a step, measured.
        fitted: Mean seconds of a step, by the profile.
    """

    prefill: tuple[int, int]
    decoding: tuple[int, int]
    steps: int
    measured: float
    fitted: float


def fit(steps: Sequence[StepTime], name: str, **limits: Any) -> Profile:
    """The profile whose step times are closest to the measured ones.

    Least squares of seconds, unweighted: a run's seconds are the sum of its steps', and so are
    kept, those that other work on the machine drew out included.

    Args:
        steps: What was measured.
        name: Of the profile.
        limits: The profile's fields other than times, which are known: `block_size`, …

    Raises:
        CalibrationError: There are too few, or too much alike to tell the coefficients apart.
    """
    if len(steps) < FEWEST_STEPS:
        raise CalibrationError(f"{len(steps)} steps were measured; a fit needs {FEWEST_STEPS}")
    rows = _rows(steps)
    _check_they_differ(rows)
    times = _non_negative(rows, np.array([step.seconds for step in steps]))
    return Profile(name, *times.tolist(), **limits)


def predicted(profile: Profile, step: StepTime) -> float:
    """How long a step takes by a profile, seconds."""
    work = profile.prefill * step.prefill + profile.decode * step.decoding
    return profile.step + work + profile.context * step.context


def grouped(steps: Sequence[StepTime], profile: Profile) -> list[Group]:
    """Measured beside fitted, for a table: prefill and decoding requests in powers of two."""
    alike: dict[tuple[int, int], list[StepTime]] = {}
    for step in steps:
        key = step.prefill.bit_length(), step.decoding.bit_length()
        alike.setdefault(key, []).append(step)
    return [_group(alike[key], profile) for key in sorted(alike)]


def _group(steps: Sequence[StepTime], profile: Profile) -> Group:
    prefill = [step.prefill for step in steps]
    decoding = [step.decoding for step in steps]
    return Group(
        prefill=(min(prefill), max(prefill)),
        decoding=(min(decoding), max(decoding)),
        steps=len(steps),
        measured=sum(step.seconds for step in steps) / len(steps),
        fitted=sum(predicted(profile, step) for step in steps) / len(steps),
    )


def _rows(steps: Sequence[StepTime]) -> np.ndarray:
    """A column for each of `TERMS`, shape [steps, 4]."""
    return np.array([(1, s.prefill, s.decoding, s.context) for s in steps], float)


def _check_they_differ(rows: np.ndarray) -> None:
    for term, column in zip(TERMS[1:], rows.T[1:], strict=True):
        if np.ptp(column) == 0:
            raise CalibrationError(f"all steps have {column[0]:g} of {term}: its cost is unknown")
    if np.linalg.matrix_rank(rows / rows.max(axis=0)) < len(TERMS):
        raise CalibrationError(
            f"the steps do not tell {', '.join(TERMS)} apart: measure more loads and lengths"
        )


def _non_negative(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The non-negative coefficients of least squared error, shape [4].

    Some of them are zero in it, and the others are an ordinary least squares fit of their own
    columns. With four there are 16 ways to choose those: all are tried.
    """
    scale = rows.max(axis=0)
    best, least = np.zeros(len(TERMS)), float(seconds @ seconds)
    for chosen in _choices(len(TERMS)):
        found = np.linalg.lstsq((rows / scale)[:, chosen], seconds)[0]
        if found.min() < 0:
            continue
        error = float(np.sum(((rows / scale)[:, chosen] @ found - seconds) ** 2))
        if error < least:
            best, least = np.zeros(len(TERMS)), error
            best[chosen] = found / scale[chosen]
    return best


def _choices(count: int) -> list[list[int]]:
    return [list(c) for size in range(1, count + 1) for c in combinations(range(count), size)]
