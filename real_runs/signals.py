"""What shadow drafting records beside the drafts: how sure target and drafter were. Engine process only (imports torch).

All are natural: probabilities in [0, 1], entropies and divergences in nats. The schema's codes come later, in assembly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

DIGITS = 6
"""Significant digits kept of a signal: more than its code of 8 bits needs."""


@dataclass(frozen=True)
class Certainty:
    """Rows of a distribution: (n, V) log-probabilities and, per row, entropy, top probability and the gap to the second."""

    logp: torch.Tensor
    entropy: list[float]
    top: list[float]
    gap: list[float]

    def margin(self, row: int) -> float:
        """Top probability less the second."""
        return _short(self.top[row] * -torch.expm1(torch.tensor(-self.gap[row])).item())


def certainty(logits: torch.Tensor) -> Certainty:
    """Reads (n, V) logits; -inf marks ids that the model cannot say."""
    logp = logits.float().log_softmax(dim=-1)
    entropy = -(logp.exp() * logp).nan_to_num_(0.0).sum(dim=-1)
    best = logp.topk(2, dim=-1).values
    return Certainty(logp, entropy.tolist(), best[:, 0].exp().tolist(), (best[:, 0] - best[:, 1]).tolist())


@dataclass
class _Alive:
    """A draft whose tokens have all come true so far; ``age`` of them, so token number ``age`` is decided next."""

    row: int
    tokens: Sequence[int]
    steps: list[Certainty]
    kl: list[float]
    age: int = 0


class DraftLog:
    """Signals of the latest drafting of a batch, and the drafts that still wait for the target's opinion of them."""

    def __init__(self) -> None:
        self.to_target: torch.Tensor | None = None
        """Target id of each draft id where the drafter has a vocabulary of its own; None where ids are shared."""
        self._steps: list[Certainty] = []
        self._rows: dict[str, int] = {}
        self._alive: dict[str, list[_Alive]] = {}

    def begin(self) -> None:
        """A new drafting starts."""
        self._steps, self._rows = [], {}

    def step(self, logits: torch.Tensor) -> None:
        """One step of the drafter: (batch, V) logits."""
        self._steps.append(certainty(logits))

    def end(self, requests: Sequence[str]) -> None:
        """The drafting is over; ``requests`` are the rows of its batch."""
        self._rows = {request: row for row, request in enumerate(requests)}

    def take(self, request: str, draft: Sequence[int]) -> dict[str, list[float]]:
        """The signals of a request's draft, one per token; empty if the drafter has none.

        ``kl`` fills up while the target decodes on: one value per token up to the first that it rejects, that included.
        """
        if not self._steps or not draft:
            return {}
        row, steps = self._rows[request], self._steps[: len(draft)]
        kl: list[float] = []
        self._alive.setdefault(request, []).append(_Alive(row, draft, steps, kl))
        return {
            "prob": [_short(step.top[row]) for step in steps],
            "entropy": [_short(step.entropy[row]) for step in steps],
            "margin": [step.margin(row) for step in steps],
            "kl": kl,
        }

    def compare(self, requests: Sequence[str], logp: torch.Tensor) -> None:
        """Adds KL(drafter || target) of the token that the target decides now; row i of (n, V) ``logp`` is request i's."""
        waiting = [(row, alive) for row, request in enumerate(requests) for alive in self._alive.get(request, ())]
        if not waiting:
            return
        q = torch.stack([alive.steps[alive.age].logp[alive.row] for _, alive in waiting])
        p = logp[[row for row, _ in waiting]]
        if self.to_target is not None:
            # An id without a twin in the target's vocabulary has probability 0 in q, so it adds nothing.
            p = p[:, self.to_target.clamp(min=0)]
        divergence = (q.exp() * (q - p)).nan_to_num_(0.0, posinf=0.0, neginf=0.0).sum(dim=-1).clamp_(min=0.0)
        for (_, alive), value in zip(waiting, divergence.tolist(), strict=True):
            alive.kl.append(_short(value))

    def decided(self, request: str, token: int) -> None:
        """The target emitted a token: drafts that said another are done with, and so are those at their end."""
        still = []
        for alive in self._alive.pop(request, ()):
            right = alive.tokens[alive.age] == token
            alive.age += 1
            if right and alive.age < len(alive.tokens):
                still.append(alive)
        if still:
            self._alive[request] = still

    def forget(self, request: str) -> None:
        """The request ended."""
        self._alive.pop(request, None)


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
