"""Results on disk: results.json, the Parquet tables, the figures and one self-contained page."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from apexsim.files import Kind, atomic_directory

SCHEMA = "apexsim.results/1"
MARKER = "results.json"
DIRECTORY = Kind(MARKER, SCHEMA, frozenset({MARKER, "results.parquet", "requests.parquet", "figures", "report.html"}))
"""What the results of a comparison look like on disk."""
COLUMNS = (
    ("policy", "policy", ""),
    ("speedup", "speed-up", ".3f"),
    ("speedup_ci", "95 % interval", ""),
    ("waste_percent", "waste %", ".1f"),
    ("was", "WAS", ".2f"),
    ("tokens_per_block", "tokens/block", ".2f"),
    ("acceptance_length", "accept. length", ".2f"),
    ("mean_depth", "mean k", ".1f"),
    ("seconds", "seconds", ".2f"),
    ("objective", "J/token", ".4f"),
    ("gap_closed", "gap closed", ".2f"),
    ("coverage", "coverage", ".2f"),
)
"""Columns of the printed table: key of the row, heading, format."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>ApexSim: {title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0; }}
th, td {{ padding: .25rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #8884; }}
th:first-child, td:first-child {{ text-align: left; }}
figure {{ margin: 1rem 0; background: #fff; padding: .5rem; }}
figure svg {{ max-width: 100%; height: auto; }}
.scroll {{ overflow-x: auto; }}
pre {{ overflow-x: auto; background: #8882; padding: .7rem; }}
</style></head><body>
<h1>{title}</h1>
<p>{caption}</p>
<figure>{svg}</figure>
{notes}
{tables}
<h2>How to read it</h2>
<p>Speed-up over plain decoding and waste (discarded share of the drafted tokens) are means over requests, with a 95 % bootstrap
interval; seconds are decode time only, at batch 1. WAS is speed-up per share of waste. Tokens/block counts every pass of the
target; acceptance length counts passes that drafted and includes the target's own token (the bonus), as vLLM reports it.
Mean k is the requested depth. J/token is the objective: time in steps of plain decoding, plus the waste weight times
the wasted tokens.
Gap closed is the share of the way from the best fixed configuration of each workload (chosen in hindsight, so it may lie
above every single fixed depth) to the oracle of the policy's own class; it is negative below best fixed, and empty where that
oracle is no better. Oracles know the future: no controller reaches them. Coverage is the share of blocks the trace recorded; the
rest is modelled. An empty cell is undefined, for example the waste of a policy that never drafts.</p>
<h2>Provenance</h2>
<pre>{provenance}</pre>
</body></html>
"""


def write_results(
    out: Path,
    rows: Sequence[dict[str, Any]],
    requests: pl.DataFrame,
    provenance: dict[str, Any],
    caption: str,
    title: str,
) -> dict[str, Any]:
    """Writes everything of a comparison into ``out``, atomically.

    Args:
        out: Directory; an earlier comparison there is replaced.
        rows: Rows of ``Evaluation.rows``.
        requests: Table of ``Evaluation.requests``.
        provenance: The ``provenance`` object of results.json.
        caption: What split, seeds and costs the figures are of.
        title: Heading of the page.

    Returns:
        The content of results.json.
    """
    from apexsim import figures  # matplotlib is slow to import and not needed for --help

    results = {"schema": SCHEMA, "provenance": provenance, "rows": list(rows)}
    overall = [
        row for row in rows if row["workload"] == rows[0]["workload"]
    ]  # the first is that of all selected requests
    with atomic_directory(out, DIRECTORY) as scratch:
        (scratch / MARKER).write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
        pl.DataFrame(rows, infer_schema_length=None).write_parquet(scratch / "results.parquet")
        requests.write_parquet(scratch / "requests.parquet")
        svg, _ = figures.speed_waste(overall, caption, scratch / "figures")
        page = PAGE.format(
            title=html.escape(title),
            caption=html.escape(caption),
            svg=svg.read_text()[svg.read_text().index("<svg") :],
            tables="".join(_table(rows, bundle) for bundle in dict.fromkeys(row["bundle"] for row in rows)),
            notes="".join(f"<p><em>{html.escape(line)}</em></p>" for line in _notes(provenance)),
            provenance=html.escape(json.dumps(provenance, indent=1)),
        )
        (scratch / "report.html").write_text(page)
    return results


def cell(row: dict[str, Any], key: str, form: str) -> str:
    """A value of a row as the tables print it; empty where undefined."""
    value = row[key]
    if value is None:
        return ""
    if key == "speedup_ci":
        return f"{value[0]:.3f} to {value[1]:.3f}"
    if key == "policy":
        seed = f" (seed {row['seed']})" if row["seed"] else ""
        chosen = row["resolved"]  # what best-fixed came down to, where that is one configuration
        resolved = (
            f" → {chosen}" if chosen != value and ("fixed:" in chosen or chosen == "ar") and ";" not in chosen else ""
        )
        return f"{value}{resolved}{seed}"
    return format(value, form)


def _notes(provenance: dict[str, Any]) -> list[str]:
    """What a reader must know of each trace and its costs."""
    return [f"{bundle['name']}: {line}" for bundle in provenance["bundles"] for line in bundle["notes"]]


def _table(rows: Sequence[dict[str, Any]], bundle: str) -> str:
    head = "".join(f'<th scope="col">{html.escape(heading)}</th>' for _, heading, _ in COLUMNS)
    parts = []
    for workload in dict.fromkeys(row["workload"] for row in rows if row["bundle"] == bundle):
        mine = [row for row in rows if row["bundle"] == bundle and row["workload"] == workload]
        mine.sort(key=lambda row: row["objective"])
        lines = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell(row, key, form))}</td>" for key, _, form in COLUMNS) + "</tr>"
            for row in mine
        )
        size = f"{mine[0]['requests']} requests, {mine[0]['tokens']:,} decode tokens"
        parts.append(
            f"<h2>{html.escape(bundle)}, workload {html.escape(workload)}</h2><p>{size}; sorted by J, best first.</p>"
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
        )
    return "".join(parts)
