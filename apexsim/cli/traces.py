"""``apexsim traces`` and ``apexsim import``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from apexsim.cli.output import Json, Quiet, note, print_json, print_table
from apexsim.errors import UsageError

app = typer.Typer(help="List, describe and check trace bundles.", no_args_is_help=True, rich_markup_mode=None)
Bundle = Annotated[str, typer.Argument(metavar="BUNDLE", help="Directory, or name of a bundled trace.")]


@app.command("ls")
def ls(as_json: Json = False, quiet: Quiet = False) -> None:
    """List the traces that ship with ApexSim.

    Example: apexsim traces ls
    """
    from apexsim import traces

    rows: list[dict[str, Any]] = []
    for name in traces.bundled():
        bundle = traces.load(name)
        rows.append(
            {
                "name": name,
                "path": str(bundle.path),
                "requests": bundle.requests.height,
                "methods": list(bundle.methods),
            }
        )
    if as_json:
        print_json(rows)
        return
    lines = [(r["name"], ", ".join(r["methods"]), str(r["requests"]), r["path"]) for r in rows]
    print_table("Bundled traces", ("name", "methods", "requests", "path"), lines, left=2)


@app.command("describe")
def describe(bundle: Bundle, as_json: Json = False, quiet: Quiet = False) -> None:
    """Say what a trace holds: sizes, acceptance by method and workload, times, exactness.

    Example: apexsim traces describe smollm2-cpu
    """
    from apexsim import traces
    from apexsim.describe import describe as facts_of

    loaded = traces.load(bundle)
    facts = facts_of(loaded)
    if as_json:
        print_json(facts)
        return
    nested = ("methods", "plain")
    plain = [(k, _text(v)) for k, v in facts.items() if k not in nested]
    print_table(f"Trace {facts['name']}", ("fact", "value"), plain, left=2)
    _print_acceptance(facts)
    _print_times(facts)
    _print_exactness(facts)
    for line in loaded.meta.get("notes", []):
        note(f"note: {line}", quiet)


def _print_acceptance(facts: dict[str, Any]) -> None:
    columns = {
        "positions": "positions",
        "mean_accepted": "accepted, every position",
        "mean_accepted_visited": "accepted, visited blocks",
        "mean_drafted": "drafted",
        "empty_draft_share": "empty drafts",
    }
    lines = []
    for name, method in facts["methods"].items():
        for workload, figures in (("all", method), *method["workloads"].items()):
            lines.append((name, workload, *(_text(figures[c]) for c in columns)))
    print_table("Acceptance (mean tokens)", ("method", "workload", *columns.values()), lines, left=2)


def _print_times(facts: dict[str, Any]) -> None:
    columns = ("batch_size", "depth", "blocks", "draft_ms", "verify_ms", "overhead_ms", "idle_tax_ms")
    rows = [("none", row) for row in facts["plain"]["times"]]
    rows += [(name, row) for name, method in facts["methods"].items() for row in method["times"]]
    lines = [(name, *(_text(row.get(column)) for column in columns)) for name, row in rows]
    if lines:
        names = ("batch", "depth", "blocks", "draft ms", "verify ms", "overhead ms", "idle tax ms")
        print_table("Times of fixed-depth runs (medians)", ("drafter", *names), lines, left=1)


def _print_exactness(facts: dict[str, Any]) -> None:
    columns = ("blocks", "drafting_blocks", "mismatches", "share_equal", "censored_blocks")
    checked = {name: method["exactness"] for name, method in facts["methods"].items() if method["exactness"]}
    lines = [(name, *(_text(figures.get(column)) for column in columns)) for name, figures in checked.items()]
    if lines:
        print_table("Exactness: real blocks against the replay", ("method", *columns), lines, left=1)


@app.command("check")
def check(bundle: Bundle, quiet: Quiet = False) -> None:
    """Check a trace bundle: checksums, columns, types, ranges, relations.

    Example: apexsim traces check runs/my-trace
    """
    from apexsim import traces

    loaded = traces.load(bundle)
    note(f"{loaded.name}: valid: {loaded.requests.height} requests, {loaded.positions.height} positions, "
         f"{loaded.blocks.height} blocks", quiet)  # fmt: skip


def import_(
    format_: Annotated[str | None, typer.Argument(metavar="FORMAT", help="One of --list.")] = None,
    paths: Annotated[list[Path] | None, typer.Argument(metavar="PATH...", help="Files of that format.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="BUNDLE", help="Directory to write.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Say what each format expects.")] = False,
    quiet: Quiet = False,
) -> None:
    """Turn a public trace into a bundle.

    Example: apexsim import rounds-jsonl s1_dflash_fresh.rounds.jsonl --out runs/a10
    """
    from apexsim import importers, traces

    if list_:
        lines = [(f.name, f.expects) for f in importers.FORMATS.values()]
        print_table("Formats", ("format", "expects"), lines, left=2)
        return
    if format_ is None or not paths or out is None:
        raise UsageError(
            "import needs FORMAT PATH... --out BUNDLE; `apexsim import --list` says what each format expects"
        )
    bundle = traces.write(importers.import_trace(format_, paths, out), out)
    for key, value in bundle.meta["import"].items():
        note(f"{key}: {value}", quiet)
    for line in bundle.meta["notes"]:
        note(f"note: {line}", quiet)
    note(f"wrote {out}", quiet)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items() if not isinstance(v, dict | list)) or "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)
