"""The figures reported for prefix affinity (design section 9), beside what the replay gives.

Nothing is tuned to agree: a claim whose direction does not hold is shown as such.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from replay.experiment import Comparison, Setting, compare
from replay.figures import BY_KEY, mean_and_spread
from replay.policies import Conditions, parse_policies
from replay.table import aligned

LEAST_LOADED = "load_balanced"
AFFINITY = "relative:1@events"
MULTIPLICATIVE = "prefill_work@events"


@dataclass(frozen=True, slots=True)
class Reported:
    """A claim: what a figure was with one policy, and what with another.

    Attributes:
        figure: Key of the figure.
        before: The policy that is compared with.
        reported: The figure with it and with `AFFINITY`; of a range its middle.
        text: The same in words.
    """

    figure: str
    before: str
    reported: tuple[float, float]
    text: str


REPORTED = (
    Reported("skip", LEAST_LOADED, (0.61, 0.977), "59-63 % -> 97.7 %"),
    Reported("prefill_share", LEAST_LOADED, (0.52, 0.103), "42-62 % -> 10.3 %"),
    Reported("busy_cv", MULTIPLICATIVE, (0.434, 0.272), ".434 -> .272"),
    Reported("tail_cv", MULTIPLICATIVE, (1.275, 0.555), "1.275 -> .555"),
    Reported("idle", MULTIPLICATIVE, (0.157, 0.067), "15.7 % -> 6.7 %"),
    Reported("max_median", MULTIPLICATIVE, (2.13, 1.44), "2.13 -> 1.44"),
)


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim, checked.

    Attributes:
        reported: The claim.
        ours: The figure with both policies, mean over seeds.
        spread: Half the distance of its extremes over seeds, with both.
        holds: Whether it moves in the reported direction with every seed.
    """

    reported: Reported
    ours: tuple[float, float]
    spread: tuple[float, float]
    holds: bool

    @property
    def ratios(self) -> tuple[float, float]:
        """After / before: reported, and ours."""
        (before, after), (mine, better) = self.reported.reported, self.ours
        return after / before, better / mine if mine else 0.0

    @property
    def name(self) -> str:
        """The claim in words."""
        figure = BY_KEY[self.reported.figure]
        return f"{figure.title}: {self.reported.before} -> {AFFINITY}"

    def as_json(self) -> dict[str, Any]:
        """For `claims.json`."""
        return {
            "claim": self.name,
            "figure": BY_KEY[self.reported.figure].meaning,
            "reported": list(self.reported.reported),
            "reported_text": self.reported.text,
            "ours": [round(value, 4) for value in self.ours],
            "spread": [round(value, 4) for value in self.spread],
            "ratio_reported": round(self.ratios[0], 3),
            "ratio_ours": round(self.ratios[1], 3),
            "direction_holds": self.holds,
        }


def check(setting: Setting, quiet: bool = False) -> list[Claim]:
    """Replay the policies that the claims are about."""
    names = ",".join((LEAST_LOADED, MULTIPLICATIVE, AFFINITY))
    return judged(compare(setting, parse_policies(names, Conditions()), quiet))


def judged(comparison: Comparison) -> list[Claim]:
    """The claims, beside what was measured."""
    return [_judge(reported, comparison) for reported in REPORTED]


def _judge(reported: Reported, comparison: Comparison) -> Claim:
    before = [run.figures for run in comparison.runs[reported.before]]
    after = [run.figures for run in comparison.runs[AFFINITY]]
    key = reported.figure
    up = reported.reported[1] > reported.reported[0]
    pairs = zip(before, after, strict=True)
    means, spreads = zip(*(mean_and_spread(runs, key) for runs in (before, after)), strict=True)
    holds = all((b[key] < a[key]) if up else (b[key] > a[key]) for b, a in pairs)
    return Claim(reported, means, spreads, holds)


def claims_table(claims: Sequence[Claim]) -> str:
    """The claims for the terminal."""
    table = [["claim", "reported", "ours", "after/before: reported", "ours", "direction holds"]]
    for claim in claims:
        before, after = (
            f"{mean:.3f} ±{spread:.3f}"
            for mean, spread in zip(claim.ours, claim.spread, strict=True)
        )
        ratios = [f"{ratio:.2f}" for ratio in claim.ratios]
        holds = "yes" if claim.holds else "NO"
        row = [claim.name, claim.reported.text, f"{before} -> {after}", *ratios, holds]
        table.append(row)
    return aligned(table)
