"""What a trace holds, in figures: sizes, acceptance by method and workload, measured times, exactness."""

from __future__ import annotations

from typing import Any

import polars as pl

from apexsim import schema
from apexsim.traces import Bundle

MIN_BLOCKS = 20
"""Times of fewer blocks than this are not shown."""


def describe(bundle: Bundle) -> dict[str, Any]:
    """The facts that ``apexsim traces describe --json`` prints.

    Returns:
        Sizes and settings; ``methods``: per method its acceptance figures, over all and by workload, ``times`` by batch size
        and depth, and the exactness figures of the recording; ``plain``: the times of engines without a drafter.
    """
    requests = bundle.requests
    plain = _times(bundle, "")
    return {
        "name": bundle.name,
        "schema": bundle.meta["schema"],
        "target": bundle.meta["target"],
        "hardware": bundle.meta["hardware"],
        "engine": bundle.meta["engine"],
        "dtype": bundle.meta["dtype"],
        "sampling": bundle.meta["sampling"],
        "kmax": bundle.kmax,
        "requests": requests.height,
        "positions": bundle.positions.height,
        "blocks": bundle.blocks.height,
        "workloads": _counts(requests, "workload"),
        "methods": {method: _method(bundle, method, plain) for method in bundle.methods},
        "plain": {"times": plain},
        "splits": {split: _counts(requests, "split").get(split, 0) for split in schema.SPLITS},
        "aligned_requests": int(requests["aligned"].sum()),
    }


def _method(bundle: Bundle, method: str, plain: list[dict[str, Any]]) -> dict[str, Any]:
    if bundle.every_position:
        rows = bundle.positions.select("request", accepted=f"accepted.{method}", drafted=f"drafted.{method}")
    else:
        rows = bundle.blocks.filter(pl.col("method") == method, pl.col("depth") > 0)
        rows = rows.select("request", "accepted", "drafted")
    workload = bundle.requests["workload"]
    rows = rows.with_columns(workload=workload.gather(rows["request"]))
    figures = _figures if bundle.every_position else _block_figures
    return {
        "kind": bundle.meta["methods"][method]["kind"],
        **figures(rows),
        "workloads": {
            str(name): figures(part) for (name,), part in sorted(rows.group_by("workload", maintain_order=True))
        },
        "times": _with_idle_tax(_times(bundle, method), plain),
        "exactness": bundle.meta.get("exactness", {}).get(method),
    }


def _figures(rows: pl.DataFrame) -> dict[str, Any]:
    """Acceptance figures of positions."""
    asked = rows.drop_nulls()
    return {
        "positions": asked.height,
        "mean_accepted": asked["accepted"].mean(),
        "mean_accepted_visited": _visited_mean(rows),
        "mean_drafted": asked["drafted"].mean(),
        "empty_draft_share": (asked["drafted"] == 0).mean(),
    }


def _block_figures(rows: pl.DataFrame) -> dict[str, Any]:
    """The same of a trace that knows blocks only: every one of them was visited."""
    return {
        "positions": 0,
        "mean_accepted": None,
        "mean_accepted_visited": rows["accepted"].mean(),
        "mean_drafted": rows["drafted"].mean(),
        "empty_draft_share": (rows["drafted"] == 0).mean() if rows.height else None,
    }


def _visited_mean(rows: pl.DataFrame) -> float | None:
    """Mean accepted length over the blocks a run at depth kmax visits: not the mean over positions, since long accepts skip.

    A position where the method was not asked counts as one where nothing was accepted.
    """
    total = visited = 0
    for _, part in rows.group_by("request", maintain_order=True):
        accepted = part["accepted"].fill_null(0).to_list()
        p = 0
        while p < len(accepted):
            total += accepted[p]
            visited += 1
            p += accepted[p] + 1
    return total / visited if visited else None


def _times(bundle: Bundle, method: str) -> list[dict[str, Any]]:
    """Median milliseconds of fixed-depth runs, by batch size and depth."""
    timed = bundle.blocks.drop_nulls(["draft_s", "verify_s", "overhead_s"]).filter(
        pl.col("method") == method, (pl.col("policy").str.starts_with("fixed:")) | (pl.col("method") == "")
    )
    columns = {f"{part}_ms": pl.col(f"{part}_s").median() * 1e3 for part in ("draft", "verify", "overhead")}
    times = timed.group_by("batch_size", "depth").agg(pl.len().alias("blocks"), **columns).sort("batch_size", "depth")
    return times.filter(pl.col("blocks") >= MIN_BLOCKS).to_dicts()


def _with_idle_tax(times: list[dict[str, Any]], plain: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds to depth 0 what a step costs there beyond one of an engine without the drafter."""
    alone = {row["batch_size"]: _step_ms(row) for row in plain}
    for row in times:
        if row["depth"] == 0 and row["batch_size"] in alone:
            row["idle_tax_ms"] = _step_ms(row) - alone[row["batch_size"]]
    return times


def _step_ms(row: dict[str, Any]) -> float:
    return float(row["draft_ms"] + row["verify_ms"] + row["overhead_ms"])


def _counts(frame: pl.DataFrame, column: str) -> dict[str, int]:
    return dict(frame.group_by(column).len().sort(column).iter_rows())
