"""``apexsim bench``."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from apexsim.cli.output import Json, Quiet, names, note, print_json, print_table
from apexsim.errors import UsageError, choices

PARTS = ("vector", "single", "sb3", "replay", "oracle", "import")
KEYS = {"vector": "vector_env", "single": "single_env", "sb3": "sb3_adapter"}
"""Parts whose name in the JSON is another."""


def bench(
    bundle: Annotated[str, typer.Argument(metavar="BUNDLE", help="An every-position trace.")] = "smollm2-cpu",
    only: Annotated[str | None, typer.Option(help=f"Comma-separated parts: {','.join(PARTS)}.")] = None,
    cost_profile: Annotated[
        str | None, typer.Option(help="Shipped name or JSON file; default: the trace's own.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure this project's speed against its peers and its own plain-Python reference, as ratios in one run.

    Example: apexsim bench --only vector,replay
    """
    from apexsim import bench as parts
    from apexsim import bench_env, traces
    from apexsim.fitting import profile_for

    wanted = names(only) or list(PARTS)
    unknown = [part for part in wanted if part not in PARTS]
    if unknown:
        raise UsageError(f"--only {unknown[0]!r} is unknown; allowed: {choices(PARTS)}")
    started = time.perf_counter()
    loaded = traces.load(bundle)
    if not loaded.every_position:
        raise UsageError(f"{bundle}: bench needs an every-position trace")
    if any(loaded.positions[f"accepted.{method}"].null_count() for method in loaded.methods):
        raise UsageError(f"{bundle}: bench needs a trace in which every method was asked at every position")
    profile = profile_for(loaded, cost_profile)
    results: dict[str, dict[str, Any]] = {}
    for part in wanted:
        note(f"measuring {part} ...", quiet)
        if part == "import":
            results[part] = {"import_apexsim_s": parts.import_seconds()}
        elif part in KEYS:
            results[KEYS[part]] = getattr(bench_env, KEYS[part])(bundle)
        else:
            results[part] = getattr(parts, part)(loaded, profile)
    results["command"] = {"seconds": time.perf_counter() - started}
    if as_json:
        print_json(results)
        return
    lines = [(part, key, f"{value:.4g}") for part, facts in results.items() for key, value in facts.items()]
    print_table(f"bench on {loaded.name}, {profile.name}", ("part", "figure", "value"), lines, left=2)
