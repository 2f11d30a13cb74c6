"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("APEXSIM_SHARED", Path(__file__).parent.parent.parent / "shared"))


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """The folder of public traces that are not part of the repository."""
    folder = SHARED / "data" / "traces"
    if not folder.is_dir():
        pytest.skip("skipped: needs shared data")
    return folder


@pytest.fixture(scope="session")
def h100_bundles(shared_traces: Path) -> dict:
    """The public H100 lists, imported: gsm8k and sharegpt apart, with tokens."""
    from apexsim.importers import import_trace

    folder = shared_traces / "specdecode_bench_h100"
    return {
        name: import_trace(
            "specdecode-bench",
            [folder / f"combined_{name}.compact.jsonl", folder / f"combined_{name}.tokens.parquet"],
            Path(name),
        )
        for name in ("gsm8k", "sharegpt")
    }
