"""``apexsim policies``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from apexsim.cli.output import Json, Quiet, print_json, print_table


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
