"""Public trace formats. Each file of this folder turns one format into a bundle; ``FORMATS`` says what each expects."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from apexsim import schema
from apexsim.errors import ImportFormatError, UsageError, choices
from apexsim.provenance import argv, created
from apexsim.traces import Bundle

Read = Callable[[Sequence[Path], str], Bundle]


@dataclass(frozen=True)
class Format:
    """A public format: the module that reads it and what it wants."""

    name: str
    module: str
    expects: str


FORMATS = {
    f.name: f
    for f in (
        Format(
            "specdecode-bench",
            "apexsim.importers.specdecode_bench",
            "combined_<workload>*.jsonl of SpecDecode-Bench (id, prompt_len, gen_len, acc_eagle, acc_ngram) and, optionally, "
            "combined_<workload>*.parquet with the token ids (id, prompt_token_ids, generated_token_ids)",
        ),
        Format(
            "rounds-jsonl",
            "apexsim.importers.rounds_jsonl",
            "<run>.rounds.jsonl with one measured block a line; <run>.samples.jsonl and <run>.summary.json beside it",
        ),
        Format(
            "eagle-lossy",
            "apexsim.importers.eagle_lossy",
            "<workload>.strict.jsonl with one request a line (accepted and emitted per round); lossless arms only",
        ),
        Format(
            "vllm-metrics",
            "apexsim.importers.vllm_metrics",
            "<workload>.<method>.jsonl with one response of vLLM's OpenAI-compatible server a line, served with "
            "--per-request-spec-decode-metrics detailed; methods: ngram, suffix, draft_model, eagle3",
        ),
    )
}


def import_trace(name: str, paths: Sequence[Path], out: Path) -> Bundle:
    """Reads files of a public format as a bundle named after ``out``; what was clipped or dropped is in meta ``import``.

    Raises:
        UsageError: Unknown format or no such file.
        ImportFormatError: A file is not of the format; the message names file and line.
    """
    if name not in FORMATS:
        raise UsageError(f"format {name!r} is unknown; allowed: {choices(FORMATS)}")
    for path in paths:
        if not path.is_file():
            raise UsageError(f"{path}: no such file; {name} expects {FORMATS[name].expects}")
    read: Read = importlib.import_module(FORMATS[name].module).read
    return read(paths, out.name)


def json_lines(path: Path, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file that has these keys in every line.

    Raises:
        ImportFormatError: A line is not a JSON object or lacks a key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ImportFormatError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not any(line.strip() for line in lines):
        raise ImportFormatError(f"{path}: empty")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ImportFormatError(f"{path}, line {number}: not JSON: {error}") from error
        for key in keys:
            if not isinstance(row, dict) or key not in row:
                raise ImportFormatError(f"{path}, line {number}: missing key {key!r}")
        yield row


def whole(row: dict[str, Any], key: str, where: str, low: int = 0, high: int = 2**31 - 1) -> int:
    """A whole number of a row within bounds; a JSON ``3.0``, ``"3"`` or ``true`` is none."""
    value = row.get(key)
    if type(value) is not int or not low <= value <= high:
        raise ImportFormatError(f"{where}: {key} is {value!r}; must be a whole number in {low}..{high}")
    return value


def wholes(values: Any, where: str, low: int = 0, high: int = 2**31 - 1) -> np.ndarray:
    """(n,) int64 of a list of whole numbers within bounds."""
    if not isinstance(values, list) or any(type(value) is not int or not low <= value <= high for value in values):
        raise ImportFormatError(f"{where}: must be a list of whole numbers in {low}..{high}")
    return np.array(values, dtype=np.int64)


def seconds(row: dict[str, Any], key: str, where: str) -> float:
    """Milliseconds of a row, not negative, as seconds."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise ImportFormatError(f"{where}: {key} is {value!r}; must be non-negative milliseconds")
    return value / 1e3


def frame(table: str, rows: Sequence[dict[str, Any]]) -> pl.DataFrame:
    """A table of the schema from rows of dicts; columns that no row has are left out if optional, else null."""
    columns = {c.name: c.dtype for c in schema.TABLES[table] if c.required or (rows and c.name in rows[0])}
    return pl.DataFrame(rows, schema=columns)


def new_meta(name: str) -> dict[str, Any]:
    """The keys of meta.json that every import fills in the same way."""
    return {"schema": schema.SCHEMA, "name": name, "checksums": {}, "argv": argv(), "created": created()}
