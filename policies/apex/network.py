"""The network of APEX: a shared encoder scored once per candidate, and four heads (arXiv:2610.07780, Eqs. 15-19)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from policies.apex.losses import Predicted

HIDDEN = 64
"""The paper gives no sizes; see ``docs/apex.md`` for what a decision takes."""


class Scorer(nn.Module):
    """phi(s, m, k): the state, plus learned embeddings of method and depth, through two layers; heads on top.

    Args:
        inputs: Number of standardised inputs.
        methods: Number of methods.
        depths: Number of candidate depths.
        kmax: Draft positions with a hazard.
        one_survival: The hazards see no depth: S_j is then the same for every candidate, as for any greedy chain.
    """

    def __init__(self, inputs: int, methods: int, depths: int, kmax: int, one_survival: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, HIDDEN)
        self.methods = nn.Parameter(torch.randn(methods, HIDDEN) * 0.1)
        self.depths = nn.Parameter(torch.randn(depths, HIDDEN) * 0.1)
        self.second = nn.Linear(HIDDEN, HIDDEN)
        self.hazard = nn.Linear(HIDDEN, kmax)
        self.cost = nn.Linear(HIDDEN, 1)
        self.rate = nn.Linear(HIDDEN, 1)
        self.utility = nn.Linear(HIDDEN, 1)
        self.one_survival = one_survival

    def forward(self, states: Tensor, method: Tensor, depth: Tensor) -> Predicted:
        """Scores C candidates in each of G groups.

        Args:
            states: (G, C or 1, inputs) standardised; one for all candidates of a group, or one each.
            method: (G or 1, C) int64 method of each candidate.
            depth: (C,) int64 depth index of each candidate.
        """
        state = self.first(states) + self.methods[method]
        top = torch.relu(self.second(torch.relu(state + self.depths[depth])))
        bare = torch.relu(self.second(torch.relu(state))) if self.one_survival else top
        hazard = self.hazard(bare)
        cost, rate, utility = (head(top).squeeze(-1) for head in (self.cost, self.rate, self.utility))
        return Predicted(hazard, cost, rate, utility)


def weights(scorer: Scorer) -> dict[str, np.ndarray]:
    """All weights by name, float32."""
    return {name: value.detach().numpy().copy() for name, value in scorer.state_dict().items()}
