"""The exactness check: what real blocks accepted, against what the shadow drafts say they had to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import polars as pl

from real_runs.assemble import MeasuredRun, accepted_length
from real_runs.parts import Block, Part

ITEMISED = 100
"""Mismatches listed one by one at most; all are counted."""


def exactness(
    runs: Iterable[MeasuredRun], texts: Sequence[Part], shadow: Sequence[Part], positions: pl.DataFrame, method: str
) -> dict[str, Any]:
    """Compares what real blocks accepted with what the shadow drafts say they had to: min(depth, accepted at p).

    Blocks that the end of the text censors (p + depth > T) and blocks after a divergence have nothing to compare with.
    Blocks without a draft match trivially, so the share is over those that drafted.

    Args:
        runs: Measured runs; those of other methods are passed over.
        texts: The recorded text of each request.
        shadow: The method's own shadow pass over them.
        positions: The ``positions`` table made of it.
        method: The method.

    Returns:
        ``blocks`` compared, ``drafting_blocks`` among them, ``mismatches``, ``share_equal`` over drafting blocks (null
        if there are none), ``censored_blocks``, and ``first_divergence``: per run and request id, the first position at
        which an output differs from the recorded text (run ``shadow``: the method's own shadow pass). ``mismatch_list``
        itemises mismatches with what decided them: the lead of the target's best token over its second (logits) and of
        the drafter's (probability; null for copying methods) at the first draft token the two disagree on.
    """
    expected = {
        (request, position): accepted
        for request, position, accepted in positions.select("request", "position", f"accepted.{method}").iter_rows()
    }
    blocks = drafting = mismatches = wrong_drafting = censored = 0
    diverged: dict[str, dict[str, int]] = {}
    for own, first in zip(shadow, texts, strict=True):
        if own.token_ids != first.token_ids:
            diverged.setdefault("shadow", {})[own.request_id] = accepted_length(own.token_ids, first.token_ids) + 1
    items: list[dict[str, Any]] = []
    for measured in runs:
        if measured.method != method:
            continue
        for request, part in zip(measured.run.requests, measured.parts, strict=True):
            text = texts[request].token_ids
            same = accepted_length(part.token_ids, text)
            if same < max(min(len(text), measured.run.max_tokens), len(part.token_ids)):
                diverged.setdefault(measured.run.name, {})[part.request_id] = same + 1
            for block in part.blocks:
                right = expected.get((request, block.position))
                if block.position > same or right is None:
                    continue
                if block.position + block.depth > len(text):
                    censored += 1
                    continue
                wrong = block.accepted != min(block.depth, right)
                blocks += 1
                mismatches += wrong
                if wrong and len(items) < ITEMISED:
                    item = _item(block, right, texts[request], shadow[request])
                    items.append({"run": measured.run.name, "request_id": part.request_id, **item})
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
        "mismatch_list": items,
    }


def _item(block: Block, expected: int, text: Part, shadow: Part) -> dict[str, Any]:
    said = min(block.depth, expected)
    first = min(said, block.accepted)  # the draft token, counted from 0, that one of the two accepted
    margins = shadow.signals.get("margin", {}).get(block.position, ())
    return {
        "position": block.position,
        "depth": block.depth,
        "expected": said,
        "accepted": block.accepted,
        "target_logit_gap": text.gap[block.position + first] if block.position + first < len(text.gap) else None,
        "draft_margin": margins[first] if first < len(margins) else None,
    }
