"""The replay of one block and everything that loops over it: tabled replay, the oracle, and stepping with observations.

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


class Episodes(NamedTuple):
    """What stepping through requests needs beside the tables; C context features."""

    context: np.ndarray  # (P + R, C) float32: features of p = 1..T of every request
    plain_s: np.ndarray  # (P + 1,) float64: seconds of plain decoding, summed from the first position on
    cut: np.ndarray  # (R,) bool: the log ends before the request does
    best_rate: np.ndarray  # (R, M + 1) float64: best constant's tokens per second with each method, and with any
    rule: np.ndarray  # (RULES,) float64: see the constants below


class Slots(NamedTuple):
    """n requests being stepped through."""

    request: np.ndarray  # (n,) int64; -1: the queue was empty when the last one ended
    position: np.ndarray  # (n,) int64: p
    state: np.ndarray  # (n, STATE) float64: what HISTORY features are made of


class Steps(NamedTuple):
    """What a step of n slots leaves; F features."""

    times: np.ndarray  # (n, 2) float64: SECONDS and GAIN, the reward
    counts: np.ndarray  # (n, COUNTS) int64
    obs: np.ndarray  # (n, F) float32: of the next block, of the next request where one ended
    final_obs: np.ndarray  # (n, F) float32: at the end of the request, where one ended
    ended: np.ndarray  # (n,) int8: 0 goes on, 1 terminated, 2 truncated (its log is cut short)


# Columns of Episodes.rule.
STEP_S, WASTE_WEIGHT, REWARD, PER_REQUEST, SYNC_S, WEIGHT_ACCEPTED, WEIGHT_WASTE, WEIGHT_ANY, WEIGHT_METHOD = range(9)
RULES = 9
REWARD_TIME, REWARD_UTILITY, REWARD_GOODPUT = range(3)
# Columns of Steps.times and Steps.counts.
SECONDS, GAIN = range(2)
METHOD, DEPTH, DRAFTED, ACCEPTED, EMITTED, POSITION, OBSERVED = range(7)
COUNTS = 7
# Columns of Slots.state: counts and the last block, sums over the request, the same over the window, and the window.
WINDOW = 8
N_BLOCKS, LAST_METHOD, LAST_DEPTH, LAST_DRAFTED, LAST_ACCEPTED, SUM_SQUARES = range(6)
SUMS = 6
RECENT = SUMS + 8
RING = RECENT + 8
STATE = RING + 4 * WINDOW
# Offsets within SUMS and RECENT.
DRAFTING, GOT, LOST, FULL, REJECTIONS, FIRST, TIME, TOKENS = range(8)
SCALE = 1.0 / 16.0
UNROLLED = np.dtype(
    [("seconds", "f8"), ("gain", "f8"), ("steps", "f8")]
    + [(name, "i8") for name in ("method", "depth", "drafted", "accepted", "emitted")]
)
SLOWEST = 1000.0


class Totals(NamedTuple):
    """What a replay adds up, per request: all (R,)."""

    seconds: np.ndarray  # float64
    blocks: np.ndarray  # int64
    drafting_blocks: np.ndarray  # int64: blocks with drafted > 0
    drafted: np.ndarray  # int64
    committed: np.ndarray  # int64
    depth: np.ndarray  # int64: sum of requested depths
    observed: np.ndarray  # int64: blocks whose outcome the trace holds


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _block(t, row, low, weight, left, m, k, sync):
    """The block at one position with method m and depth k: (seconds, drafted, accepted, emitted).

    ``low`` and ``weight`` place the context between knots, ``left`` is T - p, ``sync`` sums over the configured methods.
    ``accepted`` counts what is emitted of the draft (committed); the last block is priced in full.
    """
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
            seconds, drafted, accepted, emitted = _block(t, row, t.knot[row], t.weight[row], length[r] - p, m, k, sync)
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
            low = t.knot[row]
            weight = t.weight[row]
            least = np.inf
            choice = 0
            for action in allowed:
                m = t.action_method[action]
                k = t.action_depth[action]
                seconds, drafted, accepted, emitted = _block(t, row, low, weight, left, m, k, sync)
                cost = seconds / step_s + waste_weight * (drafted - accepted)
                if emitted < left:
                    cost += value[row + emitted]
                if cost < least:
                    least = cost
                    choice = action
            value[row] = least
            best[row] = choice


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def plain_seconds(t, out):
    """Seconds of a plain step without any drafter configured, at every position: ``out`` (P,) float64."""
    plain = t.overhead_s[t.sync_s.shape[0]]
    for row in range(out.shape[0]):
        low = t.knot[row]
        weight = t.weight[row]
        out[row] = t.verify_s[1, low] * (1.0 - weight) + t.verify_s[1, low + 1] * weight + plain


@njit(cache=True, nogil=True, error_model="numpy")
def autoregressive_seconds(t, out):
    """Seconds of plain decoding of each request: ``out`` (R,) float64."""
    each = np.empty(t.weight.shape[0])
    plain_seconds(t, each)
    for r in range(t.length.shape[0]):
        total = 0.0
        for row in range(t.start[r], t.start[r + 1]):
            total += each[row]
        out[r] = total


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def learn(state, i, method, depth, drafted, accepted, emitted, steps):
    """Books a block in row i of ``state`` (n, STATE); ``steps`` are its seconds in units of c_0, ``method`` its index.

    Written without branches: on a hundred slots at a time a branch on what was accepted is mispredicted every other time.
    """
    blocks = int(state[i, N_BLOCKS])
    slot = RING + 4 * (blocks % WINDOW)
    old_drafted = state[i, slot]  # zeros until the window has filled, which take nothing out
    old_accepted = state[i, slot + 1]
    old_drafts = 1.0 * (old_drafted > 0.0)
    old_rejects = 1.0 * (old_accepted < old_drafted)
    drafts = 1.0 * (drafted > 0)
    rejects = 1.0 * (accepted < drafted)
    first = rejects * (accepted + 1.0)
    state[i, SUMS + DRAFTING] += drafts
    state[i, SUMS + GOT] += accepted
    state[i, SUMS + LOST] += drafted - accepted
    state[i, SUMS + FULL] += drafts - rejects
    state[i, SUMS + REJECTIONS] += rejects
    state[i, SUMS + FIRST] += first
    state[i, SUMS + TIME] += steps
    state[i, SUMS + TOKENS] += emitted
    state[i, RECENT + DRAFTING] += drafts - old_drafts
    state[i, RECENT + GOT] += accepted - old_accepted
    state[i, RECENT + LOST] += (drafted - accepted) - (old_drafted - old_accepted)
    state[i, RECENT + FULL] += (drafts - rejects) - (old_drafts - old_rejects)
    state[i, RECENT + REJECTIONS] += rejects - old_rejects
    state[i, RECENT + FIRST] += first - old_rejects * (old_accepted + 1.0)
    state[i, RECENT + TIME] += steps - state[i, slot + 2]
    state[i, RECENT + TOKENS] += emitted - state[i, slot + 3]
    state[i, slot] = drafted
    state[i, slot + 1] = accepted
    state[i, slot + 2] = steps
    state[i, slot + 3] = emitted
    state[i, SUM_SQUARES] += accepted * accepted
    state[i, N_BLOCKS] = blocks + 1.0
    state[i, LAST_METHOD] = method + 1.0
    state[i, LAST_DEPTH] = depth
    state[i, LAST_DRAFTED] = drafted
    state[i, LAST_ACCEPTED] = accepted


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def recall(state, i, methods, obs, at, first):
    """Writes the HISTORY features of row i of ``state`` (n, STATE) into row ``at`` of ``obs`` (n, F), from ``first`` on."""
    blocks = state[i, N_BLOCKS]
    drafting = state[i, SUMS + DRAFTING]
    obs[at, first + 0] = 1.0 if drafting > 0.0 else 0.0
    obs[at, first + 1] = blocks / (blocks + 16.0)
    obs[at, first + 2] = state[i, LAST_METHOD] / methods
    obs[at, first + 3] = state[i, LAST_DEPTH] * SCALE
    obs[at, first + 4] = state[i, LAST_DRAFTED] * SCALE
    obs[at, first + 5] = state[i, LAST_ACCEPTED] * SCALE
    each = 1.0 / max(drafting, 1.0)
    mean = state[i, SUMS + GOT] * each
    obs[at, first + 6] = mean * SCALE
    obs[at, first + 7] = np.sqrt(max(state[i, SUM_SQUARES] * each - mean * mean, 0.0)) * SCALE
    obs[at, first + 8] = state[i, SUMS + LOST] * each * SCALE
    obs[at, first + 9] = state[i, SUMS + FULL] * each
    obs[at, first + 10] = state[i, SUMS + FIRST] / max(state[i, SUMS + REJECTIONS], 1.0) * SCALE
    obs[at, first + 11] = min(state[i, SUMS + TIME] / max(state[i, SUMS + TOKENS], 1.0), SLOWEST)
    each = 1.0 / max(state[i, RECENT + DRAFTING], 1.0)
    obs[at, first + 12] = state[i, RECENT + GOT] * each * SCALE
    obs[at, first + 13] = state[i, RECENT + LOST] * each * SCALE
    obs[at, first + 14] = state[i, RECENT + FULL] * each
    obs[at, first + 15] = state[i, RECENT + FIRST] / max(state[i, RECENT + REJECTIONS], 1.0) * SCALE
    # What is taken out of a sum of seconds leaves a rounding error behind; it must not go below zero.
    obs[at, first + 16] = min(max(state[i, RECENT + TIME], 0.0) / max(state[i, RECENT + TOKENS], 1.0), SLOWEST)


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _observe(context, row, state, i, methods, obs):
    """Writes the whole observation into row i of ``obs``; ``row`` is that of the context, start of the request + r + p - 1."""
    width = context.shape[1]
    for c in range(width):
        obs[i, c] = context[row, c]
    recall(state, i, methods, obs, i, width)


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def utility(rate, accepted, wasted, any_best, own_best, weights):
    """APEX's label (arXiv:2610.07780, Eqs. 23-25) of a block, or of whole requests: numbers or arrays that broadcast.

    ``rate`` in tokens per second, ``accepted`` tokens, ``wasted`` share of the draft, the best constant's rates on the request
    with any method and with the own one, and ``weights`` a_A, a_W, a_G, a_M.
    """
    return (
        np.log(rate)
        + weights[0] * np.log(accepted + 0.1)
        - weights[1] * wasted
        - weights[2] * np.maximum(0.0, any_best - rate) / any_best
        - weights[3] * np.maximum(0.0, own_best - rate) / own_best
    )


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _gain(e, r, row, method, seconds, drafted, accepted, emitted):
    """The reward of a block, by the rule of the episodes."""
    kind = int(e.rule[REWARD])
    if kind == REWARD_TIME:
        saved = e.plain_s[row + emitted] - e.plain_s[row] - seconds
        return saved / e.rule[STEP_S] - e.rule[WASTE_WEIGHT] * (drafted - accepted)
    rate = emitted / seconds
    if kind == REWARD_GOODPUT:
        return rate * e.rule[STEP_S]
    wasted = (drafted - accepted) / drafted if drafted > 0 else 0.0
    any_best = e.best_rate[r, e.best_rate.shape[1] - 1]
    return utility(rate, accepted, wasted, any_best, e.best_rate[r, method], e.rule[WEIGHT_ACCEPTED:])


@njit(cache=True, nogil=True, error_model="numpy")
def begin(t, e, slots, chosen, obs):
    """Starts the requests ``slots.request`` in the slots ``chosen`` (k,) and writes their first observations."""
    methods = max(t.sync_s.shape[0], 1)
    for i in chosen:
        slots.position[i] = 1
        slots.state[i, :] = 0.0
        r = slots.request[i]
        _observe(e.context, t.start[r] + r, slots.state, i, methods, obs)


@njit(cache=True, nogil=True, error_model="numpy")
def step(t, e, slots, action, noise, queue, cursor, out):
    """One block of each slot, its reward and the next observation; a request that ended is replaced by the queue's next.

    Args:
        t: The compiled trace.
        e: What episodes need.
        slots: The running requests; advanced.
        action: (n,) int64 action indices.
        noise: (n,) float64 factors on the block seconds.
        queue: (q,) int64 requests to come.
        cursor: (1,) int64 place in the queue; advanced.
        out: What the step leaves.
    """
    methods = max(t.sync_s.shape[0], 1)
    per_request = e.rule[PER_REQUEST] > 0.0
    configured = e.rule[SYNC_S]
    each = 1.0 / e.rule[STEP_S]
    # Taken out of their tuples once: inside the loop that would be done for every slot.
    start, length, knot, weight, known, sync_s = t.start, t.length, t.knot, t.weight, t.known, t.sync_s
    action_method, action_depth = t.action_method, t.action_depth
    request, position, state = slots.request, slots.position, slots.state
    times, counts, obs, ended, context = out.times, out.counts, out.obs, out.ended, e.context
    for i in range(request.shape[0]):
        r = request[i]
        p = position[i]
        m = action_method[action[i]]
        k = action_depth[action[i]]
        sync = configured
        if per_request:  # the first block's method stays, and it is the only one configured
            if state[i, N_BLOCKS] > 0.0:
                m = int(state[i, LAST_METHOD]) - 1
            sync = sync_s[m]
        row = start[r] + p - 1
        seconds, drafted, accepted, emitted = _block(t, row, knot[row], weight[row], length[r] - p, m, k, sync)
        seconds *= noise[i]
        learn(state, i, m, k, drafted, accepted, emitted, seconds * each)
        times[i, SECONDS] = seconds
        counts[i, METHOD] = m
        counts[i, DEPTH] = k
        counts[i, DRAFTED] = drafted
        counts[i, ACCEPTED] = accepted
        counts[i, EMITTED] = emitted
        times[i, GAIN] = _gain(e, r, row, m, seconds, drafted, accepted, emitted)
        counts[i, POSITION] = p
        counts[i, OBSERVED] = k == 0 or drafted <= known[m, row]
        p += emitted
        position[i] = p
        ended[i] = 0
        if p >= length[r]:
            ended[i] = 2 if e.cut[r] else 1
            _observe(context, start[r] + r + p - 1, state, i, methods, out.final_obs)
            if cursor[0] >= queue.shape[0]:
                request[i] = -1
                continue
            r = queue[cursor[0]]
            cursor[0] += 1
            p = 1
            request[i] = r
            position[i] = p
            state[i, :] = 0.0
        _observe(context, start[r] + r + p - 1, state, i, methods, obs)


@njit(cache=True, nogil=True, error_model="numpy")
def unroll(t, e, r, first, last, noise, out):
    """Every action's block at p = first..last of request r: ``out`` (last - first + 1, A) of ``UNROLLED`` records.

    One request stepped through alone is then a look-up per block.
    """
    per_request = e.rule[PER_REQUEST] > 0.0
    each = 1.0 / e.rule[STEP_S]
    for p in range(first, last + 1):
        row = t.start[r] + p - 1
        left = t.length[r] - p
        low = t.knot[row]
        weight = t.weight[row]
        for action in range(t.action_depth.shape[0]):
            m = t.action_method[action]
            k = t.action_depth[action]
            sync = t.sync_s[m] if per_request else e.rule[SYNC_S]
            seconds, drafted, accepted, emitted = _block(t, row, low, weight, left, m, k, sync)
            seconds *= noise
            record = out[p - first, action]
            record.seconds = seconds
            record.gain = _gain(e, r, row, m, seconds, drafted, accepted, emitted)
            record.steps = seconds * each
            record.method = m
            record.depth = k
            record.drafted = drafted
            record.accepted = accepted
            record.emitted = emitted


@njit(cache=True, nogil=True, error_model="numpy")
def follow(unrolled, context, state, obs, at, p, action, methods):
    """Books the unrolled block that ``action`` begins at p and writes the next observation into row ``at`` of ``obs``."""
    block = unrolled[p - 1, action]
    learn(state, 0, block.method, block.depth, block.drafted, block.accepted, block.emitted, block.steps)
    width = context.shape[1]
    for c in range(width):
        obs[at, c] = context[p + block.emitted - 1, c]
    recall(state, 0, methods, obs, at, width)
