"""One page of HTML with everything in it; it opens from disk and fetches nothing."""

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replay.advice import advice, advised
from replay.experiment import Comparison
from replay.figures import FIGURES, TERMS
from replay.plots import pictures
from replay.table import best_of, shown

_STYLE = """
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
body > * { max-width: 62rem; margin-left: auto; margin-right: auto; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; } svg { max-width: 100%; height: auto; }
.wide svg { min-width: 46rem; }
.results { width: fit-content; max-width: 100%; max-height: 85vh; overflow: auto; }
table { border-collapse: separate; border-spacing: 0; font-size: 12px; white-space: nowrap; }
th, td { padding: 3px 8px; text-align: right; border-bottom: 1px solid #ddd; background: #fff; }
thead th { position: sticky; top: 0; z-index: 1; border-bottom: 2px solid #888; }
th:first-child { text-align: left; position: sticky; left: 0; border-right: 1px solid #888; }
thead th:first-child { z-index: 2; } tbody th { font-weight: 400; }
tr.recommended > * { background: #e3edf8; } tr:hover > * { background: #f2f6fb; }
td.best { font-weight: 700; } small { color: #555; }
dt { font-weight: 600; } dd { margin: 0 0 .3rem 1rem; }
.advice { background: #f2f6fb; border-left: 4px solid #3572b0; padding: .1rem 1rem; }
pre { font-size: 12px; background: #f6f6f6; padding: .6rem; overflow-x: auto; }
pre.line { white-space: pre-wrap; overflow-wrap: anywhere; }
@media print { .results { max-height: none; } }
"""


def page(comparison: Comparison, setting: dict[str, Any], command: str) -> str:
    """The page as a text.

    Args:
        comparison: The runs.
        setting: How they were made.
        command: What makes them again, for a shell.
    """
    title = html.escape(f"Replay of {comparison.workload}")
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{_STYLE}</style></head><body>
<h1>{title}</h1>
{_found(comparison)}
{_pictures(comparison)}
<h2>What the words mean</h2>
{_list(TERMS)}
<h2>What the columns mean</h2>
{_list({figure.heading: figure.meaning for figure in FIGURES})}
<h2>How it was run</h2>
<pre class=line>{html.escape(command)}</pre>
<pre>{html.escape(json.dumps(setting, indent=1))}</pre>
</body></html>
"""


def write_page(path: Path, comparison: Comparison, setting: dict[str, Any], command: str) -> None:
    """Write the page."""
    path.write_text(page(comparison, setting, command), encoding="utf-8")


def _found(comparison: Comparison) -> str:
    runs = max(len(runs) for runs in comparison.runs.values())
    seeds = f"{runs} seeds; ± is half the distance of the extremes" if runs > 1 else "one seed"
    return f"""<p>{comparison.requests:,} requests a run, {seeds}. One infinite cache would skip
{comparison.bound:.1%} of the prompt tokens. After a policy's name stands how it knows of caches:
@events, replicas tell of them; @history and @stock, what they hold is guessed.</p>
<h2>Recommendation</h2>
<div class=advice>{"".join(f"<p>{html.escape(text)}</p>" for text in advice(comparison))}</div>
<h2>Results</h2>
<p>Bold is the best mean of a column. What the columns mean stands below the pictures.</p>
<div class=results>{_table(comparison)}</div>"""


def _pictures(comparison: Comparison) -> str:
    return "\n".join(
        f"<h2>{html.escape(picture.title)}</h2>\n<p>{html.escape(picture.note)}</p>\n"
        f"<div class=wide>{picture.svg}</div>"
        for picture in pictures(comparison)
    )


def _table(comparison: Comparison) -> str:
    head = "".join(f"<th scope=col>{html.escape(f.heading)}</th>" for f in FIGURES)
    best = {figure.key: best_of(comparison, figure) for figure in FIGURES}
    lines = [f"<table><thead><tr><th scope=col>policy</th>{head}</tr></thead><tbody>"]
    for name, runs in comparison.runs.items():
        marked = name == advised(comparison) and len(comparison.runs) > 1
        note = " <small>recommended</small>" if marked else ""
        cells = "".join(
            f"<td{' class=best' if name in best[f.key] else ''}>{shown(runs, f)}</td>"
            for f in FIGURES
        )
        row = f"<th scope=row>{html.escape(name)}{note}</th>{cells}"
        lines.append(f"<tr{' class=recommended' if marked else ''}>{row}</tr>")
    return "\n".join([*lines, "</tbody></table>"])


def _list(meanings: Mapping[str, str]) -> str:
    items = (f"<dt>{html.escape(t)}</dt><dd>{html.escape(m)}</dd>" for t, m in meanings.items())
    return f"<dl>{''.join(items)}</dl>"
