"""Replays policies over a program: exactly what an engine would have done, block by block."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from apexsim import features
from apexsim.kernels import blocks as kernels
from apexsim.kernels.blocks import Totals
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


def run_policy(program: Program, policy: Policy, seed: int = 0, concurrency: int = 1) -> Replay:
    """A policy acting block by block.

    A policy without memory across requests runs all of them in lockstep. One with memory sees them in an order of
    arrival drawn from ``seed``, with ``concurrency`` requests in flight; slots are reused.
    """
    tables, count = program.tables, program.requests.height
    prompt = program.requests["prompt_tokens"].to_numpy().astype(np.int64)
    max_tokens = program.requests["max_tokens"].fill_null(0).to_numpy().astype(np.int64)
    waiting = np.random.default_rng(seed).permutation(count) if policy.persistent else np.arange(count)
    slots = min(concurrency, count) if policy.persistent else count
    queue = iter(waiting[slots:].tolist())
    request = waiting[:slots].copy()
    slot = np.arange(slots)
    position = np.ones(slots, dtype=np.int64)
    done_blocks = np.zeros(slots, dtype=np.int64)
    last = np.zeros((slots, 3), dtype=np.int64)
    out = empty_totals(count)
    sync_s = program.sync_s(policy.methods)
    depth_of = tables.action_depth
    controller_s = 0.0
    policy.reset(slot)
    while slot.size:
        obs = features.observe(position, prompt[request], max_tokens[request], done_blocks, last)
        started = time.perf_counter()
        actions = policy.act(obs, slot)
        controller_s += time.perf_counter() - started
        seconds = np.empty(slot.size)
        drafted, committed, emitted = (np.empty(slot.size, dtype=np.int64) for _ in range(3))
        kernels.step(tables, request, position, actions, sync_s, out, seconds, drafted, committed, emitted)
        depth = depth_of[actions]
        started = time.perf_counter()
        policy.update(slot, actions, Outcome(depth, drafted, committed, emitted, seconds))
        controller_s += time.perf_counter() - started
        done_blocks += 1
        last = np.column_stack((depth, drafted, committed))
        ended = np.flatnonzero(position >= tables.length[request])
        if not ended.size:
            continue
        refill = [(i, new) for i, new in zip(ended.tolist(), queue, strict=False)]
        for i, new in refill:
            request[i], position[i], done_blocks[i], last[i] = new, 1, 0, 0
            policy.reset(slot[i : i + 1])
        gone = ended[len(refill) :]
        if gone.size:
            slot, request, position, done_blocks = (np.delete(a, gone) for a in (slot, request, position, done_blocks))
            last = np.delete(last, gone, axis=0)
    return Replay(out, None, controller_s)
