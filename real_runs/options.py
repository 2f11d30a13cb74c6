"""What to record: the options of ``apexsim collect``, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apexsim import provenance, traces
from apexsim.errors import UsageError, choices
from real_runs import drafters, models
from real_runs.drafters import Drafter

ENGINES = ("vllm",)
DTYPE = "float32"
"""In bf16 the target's own argmax depends on how many tokens share a pass, and a replay would not be exact."""
KMAX_ALLOWED = 64


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
        max_prompt_tokens: Prompts longer than this are left out; None leaves out those that the model has no room for.
        seed: Seed of the random-depth run.
        resume: Go on with an interrupted recording.
        engine: The inference engine.
        draft_model: Drafter of method draft_model: a folder, a hub id, or ``layer-skip:L,L,...``.
        eagle3_model: Drafter of method eagle3.
        further_drafters: ``NAME=KIND:MODEL`` of methods beyond one per kind.
        timing_tokens: Output limit of the timed requests; None is that of all.
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
    max_prompt_tokens: int | None = None
    seed: int = 0
    resume: bool = False
    engine: str = "vllm"
    draft_model: str | None = None
    eagle3_model: str | None = None
    further_drafters: tuple[str, ...] = ()
    timing_tokens: int | None = None

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        own = {"draft_model": self.draft_model, "eagle3": self.eagle3_model}
        return drafters.choose(self.methods, own, self.further_drafters)


def check_options(options: CollectOptions) -> None:
    """Refuses options that cannot be recorded, before anything is loaded."""
    if options.engine not in ENGINES:
        raise UsageError(f"--engine {options.engine}: allowed: {choices(ENGINES)}")
    _ = options.drafters
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
        "--timing-tokens": options.max_tokens if options.timing_tokens is None else options.timing_tokens,
        "--batch-size": options.batch_size,
        "--limit-per-workload": 1 if options.limit_per_workload is None else options.limit_per_workload,
        "--max-prompt-tokens": 1 if options.max_prompt_tokens is None else options.max_prompt_tokens,
        "--timing-batches": min(options.timing_batches, default=0),
    }
    for name, value in positive.items():
        if value < 1:
            raise UsageError(f"{name} {value}: must be at least 1")
    traces.DIRECTORY.check(options.out)


def fingerprint(options: CollectOptions, engine_version: str, target: str) -> dict[str, Any]:
    """Everything that decides what is recorded: two recordings with the same can share parts.

    Args:
        options: What to record.
        engine_version: The engine's version.
        target: The resolved target.
    """
    files = {file.name: provenance.sha256(file) for file in options.prompts}
    left_out = ("prompts", "out", "resume", "draft_model", "eagle3_model", "further_drafters")
    rest = {key: value for key, value in vars(options).items() if key not in left_out}
    methods = {drafter.name: drafters.facts(drafter, target, options.kmax) for drafter in options.drafters}
    engine = {"vllm": engine_version, "dtype": DTYPE}
    return {**rest, "prompts": files, "methods": methods, "target_sha256": models.digest(target), **engine}


def command(options: CollectOptions) -> list[str]:
    """The command that records the same, files by their bare names: where they lay on one machine tells nothing."""
    target = str(models.facts(options.target)["name"])
    words = ["apexsim", "collect", "--target", target, "--methods", ",".join(options.methods), "--prompts"]
    words += [file.name for file in options.prompts]
    words += ["--out", options.out.name, "--max-tokens", str(options.max_tokens), "--kmax", str(options.kmax)]
    words += ["--timing-depths", ",".join(map(str, options.timing_depths))]
    if options.draft_model:
        words += ["--draft-model", models.display_name(options.draft_model)]
    if options.eagle3_model:
        words += ["--eagle3-model", models.display_name(options.eagle3_model)]
    for drafter in options.drafters:
        if drafter.name != drafter.kind:
            words += ["--drafter", f"{drafter.name}={drafter.kind}:{models.display_name(str(drafter.model))}"]
    words += ["--timing-requests", str(options.timing_requests), "--batch-size", str(options.batch_size)]
    words += ["--timing-batches", ",".join(map(str, options.timing_batches)), "--seed", str(options.seed)]
    if options.timing_tokens is not None:
        words += ["--timing-tokens", str(options.timing_tokens)]
    if options.limit_per_workload is not None:
        words += ["--limit-per-workload", str(options.limit_per_workload)]
    if options.max_prompt_tokens is not None:
        words += ["--max-prompt-tokens", str(options.max_prompt_tokens)]
    return words
