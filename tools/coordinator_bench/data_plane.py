"""The data plane: requests through real processes and back, over loopback TCP."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType

from coordinator_bench.options import Options
from coordinator_bench.plane_keys import Keys
from coordinator_bench.plane_load import Generator, Load, Round
from coordinator_bench.plane_processes import running
from coordinator_bench.rows import AGAINST_BASE, FASTER, MORE, OF_LIMIT, Row, Target
from coordinator_bench.workers import Worker, alternate, say, workers

RANKS = 16
_LONG, _AT_LONG = 32_768, 15.0
"""From this length on we must be so many times as fast as the released coordinator."""

Rounds = dict[str, list[Round]]


def measure(options: Options) -> list[Row]:
    """The rows of this part."""
    found = {tokens: _one_length(tokens, options) for tokens in options.plane_tokens}
    rows = [row for tokens, rounds in found.items() for row in _rows(_name(tokens), tokens, rounds)]
    rows += _growth_with_length(found)
    for tokens in options.plane_curve:
        rounds = _one_length(tokens, options, Keys.generate())
        rows += _rows(_name(tokens, curve=True), tokens, rounds)
    return rows


def _name(tokens: int, curve: bool = False) -> str:
    return f"{tokens:,} tokens{', CURVE' if curve else ''}"


def _one_length(tokens: int, options: Options, keys: Keys | None = None) -> Rounds:
    names = ["ours", "limit"]
    if tokens in options.plane_released and keys is None:  # it speaks in plain only
        names.insert(1, "released")
    load = Load(tokens, options.block, RANKS, options.plane_in_flight)
    about = f"data plane, {_name(tokens, curve=keys is not None)}"
    with ExitStack() as stack:
        say(f"{about}: starting {', '.join(names)}")
        made = {name: stack.enter_context(_generator(name, load, keys)) for name in names}
        for generator in made.values():
            generator.call("round", 0.0)  # caches and connections fill
        measures = {
            name: lambda _, generator=generator: generator.call("round", options.plane_seconds)
            for name, generator in made.items()
        }
        return alternate(options.rounds, measures, about)


@contextmanager
def _generator(name: str, load: Load, keys: Keys | None) -> Iterator[Worker]:
    with (
        running(name, load.ranks, load.block, keys) as target,
        workers(load=(Generator, name, target.address, target.pid, load, keys)) as made,
    ):
        target.wait()
        made["load"].call("connect")
        yield made["load"]


def _rows(name: str, tokens: int, rounds: Rounds) -> list[Row]:
    targets = [Target(OF_LIMIT, at_least=0.6)]
    if tokens >= _LONG:
        targets.append(Target(MORE, at_least=_AT_LONG))
    shown = (MORE, OF_LIMIT) if "released" in rounds else (OF_LIMIT,)
    details = {
        f"{what}, {side}": sum(getattr(r, what) for r in of) / len(of)
        for side, of in rounds.items()
        for what in ("held", "batch", "busy")
    }
    cpu = (FASTER,) if "released" in rounds else ()
    return [
        _row(name, "requests/s", "rate", rounds, shown, tuple(targets), details),
        _row(f"{name}: processor time of the loop", "us", "loop_us", rounds, cpu),
        _row(f"{name}: of all threads", "us", "process_us", rounds, cpu),
    ]


def _row(
    name: str,
    unit: str,
    what: str,
    rounds: Rounds,
    ratios: tuple[str, ...],
    targets: tuple[Target, ...] = (),
    details: Mapping[str, float] = MappingProxyType({}),
) -> Row:
    figures = {side: [getattr(r, what) for r in of] for side, of in rounds.items()}
    return Row(
        "data plane",
        name,
        unit,
        figures["ours"],
        figures.get("released", []),
        figures["limit"],
        ratios=ratios,
        targets=targets,
        details=details,
    )


def _growth_with_length(found: dict[int, Rounds]) -> list[Row]:
    """Processor time a request of the longest prompts against that of the shortest."""
    shortest, longest = min(found), max(found)
    rows = []
    for what, name, bounds in (
        ("loop_us", "the loop", (Target(AGAINST_BASE, at_most=1.3),)),
        ("process_us", "all threads", ()),
    ):
        ours, base = (
            [getattr(r, what) for r in found[tokens]["ours"]] for tokens in (longest, shortest)
        )
        rows.append(
            Row(
                "data plane",
                f"processor time of {name}, {longest:,} tokens; base: {shortest:,}",
                "us",
                ours,
                base=base,
                ratios=(AGAINST_BASE,),
                targets=bounds,
            )
        )
    return rows
