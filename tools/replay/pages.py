"""One page of HTML with everything in it; it opens from disk and fetches nothing."""

import html
import json
from pathlib import Path
from typing import Any

from replay import plots
from replay.advice import advice
from replay.experiment import Comparison
from replay.figures import FIGURES
from replay.table import rows

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 12px; white-space: nowrap; }
th, td { padding: 3px 8px; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
tr:hover td { background: #f2f6fb; } dt { font-weight: 600; } dd { margin: 0 0 .3rem 1rem; }
.advice { background: #f2f6fb; border-left: 4px solid #3572b0; padding: .6rem 1rem; }
pre { font-size: 12px; background: #f6f6f6; padding: .6rem; overflow-x: auto; }
"""


def page(comparison: Comparison, setting: dict[str, Any]) -> str:
    """The page as a text."""
    title = f"Replay of {comparison.workload}"
    pictures = [
        ("Skip rate against imbalance", plots.skip_against_imbalance(comparison)),
        ("What beta does", plots.beta_sweep(comparison)),
        ("Time to the first token", plots.ttft_distributions(comparison)),
        ("Load over time, by replica", plots.loads_over_time(comparison)),
    ]
    sections = [
        f"<h2>{name}</h2>\n<div class=wide>{picture}</div>" for name, picture in pictures if picture
    ]
    words = "".join(f"<p>{html.escape(text)}</p>" for text in advice(comparison))
    runs = max(len(runs) for runs in comparison.runs.values())
    seeds = f"{runs} seeds; ± is half the distance of the extremes" if runs > 1 else "one seed"
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>
<p>{comparison.requests:,} requests a run, {seeds}. One infinite cache would skip
{comparison.bound:.1%} of the prompt tokens. Round points: replicas tell of their caches; squares:
what they hold is guessed; triangles: nobody asks.</p>
<h2>Figures</h2>
<div class=wide>{_table(comparison)}</div>
{"".join(sections)}
<h2>What the figures mean</h2>
<dl>{_meanings()}</dl>
<h2>How it was run</h2>
<pre>{html.escape(json.dumps(setting, indent=1))}</pre>
<h2>Recommendation</h2>
<div class=advice>{words}</div>
</body></html>
"""


def write_page(path: Path, comparison: Comparison, setting: dict[str, Any]) -> None:
    """Write the page."""
    path.write_text(page(comparison, setting), encoding="utf-8")


def _table(comparison: Comparison) -> str:
    header, *body = rows(comparison, FIGURES)
    lines = ["<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in header) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in body]
    return "<table>" + "\n".join(lines) + "</table>"


def _meanings() -> str:
    return "".join(
        f"<dt>{html.escape(figure.title)}</dt><dd>{html.escape(figure.meaning)}"
        f"{', ' + figure.unit if figure.unit else ''}</dd>"
        for figure in FIGURES
    )
