"""From the parts a recording left on disk to the tables of a trace bundle. No engine here."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
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
    prompts: Sequence[Prompt], texts: Sequence[Part], prefill: Sequence[Part], max_tokens: int
) -> pl.DataFrame:
    """The ``requests`` table: one row per prompt, with the output of the shadow pass and the facts of its prefill."""
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
            "prefill_s": first.prefill_s,
            "prompt_repetition": repeated_trigrams(np.array(prompt.token_ids, dtype=np.int32)),
            "prompt_entropy": token_entropy(prompt.token_ids),
            "prompt_embedding": first.embedding or None,
            "prompt_token_ids": list(prompt.token_ids),
        }
        for prompt, text, first in zip(prompts, texts, prefill, strict=True)
    ]
    return pl.DataFrame(rows, schema={column.name: column.dtype for column in schema.REQUESTS})


def position_table(
    prompts: Sequence[Prompt], shadows: Mapping[str, Sequence[Part]], copying: Container[str]
) -> pl.DataFrame:
    """The ``positions`` table: p = 1..T-1 of each request, with the columns of each method.

    Args:
        prompts: One per request.
        shadows: Per method the parts of its shadow pass. The target's signals and tokens are those of the first.
        copying: The methods among them that copy: for these the length of the match is recorded.
    """
    texts = next(iter(shadows.values()))
    frames = [
        _positions_of(row, prompts[row], texts[row], {method: parts[row] for method, parts in shadows.items()}, copying)
        for row in range(len(prompts))
        if len(texts[row].token_ids) >= 2
    ]
    if not frames:
        raise ApexSimError("no request has two output tokens: there is nothing to speculate on")
    return pl.concat(frames)


def _positions_of(
    row: int, prompt: Prompt, text: Part, shadows: Mapping[str, Part], copying: Container[str]
) -> pl.DataFrame:
    tokens, count = text.token_ids, len(text.token_ids) - 1
    probability = np.array(text.probability[:count])
    margin = probability * -np.expm1(-np.array(text.gap[:count]))
    columns: dict[str, Any] = {
        "request": np.full(count, row, dtype=np.int32),
        "position": np.arange(1, count + 1, dtype=np.int32),
        "token_id": np.array(tokens[:count], dtype=np.int32),
        "target_entropy": schema.encode_entropy(np.array(text.entropy[:count])),
        "target_prob": schema.encode_probability(probability),
        "target_margin": schema.encode_probability(margin),
    }
    for method, shadow in shadows.items():
        # Where the method's own pass left the text, its drafts answer another prefix: it was not asked there.
        asked = min(count, accepted_length(shadow.token_ids, tokens))
        missing = [p for p in range(1, asked + 1) if p not in shadow.drafts]
        if missing:
            raise ApexSimError(f"{method}: request {shadow.request_id}: no draft was recorded at position {missing[0]}")
        drafts = [shadow.drafts[p] for p in range(1, asked + 1)]
        blank: list[Any] = [None] * (count - asked)
        accepted = [accepted_length(draft, tokens[p:]) for p, draft in enumerate(drafts, start=1)]
        columns[f"accepted.{method}"] = pl.Series(accepted + blank, dtype=pl.UInt8)
        columns[f"drafted.{method}"] = pl.Series([len(draft) for draft in drafts] + blank, dtype=pl.UInt8)
        if method in copying:
            columns[f"match.{method}"] = match_lengths(prompt.token_ids, tokens)
        for name, encode in schema.DRAFT_CODES.items():
            if name in shadow.signals:
                codes = _codes(shadow.signals[name], asked, encode)
                columns[f"draft_{name}.{method}"] = pl.Series(codes + blank, dtype=pl.List(pl.UInt8))
    return pl.DataFrame(columns)


def _codes(
    values: Mapping[int, Sequence[float]], count: int, encode: Callable[[np.ndarray], np.ndarray]
) -> list[list[int] | None]:
    """One list of codes per position 1..count."""
    lists = [values.get(p, ()) for p in range(1, count + 1)]
    codes = encode(np.array([value for one in lists for value in one], dtype=np.float64)).tolist()
    ends = np.cumsum([len(one) for one in lists], dtype=np.int64)
    return [codes[end - len(one) : end] for one, end in zip(lists, ends, strict=True)]


def token_entropy(tokens: Sequence[int]) -> float:
    """Entropy of the distribution of the tokens in a text, nats: low where few tokens recur, log n where all differ."""
    if not tokens:
        return 0.0
    share = np.unique(np.array(tokens), return_counts=True)[1] / len(tokens)
    return float(max(0.0, -np.sum(share * np.log(share))))


def match_lengths(prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """At p = 1..T-1, the longest suffix of prompt + y_1..y_p, up to 32 tokens, that occurs earlier in it."""
    text = np.array([*prompt, *output], dtype=np.int32)
    match, drafted, accepted = (np.zeros(len(output) - 1, dtype=np.uint8) for _ in range(3))
    longest_suffix(text, len(prompt), MAX_MATCH, 1, match, drafted, accepted)
    return match


def block_table(runs: Iterable[MeasuredRun], texts: Sequence[Part]) -> tuple[pl.DataFrame, int]:
    """The ``blocks`` table of measured runs, and how many blocks were left out of it.

    A block that starts after its request's output has left the shadow text has a position that means something else
    there: it is left out. The last block of a run with a lower output limit than the trace's is recorded as if that had not cut
    it: what was accepted is what the verifier said.
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
        "step": block.step,
    }


def foreign_load(runs: Iterable[MeasuredRun]) -> dict[str, float] | None:
    """Cores that other processes kept busy while requests were timed: median and largest; None if unknown."""
    cores = [part.foreign_cores for measured in runs for part in measured.parts if part.foreign_cores is not None]
    return {"median_cores": round(float(np.median(cores)), 3), "max_cores": round(max(cores), 3)} if cores else None
