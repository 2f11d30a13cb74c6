"""What the router and the depth controller see: columns of ``apexsim.features``, standardised (arXiv:2610.07780, Eqs. 4, 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from apexsim.errors import PolicyError, choices
from apexsim.features import FEATURES, HISTORY, PROMPT
from apexsim.kernels.network import CLIP

ALL = FEATURES + PROMPT
"""Every column there is: the observation's, then the prompt's."""
EMBEDDING = PROMPT[1:]
GROUPS: dict[str, tuple[str, ...]] = {
    "entropy": ("prompt_entropy", "has_entropy", "entropy", "probability", "entropy_recent"),
    "repetition": ("prompt_repetition", "has_match", "match", "repetition"),
    "history": tuple(feature.name for feature in HISTORY),
    "embedding": EMBEDDING,
}
"""What an ablation can take away."""
REQUEST = ("has_limit", "remaining", "prompt", "prompt_repetition", *PROMPT)
"""s_0 (Eq. 4). The decoding configuration is the output limit; temperature is 0 in every trace."""
BLOCK = ALL
"""s_t (Eq. 5), with the request's own features."""
RECORDED_BY = {
    "target_entropy": ("entropy", "entropy_recent"),
    "target_prob": ("probability",),
    "match": ("match", "repetition"),
    "prompt_repetition": ("prompt_repetition",),
    "prompt_entropy": ("prompt_entropy",),
    "prompt_embedding": EMBEDDING,
}
"""The columns of a trace that features come from; the others need nothing beyond the accepted lengths."""


@dataclass(frozen=True)
class Inputs:
    """The columns used, in order, with their standardisation.

    Attributes:
        names: Names, of ``ALL``.
        mean: (C,) float32.
        scale: (C,) float32, 1 / standard deviation.
    """

    names: tuple[str, ...]
    mean: np.ndarray
    scale: np.ndarray

    @property
    def columns(self) -> np.ndarray:
        """(C,) int64 indices into ``ALL``."""
        return np.array([ALL.index(name) for name in self.names], dtype=np.int64)

    @property
    def signals(self) -> tuple[str, ...]:
        """What a trace must record."""
        return tuple(signal for signal, names in RECORDED_BY.items() if set(names) & set(self.names))

    def __call__(self, states: np.ndarray) -> np.ndarray:
        """(..., C) float32 standardised inputs of raw states (..., len(ALL)); unknown values become the mean, 0."""
        values = np.clip((states[..., self.columns] - self.mean) * self.scale, -CLIP, CLIP)
        return np.nan_to_num(values, nan=0.0).astype(np.float32)


def fit(states: np.ndarray, wanted: Sequence[str], without: Sequence[str] = ()) -> tuple[Inputs, tuple[str, ...]]:
    """Chooses and standardises columns.

    Args:
        states: (n, len(ALL)) raw training states.
        wanted: Names to use.
        without: Groups to leave out.

    Returns:
        The inputs, and the names left out because they are unknown or constant in the training states.

    Raises:
        PolicyError: An unknown group, or nothing is left.
    """
    unknown = [group for group in without if group not in GROUPS]
    if unknown:
        raise PolicyError(f"feature group {unknown[0]!r} is unknown; allowed: {choices(GROUPS)}")
    barred = {name for group in without for name in GROUPS[group]}
    names = [name for name in wanted if name not in barred]
    values = states[:, [ALL.index(name) for name in names]].astype(np.float64)
    known = np.isfinite(values).any(axis=0)
    mean, spread = (np.zeros(len(names)) for _ in range(2))
    mean[known], spread[known] = np.nanmean(values[:, known], axis=0), np.nanstd(values[:, known], axis=0)
    used = spread > 1e-9 * np.maximum(1.0, np.abs(mean))
    kept = tuple(name for name, use in zip(names, used, strict=True) if use)
    if not kept:
        raise PolicyError("no feature varies over the training requests: there is nothing to decide by")
    dropped = tuple(name for name in names if name not in kept)
    return Inputs(kept, mean[used].astype(np.float32), (1.0 / spread[used]).astype(np.float32)), dropped
