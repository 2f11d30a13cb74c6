"""``apexsim compare``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apexsim.cli.output import Json, Quiet, names, note, numbers, print_json, print_table, progress
from apexsim.errors import PolicyError, UsageError

if TYPE_CHECKING:
    import polars as pl

    from apexsim.cost import CostProfile
    from apexsim.evaluate import Entry
    from apexsim.program import Program
    from apexsim.traces import Bundle
    from policies import Context


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
    allow_train_overlap: Annotated[
        bool, typer.Option("--allow-train-overlap", help="Score a trained policy on requests it was trained on.")
    ] = False,
    charge_controller: Annotated[bool, typer.Option("--charge-controller", help="Add measured decision time.")] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the results go.")] = Path("runs/compare"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare policies on traces: a table, results.json, Parquet tables, a figure and a page.

    Example: apexsim compare smollm2-cpu --policies ar,fixed:ngram:4,hf-heuristic,oracle --out runs/first
    """
    import polars as pl

    from apexsim import provenance, report

    if concurrency != 1:
        raise UsageError(
            f"--concurrency {concurrency}: a replay of requests that share a step is not built; allowed: 1"
        )
    if not 0 <= waste_weight < float("inf"):
        raise UsageError(f"--waste-weight {waste_weight}: must be a finite number of at least 0")
    choice = Choice(
        names(policies) or [],
        workload,
        split,
        names(methods),
        numbers(depths, "--depths"),
        aligned,
        waste_weight,
        cost_profile,
        seeds,
        jobs,
        charge_controller,
        allow_train_overlap,
    )
    report.DIRECTORY.check(out)
    parts: list[Part] = []
    for name in bundles:
        part = _replay(name, choice, quiet)
        if part.source["name"] in [other.source["name"] for other in parts]:
            raise UsageError(f"two bundles are called {part.source['name']!r}: rename a folder, results go by name")
        parts.append(part)
    rows = [row for part in parts for row in part.rows]
    costs = ", ".join(dict.fromkeys(part.profile for part in parts))
    facts = {
        "argv": provenance.argv(),
        "version": provenance.version(),
        "git": provenance.git_revision(),
        "bundles": [part.source for part in parts],
        "cost_profile": costs,
        "waste_weight": waste_weight,
        "seed": 0,
        "created": provenance.created(),
    }
    caption = (
        f"split {split}, workload {workload or 'all'}{', aligned requests' if aligned else ''}; seeds {seeds}; "
        f"costs {costs}; batch 1; waste weight {waste_weight:g}"
    )
    title = ", ".join(part.source["name"] for part in parts)
    requests = pl.concat([part.requests for part in parts])
    results = report.write_results(out, rows, requests, facts, caption, title)
    if as_json:
        print_json(results)
        return
    for part in parts:
        _print([row for row in part.rows if row["workload"] == (workload or "all")], part.source["name"], caption)
    note(f"tables   {out / 'results.json'}, results.parquet, requests.parquet", quiet)
    note(f"figure   {out / 'figures' / 'speed_waste.svg'}, speed_waste.png", quiet)
    note(f"report   {out / 'report.html'}", quiet)


@dataclass(frozen=True)
class Choice:
    """The options of a comparison, parsed."""

    policies: list[str]
    workload: str | None
    split: str
    methods: list[str] | None
    depths: list[int] | None
    aligned: bool
    waste_weight: float
    cost_profile: str | None
    seeds: int
    jobs: int
    charge_controller: bool
    allow_train_overlap: bool


@dataclass(frozen=True)
class Part:
    """The comparison on one bundle."""

    rows: list[dict[str, Any]]
    requests: pl.DataFrame
    source: dict[str, Any]
    profile: str


def _replay(name: str, choice: Choice, quiet: bool) -> Part:
    """Replays all policies on one bundle."""
    from apexsim import traces
    from apexsim.evaluate import Evaluation
    from apexsim.fitting import profile_for
    from apexsim.hindsight import Hindsight
    from apexsim.program import compile_program, select
    from policies import Context, expand

    bundle = traces.load(name)
    profile = profile_for(bundle, choice.cost_profile)

    def compiled(split: str) -> Program:
        rows = select(bundle, split, choice.workload, choice.aligned)
        return compile_program(bundle, profile, rows, choice.methods, choice.depths)

    program = compiled(choice.split)
    if not program.requests.height:
        raise UsageError(f"{bundle.name}: every request selected has fewer than two output tokens")
    known = Hindsight(program, choice.waste_weight)
    notes = _notes(bundle, profile, program)
    try:
        fitted_on = compiled("train")
        train = Hindsight(fitted_on, choice.waste_weight) if fitted_on.requests.height else None
    except UsageError:  # nothing selected lies in the train split
        train = None
    context = Context(program.space, 0, train, known)
    wanted = expand(choice.policies, program.space)
    if train is None and "all" in choice.policies:
        wanted = [policy for policy in wanted if policy != "best-fixed"]
        notes.append("best-fixed is left out: no selected request lies in the train split")
    entries = [entry for policy in wanted for entry in _entries(policy, context, bundle, choice.seeds)]
    if not choice.allow_train_overlap:
        _check_overlap(entries, program)
    evaluation = Evaluation(program, known, choice.split, choice.workload, choice.charge_controller)
    with progress(quiet) as bar:
        task = bar.add_task(f"replaying {bundle.name}", total=len(entries))
        scored = evaluation.score(entries, choice.jobs, lambda _: bar.advance(task))
        bar.update(task, description=f"scoring {bundle.name}")
        rows = evaluation.rows(scored)
    if any((row["coverage"] or 1.0) < 1.0 for row in rows):
        notes.append("coverage below 1: the other blocks are modelled, those of the oracles too")
    for line in notes:
        note(f"note: {bundle.name}: {line}", quiet)
    source = {"name": bundle.name, "sha256": bundle.digest, "notes": notes}
    return Part(rows, evaluation.requests(scored), source, profile.name)


def _entries(name: str, context: Context, bundle: Bundle, seeds: int) -> list[Entry]:
    """The policy once, or once per seed where it has randomness or memory from one request to the next."""
    from apexsim.evaluate import Entry
    from policies import build, find

    spec, _ = find(name)
    first = build(name, context)
    needed = dict.fromkeys((*spec.signals, *getattr(first, "signals", ())))
    missing = [signal for signal in needed if signal not in bundle.signals]
    if missing:
        raise PolicyError(f"policy {name!r} is not replayable on {bundle.name}: needs {', '.join(missing)}")
    entries = [Entry(name, spec.family, first, 0)]
    if getattr(first, "persistent", False) or getattr(first, "stochastic", False):
        entries += [Entry(name, spec.family, build(name, replace(context, seed=s)), s) for s in range(1, seeds)]
    return entries


def _check_overlap(entries: Sequence[Entry], program: Program) -> None:
    """Refuses to score a trained policy on what it was trained on: the same id, prompt and output length."""
    scored = set(program.requests.select("request_id", "prompt_tokens", "output_tokens").iter_rows())
    for entry in entries:
        known = [request for request in getattr(entry.policy, "trained_requests", ()) if request in scored]
        if known:
            raise PolicyError(
                f"policy {entry.name!r} was trained on {len(known)} of the requests it would be scored on, {known[0][0]!r} among "
                "them; choose another --split, or give --allow-train-overlap"
            )


def _notes(bundle: Bundle, profile: CostProfile, program: Program) -> list[str]:
    lines = list(bundle.meta.get("notes", []))
    lines += [f"cost profile {profile.name}: {line}" for line in profile.notes]
    if program.skipped:
        lines.append(f"{program.skipped} requests with fewer than two output tokens are skipped")
    if len(program.space.methods) > 1 and not program.requests["aligned"].all():
        count = int((~program.requests["aligned"]).sum())
        lines.append(f"{count} requests are not aligned: replay across methods is approximate there (--aligned)")
    return lines


def _print(rows: list[dict[str, Any]], bundle: str, caption: str) -> None:
    from apexsim.report import COLUMNS, cell

    lines = [[cell(row, key, form) for key, _, form in COLUMNS] for row in rows]
    size = f"{rows[0]['requests']} requests, {rows[0]['tokens']:,} decode tokens"
    print_table(f"{bundle}: {size}; {caption}", [heading for _, heading, _ in COLUMNS], lines)
