"""Survival of a draft: how likely its first j tokens are all accepted, from outcomes that may be censored."""

from __future__ import annotations

import numpy as np


def hazards(accepted: np.ndarray, rejected: np.ndarray, kmax: int) -> np.ndarray:
    """Kaplan-Meier hazards of rejection by draft position (APEX, arXiv:2610.07780, Eqs. 8-10).

    Args:
        accepted: (n,) accepted tokens of each draft.
        rejected: (n,) bool; True if the next draft token was rejected, False if nothing is known of it (censored).
        kmax: Number of draft positions.

    Returns:
        (kmax,) float64: P(position j is rejected | it was reached). A position never reached takes the last known hazard.
    """
    events = np.bincount(accepted[rejected], minlength=kmax)[:kmax].astype(float)
    ends = np.bincount(accepted, minlength=kmax + 1)
    # A draft reaches position j + 1 if it accepted more than j tokens, or accepted j and saw the next one rejected.
    longer = accepted.size - np.cumsum(ends)[:kmax]
    at_risk = longer + events
    q = np.divide(events, at_risk, out=np.full(kmax, np.nan), where=at_risk > 0)
    last = 1.0
    for j in range(kmax):
        last = q[j] = last if np.isnan(q[j]) else q[j]
    return q


def draw_accepted(q: np.ndarray, uniform: np.ndarray, at_least: np.ndarray) -> np.ndarray:
    """Accepted lengths drawn from the hazards, given that at least so many tokens are accepted.

    Args:
        q: (kmax,) hazards.
        uniform: (n,) uniforms in [0, 1): the same uniform gives the same length, so a replay is repeatable.
        at_least: (n,) tokens known to be accepted.
    """
    survival = np.concatenate(([1.0], np.cumprod(1.0 - q)))
    drawn = (uniform[:, None] * survival[at_least][:, None] < survival[None, 1:]).sum(axis=1)
    return np.maximum(drawn, at_least)
