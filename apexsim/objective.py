"""The one objective: time in units of an autoregressive step, plus a price per wasted token."""

from __future__ import annotations

import numpy as np

PROFILES = {"s": (0.20, 0.20, 0.20, 0.15), "b": (0.30, 0.35, 0.15, 0.20), "e": (0.40, 0.50, 0.10, 0.25)}
"""a_A, a_W, a_G, a_M of APEX-S, -B and -E (arXiv:2610.07780, Eq. 25): what ``kernels.blocks.utility`` weighs."""


def objective(seconds: np.ndarray, wasted: np.ndarray, step_s: float, waste_weight: float) -> np.ndarray:
    """J = seconds / c_0 + lambda * wasted tokens, additive over blocks and requests.

    Args:
        seconds: Decode seconds, any shape.
        wasted: Draft tokens paid for and not emitted, same shape.
        step_s: c_0, seconds of one autoregressive step (one constant per bundle and cost profile).
        waste_weight: lambda, autoregressive steps per wasted token.
    """
    return np.asarray(seconds / step_s + waste_weight * wasted)
