"""Atomic output: a file or directory appears whole, or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from apexsim.errors import UsageError


def check_replaceable(target: Path, marker: str) -> None:
    """Refuses to write over anything but an empty directory or an earlier output of the same kind, which holds ``marker``.

    Raises:
        UsageError: ``target`` exists and is something else.
    """
    if target.exists() and (not target.is_dir() or (any(target.iterdir()) and not (target / marker).is_file())):
        raise UsageError(f"{target}: exists and is not an earlier output (no {marker} in it); choose another --out")


@contextmanager
def atomic_directory(target: Path, marker: str) -> Iterator[Path]:
    """Yields a scratch directory beside ``target`` that takes its place when the block ends without an error.

    Args:
        target: The directory to make; see ``check_replaceable``.
        marker: Name of the file that tells an earlier output.

    Raises:
        UsageError: ``target`` exists and is something else.
    """
    target = target.absolute()
    check_replaceable(target, marker)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    scratch.chmod(0o755)
    try:
        yield scratch
        old = scratch.with_name(scratch.name + ".old")
        if target.exists():
            target.rename(old)
        scratch.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_atomic(path: Path, data: bytes) -> None:
    """Writes ``data`` to ``path`` through a scratch file in the same folder."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_bytes(data)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
