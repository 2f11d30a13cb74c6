"""Constants: plain decoding, a fixed (method, depth), and the best of them per workload."""

from __future__ import annotations

import numpy as np

from apexsim.errors import PolicyError, choices
from apexsim.hindsight import Hindsight
from apexsim.program import Program
from apexsim.protocol import ActionSpace, Outcome, Policy
from apexsim.replay import Plan, Planner
from policies import Context, register

SWEEP = (1, 2, 4, 8, 16)
"""Depths of the fixed sweep (APEX, arXiv:2610.07780, Evaluation)."""


class Fixed:
    """The same action at every block."""

    scope = "depth"
    persistent = False

    def __init__(self, action: int, methods: tuple[str, ...]) -> None:
        self.action = action
        self.methods = methods

    def reset(self, slots: np.ndarray, prompts: np.ndarray) -> None: ...

    def act(self, obs: np.ndarray, slots: np.ndarray) -> np.ndarray:
        return np.full(slots.size, self.action, dtype=np.int64)

    def update(self, slots: np.ndarray, actions: np.ndarray, outcome: Outcome) -> None: ...


class BestFixed:
    """The constant of each workload that minimises J on some requests: those of the train split, or the scored ones."""

    scope = "method"

    def __init__(self, chosen_on: Hindsight, space: ActionSpace) -> None:
        self.chosen = chosen_on.best_fixed_names()
        self.methods = tuple(m for m in space.methods if any(f":{m}:" in name for name in self.chosen.values()))

    def plan(self, program: Program) -> Plan:
        return Hindsight(program).fixed_by_workload(self.chosen)


@register(
    "ar", family="fixed", source="plain decoding", variants=lambda name, space: [name] if 0 in space.depths else []
)
def build_ar(context: Context, args: tuple[str, ...]) -> Policy:
    if args:
        raise PolicyError(f"policy 'ar' takes no further parts, got {':'.join(args)!r}")
    return Fixed(context.space.index(None, 0), methods=())


@register(
    "fixed",
    family="fixed",
    source="constant depth",
    variants=lambda name, space: [f"{name}:{m}:{k}" for m in space.methods for k in SWEEP if k in space.depths],
)
def build_fixed(context: Context, args: tuple[str, ...]) -> Policy:
    if len(args) != 2 or not args[1].isdecimal():
        raise PolicyError(f"policy 'fixed' is written fixed:METHOD:K, got {':'.join(('fixed', *args))!r}")
    return Fixed(context.space.index(args[0], int(args[1])), methods=(args[0],))


@register(
    "best-fixed",
    family="fixed",
    source="best constant per workload, chosen on the train split, or with :hindsight on the scored requests",
    live=False,
    variants=lambda name, space: [name, f"{name}:hindsight"],
)
def build_best_fixed(context: Context, args: tuple[str, ...]) -> Planner:
    if args not in ((), ("hindsight",)):
        raise PolicyError(f"policy 'best-fixed:{':'.join(args)}' is unknown; allowed: {choices(('', ':hindsight'))}")
    chosen_on = context.test if args else context.train
    if chosen_on is None:
        raise PolicyError(
            "policy 'best-fixed' needs requests in the train split, and none of those selected lies there"
        )
    return BestFixed(chosen_on, context.space)
