"""Replays policies over a program: exactly what an engine would have done, block by block."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from apexsim.errors import PolicyError
from apexsim.features import FEATURES
from apexsim.kernels import blocks as kernels
from apexsim.kernels.blocks import Episodes, Slots, Steps, Totals
from apexsim.program import Program
from apexsim.protocol import Outcome, Policy


class Plan(NamedTuple):
    """A whole replay decided beforehand, by a policy that may see the trace (simulation only)."""

    actions: np.ndarray  # (P,) int16: action index at every position
    sync_s: np.ndarray  # (R,) float64: summed sync of the methods configured for each request
    resolved: tuple[str, ...]  # (R,) what was chosen for each request, in policy names


@runtime_checkable
class Planner(Protocol):
    """A sim-only policy: it reads the compiled trace."""

    methods: tuple[str, ...]
    scope: str

    def plan(self, program: Program) -> Plan:
        """Decides every block of every request of the program."""


@dataclass(frozen=True)
class Replay:
    """One policy over all requests of a program.

    Attributes:
        totals: Sums per request.
        resolved: Per request, what a sim-only policy chose, in policy names; None for a policy that acts block by block.
        controller_s: Seconds the policy itself took to act and learn.
    """

    totals: Totals
    resolved: tuple[str, ...] | None = None
    controller_s: float = 0.0


def empty_totals(requests: int) -> Totals:
    """Totals of zero for so many requests."""
    return Totals(np.zeros(requests), *(np.zeros(requests, dtype=np.int64) for _ in range(6)))


def run_constant(program: Program, action: int, sync_s: float) -> Totals:
    """Every block of every request with one action; ``sync_s`` of the methods configured."""
    actions = np.full(int(program.tables.start[-1]), action, dtype=np.int16)
    out = empty_totals(program.requests.height)
    kernels.replay_actions(program.tables, actions, np.full(program.requests.height, sync_s), out)
    return out


def run_plan(program: Program, plan: Plan) -> Replay:
    """Every block as planned beforehand."""
    out = empty_totals(program.requests.height)
    kernels.replay_actions(program.tables, plan.actions, plan.sync_s, out)
    return Replay(out, plan.resolved)


def make_episodes(program: Program, rule: np.ndarray, best_rate: np.ndarray | None = None) -> Episodes:
    """What the stepping kernel needs beside the tables.

    Args:
        program: The compiled requests.
        rule: (RULES,) reward and cost rule; the constants in ``apexsim.kernels.blocks`` name its entries.
        best_rate: (R, M + 1) best constant's tokens per second; only the utility reward needs it.
    """
    tables, requests = program.tables, program.requests
    plain_s = np.empty(int(tables.start[-1]))
    kernels.plain_seconds(tables, plain_s)
    return Episodes(
        context=program.context,
        plain_s=np.concatenate(([0.0], np.cumsum(plain_s))),
        cut=(requests["finish_reason"] == "cut").to_numpy(),
        best_rate=np.ones((requests.height, len(program.space.methods) + 1)) if best_rate is None else best_rate,
        rule=rule,
    )


def make_slots(requests: np.ndarray) -> Slots:
    """Slots that start with these requests (n,) int64."""
    count = requests.size
    return Slots(requests.astype(np.int64), np.ones(count, dtype=np.int64), np.zeros((count, kernels.STATE)))


def make_steps(count: int) -> Steps:
    """Buffers for what a step of so many slots leaves."""
    wide = (count, len(FEATURES))
    return Steps(
        np.zeros((count, 2)),
        np.zeros((count, kernels.COUNTS), np.int64),
        np.zeros(wide, np.float32),
        np.zeros(wide, np.float32),
        np.zeros(count, np.int8),
    )


def outcome_of(steps: Steps) -> Outcome:
    """The part of a step's outcome that a live engine sees, too."""
    depth, drafted, accepted, emitted = (
        steps.counts[:, column].copy() for column in (kernels.DEPTH, kernels.DRAFTED, kernels.ACCEPTED, kernels.EMITTED)
    )
    return Outcome(depth, drafted, accepted, emitted, steps.times[:, kernels.SECONDS].copy())


def run_policy(program: Program, policy: Policy, seed: int = 0, concurrency: int = 1, lockstep: bool = True) -> Replay:
    """A policy acting block by block.

    A policy without memory across requests runs all of them in lockstep, unless that is forbidden: decision time then is
    that of one request at a time. One with memory sees them in an order of arrival drawn from ``seed``, with
    ``concurrency`` requests in flight; slots are reused.
    """
    count = program.requests.height
    arrivals = np.random.default_rng(seed).permutation(count) if policy.persistent else np.arange(count)
    in_flight = count if lockstep and not policy.persistent else min(concurrency, count)
    rule = np.zeros(kernels.RULES)
    rule[kernels.STEP_S], rule[kernels.SYNC_S] = program.step_s, program.sync_s(policy.methods)
    rule[kernels.PER_REQUEST] = (
        policy.scope == "method"
    )  # only the method chosen at the first block is configured, then
    episodes = make_episodes(program, rule)
    slots, steps, slot = make_slots(arrivals[:in_flight]), make_steps(in_flight), np.arange(in_flight)
    queue, cursor = arrivals[in_flight:].astype(np.int64), np.zeros(1, dtype=np.int64)
    totals = empty_totals(count)
    controller_s = 0.0
    allowed = _allowed(program, policy)
    kernels.begin(program.tables, episodes, slots, slot, steps.obs)
    policy.reset(slot, program.prompts[arrivals[:in_flight]])
    while slot.size:
        request = slots.request.copy()
        started = time.perf_counter()
        actions = policy.act(steps.obs, slot)
        controller_s += time.perf_counter() - started
        _check_actions(program, policy, actions, slot.size, allowed)
        kernels.step(
            program.tables, episodes, slots, actions.astype(np.int64), np.ones(slot.size), queue, cursor, steps
        )
        outcome = outcome_of(steps)
        started = time.perf_counter()
        policy.update(slot, actions, outcome)
        controller_s += time.perf_counter() - started
        totals.seconds[request] += outcome.seconds
        totals.blocks[request] += 1
        totals.drafting_blocks[request] += outcome.drafted > 0
        totals.drafted[request] += outcome.drafted
        totals.committed[request] += outcome.accepted
        totals.depth[request] += outcome.depth
        totals.observed[request] += steps.counts[:, kernels.OBSERVED]
        if not steps.ended.any():
            continue
        alive = slots.request >= 0
        for i in np.flatnonzero((steps.ended > 0) & alive):
            policy.reset(slot[i : i + 1], program.prompts[slots.request[i : i + 1]])
        if not alive.all():
            slot = slot[alive]
            slots = Slots(*(part[alive] for part in slots))
            steps = Steps(*(part[alive] for part in steps))
    return Replay(totals, None, controller_s)


def _allowed(program: Program, policy: Policy) -> np.ndarray:
    """(A,) bool: the actions that use a method the policy has configured, or none."""
    tables = program.tables
    rows = [program.space.methods.index(method) for method in policy.methods]
    return np.isin(tables.action_method, rows) | (tables.action_depth == 0)


def _check_actions(program: Program, policy: Policy, actions: np.ndarray, count: int, allowed: np.ndarray) -> None:
    """Refuses actions the kernels, which check no bounds, must not see, and methods the policy does not pay sync for."""
    name = type(policy).__name__
    if not isinstance(actions, np.ndarray) or actions.shape != (count,) or actions.dtype.kind not in "iu":
        raise PolicyError(f"policy {name} must give {count} whole numbers, gave {actions!r}")
    if actions.min() < 0 or actions.max() >= allowed.size:
        raise PolicyError(f"policy {name} gave an action out of range: {actions!r}; allowed: 0..{allowed.size - 1}")
    if not allowed[actions].all():
        row = int(program.tables.action_method[actions[~allowed[actions]][0]])
        method = program.space.methods[row]
        raise PolicyError(f"policy {name} used method {method!r}, which it does not configure: {policy.methods}")
