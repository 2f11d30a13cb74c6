"""From what has happened in a request to what a policy sees of it: the same code in the simulator and on a live engine.

An observation has two halves. The first, ``CONTEXT``, tells where the request stands and depends on the text so far alone:
``context_features`` computes it, for a whole trace at once or for the requests now running. The second, ``HISTORY``, is the
verifier's feedback: ``apexsim.kernels.blocks.learn`` books each block in a slot's state and ``recall`` writes the features.
Every feature is finite; where something is undefined it is 0 and a mask (``has_*``) says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from apexsim.embedding import DIMENSIONS
from apexsim.kernels.blocks import WINDOW

REMAINING_CAP = 255
"""``remaining`` counts tokens up to here: deeper than any draft."""
ENTROPY_WINDOW = 8
REPETITION_WINDOW = 32
REPEATED_MATCH = 3
"""A position repeats if at least so many last tokens occurred before."""


class Feature(NamedTuple):
    """One column of the observation."""

    name: str
    unit: str
    low: float
    high: float
    meaning: str


CONTEXT = (
    Feature("progress", "share", 0, 1, "p / max_tokens; 0 where the limit is unknown"),
    Feature("has_limit", "mask", 0, 1, "max_tokens is known"),
    Feature("remaining", "tokens / 255", 0, 1, "max_tokens - p, at most 255; 1 where the limit is unknown"),
    Feature("position", "ln(1 + tokens)", 0, 20, "tokens emitted so far, p"),
    Feature("context", "ln(1 + tokens)", 0, 20, "prompt tokens + p"),
    Feature("prompt", "ln(1 + tokens)", 0, 20, "prompt tokens"),
    Feature("prompt_repetition", "share", 0, 1, "prompt tokens that end a 3-gram seen before; 0 where unknown"),
    Feature("has_entropy", "mask", 0, 1, "the target's entropy is known"),
    Feature("entropy", "nats", 0, 12, "of the distribution that produced y_p"),
    Feature("probability", "share", 0, 1, "of y_p in it"),
    Feature("entropy_recent", "nats", 0, 12, f"mean entropy of the last {ENTROPY_WINDOW} tokens"),
    Feature("has_match", "mask", 0, 1, "the context match is known"),
    Feature("match", "tokens / 32", 0, 8, "longest suffix of the context that occurred before"),
    Feature("repetition", "share", 0, 1, f"last {REPETITION_WINDOW} tokens with a match of {REPEATED_MATCH} or more"),
)  # fmt: skip
HISTORY = (
    Feature("has_history", "mask", 0, 1, "a block that drafted was run in this request"),
    Feature("blocks", "n / (n + 16)", 0, 1, "blocks run so far, n"),
    Feature("method", "share", 0, 1, "(1 + index of the last block's method) / methods; 0 before the first block"),
    Feature("last_depth", "tokens / 16", 0, 16, "requested depth of the last block"),
    Feature("last_drafted", "tokens / 16", 0, 16, "tokens it submitted"),
    Feature("last_accepted", "tokens / 16", 0, 16, "tokens of them committed"),
    Feature("accepted", "tokens / 16", 0, 16, "mean committed tokens of the blocks that drafted"),
    Feature("accepted_spread", "tokens / 16", 0, 16, "standard deviation of the same"),
    Feature("rejected", "tokens / 16", 0, 16, "mean discarded tokens"),
    Feature("full", "share", 0, 1, "blocks whose whole draft was accepted"),
    Feature("first_rejection", "tokens / 16", 0, 17, "mean 1-based position of the first rejection; 0 if there was none"),
    Feature("time_per_token", "plain steps", 0, 1000, "seconds per emitted token / c_0"),
    Feature("recent_accepted", "tokens / 16", 0, 16, f"as accepted, of the last {WINDOW} blocks"),
    Feature("recent_rejected", "tokens / 16", 0, 16, f"as rejected, of the last {WINDOW} blocks"),
    Feature("recent_full", "share", 0, 1, f"as full, of the last {WINDOW} blocks"),
    Feature("recent_first_rejection", "tokens / 16", 0, 17, f"as first_rejection, of the last {WINDOW} blocks"),
    Feature("recent_time_per_token", "plain steps", 0, 1000, f"as time_per_token, of the last {WINDOW} blocks"),
)  # fmt: skip
FEATURES = tuple(feature.name for feature in CONTEXT + HISTORY)
PROMPT = ("prompt_entropy", *(f"embedding_{i}" for i in range(DIMENSIONS)))
"""What is known of a prompt beyond the observation: entropy of its tokens (nats) and its ``apexsim.embedding``."""


class Text(NamedTuple):
    """What is known of n positions of running texts; all (n,), NaN where unknown."""

    position: np.ndarray
    prompt: np.ndarray
    max_tokens: np.ndarray
    prompt_repetition: np.ndarray
    entropy: np.ndarray  # nats
    probability: np.ndarray
    entropy_recent: np.ndarray  # nats
    match: np.ndarray  # tokens
    repetition: np.ndarray


def context_features(text: Text) -> np.ndarray:
    """(n, len(CONTEXT)) float32 features of n positions; only the past and the request's own limits enter."""
    limit = np.isfinite(text.max_tokens)
    remaining = np.minimum(text.max_tokens - text.position, REMAINING_CAP) / REMAINING_CAP
    columns = (
        np.where(limit, text.position / np.where(limit, text.max_tokens, 1.0), 0.0),
        limit,
        np.where(limit, remaining, 1.0),
        np.log1p(text.position),
        np.log1p(text.position + text.prompt),
        np.log1p(text.prompt),
        text.prompt_repetition,
        np.isfinite(text.entropy),
        text.entropy,
        text.probability,
        text.entropy_recent,
        np.isfinite(text.match),
        text.match / 32,
        text.repetition,
    )
    return np.nan_to_num(np.column_stack(columns), nan=0.0).astype(np.float32)


def prompt_features(entropy: Sequence[float | None], embedding: Sequence[Sequence[float] | None]) -> np.ndarray:
    """(n, len(PROMPT)) float32 of n prompts, NaN where unknown."""
    out = np.full((len(entropy), len(PROMPT)), np.nan, dtype=np.float32)
    for row, (nats, numbers) in enumerate(zip(entropy, embedding, strict=True)):
        if nats is not None:
            out[row, 0] = nats
        if numbers is not None:
            out[row, 1:] = numbers
    return out


def trailing_mean(values: np.ndarray, window: int) -> np.ndarray:
    """(n,) mean of those of the last ``window`` values up to each that are known; NaN where none is."""
    known = np.isfinite(values)
    last = np.arange(1, values.size + 1)
    first = np.maximum(last - window, 0)
    sums, counts = (np.concatenate(([0.0], np.cumsum(part))) for part in (np.where(known, values, 0.0), known))
    count = counts[last] - counts[first]
    return np.divide(sums[last] - sums[first], count, out=np.full(values.size, np.nan), where=count > 0)


def remaining_tokens(obs: np.ndarray) -> np.ndarray:
    """(n,) int64 tokens a request may still emit, at most 255; 255 where the limit is unknown. ``obs`` is (n, F)."""
    return np.rint(obs[:, FEATURES.index("remaining")] * REMAINING_CAP).astype(np.int64)
