"""``apexsim train``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from apexsim.cli.output import Json, Quiet, names, note, numbers, print_json, progress
from apexsim.errors import UsageError, choices

if TYPE_CHECKING:
    from apexsim.program import Program
    from apexsim.traces import Bundle
    from policies.apex.checkpoint import Part
    from policies.apex.training import Settings

TRAINABLE = {"apex": ("router", "depth"), "apex-router": ("router",), "apex-depth": ("depth",)}


def train(
    policy: Annotated[str, typer.Argument(metavar="POLICY", help=f"{', '.join(TRAINABLE)}.")],
    bundles: Annotated[list[str], typer.Argument(metavar="BUNDLE...", help="Directories or bundled traces.")],
    profile: Annotated[str, typer.Option(help="s (speed), b (balanced) or e (efficient).")] = "b",
    seed: Annotated[int, typer.Option(help="Of sampling, weights and batches.")] = 0,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Default runs/apex-PROFILE.")] = None,
    methods: Annotated[str | None, typer.Option(help="Comma-separated methods; default all of the trace.")] = None,
    depths: Annotated[str, typer.Option(help="Candidate depths, such as 3-16 or 2,4,8,12,16.")] = "1-16",
    first: Annotated[
        str | None, typer.Option(help="First pairs the router may choose, METHOD:K,...; default all.")
    ] = None,
    source: Annotated[
        str, typer.Option(help="counterfactual (every-position) or on-policy (fixed-depth runs).")
    ] = "counterfactual",
    without: Annotated[
        str | None, typer.Option(help="Ablations: survival, cost-rate, entropy, repetition, history, embedding.")
    ] = None,
    one_survival: Annotated[
        bool, typer.Option("--one-survival", help="Hazards that cannot depend on the candidate depth.")
    ] = False,
    cost_profile: Annotated[
        str | None, typer.Option(help="Shipped name or JSON file; default: the trace's own.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train the APEX controller on the train split of traces; the validation split stops it, the test split is not touched.

    Example: apexsim train apex smollm2-cpu --profile s --out runs/apex-s
    """
    from apexsim import traces
    from apexsim.fitting import profile_for
    from policies.apex import checkpoint
    from policies.apex.training import Settings

    if policy not in TRAINABLE:
        raise UsageError(f"policy {policy!r} cannot be trained; allowed: {choices(TRAINABLE)}")
    settings = Settings(
        profile=profile,
        source=source,
        seed=seed,
        without=tuple(names(without) or ()),
        one_survival=one_survival,
        first=_pairs(first),
    )
    settings.check()
    target = out or Path("runs") / f"apex-{profile}"
    checkpoint.DIRECTORY.check(target)
    candidates = numbers(depths, "--depths") or []
    loaded = [traces.load(name) for name in bundles]
    parts: dict[str, list[Program]] = {"train": [], "validation": []}
    costs = []
    for bundle in loaded:
        costs.append(profile_for(bundle, cost_profile))
        for split, programs in parts.items():
            programs += _compiled(bundle, costs[-1], split, names(methods), candidates)
    if not parts["train"]:
        raise UsageError(f"{choices(bundles)}: no request of two output tokens or more in the train split")
    trained = _train(TRAINABLE[policy], parts["train"], parts["validation"], settings, quiet)
    space = parts["train"][0].space
    used = [p.requests.select("request_id", "prompt_tokens", "output_tokens") for ps in parts.values() for p in ps]
    result = checkpoint.Checkpoint(
        profile,
        space.methods,
        space.depths,
        ", ".join(dict.fromkeys(cost.name for cost in costs)),
        tuple((bundle.name, bundle.digest) for bundle in loaded),
        tuple(row for frame in used for row in frame.iter_rows()),
        trained,
    )
    checkpoint.write(result, target)
    for name, part in trained.items():
        if part.facts["dropped"]:
            note(f"note: {name}: left out, unknown or the same everywhere: {_shortened(part.facts['dropped'])}", quiet)
    facts = {
        "policy": policy,
        "checkpoint": str(target),
        "parts": {
            name: {key: part.facts[key] for key in ("examples", "epochs", "validation_loss")}
            for name, part in trained.items()
        },
    }
    if as_json:
        print_json(facts)
    note(f"wrote {target}: apexsim compare {bundles[0]} --policies all-fixed,best-fixed,apex-{profile}@{target}", quiet)


def _compiled(bundle: Bundle, cost: object, split: str, methods: list[str] | None, depths: list[int]) -> list[Program]:
    """The requests of one split, or none."""
    from apexsim.program import compile_program, select

    rows = select(bundle, "all")
    chosen = rows[(bundle.requests["split"] == split).to_numpy()]
    program = compile_program(bundle, cost, chosen, methods, depths)  # type: ignore[arg-type]
    return [program] if program.requests.height else []


def _train(
    wanted: tuple[str, ...], train: list[Program], validation: list[Program], settings: Settings, quiet: bool
) -> dict[str, Part]:
    from dataclasses import asdict

    from policies.apex import training
    from policies.apex.checkpoint import Part
    from policies.apex.network import weights

    fits = {"router": training.train_router, "depth": training.train_depth}
    parts = {}
    with progress(quiet) as bar:
        tasks = {}

        def advance(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done, total=total)

        for name in wanted:
            result = fits[name](train, validation, settings, advance)
            facts = {
                "settings": asdict(settings),
                "dropped": list(result.dropped),
                "examples": result.examples,
                "epochs": len(result.losses),
                "validation_loss": min(result.losses),
            }
            parts[name] = Part(weights(result.scorer), result.inputs, result.admissible, facts)
    return parts


def _pairs(text: str | None) -> tuple[tuple[str, int], ...] | None:
    if text is None:
        return None
    pairs = []
    for item in names(text) or []:
        method, _, depth = item.partition(":")
        if not depth.isdecimal():
            raise UsageError(f"--first {item!r}: must be METHOD:K")
        pairs.append((method, int(depth)))
    return tuple(pairs)


def _shortened(dropped: list[str]) -> str:
    """Names, the embedding's numbers as one."""
    return ", ".join(dict.fromkeys("embedding" if name.startswith("embedding_") else name for name in dropped))
