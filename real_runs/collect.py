"""Recording a trace bundle from live vLLM.

Engines, one process each: per method a shadow pass over all prompts (every position's draft); then, in rounds over a few
prompts, the method's real blocks at fixed and random depths and a plain engine's autoregressive steps; last the prefill
of every prompt.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apexsim import provenance, schema, traces
from apexsim.errors import UsageError, choices
from apexsim.files import write_atomic
from apexsim.traces import Bundle
from real_runs import assemble, engine, models, prompts, recording
from real_runs.assemble import MeasuredRun
from real_runs.parts import Job, Run
from real_runs.prompts import Prompt
from real_runs.recording import Progress

METHODS = ("ngram",)
ENGINES = ("vllm",)
DTYPE = "float32"
"""In bf16 the target's own argmax depends on how many tokens share a pass, and a replay would not be exact."""
MAX_MODEL_LEN = 8192
NGRAM_LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
KMAX_ALLOWED = 64
TIMING_ROUNDS = 3
"""Speed drifted by a quarter within minutes here; engines are timed in turn, this often."""


@dataclass(frozen=True)
class CollectOptions:
    """What to record.

    Attributes:
        target: A Hugging Face folder, a hub id, or ``smollm2-135m-instruct``.
        methods: Drafting methods.
        prompts: Prompt files, JSON lines.
        out: The bundle to write.
        max_tokens: Output limit of every request.
        kmax: Longest draft recorded.
        timing_depths: Fixed depths that are timed.
        timing_requests: How many prompts are timed, spread over the workloads.
        batch_size: Requests that run together in the shadow pass.
        timing_batches: Batch sizes that are timed.
        limit_per_workload: Prompts taken of each workload at most.
        seed: Seed of the random-depth run.
        resume: Go on with an interrupted recording.
        engine: The inference engine.
        draft_model: Drafter of method draft_model.
        eagle3_model: Drafter of method eagle3.
    """

    target: str
    methods: tuple[str, ...]
    prompts: tuple[Path, ...]
    out: Path
    max_tokens: int = 256
    kmax: int = 16
    timing_depths: tuple[int, ...] = (0, 1, 2, 4, 8, 16)
    timing_requests: int = 12
    batch_size: int = 8
    timing_batches: tuple[int, ...] = (1,)
    limit_per_workload: int | None = None
    seed: int = 0
    resume: bool = False
    engine: str = "vllm"
    draft_model: str | None = None
    eagle3_model: str | None = None


@dataclass(frozen=True)
class Plan:
    """The jobs of a recording: a shadow job per method, timing jobs of the methods and the plain engine in turn, prefill."""

    shadow: dict[str, Job]
    timing: tuple[Job, ...]
    prefill: Job

    @property
    def jobs(self) -> tuple[Job, ...]:
        return (*self.shadow.values(), *self.timing, self.prefill)


def collect(options: CollectOptions, progress: Progress | None = None) -> Bundle:
    """Records a bundle and writes it to ``options.out``.

    Parts are kept in ``<out>.partial`` until the bundle stands, so that ``resume`` can go on after a kill.

    Args:
        options: What to record.
        progress: Called with the name of the pass, the requests it has finished, and their number.

    Raises:
        UsageError: The options do not fit together, or not with what an interrupted recording left.
        ApexSimError: The engine is missing, of an untried version, or failed.
    """
    check_options(options)
    chosen = prompts.read(options.prompts)
    version = engine.installed_version()
    model = models.resolve(options.target)
    folder = recording.working_folder(options.out.absolute())
    recording.open_folder(folder, fingerprint(options, version), options.resume)
    rows, skipped = _prepare(folder, options, chosen, model)
    plan = make_plan(options, rows, model)
    for job in plan.jobs:
        recording.run_job(folder, job, Path(model).is_dir(), progress or (lambda name, done, total: None))
    bundle = traces.write(_assemble(folder, options, plan, rows, skipped), options.out)
    shutil.rmtree(folder)
    return bundle


def check_options(options: CollectOptions) -> None:
    """Refuses options that cannot be recorded, before anything is loaded."""
    if options.engine not in ENGINES:
        raise UsageError(f"--engine {options.engine}: allowed: {choices(ENGINES)}")
    if not options.methods or len(set(options.methods)) != len(options.methods):
        raise UsageError(f"--methods: name each method once; allowed: {choices(METHODS)}")
    for method in options.methods:
        if method not in METHODS:
            raise UsageError(f"--methods {method}: cannot be recorded yet; allowed: {choices(METHODS)}")
    if options.draft_model or options.eagle3_model:
        raise UsageError("--draft-model and --eagle3-model belong to methods that cannot be recorded yet")
    if not options.prompts:
        raise UsageError("--prompts: give at least one file")
    if not 1 <= options.kmax <= KMAX_ALLOWED:
        raise UsageError(f"--kmax {options.kmax}: allowed: 1..{KMAX_ALLOWED}")
    for depth in options.timing_depths:
        if not 0 <= depth <= options.kmax:
            raise UsageError(f"--timing-depths {depth}: allowed: 0..{options.kmax} (--kmax)")
    positive = {
        "--max-tokens": options.max_tokens,
        "--timing-requests": options.timing_requests,
        "--batch-size": options.batch_size,
        "--limit-per-workload": 1 if options.limit_per_workload is None else options.limit_per_workload,
        "--timing-batches": min(options.timing_batches, default=0),
    }
    for name, value in positive.items():
        if value < 1:
            raise UsageError(f"{name} {value}: must be at least 1")
    traces.DIRECTORY.check(options.out)


def fingerprint(options: CollectOptions, engine_version: str) -> dict[str, Any]:
    """Everything that decides what is recorded: two recordings with the same can share parts."""
    files = {file.name: provenance.sha256(file) for file in options.prompts}
    left_out = ("prompts", "out", "resume")
    rest = {key: value for key, value in vars(options).items() if key not in left_out}
    return {**rest, "prompts": files, "vllm": engine_version, "ngram": NGRAM_LOOKUP, "dtype": DTYPE}


def _prepare(
    folder: Path, options: CollectOptions, chosen: Sequence[Prompt], model: str
) -> tuple[list[Prompt], dict[str, int]]:
    """Tokenizes, drops prompts that do not fit, limits and splits, once per recording; a resumed one reads the result."""
    file = folder / recording.PROMPTS_FILE
    if not file.is_file():
        room = models.context_limit(model, MAX_MODEL_LEN) - options.max_tokens
        tokenized = prompts.tokenize(chosen, models.load_tokenizer(model))
        fitting = [prompt for prompt in tokenized if len(prompt.token_ids) <= room]
        skipped: dict[str, int] = {}
        for prompt in tokenized:
            if len(prompt.token_ids) > room:
                skipped[prompt.workload] = skipped.get(prompt.workload, 0) + 1
        if not fitting:
            raise UsageError(f"--prompts: every prompt is longer than the {room} tokens the model has room for")
        kept = prompts.assign_splits(prompts.limit_per_workload(fitting, options.limit_per_workload))
        write_atomic(folder / "skipped.json", json.dumps(skipped).encode())
        write_atomic(file, json.dumps(prompts.to_json(kept)).encode())
    return prompts.from_json(json.loads(file.read_bytes())), json.loads((folder / "skipped.json").read_bytes())


def make_plan(options: CollectOptions, rows: Sequence[Prompt], model: str) -> Plan:
    """The jobs and runs of a recording."""
    everything = tuple(range(len(rows)))
    timed = prompts.stratified(rows, options.timing_requests)
    length = models.context_limit(model, MAX_MODEL_LEN)

    def job(name: str, method: str, runs: list[Run]) -> Job:
        return Job(name, model, DTYPE, length, method, speculative(method, options.kmax), options.seed, tuple(runs))

    def timing_job(number: int, method: str, rows_timed: tuple[int, ...]) -> Job:
        runs: list[Run] = []
        for batch in options.timing_batches:
            rest = (batch, options.max_tokens, rows_timed)
            if method:
                fixed = [(k, f"{method}-k{k}-b{batch}", f"fixed:{method}:{k}") for k in options.timing_depths]
                runs += [Run(name, policy, "fixed", k, *rest) for k, name, policy in fixed]
                runs.append(Run(f"{method}-random-b{batch}", f"random:{method}", "random", options.kmax, *rest))
            else:
                runs.append(Run(f"ar-b{batch}", "ar", "fixed", 0, *rest))
        return job(f"{method or 'plain'}-{number}", method, runs)

    # Engines cannot take turns within a process, so they take turns in rounds, each over its share of the timed prompts.
    shares = [timed[r::TIMING_ROUNDS] for r in range(TIMING_ROUNDS)]
    timing = [
        timing_job(number, method, share)
        for number, share in enumerate(filter(None, shares), start=1)
        for method in (*options.methods, "")
    ]
    shadow = {}
    for method in options.methods:
        run = Run("shadow", "", "shadow", options.kmax, options.batch_size, options.max_tokens, everything)
        shadow[method] = job(f"shadow-{method}", method, [run])
    # Prefill is timed alone: in a shadow batch it shares its step with the decoding of others.
    prefill = job("prefill", "", [Run("prefill", "ar", "fixed", 0, 1, 1, everything)])
    return Plan(shadow, tuple(timing), prefill)


def speculative(method: str, kmax: int) -> dict[str, Any] | None:
    """The speculative_config of vLLM for a method; None for a plain engine."""
    return {"method": "ngram", "num_speculative_tokens": kmax, **NGRAM_LOOKUP} if method else None


def _assemble(
    folder: Path, options: CollectOptions, plan: Plan, rows: Sequence[Prompt], skipped: dict[str, int]
) -> Bundle:
    shadows = {method: recording.read_run(folder, job, "shadow") for method, job in plan.shadow.items()}
    texts = next(iter(shadows.values()))
    measured = [
        MeasuredRun(run, job.method, recording.read_run(folder, job, run.name))
        for job in plan.timing
        for run in job.runs
    ]
    prefill = {part.request_id: part.prefill_s for part in recording.read_run(folder, plan.prefill, "prefill")}
    positions = assemble.position_table(rows, shadows)
    blocks, dropped = assemble.block_table(measured, texts)
    facts = recording.engine_facts(folder, plan.prefill)
    target, machine = models.facts(options.target), hardware()
    meta = {
        "schema": schema.SCHEMA,
        "name": options.out.name,
        "target": target,
        "methods": {
            m: {"kind": m, "settings": {"num_speculative_tokens": options.kmax, **NGRAM_LOOKUP}}
            for m in options.methods
        },
        "engine": {"name": options.engine, "version": facts["engine"], "torch": facts["torch"], "tail_draft": True},
        "hardware": machine,
        "dtype": DTYPE,
        "sampling": {"temperature": 0.0, "max_tokens": options.max_tokens},
        "kmax": options.kmax,
        "seed": options.seed,
        "argv": command(options),
        "version": provenance.version(),
        "git": provenance.git_revision(),
        "created": provenance.created(),
        "prompts": prompts.sources(options.prompts, rows),
        "prompts_skipped_too_long": skipped,
        "shadow_batch_size": options.batch_size,
        "exactness": {m: assemble.exactness(measured, texts, positions, m) for m in options.methods},
        "blocks_dropped_after_divergence": dropped,
        "timing": {
            "requests": len(prompts.stratified(rows, options.timing_requests)),
            "rounds": TIMING_ROUNDS,
            "foreign_load": assemble.foreign_load(measured),
            "measured_again_above_cores": engine.QUIET_CORES,
            "attempts": engine.ATTEMPTS,
        },
        "seconds": {name: value for job in plan.jobs for name, value in recording.seconds(folder, job).items()},
        "notes": [
            "splits are 60/20/20 by a hash of the source group, stratified by workload",
            f"recorded on {machine}",
            *([str(target["note"])] if "note" in target else []),
        ],
    }
    requests = assemble.request_table(rows, texts, prefill, options.max_tokens)
    return Bundle(meta, requests, positions, blocks)


def command(options: CollectOptions) -> list[str]:
    """The command that records the same, files by their bare names: where they lay on one machine tells nothing."""
    target = str(models.facts(options.target)["name"])
    words = ["apexsim", "collect", "--target", target, "--methods", ",".join(options.methods), "--prompts"]
    words += [file.name for file in options.prompts]
    words += ["--out", options.out.name, "--max-tokens", str(options.max_tokens), "--kmax", str(options.kmax)]
    words += ["--timing-depths", ",".join(map(str, options.timing_depths))]
    words += ["--timing-requests", str(options.timing_requests), "--batch-size", str(options.batch_size)]
    words += ["--timing-batches", ",".join(map(str, options.timing_batches)), "--seed", str(options.seed)]
    if options.limit_per_workload is not None:
        words += ["--limit-per-workload", str(options.limit_per_workload)]
    return words


def hardware() -> str:
    """The processor, as its maker names it, and the cores this process may use."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        name = names[0] if names else name
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"CPU {name}, {cores} cores"
