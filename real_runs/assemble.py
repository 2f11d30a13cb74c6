"""From the parts a recording left on disk to a trace bundle, and the exactness figures that go with it. No engine here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from apexsim import schema
from apexsim.errors import ApexSimError
from apexsim.kernels.match import MAX_MATCH, longest_suffix, repeated_trigrams
from real_runs.parts import Block, Part, Run
from real_runs.prompts import Prompt


@dataclass(frozen=True)
class MeasuredRun:
    """A run with its parts, in the order of ``run.requests``. ``method`` is empty for an engine without speculation."""

    run: Run
    method: str
    parts: tuple[Part, ...]


def accepted_length(draft: Sequence[int], following: Sequence[int]) -> int:
    """How many tokens of a draft agree with the text that follows."""
    agree = 0
    while agree < min(len(draft), len(following)) and draft[agree] == following[agree]:
        agree += 1
    return agree


def request_table(
    prompts: Sequence[Prompt], texts: Sequence[Part], prefill_s: Mapping[str, float | None], max_tokens: int
) -> pl.DataFrame:
    """The ``requests`` table: one row per prompt, with the output of the shadow pass."""
    rows = [
        {
            "request_id": prompt.request_id,
            "source_group": prompt.source_group,
            "workload": prompt.workload,
            "split": prompt.split,
            "prompt_tokens": len(prompt.token_ids),
            "output_tokens": len(text.token_ids),
            "max_tokens": max_tokens,
            "finish_reason": text.finish_reason if text.finish_reason in ("stop", "length") else "cut",
            "aligned": True,
            "prefill_s": prefill_s.get(prompt.request_id),
            "prompt_repetition": repeated_trigrams(np.array(prompt.token_ids, dtype=np.int32)),
            "prompt_token_ids": list(prompt.token_ids),
        }
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    return pl.DataFrame(
        rows, schema={column.name: column.dtype for column in schema.REQUESTS} | {"prompt_token_ids": pl.List(pl.Int32)}
    )


def position_table(prompts: Sequence[Prompt], shadows: Mapping[str, Sequence[Part]]) -> pl.DataFrame:
    """The ``positions`` table: p = 1..T-1 of each request, with the columns of each method.

    Args:
        prompts: One per request.
        shadows: Per method the parts of its shadow pass. Entropies and tokens are those of the first.
    """
    texts = next(iter(shadows.values()))
    frames = [
        _positions_of(row, prompts[row], texts[row], {method: parts[row] for method, parts in shadows.items()})
        for row in range(len(prompts))
        if len(texts[row].token_ids) >= 2
    ]
    if not frames:
        raise ApexSimError("no request has two output tokens: there is nothing to speculate on")
    return pl.concat(frames)


def _positions_of(row: int, prompt: Prompt, text: Part, shadows: Mapping[str, Part]) -> pl.DataFrame:
    tokens, count = text.token_ids, len(text.token_ids) - 1
    columns: dict[str, Any] = {
        "request": np.full(count, row, dtype=np.int32),
        "position": np.arange(1, count + 1, dtype=np.int32),
        "token_id": np.array(tokens[:count], dtype=np.int32),
        "target_entropy": schema.encode_entropy(np.array(text.entropy[:count])),
        "target_prob": schema.encode_probability(np.array(text.probability[:count])),
    }
    for method, shadow in shadows.items():
        missing = [p for p in range(1, count + 1) if p not in shadow.drafts]
        if missing:
            raise ApexSimError(f"{method}: request {shadow.request_id}: no draft was recorded at position {missing[0]}")
        drafts = [shadow.drafts[p] for p in range(1, count + 1)]
        accepted = [accepted_length(draft, tokens[p:]) for p, draft in enumerate(drafts, start=1)]
        columns[f"accepted.{method}"] = np.array(accepted, dtype=np.uint8)
        columns[f"drafted.{method}"] = np.array([len(draft) for draft in drafts], dtype=np.uint8)
        columns[f"match.{method}"] = match_lengths(prompt.token_ids, tokens)
    return pl.DataFrame(columns)


def match_lengths(prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """At p = 1..T-1, the longest suffix of prompt + y_1..y_p, up to 32 tokens, that occurs earlier in it."""
    text = np.array([*prompt, *output], dtype=np.int32)
    match, drafted, accepted = (np.zeros(len(output) - 1, dtype=np.uint8) for _ in range(3))
    longest_suffix(text, len(prompt), MAX_MATCH, 1, match, drafted, accepted)
    return match


def block_table(runs: Iterable[MeasuredRun], texts: Sequence[Part]) -> tuple[pl.DataFrame, int]:
    """The ``blocks`` table of measured runs, and how many blocks were left out of it.

    A block that starts after its request's output has left the shadow text has a position that means something else
    there: it is left out.
    """
    rows, dropped = [], 0
    for measured in runs:
        for request, part in zip(measured.run.requests, measured.parts, strict=True):
            text = texts[request].token_ids
            same = accepted_length(part.token_ids, text)
            for block in part.blocks:
                if same < min(block.position + block.emitted, len(text)):
                    dropped += 1
                else:
                    rows.append(_block_row(measured, request, block, len(text)))
    return pl.DataFrame(rows, schema={column.name: column.dtype for column in schema.BLOCKS}), dropped


def _block_row(measured: MeasuredRun, request: int, block: Block, length: int) -> dict[str, Any]:
    # The engine counts draft tokens accepted past the end of the text; a trace does not.
    accepted = min(block.accepted, length - block.position)
    return {
        "request": request,
        "run": measured.run.name,
        "policy": measured.run.policy,
        "method": measured.method,
        "position": block.position,
        "depth": block.depth,
        "drafter_steps": block.drafted,  # a copying method pays a look-up, not a step per token
        "drafted": block.drafted,
        "accepted": accepted,
        "emitted": min(accepted + 1, length - block.position),
        "draft_s": block.draft_s,
        "verify_s": block.verify_s,
        "overhead_s": block.overhead_s,
        "batch_size": block.batch_size,
        "context_tokens": block.context_tokens,
    }


def exactness(
    runs: Iterable[MeasuredRun], texts: Sequence[Part], positions: pl.DataFrame, method: str
) -> dict[str, Any]:
    """Compares what real blocks accepted with what the shadow drafts say they had to: min(depth, accepted at p).

    Blocks that the end of the text censors (p + depth > T) and blocks after a divergence have nothing to compare with.
    Blocks without a draft match trivially, so the share is over those that drafted.

    Returns:
        ``blocks`` compared, ``drafting_blocks`` among them, ``mismatches``, ``share_equal`` over drafting blocks (null
        if there are none), ``censored_blocks``, and ``first_divergence``: per run and request id, the first position at
        which an output differs from the shadow text.
    """
    expected = {
        (request, position): accepted
        for request, position, accepted in positions.select("request", "position", f"accepted.{method}").iter_rows()
    }
    blocks = drafting = mismatches = wrong_drafting = censored = 0
    diverged: dict[str, dict[str, int]] = {}
    for measured in runs:
        if measured.method != method:
            continue
        for request, part in zip(measured.run.requests, measured.parts, strict=True):
            text = texts[request].token_ids
            same = accepted_length(part.token_ids, text)
            if same < max(len(text), len(part.token_ids)):
                diverged.setdefault(measured.run.name, {})[part.request_id] = same + 1
            for block in part.blocks:
                if block.position > same or (request, block.position) not in expected:
                    continue
                if block.position + block.depth > len(text):
                    censored += 1
                    continue
                wrong = block.accepted != min(block.depth, expected[request, block.position])
                blocks += 1
                mismatches += wrong
                if block.drafted:
                    drafting += 1
                    wrong_drafting += wrong
    return {
        "blocks": blocks,
        "drafting_blocks": drafting,
        "mismatches": mismatches,
        "share_equal": 1.0 - wrong_drafting / drafting if drafting else None,
        "censored_blocks": censored,
        "first_divergence": diverged,
    }


def foreign_load(runs: Iterable[MeasuredRun]) -> dict[str, float] | None:
    """Cores that other processes kept busy while requests were timed: median and largest; None if unknown."""
    cores = [part.foreign_cores for measured in runs for part in measured.parts if part.foreign_cores is not None]
    return {"median_cores": round(float(np.median(cores)), 3), "max_cores": round(max(cores), 3)} if cores else None
