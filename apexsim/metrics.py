"""Every metric, defined once. ``None`` stands for undefined: a waste where nothing was drafted is not 0.

All count committed tokens, the accepted tokens that were emitted; ``docs/metrics.md`` has the symbols.
"""

from __future__ import annotations

import numpy as np
from scipy import stats

RESAMPLES = 2000
CONFIDENCE = 0.95


def ratio(numerator: float, denominator: float) -> float | None:
    """A ratio of sums; None where the denominator is 0."""
    return float(numerator) / float(denominator) if denominator else None


def acceptance_rate(committed: int, drafted: int) -> float | None:
    """Committed tokens per drafted token; blocks that drafted nothing do not enter."""
    return ratio(committed, drafted)


def acceptance_length(committed: int, drafting_blocks: int, bonus: bool = True) -> float | None:
    """Mean acceptance length over the blocks that drafted, with the target's own token (as vLLM counts it) or without."""
    mean = ratio(committed, drafting_blocks)
    return None if mean is None else mean + bonus


def tokens_per_block(tokens: int, blocks: int) -> float | None:
    """Decode tokens per target pass, passes without a draft included: what speed-up follows."""
    return ratio(tokens, blocks)


def waste_percent(drafted: int, committed: int) -> float | None:
    """100 * discarded draft tokens / drafted tokens (APEX, arXiv:2610.07780, Eq. 35)."""
    share = ratio(drafted - committed, drafted)
    return None if share is None else 100.0 * share


def waste_adjusted_speedup(speedup: float, waste: float | None) -> float | None:
    """WAS = speed-up / (waste percent / 100) (APEX, Eq. 36), from unrounded values."""
    return ratio(speedup, waste / 100.0) if waste is not None else None


def expected_tokens(acceptance_by_position: np.ndarray) -> np.ndarray:
    """Expected tokens of a block by depth 0..K: 1 + sum of P(the first j draft tokens are accepted).

    Args:
        acceptance_by_position: (K,) probability that the token at draft position j and all before it are accepted.
    """
    return np.concatenate(([1.0], 1.0 + np.cumsum(acceptance_by_position)))


def mean_interval(values: np.ndarray, groups: np.ndarray, seed: int) -> list[float] | None:
    """95 % bootstrap interval of the mean over requests, resampling whole source groups.

    Repeats of one prompt are not independent samples: they share a group, and a group is drawn as one.

    Args:
        values: (R,) one value per request.
        groups: (R,) group of each request, any dtype.
        seed: Of the resampling.

    Returns:
        [low, high], or None with fewer than two groups.
    """
    _, member = np.unique(groups, return_inverse=True)
    count = np.bincount(member)
    if count.size < 2:
        return None
    sums = np.bincount(member, weights=values)

    def mean(total: np.ndarray, size: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.asarray(total.sum(axis=axis) / size.sum(axis=axis))

    if np.ptp(sums / count) == 0.0:
        value = float(sums[0] / count[0])
        return [value, value]
    interval = stats.bootstrap(
        (sums, count),
        mean,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return [float(interval.low), float(interval.high)]
