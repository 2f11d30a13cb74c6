"""What no controller could beat: hindsight optima of a program, by class of policy, and the best constant action.

An engine pays sync for methods it configured and does not use, so every optimum also chooses, per request, which
methods to configure: it is then never worse than any policy of its class.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, combinations

import numpy as np

from apexsim import replay
from apexsim.errors import UsageError, choices
from apexsim.kernels import blocks as kernels
from apexsim.objective import objective
from apexsim.program import Program
from apexsim.replay import Plan


class Hindsight:
    """Optima of one program for one waste weight; each is computed once and kept.

    Args:
        program: What to optimise over.
        waste_weight: lambda of the objective, in autoregressive steps per wasted token.
    """

    def __init__(self, program: Program, waste_weight: float = 0.0) -> None:
        self.program = program
        self.waste_weight = waste_weight
        self._solved: dict[tuple[str, ...], tuple[Plan, np.ndarray]] = {}
        self._constants: tuple[list[str], np.ndarray, np.ndarray, np.ndarray] | None = None

    def switch(self) -> Plan:
        """Any method at any block (``oracle``)."""
        methods = self.program.space.methods
        free = tuple(m for m in methods if self.program.sync_s((m,)) == 0.0)
        costly = [m for m in methods if m not in free]
        subsets = chain.from_iterable(combinations(costly, n) for n in range(len(costly) + 1))
        return self._cheapest([self._solve(self._ordered(free + subset)) for subset in subsets])

    def method(self) -> Plan:
        """One method per request, any depths (``oracle:method``)."""
        return self._cheapest([self._solve((m,)) for m in self.program.space.methods] + [self._solve(())])

    def depth(self, method: str) -> Plan:
        """The method given, any depths, or plain decoding without it (``oracle:depth:<method>``)."""
        allowed = self.program.space.methods
        if method not in allowed:
            raise UsageError(f"method {method!r} is not selected; allowed: {choices(allowed)}")
        return self._cheapest([self._solve((method,)), self._solve(())])

    def cost(self, methods: Sequence[str]) -> np.ndarray:
        """(R,) least objective of each request with exactly these methods configured."""
        return self._solve(self._ordered(methods))[1]

    def request(self) -> Plan:
        """One (method, depth) per request (``oracle:request``)."""
        names, cost, actions, sync = self._constant_costs()
        return self._plan(np.argmin(cost, axis=0), names, actions, sync)

    def best_fixed(self) -> Plan:
        """The best constant (method, depth) of each workload on these very requests (``best-fixed:hindsight``)."""
        return self.fixed_by_workload(self.best_fixed_names())

    def best_fixed_names(self) -> dict[str, str]:
        """The policy name of the best constant of each workload, and under ``all`` of all requests together."""
        names, cost, _, _ = self._constant_costs()
        workloads = self.program.requests["workload"].to_numpy()
        best = {str(w): names[int(np.argmin(cost[:, workloads == w].sum(axis=1)))] for w in np.unique(workloads)}
        return best | {"all": names[int(np.argmin(cost.sum(axis=1)))]}

    def fixed_by_workload(self, chosen: dict[str, str]) -> Plan:
        """A constant per workload, by policy name; a workload that is not listed takes that of ``all``."""
        names, _, actions, sync = self._constant_costs()
        workloads = self.program.requests["workload"].to_list()
        pick = np.array([names.index(chosen.get(w, chosen["all"])) for w in workloads])
        return self._plan(pick, names, actions, sync)

    def _ordered(self, methods: Sequence[str]) -> tuple[str, ...]:
        return tuple(m for m in self.program.space.methods if m in methods)

    def _solve(self, methods: tuple[str, ...]) -> tuple[Plan, np.ndarray]:
        """The optimum with exactly these methods configured, and its objective per request."""
        if methods in self._solved:
            return self._solved[methods]
        program, tables = self.program, self.program.tables
        rows = [program.space.methods.index(m) for m in methods]
        drafting = np.isin(tables.action_method, rows) & (tables.action_depth > 0)
        plain = np.flatnonzero(tables.action_depth == 0)[:1]  # it stands once per method and costs the same in each
        allowed = np.concatenate((plain, np.flatnonzero(drafting)))
        size, count = int(tables.start[-1]), program.requests.height
        value, best = np.empty(size), np.empty(size, dtype=np.int16)
        sync_s = program.sync_s(methods)
        kernels.solve(tables, allowed, sync_s, program.step_s, self.waste_weight, value, best)
        name = {0: "ar", 1: f"oracle:depth:{''.join(methods)}"}.get(len(methods), "oracle")
        plan = Plan(best, np.full(count, sync_s), (name,) * count)
        self._solved[methods] = plan, value[tables.start[:-1]]
        return self._solved[methods]

    def _cheapest(self, solved: list[tuple[Plan, np.ndarray]]) -> Plan:
        """Per request the cheapest of several plans; ties take the first."""
        pick = np.argmin([cost for _, cost in solved], axis=0)
        by_position = np.repeat(pick, self.program.tokens)
        actions, sync = solved[0][0].actions.copy(), solved[0][0].sync_s.copy()
        resolved = list(solved[0][0].resolved)
        for i, (plan, _) in enumerate(solved[1:], start=1):
            actions[by_position == i] = plan.actions[by_position == i]
            sync[pick == i] = plan.sync_s[pick == i]
            for r in np.flatnonzero(pick == i):
                resolved[r] = plan.resolved[r]
        return Plan(actions, sync, tuple(resolved))

    def _constant_costs(self) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
        """Names (N), objective (N, R), action (N,) and sync (N,) of plain decoding and every constant (method, depth)."""
        if self._constants is None:
            program = self.program
            space = program.space
            pairs = [("ar", 0, 0.0)] if 0 in space.depths else []
            pairs += [
                (f"fixed:{method}:{depth}", space.index(method, depth), program.sync_s((method,)))
                for method in space.methods
                for depth in space.depths
                if depth > 0
            ]
            if not pairs:
                raise UsageError("no action to choose from: give --methods or depth 0")
            costs = []
            for _, action, sync_s in pairs:
                totals = replay.run_constant(program, action, sync_s)
                wasted = totals.drafted - totals.committed
                costs.append(objective(totals.seconds, wasted, program.step_s, self.waste_weight))
            names, actions, syncs = zip(*pairs, strict=True)
            self._constants = list(names), np.array(costs), np.array(actions), np.array(syncs)
        return self._constants

    def _plan(self, pick: np.ndarray, names: list[str], actions: np.ndarray, sync: np.ndarray) -> Plan:
        by_position = np.repeat(actions[pick].astype(np.int16), self.program.tokens)
        return Plan(by_position, sync[pick], tuple(names[i] for i in pick))


def best_rates(program: Program) -> np.ndarray:
    """(R, M + 1) best tokens per second of a constant depth with each method, and with any (arXiv:2610.07780, Eqs. 21, 22)."""
    space, tokens = program.space, program.tokens
    rates = np.zeros((tokens.size, len(space.methods) + 1))
    for m, method in enumerate(space.methods):
        for depth in space.depths:
            totals = replay.run_constant(program, space.index(method, depth), program.sync_s((method,)))
            rates[:, m] = np.maximum(rates[:, m], tokens / totals.seconds)
    rates[:, -1] = rates.max(axis=1)
    return rates
