"""The policy protocol: one object that decides depths in the simulator and on a live engine alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from apexsim.errors import UsageError, choices


@dataclass(frozen=True)
class ActionSpace:
    """The (method, depth) pairs a policy chooses from, row-major: index = method index * number of depths + depth index.

    Attributes:
        methods: Method names.
        depths: Ascending depths; depth 0 is plain decoding and stands once per method.
    """

    methods: tuple[str, ...]
    depths: tuple[int, ...]

    def __post_init__(self) -> None:
        if list(self.depths) != sorted(set(self.depths)) or not self.depths or self.depths[0] < 0:
            raise UsageError(f"--depths must be ascending, not negative and not empty; got {choices(self.depths)}")

        if len(set(self.methods)) != len(self.methods):
            raise UsageError(f"--methods must name each method once; got {choices(self.methods)}")

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(method index, depth) of every action."""
        return [(m, k) for m in range(max(len(self.methods), 1)) for k in self.depths]

    def index(self, method: str | None, depth: int) -> int:
        """The action index of a method and depth.

        Raises:
            UsageError: The method or depth is not among those selected.
        """
        if method is not None and method not in self.methods:
            raise UsageError(f"method {method!r} is not selected; allowed: {choices(self.methods)}")
        if depth not in self.depths:
            raise UsageError(f"depth {depth} is not selected; allowed: {choices(self.depths)}")
        row = 0 if method is None else self.methods.index(method)
        return row * len(self.depths) + self.depths.index(depth)


class Outcome(NamedTuple):
    """What a live engine sees of the blocks it has just run; all (n,)."""

    depth: np.ndarray  # int64: requested
    drafted: np.ndarray  # int64: submitted
    accepted: np.ndarray  # int64: accepted and emitted (committed)
    emitted: np.ndarray  # int64
    seconds: np.ndarray  # float64


@runtime_checkable
class Policy(Protocol):
    """A controller. A slot is one running request; a live engine and the replayer reuse slots as requests come and go."""

    methods: tuple[str, ...]
    """The methods it configures, before the run: it pays the sync of each it does not use."""
    scope: str
    """``depth`` (one method), ``method`` (one method per request) or ``switch`` (any method at any block)."""
    persistent: bool
    """True if it remembers something from one request to the next: then the order of arrival matters."""

    def reset(self, slots: np.ndarray, prompts: np.ndarray) -> None:
        """New requests start in these slots (n,) int64; ``prompts`` are their ``features.PROMPT`` (n, P), NaN where unknown."""

    def act(self, obs: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Action indices (n,) int64 for observations (n, F) of ``apexsim.features``; the arguments are read only."""

    def update(self, slots: np.ndarray, actions: np.ndarray, outcome: Outcome) -> None:
        """The outcomes of the blocks just run in these slots."""
