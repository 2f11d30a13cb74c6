"""Atomic output: a file or directory appears whole, or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from apexsim.errors import UsageError


@dataclass(frozen=True)
class Kind:
    """A kind of output directory: how to tell an earlier one, and every name it may hold.

    Attributes:
        marker: The JSON file that tells it.
        schema: The value of ``schema`` in the marker.
        names: Files and folders it consists of.
    """

    marker: str
    schema: str
    names: frozenset[str]

    def check(self, target: Path) -> None:
        """Refuses to replace anything but an empty directory or an earlier output of this kind with nothing else in it.

        Raises:
            UsageError: ``target`` exists and is something else.
        """
        if not target.exists():
            return
        held = {path.name for path in target.iterdir()} if target.is_dir() else set()
        ours = target.is_dir() and (not held or (self._marked(target / self.marker) and held <= self.names))
        if not ours:
            foreign = sorted(held - self.names) or [self.marker if target.is_dir() else "a file"]
            raise UsageError(f"{target}: exists and is not an earlier output ({foreign[0]}); choose another --out")

    def _marked(self, marker: Path) -> bool:
        try:
            content = json.loads(marker.read_bytes())
        except (OSError, ValueError):
            return False
        return isinstance(content, dict) and content.get("schema") == self.schema


@contextmanager
def atomic_directory(target: Path, kind: Kind) -> Iterator[Path]:
    """Yields a scratch directory beside ``target`` that takes its place when the block ends without an error.

    Raises:
        UsageError: ``target`` exists and is not an earlier output of the kind, or cannot be written beside.
    """
    target = target.resolve()
    kind.check(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise UsageError(f"--out {target}: cannot be written: {error.strerror}") from error
    scratch.chmod(0o755)
    old = scratch.with_name(scratch.name + ".old")
    try:
        yield scratch
        if target.exists():
            kind.check(target)  # again: somebody may have put a file there meanwhile
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
