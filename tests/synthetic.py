"""Small traces and profiles made on the spot."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from apexsim import schema
from apexsim.cost import CostProfile, Linear, MethodCost, Table
from apexsim.traces import Bundle, split_of

Lists = dict[str, list[int]]


def meta(methods: dict[str, str], kmax: int, name: str = "synthetic") -> dict[str, Any]:
    return {
        "schema": schema.SCHEMA,
        "name": name,
        "target": {"name": "none"},
        "methods": {m: {"kind": kind, "settings": {}} for m, kind in methods.items()},
        "engine": {"name": "none"},
        "hardware": "none",
        "dtype": "float32",
        "sampling": {"temperature": 0.0},
        "kmax": kmax,
        "checksums": {},
    }


def requests(lengths: list[int], prompts: list[int] | None = None, **columns: list[Any]) -> pl.DataFrame:
    count = len(lengths)
    ids = [f"r{i}" for i in range(count)]
    data = {
        "request_id": ids,
        "source_group": ids,
        "workload": ["w"] * count,
        "split": [split_of(i) for i in ids],
        "prompt_tokens": prompts or [10] * count,
        "output_tokens": lengths,
        "max_tokens": [None] * count,
        "finish_reason": ["stop"] * count,
        "aligned": [True] * count,
        "prefill_s": [None] * count,
    } | columns
    return pl.DataFrame(data, schema={c.name: c.dtype for c in schema.REQUESTS if c.name in data})


def bundle(
    accepted: list[Lists],
    drafted: list[Lists] | None = None,
    kmax: int = 16,
    kinds: dict[str, str] | None = None,
    prompts: list[int] | None = None,
    **columns: list[Any],
) -> Bundle:
    """An every-position trace: one dict of method -> accepted at p = 1..T-1 per request."""
    methods = list(accepted[0])
    lengths = [len(next(iter(lists.values()))) + 1 for lists in accepted]
    rows: dict[str, Any] = {
        "request": [r for r, n in enumerate(lengths) for _ in range(n - 1)],
        "position": [p for n in lengths for p in range(1, n)],
    }
    types: dict[str, Any] = {"request": pl.Int32, "position": pl.Int32}
    for m in methods:
        rows[f"accepted.{m}"] = [a for lists in accepted for a in lists[m]]
        rows[f"drafted.{m}"] = [d for lists in drafted for d in lists[m]] if drafted else [kmax] * len(rows["position"])
        types |= {f"accepted.{m}": pl.UInt8, f"drafted.{m}": pl.UInt8}
    kinds = kinds or {m: ("ngram" if m in ("ngram", "suffix") else "eagle3") for m in methods}
    return Bundle(meta(kinds, kmax), requests(lengths, prompts, **columns), pl.DataFrame(rows, schema=types))


def random_bundle(seed: int, count: int = 5, longest: int = 40, kmax: int = 6, methods: int = 2) -> Bundle:
    """Random outcomes within the schema's rules, short and empty drafts and full acceptance included."""
    rng = np.random.default_rng(seed)
    names = ["eagle3", "ngram", "draft_model"][:methods]
    accepted, drafted = [], []
    for _ in range(count):
        n = int(rng.integers(0, longest))
        left = np.arange(n, 0, -1)
        sent = {m: rng.integers(0, kmax + 1, n) if m == "ngram" else np.full(n, kmax) for m in names}
        got = {m: np.minimum(np.minimum(rng.geometric(0.4, n) - 1, sent[m]), left) for m in names}
        accepted.append({m: v.tolist() for m, v in got.items()})
        drafted.append({m: v.tolist() for m, v in sent.items()})
    accepted.append({m: [1, 0] for m in names})  # never nothing to replay
    drafted.append({m: [kmax, kmax] for m in names})
    count += 1
    workloads = [("a", "b")[i % 2] for i in range(count)]
    return bundle(accepted, drafted, kmax, prompts=rng.integers(1, 900, count).tolist(), workload=workloads)


def profile(sync: float = 0.0, tail_draft: bool = False, staircase: bool = False) -> CostProfile:
    """Linear costs, or a staircase with steps in tokens and a slope in context."""
    verify: Linear | Table = Linear(1.0, 0.01, 0.0001)
    if staircase:
        steps = tuple((1.0 + 0.3 * (t // 3), 1.4 + 0.3 * (t // 3)) for t in range(1, 19))
        verify = Table((1.0,), tuple(float(t) for t in range(1, 19)), (10.0, 500.0), (steps,))
    return CostProfile(
        "synthetic",
        "analytic",
        "tests",
        verify,
        {
            "eagle3": MethodCost(Linear(0.1, 0.05, 0.00001), overhead_s=0.03, sync_s=sync),
            "ngram": MethodCost(verify_share=0.01),
        },
        overhead_s=0.02,
        tail_draft=tail_draft,
    )
