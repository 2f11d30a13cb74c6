"""``apexsim compare`` and ``apexsim policies``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apexsim.cli.output import Json, Quiet, names, note, numbers, print_json, print_table, progress
from apexsim.errors import PolicyError, UsageError

if TYPE_CHECKING:
    from apexsim.cost import CostProfile
    from apexsim.evaluate import Entry
    from apexsim.program import Program
    from apexsim.traces import Bundle
    from policies import Context


def policies(
    bundle: Annotated[str | None, typer.Option("--bundle", help="Say which can be replayed on this trace.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List the registry of policies.

    Example: apexsim policies --bundle smollm2-cpu
    """
    from apexsim import traces
    from policies import registry

    rows: list[dict[str, Any]] = [spec.summary() for spec in registry().values()]
    if bundle is not None:
        held = traces.load(bundle).signals
        for row in rows:
            row["missing"] = [signal for signal in row["signals"] if signal not in held]
            row["replayable"] = not row["missing"]
    if as_json:
        print_json(rows)
        return
    headings = tuple(rows[0])
    lines = [tuple(", ".join(v) if isinstance(v, list) else str(v) for v in row.values()) for row in rows]
    print_table("Policies", headings, lines, left=len(headings))


def compare(
    bundles: Annotated[list[str], typer.Argument(metavar="BUNDLE...", help="Directories or bundled traces.")],
    policies: Annotated[str, typer.Option(help="Comma-separated names; all; all-fixed.")] = "all",
    workload: Annotated[str | None, typer.Option(help="Only this workload.")] = None,
    split: Annotated[str, typer.Option(help="train, validation, test or all.")] = "test",
    methods: Annotated[str | None, typer.Option(help="Comma-separated methods; default all of the trace.")] = None,
    depths: Annotated[str | None, typer.Option(help="Depths, such as 0,1,2,4 or 0-16; default 0..K_max.")] = None,
    aligned: Annotated[bool, typer.Option("--aligned", help="Only requests whose methods saw the same text.")] = False,
    waste_weight: Annotated[float, typer.Option(help="lambda: plain decoding steps per wasted token.")] = 0.0,
    cost_profile: Annotated[
        str | None, typer.Option(help="Shipped name or JSON file; default: the trace's own.")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests that share a step; 1 is supported.")] = 1,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of policies with randomness or memory.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Policies replayed at a time.")] = 1,
    charge_controller: Annotated[bool, typer.Option("--charge-controller", help="Add measured decision time.")] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the results go.")] = Path("runs/compare"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare policies on traces: a table, results.json, Parquet tables, a figure and a page.

    Example: apexsim compare smollm2-cpu --policies ar,fixed:ngram:4,hf-heuristic,oracle --out runs/first
    """
    import polars as pl

    from apexsim import provenance, report, traces
    from apexsim.evaluate import Evaluation
    from apexsim.hindsight import Hindsight
    from apexsim.program import compile_program, select
    from policies import Context, expand

    if concurrency != 1:
        raise UsageError(
            f"--concurrency {concurrency}: a replay of requests that share a step is not built; allowed: 1"
        )
    if not waste_weight >= 0 or waste_weight == float("inf"):
        raise UsageError(f"--waste-weight {waste_weight}: must be a finite number of at least 0")
    rows: list[dict[str, Any]] = []
    tables: list[pl.DataFrame] = []
    sources, priced = [], []
    chosen_methods, chosen_depths = names(methods), numbers(depths, "--depths")
    for name in bundles:
        bundle = traces.load(name)
        profile = _profile(bundle, cost_profile)

        def compiled(which: str, bundle: Bundle = bundle, profile: CostProfile = profile) -> Program:
            chosen = select(bundle, which, workload, aligned)
            return compile_program(bundle, profile, chosen, chosen_methods, chosen_depths)

        program = compiled(split)
        if not program.requests.height:
            raise UsageError(f"{bundle.name}: every request selected has fewer than two output tokens")
        known = Hindsight(program, waste_weight)
        train = None
        if (bundle.requests["split"] == "train").any():
            try:
                train = Hindsight(compiled("train"), waste_weight)
            except UsageError:  # the workload or the aligned requests have none in the train split
                train = None
        context = Context(program.space, 0, train, known)
        wanted = expand(names(policies) or [], program.space)
        if train is None and "best-fixed" in wanted and policies == "all":
            wanted.remove("best-fixed")
        entries = [entry for policy in wanted for entry in _entries(policy, context, bundle, seeds)]
        evaluation = Evaluation(program, known, split, charge_controller)
        with progress(quiet) as bar:
            task = bar.add_task(f"replaying {bundle.name}", total=len(entries))
            scored = evaluation.score(entries, jobs, lambda _, bar=bar, task=task: bar.advance(task))
            bar.update(task, description=f"scoring {bundle.name}")
            rows += evaluation.rows(scored)
        tables.append(evaluation.requests(scored))
        sources.append({"name": bundle.name, "sha256": bundle.digest})
        priced.append(profile.name)
        for line in _notes(bundle, profile, program):
            note(f"note: {line}", quiet)
    facts = {
        "argv": provenance.argv(),
        "version": provenance.version(),
        "git": provenance.git_revision(),
        "bundles": sources,
        "cost_profile": ", ".join(dict.fromkeys(priced)),
        "waste_weight": waste_weight,
        "seed": 0,
        "created": provenance.created(),
    }
    caption = (
        f"split {split}, workload {workload or 'all'}{', aligned requests' if aligned else ''}; seeds {seeds}; "
        f"costs {facts['cost_profile']}; batch 1; waste weight {waste_weight:g}"
    )
    results = report.write_results(out, rows, pl.concat(tables), facts, caption, ", ".join(s["name"] for s in sources))
    if as_json:
        print_json(results)
        return
    for source in sources:
        mine = [row for row in rows if row["bundle"] == source["name"] and row["workload"] == "all"]
        _print(mine, source["name"], caption)
    note(f"tables   {out / 'results.json'}, results.parquet, requests.parquet", quiet)
    note(f"figure   {out / 'figures' / 'speed_waste.svg'}, speed_waste.png", quiet)
    note(f"report   {out / 'report.html'}", quiet)


def _profile(bundle: Bundle, name: str | None) -> CostProfile:
    """The profile asked for, or the trace's own: fitted to its blocks, else the one its meta names."""
    from apexsim.cost import load_profile
    from apexsim.fitting import fit_profile

    if name is None and not bundle.blocks.height:
        name = bundle.meta.get("default_cost_profile")
    return fit_profile(bundle) if name is None else load_profile(name)


def _entries(name: str, context: Context, bundle: Bundle, seeds: int) -> list[Entry]:
    from dataclasses import replace

    from apexsim.evaluate import Entry
    from policies import build, find

    spec, _ = find(name)
    missing = [signal for signal in spec.signals if signal not in bundle.signals]
    if missing:
        raise PolicyError(f"policy {name!r} is not replayable on {bundle.name}: needs {', '.join(missing)}")
    first = build(name, context)
    entries = [Entry(name, spec.family, first, 0)]
    if getattr(first, "persistent", False) or getattr(first, "stochastic", False):
        entries += [Entry(name, spec.family, build(name, replace(context, seed=s)), s) for s in range(1, seeds)]
    return entries


def _notes(bundle: Bundle, profile: CostProfile, program: Program) -> list[str]:
    lines = [f"{bundle.name}: {line}" for line in bundle.meta.get("notes", [])]
    lines += [f"cost profile {profile.name}: {line}" for line in profile.notes]
    if program.skipped:
        lines.append(f"{bundle.name}: {program.skipped} requests with fewer than two output tokens are skipped")
    if len(program.space.methods) > 1 and not program.requests["aligned"].all():
        count = int((~program.requests["aligned"]).sum())
        lines.append(
            f"{bundle.name}: {count} requests are not aligned: replay across methods is approximate there (--aligned)"
        )
    return lines


def _print(rows: list[dict[str, Any]], bundle: str, caption: str) -> None:
    from apexsim.report import COLUMNS, cell

    lines = [[cell(row, key, form) for key, _, form in COLUMNS] for row in rows]
    size = f"{rows[0]['requests']} requests, {rows[0]['tokens']:,} decode tokens"
    print_table(f"{bundle}: {size}; {caption}", [heading for _, heading, _ in COLUMNS], lines)
