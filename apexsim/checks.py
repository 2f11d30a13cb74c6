"""What makes a trace bundle valid. Every failure names file, column and row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from apexsim import schema
from apexsim.embedding import DIMENSIONS
from apexsim.errors import BundleError, choices

Tables = Mapping[str, pl.DataFrame]


def check_bundle(meta: Mapping[str, Any], tables: Tables, path: Path) -> None:
    """Checks meta, types, ranges and the relations between the tables.

    Args:
        meta: The content of meta.json.
        tables: ``requests``, ``positions`` and ``blocks``; the last two may have no rows.
        path: Its directory, for the messages.

    Raises:
        BundleError: The first thing found wrong.
    """
    _check_meta(meta, path / "meta.json")
    requests, positions, blocks = (tables[table] for table in schema.TABLES)
    per_method = tuple(column for method in meta["methods"] for column in schema.method_columns(method))
    _check_columns(requests, schema.REQUESTS, path / "requests.parquet")
    _check_columns(positions, schema.POSITIONS + (per_method if positions.height else ()), path / "positions.parquet")
    _check_columns(blocks, schema.BLOCKS, path / "blocks.parquet")
    _check_requests(requests, path / "requests.parquet")
    if positions.height:
        _check_positions(meta, requests, positions, path / "positions.parquet")
    if blocks.height:
        _check_blocks(meta, requests, blocks, path / "blocks.parquet")


def _check_meta(meta: Mapping[str, Any], file: Path) -> None:
    shapes = {
        "name": str,
        "engine": dict,
        "sampling": dict,
        "checksums": dict,
        "exactness": dict,
        "notes": list,
        "import": dict,
    }
    for key, kind in shapes.items():
        if key in meta and not isinstance(meta[key], kind):
            raise BundleError(f"{file}: {key} must be a {kind.__name__}, is {meta[key]!r}")
    if not all(isinstance(note, str) for note in meta.get("notes", [])):
        raise BundleError(f"{file}: notes must be a list of texts")
    kmax = meta["kmax"]
    if not isinstance(kmax, int) or not 1 <= kmax <= schema.KMAX_LIMIT:
        raise BundleError(f"{file}: kmax is {kmax!r}; allowed: 1..{schema.KMAX_LIMIT}")
    methods = meta["methods"]
    if not isinstance(methods, dict):
        raise BundleError(f"{file}: methods must map each method name to its kind and settings")
    for name, method in methods.items():
        if not isinstance(method, dict) or "kind" not in method:
            raise BundleError(f"{file}: methods.{name}: missing key 'kind'")
        if not name or any(c in name for c in ":@,. "):
            raise BundleError(f"{file}: method name {name!r} must not hold any of ':@,.' or a space")


def _check_columns(frame: pl.DataFrame, columns: tuple[schema.Column, ...], file: Path) -> None:
    for column in columns:
        if column.name not in frame.columns:
            if column.required:
                raise BundleError(f"{file}: missing column {column.name!r} ({column.doc})")
            continue
        series = frame[column.name]
        if series.dtype != column.dtype:
            raise BundleError(f"{file}: column {column.name!r} is {series.dtype}; expected {column.dtype}")
        if not column.nullable and series.null_count():
            _fail(file, column.name, series.is_null(), series, "must not be null")
        if column.values is not None:
            allowed = choices(column.values)
            _fail_any(file, column.name, ~series.is_in(column.values), series, f"allowed: {allowed}")
        if series.dtype.is_float():
            _fail_any(file, column.name, ~series.is_finite(), series, "must be a finite number")
        if column.low is not None:
            _fail_any(file, column.name, series < column.low, series, f"must be at least {column.low:g}")
        if column.high is not None:
            _fail_any(file, column.name, series > column.high, series, f"must be at most {column.high:g}")


def _check_requests(requests: pl.DataFrame, file: Path) -> None:
    if not requests.height:
        raise BundleError(f"{file}: no requests: the bundle is empty")
    ids = requests["request_id"]
    _fail_any(file, "request_id", ids.is_duplicated(), ids, "must be unique")
    over = requests["output_tokens"] > requests["max_tokens"]
    _fail_any(file, "output_tokens", over, requests["output_tokens"], "must not exceed max_tokens")
    split_groups = requests.group_by("source_group").agg(pl.col("split").n_unique()).filter(pl.col("split") > 1)
    if split_groups.height:
        group = split_groups["source_group"].sort()[0]
        raise BundleError(f"{file}: column 'split': source group {group!r} lies in more than one split")
    if "prompt_embedding" in requests.columns:
        embedding = requests["prompt_embedding"]
        sizes = embedding.list.len()
        _fail_any(file, "prompt_embedding", sizes != DIMENSIONS, sizes, f"numbers in the list: must be {DIMENSIONS}")
        finite = embedding.list.eval(pl.element().is_finite()).list.all()
        _fail_any(file, "prompt_embedding", ~finite, sizes, "numbers in the list: all must be finite")


def _check_positions(meta: Mapping[str, Any], requests: pl.DataFrame, rows: pl.DataFrame, file: Path) -> None:
    lengths = requests["output_tokens"].to_numpy().astype(np.int64)
    counts = np.maximum(lengths - 1, 0)
    request = np.repeat(np.arange(lengths.size), counts)
    position = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + 1
    if rows.height != request.size:
        raise BundleError(f"{file}: {rows.height} rows; the output lengths in requests.parquet need {request.size}")
    for name, expected in (("request", request), ("position", position)):
        wrong = pl.Series(rows[name].to_numpy() != expected)
        _fail_any(file, name, wrong, rows[name], "rows must be p = 1..T-1 of each request, in order")
    left = pl.Series(lengths[request] - position)
    for method in meta["methods"]:
        accepted, drafted = rows[f"accepted.{method}"], rows[f"drafted.{method}"]
        _fail_any(file, drafted.name, drafted > meta["kmax"], drafted, f"must be at most kmax {meta['kmax']}")
        _fail_any(file, accepted.name, accepted > drafted, accepted, f"must be at most {drafted.name}")
        _fail_any(file, accepted.name, accepted > left, accepted, "must be at most T - p, the tokens that follow")
        for column in schema.DRAFT_SIGNALS:
            _check_draft_signal(rows, f"{column}.{method}", drafted, exact=column != "draft_kl", file=file)
        one_null = accepted.is_null() != drafted.is_null()
        _fail_any(file, accepted.name, one_null, accepted, f"must be null exactly where {drafted.name} is")


def _check_draft_signal(rows: pl.DataFrame, name: str, drafted: pl.Series, exact: bool, file: Path) -> None:
    if name not in rows.columns:
        return
    lengths = rows[name].list.len().cast(pl.Int64)
    drafted = drafted.cast(pl.Int64)
    wrong = (lengths != drafted) if exact else (lengths > drafted)
    rule = "one value per draft token" if exact else "at most one value per draft token"
    _fail_any(file, name, wrong, lengths, f"values in the list: must be {rule}, {drafted.name}")
    nulls = rows[name].list.eval(pl.element().is_null()).list.any()
    _fail_any(file, name, nulls, lengths, "values in the list: none of them may be null")


def _check_blocks(meta: Mapping[str, Any], requests: pl.DataFrame, blocks: pl.DataFrame, file: Path) -> None:
    lengths = requests["output_tokens"]
    unknown = blocks["request"] >= lengths.len()
    _fail_any(file, "request", unknown, blocks["request"], f"must be below the number of requests {lengths.len()}")
    names = ("", *meta["methods"])
    known = blocks["method"].is_in(names)
    _fail_any(file, "method", ~known, blocks["method"], f"allowed: {choices(repr(n) for n in names)}")
    left = lengths.gather(blocks["request"]) - blocks["position"]
    _fail_any(file, "position", left < 1, blocks["position"], "must be below output_tokens")
    for small, large in (("accepted", "drafted"), ("drafted", "drafter_steps"), ("drafter_steps", "depth")):
        _fail_any(file, small, blocks[small] > blocks[large], blocks[small], f"must be at most {large}")
    most = pl.select(pl.min_horizontal(blocks["accepted"] + 1, left)).to_series()
    _fail_any(file, "emitted", blocks["emitted"] != most, blocks["emitted"], "must be min(accepted + 1, T - p)")
    _fail_any(file, "verify_s", blocks["verify_s"] <= 0, blocks["verify_s"], "must be positive seconds")


def _fail_any(file: Path, column: str, wrong: pl.Series, values: pl.Series, rule: str) -> None:
    if wrong.any():
        _fail(file, column, wrong, values, rule)


def _fail(file: Path, column: str, wrong: pl.Series, values: pl.Series, rule: str) -> None:
    row = int(wrong.fill_null(False).arg_true()[0])
    raise BundleError(f"{file}: column {column!r}, row {row}: {values[row]!r}: {rule}")
