"""Survival of drafts under censoring, against scipy's Kaplan-Meier estimate."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from apexsim import survival

pytestmark = pytest.mark.small


def test_hand_computed_hazards():
    """Accepted 0, 1, 1 (all rejected next), 2 censored, of 3 positions: 1/4, 2/3, then none seen: the last known."""
    q = survival.hazards(np.array([0, 1, 1, 2]), np.array([True, True, True, False]), 3)
    assert q == pytest.approx([1 / 4, 2 / 3, 2 / 3])


@pytest.mark.parametrize("seed", range(5))
def test_equals_scipys_kaplan_meier(seed):
    rng = np.random.default_rng(seed)
    true = rng.geometric(0.35, 400) - 1
    limit = rng.integers(1, 9, 400)
    accepted = np.minimum(true, limit)
    rejected = true < limit
    q = survival.hazards(accepted, rejected, 9)
    # scipy counts an event at time j + 1, the first rejected position; a censored draft leaves after its last token.
    data = stats.CensoredData(uncensored=accepted[rejected] + 1, right=accepted[~rejected])
    curve = stats.ecdf(data).sf
    ours = np.cumprod(1 - q)
    for j in range(8):
        assert ours[j] == pytest.approx(float(curve.evaluate(j + 1)), abs=1e-12)


def test_draws_follow_the_hazards_and_what_is_known():
    q = np.full(6, 0.3)
    uniform = np.random.default_rng(0).random(200_000)
    drawn = survival.draw_accepted(q, uniform, np.zeros(uniform.size, dtype=int))
    assert (drawn >= 2).mean() == pytest.approx(0.49, abs=0.005)
    given = survival.draw_accepted(q, uniform, np.full(uniform.size, 2))
    assert given.min() == 2
    assert (given >= 3).mean() == pytest.approx(0.7, abs=0.005)
    assert (given <= 6).all()
