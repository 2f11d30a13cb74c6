"""Rules that move the depth by the last outcome alone."""

from __future__ import annotations

import numpy as np

from apexsim.errors import PolicyError, choices
from apexsim.features import remaining_tokens
from apexsim.protocol import ActionSpace, Outcome, Policy
from policies import Context, register

START_DEPTH = 5
SOURCE = "Hugging Face transformers, assisted generation"


class HfHeuristic:
    """Hugging Face transformers' ``heuristic`` schedule (``num_assistant_tokens_schedule``).

    After a block whose whole draft was accepted the depth grows by 2, else it falls by 1, to 1 at least; it starts at 5.
    A depth only partly drafted counts as fully accepted only when accepted == k; nothing drafted leaves k unchanged.
    ``heuristic`` keeps the depth from one request to the next, ``heuristic_transient`` starts each at 5. A draft is never
    asked to be longer than the tokens the request may still emit. Where the source is silent: the depth submitted is the
    deepest selected depth that is not deeper than the rule's; depth 1, where the rule bottoms out, must be selected.

    Args:
        space: The actions.
        method: Which drafter.
        transient: Forget the depth when a request ends.
    """

    scope = "depth"

    def __init__(self, space: ActionSpace, method: str, transient: bool) -> None:
        self.methods: tuple[str, ...] = (method,)
        self.persistent = not transient
        self.depths = np.array(space.depths)
        self.first_action = space.index(method, space.depths[0])
        self.depth = np.empty(0, dtype=np.int64)  # by slot, as the rule has it
        self.carried = START_DEPTH

    def reset(self, slots: np.ndarray, prompts: np.ndarray) -> None:
        if slots.size and slots.max() >= self.depth.size:
            grown = np.full(int(slots.max()) + 1, START_DEPTH)
            grown[: self.depth.size] = self.depth
            self.depth = grown
        self.depth[slots] = self.carried

    def act(self, obs: np.ndarray, slots: np.ndarray) -> np.ndarray:
        wanted = np.minimum(self.depth[slots], remaining_tokens(obs))
        deepest = np.searchsorted(self.depths, wanted, side="right") - 1
        return np.asarray(self.first_action + np.maximum(deepest, 0), dtype=np.int64)

    def update(self, slots: np.ndarray, actions: np.ndarray, outcome: Outcome) -> None:
        depth = self.depth[slots]
        full = outcome.accepted == outcome.depth
        moved = np.where(full, depth + 2, np.maximum(depth - 1, 1))
        self.depth[slots] = np.where(outcome.drafted == 0, depth, moved)
        if self.persistent:
            self.carried = int(self.depth[slots[-1]])


def _register(name: str, transient: bool) -> None:
    def variants(name: str, space: ActionSpace) -> list[str]:
        return [f"{name}:{method}" for method in space.methods] if 1 in space.depths else []

    @register(name, family="heuristics", signals=("accepted",), source=SOURCE, variants=variants)
    def build(context: Context, args: tuple[str, ...]) -> Policy:
        if 1 not in context.space.depths:
            raise PolicyError(f"policy {name!r} needs depth 1 among --depths, got {choices(context.space.depths)}")
        return HfHeuristic(context.space, context.one_method(name, args), transient)


_register("hf-heuristic", transient=False)
_register("hf-heuristic-transient", transient=True)
