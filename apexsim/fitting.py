"""Fits a cost profile to the measured blocks of a bundle: medians, one outlier rule, monotone where physics is.

Contexts are binned by octave (a pass over twice the context costs more, and the more so the more tokens it holds). A cell of
(tokens, octave) with enough blocks takes its median. The rest is f(tokens) + g(octave), by median polish, plus the residual of
the nearest measured cells; isotonic regression then makes the table non-decreasing in both, which keeps the steps of a staircase.
Each batch size that was measured often enough is fitted apart: there a step is one measurement, of the mean number of tokens of
its requests, and a draft one of the deepest of them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import polars as pl
from scipy.optimize import isotonic_regression

from apexsim.cost import CostProfile, MethodCost, Table, load_profile
from apexsim.errors import ProfileError
from apexsim.traces import Bundle

OUTLIER_RATIO = 3.0
"""A block is an outlier if it takes over this many times the median of the blocks that did the same work."""
SAME_WORK = ("method", "depth", "drafted", "batch_size", "octave")
"""Blocks did the same work if they agree in these; the octave is that of the context length."""
MIN_PER_CELL = 5
MIN_BATCH_SHARE = 0.05
"""A batch size of fewer of the blocks than this (a batch of which some requests had ended) is not fitted."""
ROUNDS = 10


def outliers(blocks: pl.DataFrame) -> pl.Series:
    """Flags warm-up outliers by one rule, the same for every policy and method.

    Returns:
        (n,) True where a block takes over ``OUTLIER_RATIO`` times the median of ``SAME_WORK``; never without times.
    """
    total = pl.sum_horizontal("draft_s", "verify_s", "overhead_s", ignore_nulls=False)
    frame = blocks.with_columns(octave=octave(blocks["context_tokens"]))
    flagged = total > OUTLIER_RATIO * total.median().over(SAME_WORK)
    return frame.select(flagged.fill_null(False).alias("outlier"))["outlier"]


def octave(context: pl.Series) -> pl.Series:
    """floor(log2) of context lengths."""
    return context.log(2.0).floor().cast(pl.Int64)


def profile_for(bundle: Bundle, name: str | None) -> CostProfile:
    """The profile called ``name``; None takes the trace's own: fitted to its blocks, else the one its meta names."""
    if name is None and not bundle.blocks.height:
        name = bundle.meta.get("default_cost_profile")
    return fit_profile(bundle) if name is None else load_profile(name)


def residuals(bundle: Bundle, profile: CostProfile) -> np.ndarray:
    """(n,) measured over priced seconds of each timed block that drafts and is no outlier, scaled to a mean of 1.

    Without the scaling noise would make drafting look slower than plain decoding, which is priced without noise.

    Raises:
        ProfileError: The bundle has no timed block to measure noise on.
    """
    timed = bundle.blocks.drop_nulls(["draft_s", "verify_s", "overhead_s"])
    timed = timed.filter(~outliers(timed)).filter(pl.col("method").is_in(bundle.methods), pl.col("depth") > 0)
    if not timed.height:
        raise ProfileError(f"{bundle.name}: has no timed blocks that draft: cost noise cannot be measured on it")
    columns = ("method", "depth", "drafted", "context_tokens", "batch_size", "draft_s", "verify_s", "overhead_s")
    factors = np.array(
        [
            sum(seconds)
            / _price(profile, method, bundle.meta["methods"][method]["kind"], depth, drafted, context, batch)
            for method, depth, drafted, context, batch, *seconds in timed.select(columns).iter_rows()
        ]
    )
    return np.asarray(factors / factors.mean())


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
    kept = _steps(_common_batches(timed.filter(~flagged)))
    notes = [
        f"{flagged.sum()} of {timed.height} blocks left out as outliers (over {OUTLIER_RATIO:g} x the median of the same work)"
    ]
    smallest = int(kept["tokens"].min())  # type: ignore[arg-type]
    if smallest > 1:
        notes.append(
            f"no pass of fewer than {smallest} tokens was measured: plain decoding is priced as {smallest} tokens"
        )
    plain = kept.filter(pl.col("method") == "")
    batch = int(kept["batch_size"].min())  # type: ignore[arg-type]
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
    if batch != 1:
        notes.append(f"batch 1 was not measured: costs are those of batch {batch:g}")
    profile = CostProfile(
        name=f"measured:{bundle.name}",
        kind="measured",
        source=f"measured blocks of {bundle.name} on {bundle.meta['hardware']}",
        verify=_surface(kept, "tokens", "verify_s"),
        methods=methods,
        overhead_s=overhead_s,
        tail_draft=bool(bundle.meta["engine"].get("tail_draft", False)),
    )
    ratios = _priced_over_measured(
        bundle, profile, kept.filter(pl.col("batch_size") == batch)
    )  # a step is a block there
    notes.append(
        f"priced over measured seconds of its own runs: {min(ratios):.2f} to {max(ratios):.2f} "
        "(medians of skewed times are low, and the machine drifts between runs)"
    )
    return replace(profile, notes=tuple(notes))


def _common_batches(blocks: pl.DataFrame) -> pl.DataFrame:
    share = pl.len().over("batch_size") / blocks.height
    return blocks.filter(share >= MIN_BATCH_SHARE)


def _steps(blocks: pl.DataFrame) -> pl.DataFrame:
    """One row per engine step, with ``tokens``: mean tokens per request; a trace without step numbers has one block each."""
    if "step" not in blocks.columns:
        return blocks.with_columns(tokens=pl.col("drafted") + 1)
    tokens = (pl.col("drafted") + 1).mean().round().cast(pl.Int32).alias("tokens")
    rest = pl.col("position", "drafted", "batch_size", "context_tokens", "draft_s", "verify_s", "overhead_s")
    return blocks.group_by("run", "method", "step", maintain_order=True).agg(
        tokens, pl.col("depth").max(), rest.first()
    )


def _priced_over_measured(bundle: Bundle, profile: CostProfile, blocks: pl.DataFrame) -> list[float]:
    """Per run, what its blocks cost under the profile over what they took."""
    columns = ("run", "method", "depth", "drafted", "context_tokens", "batch_size", "draft_s", "verify_s", "overhead_s")
    priced: dict[str, float] = defaultdict(float)
    measured: dict[str, float] = defaultdict(float)
    for run, method, depth, drafted, context, batch, *seconds in blocks.select(columns).iter_rows():
        kind = bundle.meta["methods"][method]["kind"] if method else ""
        priced[run] += _price(profile, method, kind, depth, drafted, context, batch)
        measured[run] += sum(seconds)
    return [priced[run] / measured[run] for run in priced]


def _price(profile: CostProfile, method: str, kind: str, depth: int, drafted: int, context: int, batch: int) -> float:
    """Seconds of a measured block under the profile; ``method`` is empty for an engine without a drafter."""
    verify = profile.verify.seconds(drafted + 1, context, batch)
    if not method:
        return verify + profile.overhead_s
    price = profile.method(method, kind)
    if depth == 0:
        return verify + profile.overhead_s + price.sync_s
    overhead = profile.overhead_s if price.overhead_s is None else price.overhead_s
    return price.draft.seconds(depth, context, batch) + (1 + price.verify_share) * verify + overhead


def _surface(blocks: pl.DataFrame, tokens: str, seconds: str) -> Table:
    """Seconds of one column by tokens and context, for each batch size measured."""
    batches = sorted(blocks["batch_size"].unique())
    contexts = blocks["context_tokens"].to_numpy().astype(float)
    octaves, column = np.unique(octave(blocks["context_tokens"]).to_numpy(), return_inverse=True)
    token_knots, row = np.unique(blocks[tokens].to_numpy(), return_inverse=True)
    values = blocks[seconds].to_numpy()
    size = blocks["batch_size"].to_numpy()
    shape = (token_knots.size, octaves.size)
    fitted = [_cells(values[size == b], row[size == b], column[size == b], shape) for b in batches]
    return Table(
        batch=tuple(float(b) for b in batches),
        tokens=tuple(float(t) for t in token_knots),
        context=tuple(float(np.median(contexts[column == c])) for c in range(octaves.size)),
        seconds_by=tuple(tuple(tuple(float(s) for s in cells) for cells in table) for table in fitted),
    )


def _cells(values: np.ndarray, row: np.ndarray, column: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """(tokens, octaves) seconds: medians where there are enough blocks, completed and made monotone."""
    cell = row * shape[1] + column
    counts = np.bincount(cell, minlength=shape[0] * shape[1])
    medians = _medians(values, cell, counts.size).reshape(shape)
    counts = counts.reshape(shape)
    additive = _polish(values, row, column, shape)
    residual = np.where(counts >= MIN_PER_CELL, medians - additive, np.nan)
    for along in (residual.T, residual):  # first along the tokens of an octave, then along the octaves
        for line in along:
            known = np.flatnonzero(np.isfinite(line))
            if known.size:
                line[:] = np.interp(np.arange(line.size), known, line[known])
    table = np.maximum(additive + np.nan_to_num(residual), values.min())
    weights = np.maximum(counts, 1e-3)
    for _ in range(ROUNDS):
        table = np.stack([_monotone(line, w) for line, w in zip(table, weights, strict=True)])
        table = np.stack([_monotone(line, w) for line, w in zip(table.T, weights.T, strict=True)]).T
    return np.maximum.accumulate(np.maximum.accumulate(table, axis=0), axis=1)


def _polish(values: np.ndarray, row: np.ndarray, column: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """The table f[row] + g[column] of medians; lines without a block are interpolated."""
    f, g = np.zeros(shape[0]), np.zeros(shape[1])
    for _ in range(ROUNDS):
        f = _filled(_medians(values - g[column], row, shape[0]))
        g = _filled(_medians(values - f[row], column, shape[1]))
    return f[:, None] + g[None, :]


def _medians(values: np.ndarray, index: np.ndarray, size: int) -> np.ndarray:
    medians = np.full(size, np.nan)
    for i in np.unique(index):
        medians[i] = np.median(values[index == i])
    return medians


def _filled(values: np.ndarray) -> np.ndarray:
    known = np.flatnonzero(np.isfinite(values))
    return np.interp(np.arange(values.size), known, values[known])


def _monotone(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.asarray(isotonic_regression(values, weights=weights).x)


def _median(values: pl.Series) -> float:
    return float(values.median())  # type: ignore[arg-type]
