"""The prompt embedding: the mean of the target's last hidden states over the prompt, projected to 64 numbers."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

DIMENSIONS = 64
_SEED = 610


def project(hidden: Sequence[float] | np.ndarray) -> list[float]:
    """Projects a mean hidden state by a fixed random matrix, which keeps distances to about 9 % (Johnson-Lindenstrauss).

    A target has thousands of hidden dimensions and a bundle a few hundred prompts, so the mean itself would be both large and
    more than a controller can learn from. Recording and live control use this same function.

    Args:
        hidden: (H,) mean over the prompt's tokens of the target's last hidden state.

    Returns:
        64 numbers, rounded to 5 significant digits.
    """
    mean = np.asarray(hidden, dtype=np.float64)
    return [float(f"{value:.5g}") for value in mean @ _matrix(mean.size)]


@functools.cache
def _matrix(size: int) -> np.ndarray:
    return np.random.default_rng(_SEED).standard_normal((size, DIMENSIONS)) / np.sqrt(DIMENSIONS)
