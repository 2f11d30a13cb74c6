"""The decision of a trained controller: a two-layer network scored once per candidate, without any allocation.

Loops run over the contiguous axis, so that they vectorise without reordering a sum: the result does not depend on the machine.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

CLIP = 10.0
"""Standardised inputs are held within so many standard deviations: what was never seen in training must not run away."""


class Network(NamedTuple):
    """Trained weights; C inputs, H hidden units, M methods, A depths. All float32 but the first and last."""

    columns: np.ndarray  # (C,) int64: column of the observation, or its width plus that of the prompt's features
    mean: np.ndarray  # (C,)
    scale: np.ndarray  # (C,): 1 / standard deviation
    first: np.ndarray  # (C, H)
    methods: np.ndarray  # (M, H): embedding of each method, the first layer's bias included
    depths: np.ndarray  # (A, H): embedding of each depth
    second: np.ndarray  # (H, H)
    second_bias: np.ndarray  # (H,)
    utility: np.ndarray  # (H,)
    utility_bias: np.ndarray  # (1,)
    admissible: np.ndarray  # (M, A) bool


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _encode(n, obs, prompts, i, j, state):
    """The first layer's share of the state: row i of ``obs`` and row j of ``prompts`` into ``state`` (H,)."""
    width = obs.shape[1]
    hidden = n.second_bias.shape[0]
    for h in range(hidden):
        state[h] = np.float32(0.0)
    for c in range(n.columns.shape[0]):
        column = n.columns[c]
        value = obs[i, column] if column < width else prompts[j, column - width]
        value = (value - n.mean[c]) * n.scale[c]
        value = min(max(value, np.float32(-CLIP)), np.float32(CLIP))
        if value != value:  # unknown: as the mean
            value = np.float32(0.0)
        for h in range(hidden):
            state[h] += value * n.first[c, h]


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _score(n, state, method, depth, top):
    """The utility predicted for one candidate; ``top`` (H,) is scratch."""
    hidden = n.second_bias.shape[0]
    for h in range(hidden):
        top[h] = n.second_bias[h]
    for i in range(hidden):
        value = state[i] + n.methods[method, i] + n.depths[depth, i]
        if value > np.float32(0.0):
            for h in range(hidden):
                top[h] += value * n.second[i, h]
    score = n.utility_bias[0]
    for h in range(hidden):
        score += max(top[h], np.float32(0.0)) * n.utility[h]
    return score


@njit(cache=True, nogil=True, error_model="numpy")
def scores(n, obs, prompts, out):
    """The predicted utility of every candidate: ``out`` (rows, M, A) float32."""
    state = np.empty(n.second_bias.shape[0], dtype=np.float32)
    top = np.empty_like(state)
    for i in range(obs.shape[0]):
        _encode(n, obs, prompts, i, i, state)
        for m in range(n.methods.shape[0]):
            for a in range(n.depths.shape[0]):
                out[i, m, a] = _score(n, state, m, a, top)


@njit(cache=True, nogil=True, error_model="numpy")
def decide(router, controller, obs, slots, prompts, started, actions, method, state, top, out):
    """One decision per row: the router's method and depth at a request's first block, the controller's depth at later ones.

    Args:
        router: Scores every admissible (method, depth) from the request's features.
        controller: Scores the depths of the method chosen.
        obs: (n, F) float32 observations.
        slots: (n,) int64 rows of ``prompts`` and ``method``.
        prompts: (slots, P) float32 features of the prompts.
        started: Column of ``obs`` that is 0 at the first block.
        actions: (M, A) int64 action index of every candidate.
        method: (slots,) int64 method of each request; -1 lets the router choose. Written at the first block.
        state: (H,) float32 scratch, as is ``top``.
        top: The second layer's.
        out: (n,) int64 action chosen.
    """
    for i in range(obs.shape[0]):
        slot = slots[i]
        first = obs[i, started] == np.float32(0.0)
        if first:
            _encode(router, obs, prompts, i, slot, state)
            low = max(method[slot], 0)
            high = router.methods.shape[0] if method[slot] < 0 else low + 1
        else:
            _encode(controller, obs, prompts, i, slot, state)
            low = method[slot]
            high = low + 1
        best = np.float32(-np.inf)
        chosen = depth = -1
        for m in range(low, high):
            for a in range(controller.depths.shape[0]):
                if first:
                    allowed = router.admissible[m, a]
                    score = _score(router, state, m, a, top) if allowed else best
                else:
                    allowed = controller.admissible[m, a]
                    score = _score(controller, state, m, a, top) if allowed else best
                if allowed and (score > best or chosen < 0):
                    best = score
                    chosen = m
                    depth = a
        method[slot] = chosen
        out[i] = actions[chosen, depth]
