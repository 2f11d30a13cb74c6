"""Training examples: states that running requests pass through, and what each candidate depth would have given there.

Two sources. ``on-policy`` is what the paper had: the blocks of fixed-depth runs; a group is one (request, method, block index),
and its candidates stand in different states. ``counterfactual`` is what an every-position trace allows: all candidates at one
state. Histories come from random depths first, then from the learner's own runs: what it sees depends on what it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from apexsim import replay
from apexsim.features import FEATURES
from apexsim.hindsight import best_rates
from apexsim.kernels import blocks as kernels
from apexsim.objective import PROFILES
from apexsim.program import Program
from apexsim.protocol import Outcome, Policy
from policies.apex.inputs import ALL
from policies.fixed import Fixed

SOURCES = ("counterfactual", "on-policy")


@dataclass(frozen=True)
class Groups:
    """G groups of C candidates, of one or more methods.

    Attributes:
        states: (G, S, len(ALL)) float32 raw states; S is 1, one for all candidates, or C, one each.
        method: (G,) int64 method index.
        known: (G, C) bool; the candidate was run.
        accepted, drafted: (G, C) int64 tokens.
        rejected: (G, C) bool; the token after the accepted ones was rejected.
        seconds: (G, C) float64 of the block.
        rate: (G, C) float64 emitted tokens per second.
        utility: (G, C) float64, Eq. 25.
    """

    states: np.ndarray
    method: np.ndarray
    known: np.ndarray
    accepted: np.ndarray
    drafted: np.ndarray
    rejected: np.ndarray
    seconds: np.ndarray
    rate: np.ndarray
    utility: np.ndarray

    def rows(self, chosen: np.ndarray) -> Groups:
        """Some of the groups, by index or mask."""
        return Groups(*(getattr(self, field.name)[chosen] for field in fields(self)))


def join(groups: Sequence[Groups]) -> Groups:
    """Several collections as one."""
    return Groups(*(np.concatenate([getattr(g, field.name) for g in groups]) for field in fields(Groups)))


@dataclass(frozen=True)
class Visits:
    """Blocks that a run began, in the order they were begun."""

    obs: np.ndarray  # (n, F) float32
    request: np.ndarray  # (n,) int64
    position: np.ndarray  # (n,) int64


class Visiting:
    """Runs a policy and writes down where each of its blocks began. Requests run in lockstep, so a slot is a request."""

    persistent = False

    def __init__(self, policy: Policy, requests: int) -> None:
        self.policy, self.methods, self.scope = policy, policy.methods, policy.scope
        self.position = np.ones(requests, dtype=np.int64)
        self.log: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def reset(self, slots: np.ndarray, prompts: np.ndarray) -> None:
        self.policy.reset(slots, prompts)

    def act(self, obs: np.ndarray, slots: np.ndarray) -> np.ndarray:
        self.log.append((obs.copy(), slots.copy(), self.position[slots]))
        return self.policy.act(obs, slots)

    def update(self, slots: np.ndarray, actions: np.ndarray, outcome: Outcome) -> None:
        self.position[slots] += outcome.emitted
        self.policy.update(slots, actions, outcome)


def visits(program: Program, policy: Policy) -> Visits:
    """Every block that the policy begins, over all requests of the program."""
    visiting = Visiting(policy, program.requests.height)
    replay.run_policy(program, visiting)
    return Visits(*(np.concatenate(column) for column in zip(*visiting.log, strict=True)))


class RandomDepth:
    """The behaviour mix: every other request keeps one random depth, the others draw a new one at each block."""

    scope = "method"
    persistent = False

    def __init__(self, program: Program, method: str, rng: np.random.Generator) -> None:
        self.methods: tuple[str, ...] = (method,)
        self.first, self.rng = program.space.index(method, program.space.depths[0]), rng
        self.count = len(program.space.depths)
        self.kept = rng.integers(self.count, size=program.requests.height)

    def reset(self, slots: np.ndarray, prompts: np.ndarray) -> None: ...

    def act(self, obs: np.ndarray, slots: np.ndarray) -> np.ndarray:
        drawn = self.rng.integers(self.count, size=slots.size)
        return self.first + np.where(slots % 2 == 0, self.kept[slots], drawn)

    def update(self, slots: np.ndarray, actions: np.ndarray, outcome: Outcome) -> None: ...


class Labels:
    """The outcomes and utilities of all candidates of a program, by request.

    Args:
        program: The requests; its depths are the candidates.
        profile: ``s``, ``b`` or ``e``.
    """

    def __init__(self, program: Program, profile: str) -> None:
        self.program, self.weights = program, np.array(PROFILES[profile])
        self.best = best_rates(program)
        rule = np.zeros(kernels.RULES)
        rule[kernels.STEP_S], rule[kernels.PER_REQUEST] = program.step_s, 1.0
        rule[kernels.REWARD] = kernels.REWARD_UTILITY
        rule[kernels.WEIGHT_ACCEPTED :] = self.weights
        self.episodes = replay.make_episodes(program, rule, self.best)

    def at(self, visited: Visits, method: int) -> Groups:
        """All candidates of one method at visited blocks."""
        program, tables = self.program, self.program.tables
        count, depths = visited.request.size, len(program.space.depths)
        block = np.empty((count, depths), dtype=kernels.UNROLLED)
        actions = slice(method * depths, (method + 1) * depths)
        for r in np.unique(visited.request).tolist():
            last = int(tables.length[r]) - 1
            unrolled = np.empty((last, len(program.space.pairs)), dtype=kernels.UNROLLED)
            kernels.unroll(tables, self.episodes, r, 1, last, 1.0, unrolled)
            here = visited.request == r
            block[here] = unrolled[visited.position[here] - 1, actions]
        left = (tables.length[visited.request] - visited.position)[:, None]
        states = np.concatenate((visited.obs, program.prompts[visited.request]), axis=1)
        return Groups(
            states=states[:, None, :],
            method=np.full(count, method),
            known=np.ones((count, depths), dtype=bool),
            accepted=block["accepted"],
            drafted=block["drafted"],
            # Running into the end of the text is no rejection: nothing is known of the tokens beyond it.
            rejected=(block["accepted"] < block["drafted"]) & (block["accepted"] < left),
            seconds=block["seconds"],
            rate=block["emitted"] / block["seconds"],
            utility=block["gain"],
        )

    def requests(self) -> tuple[np.ndarray, np.ndarray]:
        """The router's examples (Eqs. 6, 7): what each constant (method, depth) made of each whole request.

        The paper does not define the label; here it is the block's utility on request totals: tokens per second of the
        request, accepted tokens per block, and the share of the draft that was wasted.

        Returns:
            (R, len(ALL)) float32 raw states at the first block, and (R, M, A) float64 utilities.
        """
        program = self.program
        space, out = program.space, []
        for m, method in enumerate(space.methods):
            for depth in space.depths:
                totals = replay.run_constant(program, space.index(method, depth), program.sync_s((method,)))
                wasted = (totals.drafted - totals.committed) / np.maximum(totals.drafted, 1)
                rate, accepted = program.tokens / totals.seconds, totals.committed / totals.blocks
                out.append(kernels.utility(rate, accepted, wasted, self.best[:, -1], self.best[:, m], self.weights))
        shape = (program.requests.height, len(space.methods), len(space.depths))
        first = program.tables.start[:-1] + np.arange(shape[0])
        states = np.zeros((shape[0], len(ALL)), dtype=np.float32)
        states[:, : program.context.shape[1]] = program.context[first]
        states[:, len(FEATURES) :] = program.prompts
        return states, np.stack(out, axis=1).reshape(shape)


def _later(visited: Visits) -> Visits:
    """Without each request's first block, whose depth is the router's."""
    keep = visited.position > 1
    return Visits(visited.obs[keep], visited.request[keep], visited.position[keep])


def sample(groups: Groups, limit: int, rng: np.random.Generator) -> Groups:
    """At most ``limit`` groups, drawn without replacement, in order."""
    if groups.method.size <= limit:
        return groups
    return groups.rows(np.sort(rng.choice(groups.method.size, limit, replace=False)))


def counterfactual(labels: Labels, rng: np.random.Generator, learner: Sequence[Policy] | None = None) -> list[Groups]:
    """All candidates at the blocks of random-depth runs or, given one learner per method, at those of its own runs."""
    program = labels.program
    out = []
    for m, method in enumerate(program.space.methods):
        policy: Policy = learner[m] if learner else RandomDepth(program, method, rng)
        out.append(labels.at(_later(visits(program, policy)), m))
    return out


def on_policy(labels: Labels) -> list[Groups]:
    """The blocks of fixed-depth runs: each candidate in the state that its own run had at that block index, if it had one."""
    program = labels.program
    space, out = program.space, []
    for m, method in enumerate(space.methods):
        runs = [_later(visits(program, Fixed(space.index(method, k), (method,)))) for k in space.depths]
        index = [_block_index(run.request, program.requests.height) for run in runs]
        most = max((int(i.max(initial=0)) for i in index), default=0) + 1
        keys, place = np.unique(
            np.concatenate([run.request * most + i for run, i in zip(runs, index, strict=True)]), return_inverse=True
        )
        pieces = [labels.at(run, m) for run in runs]
        shape = (keys.size, len(space.depths))
        states = np.zeros((*shape, len(ALL)), dtype=np.float32)
        known = np.zeros(shape, dtype=bool)
        columns = {
            name: np.zeros(shape, dtype=getattr(pieces[0], name).dtype)
            for name in ("accepted", "drafted", "rejected", "seconds", "rate", "utility")
        }
        at = 0
        for a, piece in enumerate(pieces):
            rows = place[at : at + piece.method.size]
            at += piece.method.size
            states[rows, a], known[rows, a] = piece.states[:, 0], True
            for name, column in columns.items():
                column[rows, a] = getattr(piece, name)[:, a]
        out.append(Groups(states, np.full(keys.size, m), known, **columns))
    return out


def _block_index(request: np.ndarray, requests: int) -> np.ndarray:
    """(n,) how many blocks of the same request came before each; the blocks are in the order they were begun."""
    order = np.argsort(request, kind="stable")
    start = np.concatenate(([0], np.cumsum(np.bincount(request, minlength=requests))))
    index = np.empty(request.size, dtype=np.int64)
    index[order] = np.arange(request.size) - start[request[order]]
    return index
