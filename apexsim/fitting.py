"""Fits a cost profile to the measured blocks of a bundle: medians, one outlier rule, monotone where physics is.

Seconds of a part of the block (draft, verify) are taken to be f(tokens) + g(context): medians of both by alternation
(median polish), f and g then made non-decreasing by isotonic regression, which keeps the steps of a staircase. Each batch
size that was measured is fitted apart.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from scipy.optimize import isotonic_regression

from apexsim.cost import CostProfile, MethodCost, Table, load_profile
from apexsim.errors import ProfileError
from apexsim.traces import Bundle

OUTLIER_RATIO = 3.0
"""A block is a warm-up outlier if it takes more than this many times the median block of its run and depth."""
CONTEXT_BINS = 6
MIN_PER_BIN = 30
POLISH_ROUNDS = 10


def outliers(blocks: pl.DataFrame) -> pl.Series:
    """Flags warm-up outliers by one rule, the same for every policy and method.

    Returns:
        (n,) True where a block takes over ``OUTLIER_RATIO`` times the median of its run and depth; never without times.
    """
    total = pl.sum_horizontal("draft_s", "verify_s", "overhead_s", ignore_nulls=False)
    flagged = total > OUTLIER_RATIO * total.median().over("run", "depth")
    return blocks.select(flagged.fill_null(False).alias("outlier"))["outlier"]


def profile_for(bundle: Bundle, name: str | None) -> CostProfile:
    """The profile called ``name``; None takes the trace's own: fitted to its blocks, else the one its meta names."""
    if name is None and not bundle.blocks.height:
        name = bundle.meta.get("default_cost_profile")
    return fit_profile(bundle) if name is None else load_profile(name)


def fit_profile(bundle: Bundle) -> CostProfile:
    """The measured cost profile of a bundle.

    Raises:
        ProfileError: The bundle has no timed blocks, or a method of it has none.
    """
    timed = bundle.blocks.drop_nulls(["draft_s", "verify_s", "overhead_s"])
    if not timed.height:
        instead = bundle.meta.get("default_cost_profile")
        hint = f"give --cost-profile {instead}" if instead else "give --cost-profile NAME or FILE"
        raise ProfileError(f"{bundle.name}: has no timed blocks to fit a cost profile to; {hint}")
    flagged = outliers(timed)
    kept = timed.filter(~flagged).with_columns(tokens=pl.col("drafted") + 1)
    notes = [
        f"{flagged.sum()} of {timed.height} blocks left out as outliers (over {OUTLIER_RATIO:g} x the median of run and depth)"
    ]
    smallest = int(kept["tokens"].min())  # type: ignore[arg-type]
    if smallest > 1:
        notes.append(
            f"no pass of fewer than {smallest} tokens was measured: plain decoding is priced as {smallest} tokens"
        )
    plain = kept.filter(pl.col("method") == "")
    batch = kept["batch_size"].min()
    overhead_s = _median((plain if plain.height else kept).filter(pl.col("batch_size") == batch)["overhead_s"])
    if not plain.height:
        notes.append("no run without a drafter was measured: its overhead is taken to be that of the runs with one")
    methods = {}
    for method in bundle.methods:
        mine = kept.filter(pl.col("method") == method)
        drafting = mine.filter(pl.col("depth") > 0)
        if not drafting.height:
            raise ProfileError(f"{bundle.name}: method {method!r} has no timed block that drafts; give --cost-profile")
        shallowest = int(drafting["depth"].min())  # type: ignore[arg-type]
        if shallowest > 1:
            notes.append(
                f"{method}: no draft of fewer than {shallowest} steps was measured: all are priced as {shallowest}"
            )
        idle = mine.filter(pl.col("depth") == 0, pl.col("batch_size") == batch)
        idle_s = _median(idle["draft_s"] + idle["overhead_s"]) - overhead_s if idle.height else 0.0
        if not idle.height:
            notes.append(f"{method}: no block of depth 0 was measured: its sync is taken to be 0")
        methods[method] = MethodCost(
            draft=_surface(drafting, "depth", "draft_s"),
            overhead_s=_median(drafting.filter(pl.col("batch_size") == batch)["overhead_s"]),
            sync_s=max(idle_s, 0.0),
        )
    return CostProfile(
        name=f"measured:{bundle.name}",
        kind="measured",
        source=f"measured blocks of {bundle.name} on {bundle.meta['hardware']}",
        verify=_surface(kept, "tokens", "verify_s"),
        methods=methods,
        overhead_s=overhead_s,
        tail_draft=bool(bundle.meta["engine"].get("tail_draft", False)),
        notes=tuple(notes),
    )


def _surface(blocks: pl.DataFrame, tokens: str, seconds: str) -> Table:
    """f(tokens) + g(context) of one column, for each batch size measured."""
    batches = sorted(blocks["batch_size"].unique())
    contexts = blocks["context_tokens"].to_numpy().astype(float)
    edges = _context_edges(contexts)
    bins = np.searchsorted(edges, contexts, side="right")
    context_knots = np.array([np.median(contexts[bins == b]) for b in range(edges.size + 1)])
    counts = blocks[tokens].to_numpy()
    token_knots = np.unique(counts)
    rows = np.searchsorted(token_knots, counts)
    values = blocks[seconds].to_numpy()
    size = blocks["batch_size"].to_numpy()
    fitted = [
        _polish(values[size == b], rows[size == b], bins[size == b], token_knots.size, context_knots.size)
        for b in batches
    ]
    return Table(
        batch=tuple(float(b) for b in batches),
        tokens=tuple(float(t) for t in token_knots),
        context=tuple(float(c) for c in context_knots),
        seconds_by=tuple(tuple(tuple(float(s) for s in cells) for cells in table) for table in fitted),
    )


def _context_edges(contexts: np.ndarray) -> np.ndarray:
    """Inner edges of context bins of about equal weight; one bin where the contexts do not spread."""
    bins = max(1, min(CONTEXT_BINS, contexts.size // MIN_PER_BIN))
    edges = np.unique(np.quantile(contexts, np.linspace(0, 1, bins + 1)[1:-1]))
    return edges[(edges > contexts.min()) & (edges <= contexts.max())]


def _polish(values: np.ndarray, row: np.ndarray, column: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """(rows, columns) table of f[row] + g[column]; cells and lines without a sample are interpolated."""
    f, g = np.zeros(rows), np.zeros(columns)
    for _ in range(POLISH_ROUNDS):
        f = _monotone(_medians(values - g[column], row, rows), np.bincount(row, minlength=rows))
        g = _monotone(_medians(values - f[row], column, columns), np.bincount(column, minlength=columns))
    floor = values.min()
    return np.maximum(f[:, None] + g[None, :], floor)


def _medians(values: np.ndarray, index: np.ndarray, size: int) -> np.ndarray:
    medians = np.full(size, np.nan)
    for i in np.unique(index):
        medians[i] = np.median(values[index == i])
    known = np.flatnonzero(np.isfinite(medians))
    return np.interp(np.arange(size), known, medians[known])


def _monotone(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.asarray(isotonic_regression(values, weights=np.maximum(weights, 1e-6)).x)


def _median(values: pl.Series) -> float:
    return float(values.median())  # type: ignore[arg-type]
