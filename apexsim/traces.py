"""Trace bundles on disk: load, write, list. What makes a bundle valid is in ``apexsim.checks``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from apexsim import schema
from apexsim.checks import check_bundle
from apexsim.errors import BundleError, choices
from apexsim.files import Kind, atomic_directory
from apexsim.provenance import sha256

BUNDLED = Path(__file__).parent / "bundles"
DIRECTORY = Kind("meta.json", schema.SCHEMA, frozenset({"meta.json", *(f"{table}.parquet" for table in schema.TABLES)}))
"""What a bundle looks like on disk."""


@dataclass(frozen=True)
class Bundle:
    """A trace in memory: ``meta`` plus the three tables of ``apexsim.schema``.

    Attributes:
        meta: The content of ``meta.json``.
        requests: One row per request.
        positions: One row per (request, p); no rows in a blocks-only trace.
        blocks: One row per measured block; may have no rows.
        path: Where it was read from; None for a bundle made in memory.
    """

    meta: dict[str, Any]
    requests: pl.DataFrame
    positions: pl.DataFrame = field(default_factory=lambda: schema.empty("positions"))
    blocks: pl.DataFrame = field(default_factory=lambda: schema.empty("blocks"))
    path: Path | None = None

    @property
    def name(self) -> str:
        return str(self.meta["name"])

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(self.meta["methods"])

    @property
    def kmax(self) -> int:
        return int(self.meta["kmax"])

    @property
    def every_position(self) -> bool:
        """True if each method drafted at every position; False if only blocks of ordinary runs are known."""
        return self.positions.height > 0

    @property
    def signals(self) -> set[str]:
        """What the trace records, by column name of the schema without the method: what a policy may need."""
        prompts = {c.name for c in schema.REQUESTS if not c.required and c.name in self.requests.columns}
        held = {name for name in prompts if self.requests[name].null_count() < self.requests.height}
        return {"accepted", "drafted"} | held | {column.split(".")[0] for column in self.positions.columns}

    @property
    def digest(self) -> str:
        """SHA-256 over ``meta.json``, which holds the checksums of the tables: it identifies the whole bundle."""
        return hashlib.sha256(_render(self.meta)).hexdigest()

    @property
    def tables(self) -> dict[str, pl.DataFrame]:
        return {"requests": self.requests, "positions": self.positions, "blocks": self.blocks}


def split_of(group: str) -> str:
    """The split of a source group, 60/20/20 by a hash of its name alone. Recordings stratify it: ``real_runs.prompts``."""
    share = int.from_bytes(hashlib.sha256(group.encode()).digest()[:8], "big") / 2**64
    return "train" if share < 0.6 else "validation" if share < 0.8 else "test"


def bundled() -> list[str]:
    """Names of the traces that ship with ApexSim."""
    return sorted(p.parent.name for p in BUNDLED.glob("*/meta.json"))


def locate(name: str | Path) -> Path:
    """The directory of a bundle given by path or by bundled name."""
    path = Path(name)
    if path.is_dir():
        return path
    if str(name) in bundled():
        return BUNDLED / str(name)
    raise BundleError(f"{name}: no such bundle; give a directory or one of: {choices(bundled())}")


def load(name: str | Path) -> Bundle:
    """Reads and checks a bundle.

    Args:
        name: A directory, or the name of a bundled trace.

    Raises:
        BundleError: It is missing, damaged or out of range; the message names file, column and row.
    """
    path = locate(name)
    meta = _read_meta(path / "meta.json")
    tables = {}
    for table in schema.TABLES:
        file = path / f"{table}.parquet"
        expected = meta["checksums"].get(file.name)
        if expected is None:
            if table == "requests":
                raise BundleError(f"{path / 'meta.json'}: checksums has no entry for {file.name}")
            continue
        if not file.is_file():
            raise BundleError(f"{file}: missing, though meta.json lists it")
        if sha256(file) != expected:
            raise BundleError(f"{file}: damaged: its SHA-256 is not the one in meta.json")
        try:
            tables[table] = pl.read_parquet(file)
        except Exception as error:
            raise BundleError(f"{file}: not readable as Parquet: {str(error).splitlines()[0]}") from error
    bundle = Bundle(meta, path=path, **tables)
    check_bundle(meta, bundle.tables, path)
    return bundle


def write(bundle: Bundle, out: Path) -> Bundle:
    """Checks a bundle and writes it as a directory, atomically.

    Args:
        bundle: What to write; ``checksums`` in its meta is filled in here.
        out: The directory. An earlier bundle there is replaced.

    Returns:
        The bundle as it now stands on disk.
    """
    meta = {**bundle.meta, "checksums": {}}
    check_bundle(meta, bundle.tables, out)
    with atomic_directory(out, DIRECTORY) as scratch:
        for table, frame in bundle.tables.items():
            if frame.height or table == "requests":
                file = scratch / f"{table}.parquet"
                frame.write_parquet(file, compression="zstd", compression_level=19, statistics=False)
                meta["checksums"][file.name] = sha256(file)
        (scratch / "meta.json").write_bytes(_render(meta))
    return Bundle(meta, bundle.requests, bundle.positions, bundle.blocks, out)


def _read_meta(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise BundleError(f"{file}: missing: not a trace bundle")
    raw = file.read_bytes()
    try:
        meta = json.loads(raw)
    except ValueError as error:
        raise BundleError(f"{file}: damaged: not JSON: {error}") from error
    if not isinstance(meta, dict) or meta.get("schema") != schema.SCHEMA:
        found = meta.get("schema") if isinstance(meta, dict) else type(meta).__name__
        raise BundleError(f"{file}: schema is {found!r}; this version reads {schema.SCHEMA!r}")
    missing = [key for key in schema.META_KEYS if key not in meta]
    if missing:
        raise BundleError(f"{file}: missing key {missing[0]!r}")
    if raw != _render(meta):
        raise BundleError(f"{file}: damaged: its content does not match its own checksum (meta_sha256)")
    return meta


def _render(meta: Mapping[str, Any]) -> bytes:
    """The one way meta.json is written: sorted, indented, with a digest of the rest, so that any changed byte shows."""
    body = {key: value for key, value in meta.items() if key != "meta_sha256"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**body, "meta_sha256": digest}, sort_keys=True, indent=1) + "\n").encode()
