"""The losses of APEX (arXiv:2610.07780, Eqs. 12-14, 26-33), over groups of candidates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class LossWeights:
    """The weights of the terms (Eqs. 32, 33). An ablation sets some to 0."""

    survival: float = 1.0
    cost: float = 0.2
    rate: float = 0.3
    utility: float = 1.0
    rank: float = 1.0


@dataclass(frozen=True)
class Predicted:
    """What the heads say of G groups of C candidates (Eqs. 16-19): ``hazard`` (G, C, K_max) logits, the rest (G, C)."""

    hazard: Tensor
    cost: Tensor
    rate: Tensor
    utility: Tensor


@dataclass(frozen=True)
class Observed:
    """What was observed of them, all (G, C).

    Attributes:
        known: Bool; the candidate was run.
        accepted: int64 accepted tokens, L.
        rejected: Bool; the token after them was seen rejected. False: censored, by full acceptance or the end of the text.
        drafted: int64 tokens that were there to accept; a draft of none says nothing of the hazards.
        log_cost: log of the block's seconds.
        log_rate: log(1 + tokens per second).
        utility: The label (Eq. 25).
    """

    known: Tensor
    accepted: Tensor
    rejected: Tensor
    drafted: Tensor
    log_cost: Tensor
    log_rate: Tensor
    utility: Tensor

    def rows(self, chosen: Tensor) -> Observed:
        """The groups ``chosen`` (n,) int64."""
        return Observed(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


def survival_loss(logits: Tensor, accepted: Tensor, rejected: Tensor) -> Tensor:
    """Negative log-likelihood of each outcome under its discrete hazards (Eqs. 12, 13).

    Args:
        logits: (..., K) of the hazards of positions 1..K.
        accepted: (...) int64 tokens accepted, 0..K.
        rejected: (...) bool; the next position, at most K, was rejected.

    Returns:
        (...) losses.
    """
    survived = torch.cumsum(functional.logsigmoid(-logits), dim=-1)
    survived = functional.pad(survived, (1, 0))  # no position survived: log 1
    log_likelihood = survived.gather(-1, accepted.unsqueeze(-1)).squeeze(-1)
    position = accepted.clamp(max=logits.shape[-1] - 1).unsqueeze(-1)
    event = functional.logsigmoid(logits.gather(-1, position).squeeze(-1))
    return -(log_likelihood + torch.where(rejected, event, torch.zeros_like(event)))


def ranking_loss(scores: Tensor, utility: Tensor, known: Tensor) -> Tensor:
    """Softmax cross-entropy that puts the observed best candidate of each group first (Eqs. 29-31).

    Args:
        scores: (G, C) predicted utilities.
        utility: (G, C) observed ones.
        known: (G, C) bool; at least one a group. Ties take the first.

    Returns:
        (G,) losses; 0 where there is but one candidate.
    """
    lowest = torch.finfo(scores.dtype).min
    best = utility.masked_fill(~known, lowest).argmax(dim=1)
    return functional.cross_entropy(scores.masked_fill(~known, lowest), best, reduction="none")


def total_loss(predicted: Predicted, observed: Observed, weights: LossWeights) -> Tensor:
    """The weighted sum of the five terms (Eq. 33); each is a mean over what it concerns."""
    known = observed.known
    terms = {
        "cost": (functional.smooth_l1_loss, predicted.cost, observed.log_cost),
        "rate": (functional.smooth_l1_loss, predicted.rate, observed.log_rate),
        "utility": (functional.smooth_l1_loss, predicted.utility, observed.utility),
    }
    total = predicted.utility.new_zeros(())
    for name, (loss, guess, truth) in terms.items():
        if getattr(weights, name):
            total = total + getattr(weights, name) * loss(guess[known], truth[known])
    informative = known & (observed.drafted > 0)
    if weights.survival and informative.any():
        outcome = observed.accepted[informative], observed.rejected[informative]
        total = total + weights.survival * survival_loss(predicted.hazard[informative], *outcome).mean()
    several = known.sum(dim=1) > 1
    if weights.rank and several.any():
        ranked = ranking_loss(predicted.utility[several], observed.utility[several], known[several])
        total = total + weights.rank * ranked.mean()
    return total
