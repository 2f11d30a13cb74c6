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
from pathlib import Path

from apexsim import provenance, schema, traces
from apexsim.errors import UsageError
from apexsim.files import write_atomic
from apexsim.traces import Bundle
from real_runs import assemble, drafters, engine, models, prompts, recording
from real_runs.assemble import MeasuredRun
from real_runs.exactness import exactness
from real_runs.options import DTYPE, CollectOptions, check_options, command, fingerprint
from real_runs.plan import MAX_MODEL_LEN, TIMING_ROUNDS, Plan, make_plan
from real_runs.prompts import Prompt
from real_runs.recording import Progress


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
    for drafter in options.drafters:
        drafters.check(drafter, model)
    folder = recording.working_folder(options.out.absolute())
    recording.open_folder(folder, fingerprint(options, version, model), options.resume)
    rows, skipped = _prepare(folder, options, chosen, model)
    plan = make_plan(options, rows, model)
    for job in plan.jobs:
        recording.run_job(folder, job, Path(model).is_dir(), progress or (lambda name, done, total: None))
    bundle = traces.write(_assemble(folder, options, plan, rows, skipped, model), options.out)
    shutil.rmtree(folder)
    return bundle


def _prepare(
    folder: Path, options: CollectOptions, chosen: Sequence[Prompt], model: str
) -> tuple[list[Prompt], dict[str, int]]:
    """Tokenizes, drops prompts that do not fit, limits and splits, once per recording; a resumed one reads the result."""
    file = folder / recording.PROMPTS_FILE
    if not file.is_file():
        # A draft must fit too: near the limit vLLM would stop drafting for the whole batch.
        room = models.context_limit(model, MAX_MODEL_LEN) - options.max_tokens - options.kmax
        room = room if options.max_prompt_tokens is None else min(room, options.max_prompt_tokens)
        tokenized = prompts.tokenize(chosen, models.load_tokenizer(model))
        fitting = [prompt for prompt in tokenized if len(prompt.token_ids) <= room]
        skipped: dict[str, int] = {}
        for prompt in tokenized:
            if len(prompt.token_ids) > room:
                skipped[prompt.workload] = skipped.get(prompt.workload, 0) + 1
        if not fitting:
            raise UsageError(f"--prompts: every prompt is longer than the {room} tokens there is room for")
        kept = prompts.assign_splits(prompts.limit_per_workload(fitting, options.limit_per_workload))
        write_atomic(folder / "skipped.json", json.dumps(skipped).encode())
        write_atomic(file, json.dumps(prompts.to_json(kept)).encode())
    return prompts.from_json(json.loads(file.read_bytes())), json.loads((folder / "skipped.json").read_bytes())


def _assemble(
    folder: Path,
    options: CollectOptions,
    plan: Plan,
    rows: Sequence[Prompt],
    skipped: dict[str, int],
    model: str,
) -> Bundle:
    shadows = {method: recording.read_run(folder, job, "shadow") for method, job in plan.shadow.items()}
    texts = next(iter(shadows.values()))
    measured = [
        MeasuredRun(run, job.method, recording.read_run(folder, job, run.name))
        for job in plan.timing
        for run in job.runs
    ]
    prefill = recording.read_run(folder, plan.prefill, "prefill")
    copying = {drafter.name for drafter in options.drafters if drafter.kind in drafters.COPYING}
    positions = assemble.position_table(rows, shadows, copying)
    blocks, dropped = assemble.block_table(measured, texts)
    facts = recording.engine_facts(folder, plan.prefill)
    target, machine = models.facts(options.target), hardware()
    meta = {
        "schema": schema.SCHEMA,
        "name": options.out.name,
        "target": target,
        "methods": {drafter.name: drafters.facts(drafter, model, options.kmax) for drafter in options.drafters},
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
        "exactness": {m: exactness(measured, texts, shadows[m], positions, m) for m in options.methods},
        "blocks_dropped_after_divergence": dropped,
        "timing": {
            "requests": len(prompts.stratified(rows, options.timing_requests)),
            "rounds": TIMING_ROUNDS,
            "max_tokens": options.timing_tokens or options.max_tokens,
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
