"""What is asked of a campaign, and what its figures say against our coordinator."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked for (`command.make_parser`)."""

    minutes: float
    every: float
    seed: int
    engines: str
    replicas: int
    released: bool
    faults: tuple[str, ...]
    hung_timeout: float
    deadline: float
    growth_mib: float
    rate: float | None
    retries: int


def broken_promises(figures: dict[str, Any], options: Options) -> list[str]:
    """What a campaign's figures say against our coordinator, a sentence each."""
    found = [
        f"{figures[name]} {text}"
        for name, text in (
            ("lost", "requests got neither an answer nor an error"),
            ("twice", "answers or errors came to requests that had ended"),
            ("wrong", "answers are not the undisturbed engine's"),
            ("ended", "replicas ended by themselves"),
            ("exceptions", "exceptions are in the coordinator's log"),
        )
        if figures.get(name)
    ]
    found += [death["how"] for death in figures["died"]]
    if not figures.get("all_back", True):
        found.append("not every replica came back")
    missing = set(options.faults) - set(figures["faults"])
    if missing:
        found.append(f"no time for: {', '.join(sorted(missing))}")
    if "descriptors" in figures:
        before, after = figures["descriptors"]
        if after > before:
            found.append(f"{after} descriptors are open in the coordinator, {before} were before")
        before, after = figures["rss_mib"]
        if after - before > options.growth_mib:
            found.append(f"the coordinator's memory grew from {before:g} to {after:g} MiB")
    return found
