"""The controller at work: numpy and Numba only, a few microseconds a decision, the same in the simulator and live."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from apexsim.errors import PolicyError, choices
from apexsim.features import FEATURES, PROMPT
from apexsim.kernels import network as kernels
from apexsim.kernels.network import Network
from apexsim.protocol import ActionSpace, Outcome
from policies.apex.inputs import Inputs

STARTED = FEATURES.index("blocks")
"""Column that is 0 at the first block of a request."""


def decision_path(weights: Mapping[str, np.ndarray], inputs: Inputs, admissible: np.ndarray) -> Network:
    """The part of a trained network that decides, as arrays for ``apexsim.kernels.network``; the other heads stay behind.

    Args:
        weights: By name, as ``policies.apex.network`` has them.
        inputs: What the network sees.
        admissible: (M, A) bool candidates.
    """

    def array(value: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(value, dtype=np.float32)

    return Network(
        columns=inputs.columns,
        mean=inputs.mean,
        scale=inputs.scale,
        first=array(weights["first.weight"].T),
        methods=array(weights["methods"] + weights["first.bias"]),
        depths=array(weights["depths"]),
        second=array(weights["second.weight"].T),
        second_bias=array(weights["second.bias"]),
        utility=array(weights["utility.weight"][0]),
        utility_bias=array(weights["utility.bias"]),
        admissible=admissible,
    )


class Apex:
    """APEX (arXiv:2610.07780): the router picks method and first depth (Eqs. 6, 7), the controller every later depth (Eq. 20).

    Args:
        space: The actions of the simulator or engine.
        methods: Methods of the networks, in their order.
        depths: Candidate depths of the networks.
        router: Scores (method, first depth).
        controller: Scores depths.
        method: Keep to this method instead of the router's choice.

    Attributes:
        signals: What a trace must record for the features used.
        trained_on: Names of the traces it was trained on.
        trained_requests: (id, prompt tokens, output tokens) of the requests it was trained on.
    """

    scope = "method"
    persistent = False
    signals: tuple[str, ...] = ()
    trained_on: str | None = None
    trained_requests: tuple[tuple[str, int, int], ...] = ()

    def __init__(
        self,
        space: ActionSpace,
        methods: tuple[str, ...],
        depths: tuple[int, ...],
        router: Network,
        controller: Network,
        method: str | None = None,
    ) -> None:
        for what, wanted, offered in (("method", methods, space.methods), ("depth", depths, space.depths)):
            missing = [value for value in wanted if value not in offered]
            if missing:
                raise PolicyError(
                    f"the controller was trained for {what} {missing[0]}, not among those selected: {choices(offered)}"
                )
        self.methods: tuple[str, ...] = methods if method is None else (method,)
        self.router, self.controller = router, controller
        self.actions = np.array([[space.index(m, k) for k in depths] for m in methods], dtype=np.int64)
        self.chosen = -1 if method is None else methods.index(method)
        hidden = max(router.second_bias.size, controller.second_bias.size)
        self._state, self._top = np.empty(hidden, dtype=np.float32), np.empty(hidden, dtype=np.float32)
        self._prompts = np.empty((0, len(PROMPT)), dtype=np.float32)  # by slot, as is the method of its request
        self._method = np.empty(0, dtype=np.int64)
        self._out = np.empty(0, dtype=np.int64)

    def reset(self, slots: np.ndarray, prompts: np.ndarray) -> None:
        if slots.size and slots.max() >= self._method.size:
            count = int(slots.max()) + 1
            self._prompts = np.concatenate((self._prompts, np.full((count, len(PROMPT)), np.nan, np.float32)))[:count]
            self._method = np.resize(self._method, count)
            self._out = np.empty(count, dtype=np.int64)
        self._prompts[slots] = prompts
        self._method[slots] = self.chosen

    def act(self, obs: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Action indices; the array is reused by the next call."""
        out = self._out[: slots.size]
        kernels.decide(
            self.router,
            self.controller,
            obs,
            slots,
            self._prompts,
            STARTED,
            self.actions,
            self._method,
            self._state,
            self._top,
            out,
        )
        return out

    def update(self, slots: np.ndarray, actions: np.ndarray, outcome: Outcome) -> None: ...
