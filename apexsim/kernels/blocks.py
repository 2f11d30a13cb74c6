"""The replay of one block and everything that loops over it: constant, tabled and lockstep replay, and the oracle.

All kernels that price or advance a block live in this file, since a cached kernel does not notice that a callee in
another file has changed. They take arrays only and write into arrays of the caller.
"""

from typing import NamedTuple

import numpy as np
from numba import njit


class Tables(NamedTuple):
    """A compiled trace and cost profile: R requests, P positions, M methods, A actions, C context knots, K deepest depth."""

    start: np.ndarray  # (R + 1,) int64: rows start[r]..start[r+1]-1 are p = 1..T-1 of request r
    length: np.ndarray  # (R,) int64: T
    accepted: np.ndarray  # (M, P) uint8
    drafted: np.ndarray  # (M, P) uint8
    known: np.ndarray  # (M, P) int16: outcomes of drafts up to this many tokens were observed, -1 none
    knot: np.ndarray  # (P,) int16: last of the C contexts with tabled costs that is not above the position's context
    weight: np.ndarray  # (P,) float64: weight of the next one
    verify_s: np.ndarray  # (K + 2, C) float64: by tokens in the pass, 1..K+1
    draft_s: np.ndarray  # (M, K + 1, C) float64: by drafter steps
    verify_share: np.ndarray  # (M,) float64: drafting seconds that are a share of the block's verify seconds
    overhead_s: np.ndarray  # (M + 1,) float64: per block that drafts with m; last: plain decoding
    sync_s: np.ndarray  # (M,) float64: per block that does not use a configured m
    tail_draft: np.ndarray  # (1,) bool: the last block of a request drafts once more
    action_method: np.ndarray  # (A,) int64
    action_depth: np.ndarray  # (A,) int64


class Totals(NamedTuple):
    """What a replay adds up, per request: all (R,)."""

    seconds: np.ndarray  # float64
    blocks: np.ndarray  # int64
    drafting_blocks: np.ndarray  # int64: blocks with drafted > 0
    drafted: np.ndarray  # int64
    committed: np.ndarray  # int64
    depth: np.ndarray  # int64: sum of requested depths
    observed: np.ndarray  # int64: blocks whose outcome the trace holds


@njit(cache=True, nogil=True, error_model="numpy")
def _block(t, row, left, m, k, sync):
    """The block at one position with method m and depth k: (seconds, drafted, accepted, emitted).

    ``left`` is T - p, ``sync`` sums over the configured methods.
    ``accepted`` counts what is emitted of the draft (committed); the last block is priced in full.
    """
    low = t.knot[row]
    weight = t.weight[row]
    drafted = 0
    accepted = 0
    emitted = 1
    if k > 0:
        drafted = min(k, int(t.drafted[m, row]))
        accepted = min(drafted, int(t.accepted[m, row]))
        emitted = min(accepted + 1, left)
        accepted = min(accepted, emitted)
    seconds = t.verify_s[drafted + 1, low] * (1.0 - weight) + t.verify_s[drafted + 1, low + 1] * weight
    if k > 0:
        draft = t.draft_s[m, k, low] * (1.0 - weight) + t.draft_s[m, k, low + 1] * weight + t.verify_share[m] * seconds
        seconds += draft + t.overhead_s[m] + sync - t.sync_s[m]
        if t.tail_draft[0] and emitted == left:
            seconds += draft
    else:
        seconds += t.overhead_s[t.sync_s.shape[0]] + sync
    return seconds, drafted, accepted, emitted


@njit(cache=True, nogil=True, error_model="numpy")
def replay_actions(t, actions, sync_total, out):
    """Replays every request with the action tabled at each position.

    ``actions`` (P,) int16, ``sync_total`` (R,) float64 seconds of sync of the methods configured for the request.
    """
    start, length = t.start, t.length
    out_seconds, out_blocks, out_drafting, out_drafted, out_committed, out_depth, out_observed = out
    for r in range(length.shape[0]):
        total = 0.0
        blocks = drafting = sent = committed = depth_sum = observed = 0
        sync = sync_total[r]
        p = 1
        while p < length[r]:
            row = start[r] + p - 1
            m = t.action_method[actions[row]]
            k = t.action_depth[actions[row]]
            seconds, drafted, accepted, emitted = _block(t, row, length[r] - p, m, k, sync)
            total += seconds
            blocks += 1
            drafting += drafted > 0
            sent += drafted
            committed += accepted
            depth_sum += k
            observed += k == 0 or drafted <= t.known[m, row]
            p += emitted
        out_seconds[r] = total
        out_blocks[r] = blocks
        out_drafting[r] = drafting
        out_drafted[r] = sent
        out_committed[r] = committed
        out_depth[r] = depth_sum
        out_observed[r] = observed


@njit(cache=True, nogil=True, error_model="numpy")
def step(t, request, position, action, sync, out, seconds, drafted, accepted, emitted):
    """One block of each of n slots in lockstep; advances ``position`` (n,) and fills the four outcome arrays (n,)."""
    start, length = t.start, t.length
    out_seconds, out_blocks, out_drafting, out_drafted, out_committed, out_depth, out_observed = out
    for i in range(request.shape[0]):
        r = request[i]
        p = position[i]
        row = start[r] + p - 1
        m = t.action_method[action[i]]
        k = t.action_depth[action[i]]
        seconds[i], drafted[i], accepted[i], emitted[i] = _block(t, row, length[r] - p, m, k, sync)
        out_seconds[r] += seconds[i]
        out_blocks[r] += 1
        out_drafting[r] += drafted[i] > 0
        out_drafted[r] += drafted[i]
        out_committed[r] += accepted[i]
        out_depth[r] += k
        out_observed[r] += k == 0 or drafted[i] <= t.known[m, row]
        position[i] = p + emitted[i]


@njit(cache=True, nogil=True, error_model="numpy")
def solve(t, allowed, sync, step_s, waste_weight, value, best):
    """The hindsight optimum by dynamic programming, from the end of each request to its start.

    Minimises sum(seconds / step_s + waste_weight * wasted) over the action indices in ``allowed``. ``value`` (P,)
    float64 receives the cost to go, ``best`` (P,) int16 the action; ties take the first action, so the shallowest.
    """
    start, length = t.start, t.length
    for r in range(length.shape[0]):
        for p in range(length[r] - 1, 0, -1):
            row = start[r] + p - 1
            left = length[r] - p
            least = np.inf
            choice = 0
            for action in allowed:
                m = t.action_method[action]
                k = t.action_depth[action]
                seconds, drafted, accepted, emitted = _block(t, row, left, m, k, sync)
                cost = seconds / step_s + waste_weight * (drafted - accepted)
                if emitted < left:
                    cost += value[row + emitted]
                if cost < least:
                    least = cost
                    choice = action
            value[row] = least
            best[row] = choice


@njit(cache=True, nogil=True, error_model="numpy")
def autoregressive_seconds(t, out):
    """Seconds of plain decoding without any drafter configured, per request: ``out`` (R,) float64."""
    start, length = t.start, t.length
    for r in range(length.shape[0]):
        total = 0.0
        plain = t.overhead_s[t.sync_s.shape[0]]
        for p in range(1, length[r]):
            low = t.knot[start[r] + p - 1]
            weight = t.weight[start[r] + p - 1]
            total += t.verify_s[1, low] * (1.0 - weight) + t.verify_s[1, low + 1] * weight + plain
        out[r] = total
