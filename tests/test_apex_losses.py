"""Every equation of APEX (arXiv:2610.07780) against numbers worked out by hand, and against a library."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from apexsim.kernels.blocks import utility
from apexsim.objective import PROFILES
from policies.apex.losses import LossWeights, Observed, Predicted, ranking_loss, survival_loss, total_loss


def logits(*hazards: float) -> torch.Tensor:
    return torch.logit(torch.tensor(hazards, dtype=torch.float64))


def test_eq_25_by_hand():
    """TPS 20, best of any 25, best of the method 22; 3 accepted of 4: u = log 20 + .3 log 3.1 - .35/4 - .15/5 - .2/11."""
    by_hand = math.log(20) + 0.3 * math.log(3.1) - 0.35 * 0.25 - 0.15 * 5 / 25 - 0.2 * 2 / 22
    assert utility(20.0, 3, 0.25, 25.0, 22.0, np.array(PROFILES["b"])) == pytest.approx(by_hand, abs=1e-12)


def test_eqs_23_and_24_do_not_reward_more_than_the_best():
    """G and M are at least 0: a block faster than the best request pays neither."""
    weights = np.array((0.0, 0.0, 0.2, 0.15))
    assert utility(30.0, 1, 0.0, 25.0, 22.0, weights) == pytest.approx(math.log(30))


def test_the_profiles_differ_in_weights_only():
    assert PROFILES == {"s": (0.2, 0.2, 0.2, 0.15), "b": (0.3, 0.35, 0.15, 0.2), "e": (0.4, 0.5, 0.1, 0.25)}


@pytest.mark.parametrize(
    ("accepted", "rejected", "likelihood"),
    [
        (0, True, 0.1),  # rejected at once: q_1
        (2, True, 0.9 * 0.8 * 0.3),  # (1 - q_1)(1 - q_2) q_3 (Eq. 12)
        (3, False, 0.9 * 0.8 * 0.7),  # full acceptance of k = 3, censored (Eq. 13)
        (0, False, 1.0),  # nothing known
        (4, False, 0.9 * 0.8 * 0.7 * 0.6),  # K_max
    ],
)
def test_eqs_12_and_13_by_hand(accepted, rejected, likelihood):
    loss = survival_loss(logits(0.1, 0.2, 0.3, 0.4)[None], torch.tensor([accepted]), torch.tensor([rejected]))
    assert float(loss) == pytest.approx(-math.log(likelihood), abs=1e-12)


def test_the_survival_loss_is_a_sum_of_binary_cross_entropies():
    """Discrete-time survival in its textbook form: one Bernoulli per position at risk, by torch's own cross-entropy."""
    rng = np.random.default_rng(0)
    z = torch.from_numpy(rng.normal(size=(200, 16)))
    accepted = torch.from_numpy(rng.integers(0, 17, 200))
    rejected = torch.from_numpy(rng.random(200) < 0.5) & (accepted < 16)
    at = torch.arange(16)[None]
    target = ((at == accepted[:, None]) & rejected[:, None]).double()
    at_risk = (at < accepted[:, None]) | (target > 0)
    each = torch.nn.functional.binary_cross_entropy_with_logits(z, target, reduction="none")
    assert torch.allclose(survival_loss(z, accepted, rejected), (each * at_risk).sum(dim=1))


def test_hazards_are_recovered_from_what_they_generated():
    """20,000 drafts of random depth from known hazards: the maximum of the likelihood lies at the hazards."""
    rng = np.random.default_rng(1)
    true = np.array([0.3, 0.2, 0.5, 0.1])
    first = np.argmax(np.column_stack((rng.random((20_000, 4)) < true, np.ones(20_000, bool))), axis=1)
    depth = rng.integers(1, 5, 20_000)
    accepted, rejected = torch.from_numpy(np.minimum(first, depth)), torch.from_numpy(first < depth)
    z = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([z], max_iter=50)

    def closure():
        optimizer.zero_grad()
        loss = survival_loss(z.expand(20_000, 4), accepted, rejected).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert torch.sigmoid(z).detach().numpy() == pytest.approx(true, abs=0.02)


def test_eqs_29_to_31_by_hand():
    """The observed best of the known ones is the second; the unknown third does not count, whatever its score."""
    scores = torch.tensor([[1.0, 2.0, 9.0]])
    known = torch.tensor([[True, True, False]])
    loss = ranking_loss(scores, torch.tensor([[0.1, 0.2, 5.0]]), known)
    assert float(loss) == pytest.approx(math.log(1 + math.exp(-1)), abs=1e-6)


def test_eqs_26_to_28_and_33_by_hand():
    """One group, two candidates, one known: SmoothL1 of errors 0.5, 2 and 1, a survival of log 2, nothing to rank."""
    one = torch.ones(1, 2)
    predicted = Predicted(torch.zeros(1, 2, 4), one * 0.5, one * 3.0, one * 2.0)
    observed = Observed(
        known=torch.tensor([[True, False]]),
        accepted=torch.tensor([[0, 3]]),
        rejected=torch.tensor([[True, True]]),
        drafted=torch.tensor([[4, 4]]),
        log_cost=one * 0.0,
        log_rate=one * 1.0,
        utility=one * 1.0,
    )
    by_hand = math.log(2) + 0.2 * 0.5 * 0.25 + 0.3 * 1.5 + 1.0 * 0.5
    assert float(total_loss(predicted, observed, LossWeights())) == pytest.approx(by_hand, abs=1e-6)
    without = LossWeights(survival=0.0, cost=0.0, rate=0.0)
    assert float(total_loss(predicted, observed, without)) == pytest.approx(0.5, abs=1e-6)


def test_a_draft_of_nothing_says_nothing_of_the_hazards():
    one = torch.ones(1, 1)
    predicted = Predicted(torch.full((1, 1, 4), 3.0, requires_grad=True), one, one, one)
    none = torch.tensor([[0]])
    observed = Observed(one > 0, none, one < 0, none, one, one, one)
    assert float(total_loss(predicted, observed, LossWeights())) == 0.0
