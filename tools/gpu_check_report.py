"""What gpu_check.py makes of its runs: figures, comparisons, a verdict, and a table."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles
from typing import Any

from gpu_check_parts import Outcome, Sizes

PASSED, FAILED, UNUSABLE, INCOMPLETE = range(4)
"""Exit codes."""


def summary(outcome: Outcome) -> dict[str, Any]:
    """The figures of a run; None where there is nothing to take one from."""
    steps = [step for replica in outcome.replicas for step in replica["steps"]]
    prefill = [seconds for seconds, decodes_only in steps if not decodes_only]
    decode = [seconds for seconds, decodes_only in steps if decodes_only]
    computed = sum(replica["computed"] for replica in outcome.replicas)
    skipped = sum(replica["skipped"] for replica in outcome.replicas)
    return {
        "answered": len(outcome.answers),
        "lost": len(outcome.lost),
        "unsent": outcome.unsent,
        "skip_rate": ratio(skipped, computed + skipped),
        "ttft_ms": _middle_and_tail(outcome.first_token),
        "prefill_step_ms": _middle_and_tail(prefill),
        "decode_step_ms": _middle_and_tail(decode),
        "prefill_share_of_steps": ratio(sum(prefill), sum(prefill) + sum(decode)),
        "requests_per_replica": [replica["requests"] for replica in outcome.replicas],
        "evicted_requests": sum(replica["evicted"] for replica in outcome.replicas),
        "peak_gib": max((replica["peak_gib"] for replica in outcome.replicas), default=0.0),
        "seconds": round(outcome.seconds, 2),
        "start_seconds": round(outcome.start_seconds, 2),
    }


def _middle_and_tail(seconds: Sequence[float]) -> dict[str, float | int | None]:
    """Median and 90th percentile in ms, and of how many."""
    if not seconds:
        return {"median": None, "p90": None, "count": 0}
    tail = quantiles(seconds, n=10, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
    return {
        "median": round(median(seconds) * 1e3, 2),
        "p90": round(tail * 1e3, 2),
        "count": len(seconds),
    }


def ratio(part: float | None, whole: float | None) -> float | None:
    """A quotient with 4 decimals; None where one is missing or the divisor is 0."""
    return None if part is None or not whole else round(part / whole, 4)


def comparison(ours: Outcome, other: Outcome) -> dict[str, Any]:
    """Another run beside ours: are the answers equal, and ours divided by it for each time.

    A ratio below 1 says that ours is faster. `equal_share` is of the requests that both
    answered; `first_token_share` looks at the first token of each only, which no later divergence
    touches.
    """
    both = sorted(ours.answers.keys() & other.answers.keys())
    pairs = [(ours.answers[key], other.answers[key]) for key in both]
    one, two = summary(ours), summary(other)
    middle = {
        name.removesuffix("_ms"): ratio(one[name]["median"], two[name]["median"])
        for name in ("ttft_ms", "prefill_step_ms", "decode_step_ms")
    }
    return {
        "compared": len(pairs),
        "outputs_equal": bool(pairs) and all(a == b for a, b in pairs),
        "equal_share": ratio(sum(a == b for a, b in pairs), len(pairs)),
        "first_token_share": ratio(sum(a[:1] == b[:1] for a, b in pairs), len(pairs)),
        "ratios": middle | {"seconds": ratio(ours.seconds, other.seconds)},
    }


def distinct_answers(outcome: Outcome) -> int:
    """How many different answers there are: equal outputs say little if it is one."""
    return len({tuple(answer) for answer in outcome.answers.values()})


def failures(sizes: Sizes, runs: Mapping[str, dict], comparisons: Mapping[str, dict]) -> list[str]:
    """Why the check fails, one sentence each; empty when it passes.

    Only a CPU in float32 must give equal outputs. In bf16 a batch of another composition may
    round otherwise, and one token then leads to others: there the share is for the reader.
    """
    found = [f"{name}: {run['lost']} request(s) lost" for name, run in runs.items() if run["lost"]]
    if sizes.device == "cpu" and sizes.dtype == "float32":
        found += [
            f"{name}: outputs differ from ours ({each['equal_share']:.0%} are equal)"
            for name, each in comparisons.items()
            if each["compared"] and not each["outputs_equal"]
        ]
    return found


def table(report: dict[str, Any]) -> str:
    """The figures for people: one column a run, and the ratios below."""
    runs = report["runs"]
    width = max([16, *map(len, runs)]) + 2
    rows = [("", list(runs))]
    rows += [(label, [cell(run) for run in runs.values()]) for label, cell in _ROWS]
    lines = [label.ljust(26) + "".join(c.rjust(width) for c in cells) for label, cells in rows]
    lines.append(f"(an infinite cache would skip {_percent(report['skip_bound'])} of the prefill)")
    for name, each in report["against"].items():
        ratios = ", ".join(f"{k} {v if v is not None else '-'}" for k, v in each["ratios"].items())
        equal = "equal" if each["outputs_equal"] else "NOT all equal"
        lines.append(
            f"ours / {name}: outputs {equal} ({_percent(each['equal_share'])} of "
            f"{each['compared']}, first tokens {_percent(each['first_token_share'])}); {ratios}"
        )
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f} %"


def _milliseconds(name: str) -> Callable[[dict[str, Any]], str]:
    def cell(run: dict[str, Any]) -> str:
        figures = run[name]
        return f"{figures['median']} / {figures['p90']}" if figures["count"] else "-"

    return cell


_ROWS: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
    ("answered, lost", lambda run: f"{run['answered']}, {run['lost']}"),
    ("prefill skip rate", lambda run: _percent(run["skip_rate"])),
    ("TTFT ms, median / p90", _milliseconds("ttft_ms")),
    ("prefill step ms", _milliseconds("prefill_step_ms")),
    ("decode step ms", _milliseconds("decode_step_ms")),
    ("prefill share of steps", lambda run: _percent(run["prefill_share_of_steps"])),
    ("requests per replica", lambda run: " ".join(map(str, run["requests_per_replica"]))),
    ("seconds, all sessions", lambda run: str(run["seconds"])),
]


def exit_code(report: dict[str, Any]) -> int:
    """What the shell gets; a failure weighs more than something not measured."""
    if report["failures"]:
        return FAILED
    return INCOMPLETE if report["not_measured"] else PASSED
