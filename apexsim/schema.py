"""The trace schema: every table, column, unit and code of a bundle, defined once.

A bundle is a directory with ``meta.json`` and up to three Parquet tables. ``requests`` has one row per request,
``positions`` one row per (request, output position p = 1..T-1), ``blocks`` one row per measured block. ``docs/trace_schema.md``
explains them; ``apexsim.traces`` reads, checks and writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl

SCHEMA = "apexsim.trace/1"
SPLITS = ("train", "validation", "test")
FINISH_REASONS = ("stop", "length", "cut")
"""stop: end of sequence; length: max_tokens reached; cut: the log ends before the request does."""
KMAX_LIMIT = 255

ENTROPY_CEILING_NATS = 12.0


@dataclass(frozen=True)
class Column:
    """One column: its type, range and meaning. ``low`` and ``high`` are inclusive; ``values`` lists the allowed strings."""

    name: str
    dtype: type[pl.DataType] | pl.DataType
    doc: str
    required: bool = True
    nullable: bool = False
    low: float | None = None
    high: float | None = None
    values: tuple[str, ...] | None = None


REQUESTS: tuple[Column, ...] = (
    Column("request_id", pl.String, "identity of the request, unique in the bundle"),
    Column("source_group", pl.String, "near-duplicate prompts share a group; splits never cut one"),
    Column("workload", pl.String, "kind of traffic, for example code_generation"),
    Column("split", pl.String, "train, validation or test", values=SPLITS),
    Column("prompt_tokens", pl.Int32, "tokens of the prompt", low=0),
    Column("output_tokens", pl.Int32, "T: output tokens, end of sequence counted", low=1),
    Column("max_tokens", pl.Int32, "limit the request was sent with", nullable=True, low=1),
    Column("finish_reason", pl.String, "stop, length or cut", values=FINISH_REASONS),
    Column("aligned", pl.Boolean, "all methods were recorded on the same text"),
    Column("prefill_s", pl.Float64, "seconds to the first token", nullable=True, low=0.0),
    Column(
        "prompt_repetition", pl.Float32, "share of prompt tokens that end a 3-gram seen before", False, True, 0.0, 1.0
    ),
    Column("prompt_entropy", pl.Float32, "entropy (nats) of the distribution of the prompt's tokens", False, True, 0.0),
    Column("prompt_embedding", pl.List(pl.Float32), "apexsim.embedding of the prompt", False, True),
    Column("prompt_token_ids", pl.List(pl.Int32), "prompt token ids", False, True),
)

POSITIONS: tuple[Column, ...] = (
    Column("request", pl.Int32, "row of the request in requests", low=0),
    Column("position", pl.Int32, "p: tokens emitted so far, 1..T-1", low=1),
    Column("token_id", pl.Int32, "y_p, the last emitted token", False, True, 0),
    Column("target_entropy", pl.UInt8, "code of the entropy of the distribution that produced y_p", False, True),
    Column("target_prob", pl.UInt8, "code of the probability of y_p in it", False, True),
    Column("target_margin", pl.UInt8, "code of that probability less the second largest", False, True),
)

METHOD_COLUMNS: tuple[Column, ...] = (
    Column("accepted", pl.UInt8, "draft tokens that match y_{p+1}, y_{p+2}, ...; 0..min(drafted, T - p)", True, True),
    Column("drafted", pl.UInt8, "draft tokens proposed; 0..kmax", True, True),
    Column("match", pl.UInt8, "longest suffix of the context, up to 32 tokens, that occurs in it before", False, True),
    Column("draft_prob", pl.List(pl.UInt8), "per draft token: code of the drafter's probability of it", False, True),
    Column("draft_entropy", pl.List(pl.UInt8), "per draft token: code of the drafter's entropy", False, True),
    Column(
        "draft_margin", pl.List(pl.UInt8), "per draft token: code of the lead over the drafter's second", False, True
    ),
    Column("draft_kl", pl.List(pl.UInt8), "code of KL(drafter, target), up to the first rejection", False, True),
)
"""Columns of ``positions`` that exist per method, named ``<column>.<method>``."""

BLOCKS: tuple[Column, ...] = (
    Column("request", pl.Int32, "row of the request in requests", low=0),
    Column("run", pl.String, "name of the measured run"),
    Column("policy", pl.String, "policy that chose the depths of the run"),
    Column("method", pl.String, "drafter configured in the run; empty for an engine without speculation"),
    Column("position", pl.Int32, "p at the start of the block", low=1),
    Column("depth", pl.Int32, "requested depth k", low=0, high=KMAX_LIMIT),
    Column("drafter_steps", pl.Int32, "draft tokens paid for", low=0, high=KMAX_LIMIT),
    Column("drafted", pl.Int32, "draft tokens submitted to the verifier", low=0, high=KMAX_LIMIT),
    Column("accepted", pl.Int32, "draft tokens accepted", low=0, high=KMAX_LIMIT),
    Column("emitted", pl.Int32, "tokens the block added to the output", low=1, high=KMAX_LIMIT + 1),
    Column("draft_s", pl.Float64, "seconds drafting", nullable=True, low=0.0),
    Column("verify_s", pl.Float64, "seconds of the target's pass and sampling", nullable=True),
    Column("overhead_s", pl.Float64, "seconds of the rest of the step", nullable=True, low=0.0),
    Column("batch_size", pl.Int32, "requests in the step", low=1),
    Column("context_tokens", pl.Int32, "prompt plus output tokens at the start of the block", low=1),
    Column(
        "step", pl.Int64, "blocks of a run that share a number shared an engine step, and its seconds", False, low=0
    ),
)

TABLES: dict[str, tuple[Column, ...]] = {"requests": REQUESTS, "positions": POSITIONS, "blocks": BLOCKS}
META_KEYS = ("schema", "name", "target", "methods", "engine", "hardware", "dtype", "sampling", "kmax", "checksums")
"""Keys every ``meta.json`` has; collectors and importers add provenance, exactness figures and notes."""


def method_columns(method: str) -> tuple[Column, ...]:
    """The columns of ``positions`` that record one method."""
    return tuple(
        Column(f"{c.name}.{method}", c.dtype, c.doc, c.required, c.nullable, c.low, c.high) for c in METHOD_COLUMNS
    )


def empty(table: str) -> pl.DataFrame:
    """A table with the required columns and no rows."""
    return pl.DataFrame(schema={c.name: c.dtype for c in TABLES[table] if c.required})


def encode_entropy(nats: np.ndarray) -> np.ndarray:
    """Codes entropies (nats) as uint8 on a square-root scale up to 12 nats, fine where entropy is low."""
    return np.rint(255.0 * np.sqrt(np.clip(nats, 0.0, ENTROPY_CEILING_NATS) / ENTROPY_CEILING_NATS)).astype(np.uint8)


def decode_entropy(code: np.ndarray) -> np.ndarray:
    """Entropies in nats (float64) of their uint8 codes."""
    return ENTROPY_CEILING_NATS * np.square(code / 255.0)


def encode_probability(probability: np.ndarray) -> np.ndarray:
    """Codes probabilities in [0, 1] as uint8, linear."""
    return np.rint(255.0 * np.clip(probability, 0.0, 1.0)).astype(np.uint8)


def decode_probability(code: np.ndarray) -> np.ndarray:
    """Probabilities (float64) of their uint8 codes."""
    return code / 255.0


DRAFT_CODES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "prob": encode_probability,
    "entropy": encode_entropy,
    "margin": encode_probability,
    "kl": encode_entropy,
}
"""How each signal of a draft is coded; its column is ``draft_<signal>.<method>``. Divergences share the entropies' scale."""
DRAFT_SIGNALS = tuple(f"draft_{name}" for name in DRAFT_CODES)
