"""The working folder of a recording, ``<out>.partial``: its fingerprint, its jobs, and the engine processes that do them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from apexsim.errors import ApexSimError, UsageError
from apexsim.files import write_atomic
from real_runs import engine
from real_runs.parts import Job, Part, part_path, read_part

Progress = Callable[[str, int, int], None]
"""progress(pass name, requests done, requests in all)."""

FINGERPRINT_FILE = "options.json"
PROMPTS_FILE = "prompts.json"
_POLL_S = 0.5


def working_folder(out: Path) -> Path:
    """Where the parts of a recording lie until the bundle is written."""
    return out.with_name(out.name + ".partial")


def open_folder(folder: Path, fingerprint: Mapping[str, Any], resume: bool) -> None:
    """Makes the working folder, or takes up the one an interrupted recording left.

    Args:
        folder: The folder, an absolute path.
        fingerprint: Everything that decides what is recorded.
        resume: Whether to go on with an earlier recording.

    Raises:
        UsageError: One is left over and ``resume`` is not given, or it was made with other options.
    """
    file = folder / FINGERPRINT_FILE
    wanted = json.loads(json.dumps(fingerprint))
    if not folder.exists():
        folder.mkdir(parents=True)
        write_atomic(file, json.dumps(wanted, indent=1).encode())
        return
    if not resume:
        raise UsageError(f"{folder}: left by an interrupted recording; give --resume to go on with it, or delete it")
    found = json.loads(file.read_bytes()) if file.is_file() else {}
    different = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))
    if different:
        raise UsageError(
            f"{folder}: was recorded with another {', '.join(different)}; give the same, or delete the folder"
        )


def run_job(folder: Path, job: Job, local_model: bool, progress: Progress) -> None:
    """Does a job in an engine process of its own, unless it is done; tells how many requests of it are.

    Raises:
        ApexSimError: The engine failed. The parts it finished stay for ``--resume``.
    """
    parts = folder / job.name
    parts.mkdir(exist_ok=True)
    wanted = [part_path(parts, run.name, row) for run in job.runs for row in run.requests]
    if (parts / engine.DONE_FILE).is_file() and all(path.is_file() for path in wanted):
        progress(job.name, len(wanted), len(wanted))
        return
    job_file, error_file, log_file = folder / f"{job.name}.json", parts / engine.ERROR_FILE, folder / f"{job.name}.log"
    job.write(job_file)
    error_file.unlink(missing_ok=True)
    # -P: nothing in the working directory may shadow a package.
    command = [sys.executable, "-P", "-m", "real_runs.engine", str(job_file), str(folder / PROMPTS_FILE), str(parts)]
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            command,
            env=engine.environment(local_model),
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            while process.poll() is None:
                progress(job.name, sum(path.is_file() for path in wanted), len(wanted))
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        reason = error_file.read_text() if error_file.is_file() else f"exit status {process.returncode}"
        raise ApexSimError(
            f"the engine of pass {job.name!r} failed: {reason} (log: {log_file}; --resume goes on after it)"
        )
    progress(job.name, len(wanted), len(wanted))


def read_run(folder: Path, job: Job, run_name: str) -> tuple[Part, ...]:
    """The parts of one run, in the order of its requests."""
    run = next(run for run in job.runs if run.name == run_name)
    return tuple(read_part(part_path(folder / job.name, run.name, row)) for row in run.requests)


def seconds(folder: Path, job: Job) -> dict[str, float]:
    """Seconds a job spent, by run, and on start-up and warm-up; interrupted sessions included."""
    spent = json.loads((folder / job.name / engine.SECONDS_FILE).read_bytes())
    return {f"{job.name}/{name}": round(value, 2) for name, value in spent.items()}


def engine_facts(folder: Path, job: Job) -> dict[str, str]:
    """Versions the engine process of a finished job reported."""
    return dict(json.loads((folder / job.name / engine.DONE_FILE).read_bytes()))
