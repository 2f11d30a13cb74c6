"""Compiles a bundle and a cost profile into arrays only: what the kernels, and through them every replay, run on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from apexsim import features, schema, survival
from apexsim.cost import CostProfile
from apexsim.errors import ApexSimError, ProfileError, UsageError, choices
from apexsim.kernels.blocks import Tables, autoregressive_seconds
from apexsim.protocol import ActionSpace
from apexsim.traces import Bundle

KNOWN_EXACTLY = 255


@dataclass(frozen=True)
class Program:
    """A selection of requests, ready to replay.

    Attributes:
        tables: The arrays.
        space: The actions, by index.
        step_s: c_0, seconds of one autoregressive step: the mean over the bundle's train split.
        seconds_ar: (R,) seconds of plain decoding.
        context: (P + R, C) float32 ``features.CONTEXT`` of p = 1..T of every request.
        prompts: (R, len(features.PROMPT)) float32.
        requests: The rows of the bundle's requests that are replayed (T >= 2), in order.
        skipped_by_workload: Requests selected but not replayed, since T < 2.
        bundle: Name of the bundle.
        profile: Name of the cost profile.
    """

    tables: Tables
    space: ActionSpace
    step_s: float
    seconds_ar: np.ndarray
    context: np.ndarray
    prompts: np.ndarray
    requests: pl.DataFrame
    skipped_by_workload: dict[str, int]
    bundle: str
    profile: str

    @property
    def skipped(self) -> int:
        """Requests selected but not replayed, in all."""
        return sum(self.skipped_by_workload.values())

    @property
    def tokens(self) -> np.ndarray:
        """(R,) decode tokens, T - 1."""
        return np.asarray(self.tables.length - 1)

    def sync_s(self, methods: Sequence[str]) -> float:
        """Seconds of sync a block pays that uses none of these configured methods."""
        return float(sum(self.tables.sync_s[self.space.methods.index(m)] for m in methods))


def select(bundle: Bundle, split: str = "all", workload: str | None = None, aligned: bool = False) -> np.ndarray:
    """Row numbers of the requests of a split and workload; ``aligned`` keeps only those all methods saw the same text of.

    Raises:
        UsageError: Unknown split or workload, or nothing is left.
    """
    splits = (*schema.SPLITS, "all")
    if split not in splits:
        raise UsageError(f"split {split!r} is unknown; allowed: {choices(splits)}")
    workloads = sorted(bundle.requests["workload"].unique())
    if workload is not None and workload not in workloads:
        raise UsageError(f"workload {workload!r} is not in {bundle.name}; allowed: {choices(workloads)}")
    rows = bundle.requests.with_row_index("row")
    if split != "all":
        rows = rows.filter(pl.col("split") == split)
    if workload is not None:
        rows = rows.filter(pl.col("workload") == workload)
    if aligned:
        rows = rows.filter(pl.col("aligned"))
    if not rows.height:
        raise UsageError(
            f"{bundle.name}: no request in split {split!r}, workload {workload or 'all'}, aligned {aligned}"
        )
    return rows["row"].to_numpy()


def compile_program(
    bundle: Bundle,
    profile: CostProfile,
    rows: np.ndarray | None = None,
    methods: Sequence[str] | None = None,
    depths: Sequence[int] | None = None,
) -> Program:
    """Compiles the selected requests, methods and depths of a bundle under a cost profile.

    Args:
        bundle: The trace.
        profile: What blocks cost.
        rows: Row numbers of requests; None takes all.
        methods: Method names; None takes the bundle's.
        depths: Depths of the action space; None takes 0..K_max.

    Raises:
        UsageError: A method or depth the bundle does not have.
        ProfileError: The profile does not price a method or depth.
    """
    chosen = tuple(methods) if methods is not None else bundle.methods
    for method in chosen:
        if method not in bundle.methods:
            raise UsageError(f"method {method!r} is not in {bundle.name}; allowed: {choices(bundle.methods)}")
    space = ActionSpace(chosen, tuple(depths) if depths is not None else tuple(range(bundle.kmax + 1)))
    if space.depths[-1] > bundle.kmax:
        raise UsageError(
            f"depth {space.depths[-1]} is deeper than {bundle.name} was recorded; allowed: 0..{bundle.kmax}"
        )
    rows = np.arange(bundle.requests.height) if rows is None else np.asarray(rows)
    step_s = _step_seconds(bundle, profile)
    table, requests = _compile(bundle, profile, rows, space)
    seconds_ar = np.empty(requests.height)
    autoregressive_seconds(table, seconds_ar)
    context = features.context_features(_text(bundle, rows))
    known = (
        requests[name].to_list() if name in requests.columns else [None] * requests.height
        for name in ("prompt_entropy", "prompt_embedding")
    )
    prompts = features.prompt_features(*known)
    short = bundle.requests[rows].filter(pl.col("output_tokens") < 2)
    skipped = dict(short.group_by("workload").len().sort("workload").iter_rows())
    return Program(table, space, step_s, seconds_ar, context, prompts, requests, skipped, bundle.name, profile.name)


def _step_seconds(bundle: Bundle, profile: CostProfile) -> float:
    """c_0 of a bundle: mean seconds of a plain step over the train split, or over all requests if that is empty."""
    train = np.flatnonzero((bundle.requests["split"] == "train").to_numpy())
    rows = train if bundle.requests["output_tokens"].gather(train).max() not in (None, 1) else None
    rows = np.arange(bundle.requests.height) if rows is None else rows
    table, requests = _compile(bundle, profile, rows, ActionSpace((), (0,)))
    if not requests.height:
        raise ApexSimError(f"{bundle.name}: no request has two output tokens or more: nothing to replay")
    seconds = np.empty(requests.height)
    autoregressive_seconds(table, seconds)
    return float(seconds.sum() / (table.length - 1).sum())


def _compile(bundle: Bundle, profile: CostProfile, rows: np.ndarray, space: ActionSpace) -> tuple[Tables, pl.DataFrame]:
    lengths = bundle.requests["output_tokens"].to_numpy().astype(np.int64)
    starts = np.concatenate(([0], np.cumsum(np.maximum(lengths - 1, 0))))
    rows = rows[lengths[rows] > 1]
    requests = bundle.requests[rows]
    length = lengths[rows]
    start = np.concatenate(([0], np.cumsum(length - 1))).astype(np.int64)
    keep = np.concatenate([np.arange(starts[r], starts[r] + lengths[r] - 1) for r in rows] or [np.empty(0, np.int64)])
    outcomes = [_outcomes(bundle, method, starts, lengths) for method in space.methods]
    accepted, drafted, known = (
        np.stack([outcome[i][keep] for outcome in outcomes]) if outcomes else np.zeros((0, keep.size), dtype)
        for i, dtype in enumerate((np.uint8, np.uint8, np.int16))
    )
    pairs = np.array(space.pairs, dtype=np.int64)
    prompt = requests["prompt_tokens"].to_numpy().astype(np.int64)
    context = np.repeat(prompt - start[:-1], length - 1) + np.arange(1, start[-1] + 1)
    table = Tables(
        start=start,
        length=length,
        accepted=accepted,
        drafted=drafted,
        known=known,
        action_method=pairs[:, 0].copy(),
        action_depth=pairs[:, 1].copy(),
        **_costs(bundle, profile, space, context),
    )
    return table, requests


def _costs(bundle: Bundle, profile: CostProfile, space: ActionSpace, context: np.ndarray) -> dict[str, np.ndarray]:
    """The profile's surfaces at every token count and context knot, and where each position's context (P,) lies."""
    deepest = space.depths[-1]
    prices = [profile.method(method, bundle.meta["methods"][method]["kind"]) for method in space.methods]
    surfaces = [profile.verify, *(price.draft for price in prices)]
    knots = np.array(sorted({knot for surface in surfaces for knot in surface.knots()}))
    verify = np.zeros((deepest + 2, knots.size))
    draft = np.zeros((len(prices), deepest + 1, knots.size))
    try:
        for c, at in enumerate(knots):
            for tokens in range(1, deepest + 2):
                verify[tokens, c] = profile.verify.seconds(tokens, at)
            for m, price in enumerate(prices):
                for steps in range(1, deepest + 1):
                    draft[m, steps, c] = price.draft.seconds(steps, at)
    except ProfileError as error:
        raise ProfileError(f"cost profile {profile.name}: {error}") from error
    overhead = [profile.overhead_s if price.overhead_s is None else price.overhead_s for price in prices]
    knot = np.clip(np.searchsorted(knots, context, side="right") - 1, 0, knots.size - 2)
    return {
        "knot": knot.astype(np.int16),
        "weight": (context - knots[knot]) / (knots[knot + 1] - knots[knot]),
        "verify_s": verify,
        "draft_s": draft,
        "verify_share": np.array([price.verify_share for price in prices], dtype=float),
        "overhead_s": np.array([*overhead, profile.overhead_s], dtype=float),
        "sync_s": np.array([price.sync_s for price in prices], dtype=float),
        "tail_draft": np.array([profile.tail_draft]),
    }


def _text(bundle: Bundle, rows: np.ndarray) -> features.Text:
    """What the trace knows of p = 1..T of every replayed request; T, where nothing is decided or recorded, repeats T-1."""
    positions, requests = bundle.positions, bundle.requests[rows].filter(pl.col("output_tokens") > 1)
    lengths = bundle.requests["output_tokens"].to_numpy().astype(np.int64)
    starts = np.concatenate(([0], np.cumsum(np.maximum(lengths - 1, 0))))
    match_column = next((f"match.{m}" for m in bundle.methods if f"match.{m}" in positions.columns), "")

    def recorded(column: str, decode: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        if column not in positions.columns:
            return np.full(int(starts[-1]), np.nan)
        codes = positions[column]
        return np.where(codes.is_null().to_numpy(), np.nan, decode(codes.fill_null(0).to_numpy().astype(np.float64)))

    signals = [
        recorded("target_entropy", schema.decode_entropy),
        recorded("target_prob", schema.decode_probability),
        recorded(match_column, lambda tokens: tokens),
    ]
    pieces: list[tuple[np.ndarray, ...]] = []
    for r in (r for r in rows.tolist() if lengths[r] > 1):
        entropy, probability, match = (
            np.append(mine, mine[-1]) for mine in (s[starts[r] : starts[r + 1]] for s in signals)
        )
        recent = features.trailing_mean(entropy, features.ENTROPY_WINDOW)
        repeated = np.where(np.isnan(match), 0.0, match >= features.REPEATED_MATCH)
        repetition = features.trailing_mean(repeated, features.REPETITION_WINDOW)
        pieces.append((np.arange(1, lengths[r] + 1), entropy, probability, recent, match, repetition))
    columns = [np.concatenate(column) for column in zip(*pieces, strict=True)] or [np.empty(0)] * 6
    position, entropy, probability, recent, match, repetition = columns
    span = requests["output_tokens"].to_numpy()

    def of_request(column: str) -> np.ndarray:
        if column not in requests.columns:
            return np.full(position.size, np.nan)
        return np.repeat(requests[column].cast(pl.Float64).fill_null(np.nan).to_numpy(), span)

    return features.Text(
        position,
        of_request("prompt_tokens"),
        of_request("max_tokens"),
        of_request("prompt_repetition"),
        entropy,
        probability,
        recent,
        match,
        repetition,
    )


def _outcomes(
    bundle: Bundle, method: str, starts: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """accepted, drafted and known at every position of the bundle; what was not observed is drawn from a survival model."""
    left = np.concatenate([np.arange(n - 1, 0, -1) for n in lengths] or [np.empty(0, np.int64)])
    if bundle.every_position:
        recorded = bundle.positions[f"accepted.{method}"]
        drafted = bundle.positions[f"drafted.{method}"].fill_null(bundle.kmax).to_numpy().astype(np.int64)
        known = np.where(recorded.is_null().to_numpy(), -1, KNOWN_EXACTLY)
        accepted = recorded.fill_null(0).to_numpy().astype(np.int64)
    else:
        accepted, drafted, known = _observed_blocks(bundle, method, starts, left)
    unknown = known < bundle.kmax
    if unknown.any():
        seen = known >= 0
        # Running into the end of the text, or into the end of the draft, is no rejection.
        rejected = (known == KNOWN_EXACTLY) & (accepted < left) & (accepted < drafted)
        if not seen.any():
            raise ApexSimError(f"{bundle.name}: method {method!r} has no observed block")
        q = survival.hazards(accepted[seen], rejected[seen], bundle.kmax)
        uniform = np.random.default_rng(0).random(left.size)
        drawn = survival.draw_accepted(q, uniform[unknown], np.maximum(accepted[unknown], 0))
        accepted = accepted.copy()
        accepted[unknown] = np.minimum(np.minimum(drawn, drafted[unknown]), left[unknown])
    return accepted.astype(np.uint8), drafted.astype(np.uint8), known.astype(np.int16)


def _observed_blocks(
    bundle: Bundle, method: str, starts: np.ndarray, left: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """accepted, drafted and known of the positions where measured blocks of the method started.

    Exact after a rejection, at the end of the text, and where the method proposed fewer tokens than asked (a deeper request would
    have got no more); else a lower bound. What was never asked is taken to propose K_max.
    """
    blocks = bundle.blocks.filter(pl.col("method") == method, pl.col("depth") > 0)
    row = starts[blocks["request"].to_numpy()] + blocks["position"].to_numpy() - 1
    got, sent, asked = (blocks[name].to_numpy().astype(np.int64) for name in ("accepted", "drafted", "depth"))
    short = sent < asked
    exact = (got < sent) | (got >= left[row]) | short
    level = np.where(exact, KNOWN_EXACTLY, sent)
    known = np.full(left.size, -1)
    np.maximum.at(known, row, level)
    accepted = np.zeros(left.size, dtype=np.int64)
    strongest = level == known[row]
    accepted[row[strongest]] = got[strongest]
    drafted = np.full(left.size, bundle.kmax)
    drafted[row[short]] = sent[short]
    return accepted, drafted, known
