"""``apexsim collect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from apexsim.cli.output import Quiet, names, note, numbers, progress


def collect(
    target: Annotated[str, typer.Option(help="Hugging Face folder or id, or smollm2-135m-instruct.")],
    prompts: Annotated[list[Path], typer.Option(metavar="FILE", help="JSONL prompts; further files may follow.")],
    out: Annotated[Path, typer.Option(metavar="BUNDLE", help="Directory to write.")],
    more: Annotated[list[Path] | None, typer.Argument(metavar="[FILE...]", help="More files of prompts.")] = None,
    methods: Annotated[str, typer.Option(help="Comma-separated drafting methods.")] = "ngram",
    draft_model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Drafter of method draft_model, or layer-skip:L,L,..."),
    ] = None,
    eagle3_model: Annotated[str | None, typer.Option(metavar="MODEL", help="Drafter of method eagle3.")] = None,
    drafter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=KIND:MODEL", help="A further named method; may be repeated.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Output limit of every request.")] = 256,
    kmax: Annotated[int, typer.Option(min=1, help="Longest draft recorded.")] = 16,
    timing_depths: Annotated[str, typer.Option(help="Depths that are run for real and timed.")] = "0,1,2,4,8,16",
    timing_requests: Annotated[int, typer.Option(min=1, help="Prompts timed, spread over the workloads.")] = 12,
    timing_tokens: Annotated[int | None, typer.Option(min=2, help="Output limit of timed requests.")] = None,
    timing_batches: Annotated[str, typer.Option(help="Batch sizes that are timed.")] = "1",
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that run together in the shadow pass.")] = 8,
    limit_per_workload: Annotated[int | None, typer.Option(min=1, help="Prompts of each workload at most.")] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Leave out longer prompts.", show_default="what the model has room for")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random-depth run.")] = 0,
    engine: Annotated[str, typer.Option(help="Inference engine: vllm.")] = "vllm",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted recording.")] = False,
    quiet: Quiet = False,
) -> None:
    """Record a trace bundle from a live engine: every method drafts at every position, and real runs are timed.

    Example: apexsim collect --target smollm2-135m-instruct --prompts my_prompts.jsonl --out runs/my-trace
    """
    from real_runs.collect import collect as record
    from real_runs.options import CollectOptions

    options = CollectOptions(
        target=target,
        methods=tuple(names(methods) or ()),
        prompts=(*prompts, *(more or ())),
        out=out,
        max_tokens=max_tokens,
        kmax=kmax,
        timing_depths=tuple(numbers(timing_depths, "--timing-depths") or ()),
        timing_requests=timing_requests,
        batch_size=batch_size,
        timing_batches=tuple(numbers(timing_batches, "--timing-batches") or ()),
        limit_per_workload=limit_per_workload,
        max_prompt_tokens=max_prompt_tokens,
        seed=seed,
        resume=resume,
        engine=engine,
        draft_model=draft_model,
        eagle3_model=eagle3_model,
        further_drafters=tuple(drafter or ()),
        timing_tokens=timing_tokens,
    )
    with progress(quiet) as bar:
        tasks = {}

        def advance(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done, total=total)

        bundle = record(options, advance)
    for method, facts in bundle.meta["exactness"].items():
        note(f"exactness of {method}: {facts['share_equal']} of {facts['drafting_blocks']} drafting blocks", quiet)
    note(f"wrote {out}: {bundle.requests.height} requests, {bundle.positions.height} positions", quiet)
