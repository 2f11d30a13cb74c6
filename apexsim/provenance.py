"""Where a result comes from: argument vector, version, git revision, checksums, time."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path


def version() -> str:
    """The installed version of ApexSim."""
    try:
        return metadata.version("apexsim")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def git_revision() -> str | None:
    """The revision of the checkout the code runs from, None outside one; ``-dirty`` if anything differs, new files too."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        revision, changes = (
            subprocess.run(
                ["git", "-C", str(root), *command], capture_output=True, text=True, timeout=10, check=True
            ).stdout
            for command in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return revision.strip() + ("-dirty" if changes.strip() else "")


def created() -> str:
    """Now, as ISO 8601 in UTC; SOURCE_DATE_EPOCH overrides it, so that a rebuild gives the same bytes."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    moment = datetime.fromtimestamp(int(epoch), UTC) if epoch else datetime.now(UTC)
    return moment.replace(microsecond=0).isoformat()


def argv() -> list[str]:
    """The command as given, the program by its bare name: an install path tells nothing about a result."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
