"""Scores policies on a program: the rows of results.json and the per-request table behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from apexsim import metrics, replay
from apexsim.hindsight import Hindsight
from apexsim.kernels.blocks import Totals
from apexsim.objective import objective
from apexsim.program import Program
from apexsim.protocol import Policy
from apexsim.replay import Plan, Planner, Replay

Row = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """A policy to score: its name as asked for, its family, and the seed of its randomness and order of arrival."""

    name: str
    family: str
    policy: Policy | Planner
    seed: int = 0


@dataclass(frozen=True)
class Scored:
    """An entry and its replay."""

    entry: Entry
    replay: Replay


class Evaluation:
    """Scores policies on one program.

    Args:
        program: The selected requests.
        hindsight: Optima of the same program, for the gaps closed.
        split: Name of the split, for the rows.
        workload: The workload the program was restricted to, for the rows; None if it was not.
        charge_controller: Add the policies' measured decision time to their seconds.
    """

    def __init__(
        self,
        program: Program,
        hindsight: Hindsight,
        split: str = "all",
        workload: str | None = None,
        charge_controller: bool = False,
    ) -> None:
        self.program = program
        self.hindsight = hindsight
        self.split = split
        self.overall = workload or "all"
        self.charge_controller = charge_controller
        self._references: dict[str, Totals] = {}

    def score(
        self, entries: Sequence[Entry], jobs: int = 1, done: Callable[[str], None] = lambda name: None
    ) -> list[Scored]:
        """Replays all entries, ``jobs`` at a time; the results do not depend on it. ``done`` is told each name."""

        def one(entry: Entry) -> Scored:
            scored = Scored(entry, self._run(entry))
            done(entry.name)
            return scored

        with ThreadPoolExecutor(max(1, jobs)) as pool:
            return list(pool.map(one, entries))

    def _run(self, entry: Entry) -> Replay:
        if isinstance(entry.policy, Planner):
            return replay.run_plan(self.program, entry.policy.plan(self.program))
        result = replay.run_policy(self.program, entry.policy, entry.seed, lockstep=not self.charge_controller)
        if not self.charge_controller:
            return Replay(result.totals, result.resolved)
        share = result.totals.blocks / max(int(result.totals.blocks.sum()), 1)
        charged = result.totals._replace(seconds=result.totals.seconds + share * result.controller_s)
        return Replay(charged, result.resolved, result.controller_s)

    def rows(self, scored: Iterable[Scored]) -> list[Row]:
        """One row per entry for all requests and, where there are several, per workload."""
        workloads = self.program.requests["workload"].to_numpy()
        names = sorted(set(workloads.tolist()))
        rows = []
        for item in scored:
            rows.append(self._row(item, self.overall, np.ones(workloads.size, dtype=bool)))
            if len(names) > 1:
                rows += [self._row(item, name, workloads == name) for name in names]
        return rows

    def requests(self, scored: Iterable[Scored]) -> pl.DataFrame:
        """One row per entry and request."""
        program = self.program
        frames = []
        for item in scored:
            totals = item.replay.totals
            frames.append(
                program.requests.select("request_id", "workload", "split").with_columns(
                    pl.lit(item.entry.name).alias("policy"),
                    pl.Series("resolved", item.replay.resolved or (item.entry.name,) * program.requests.height),
                    pl.lit(item.entry.seed).alias("seed"),
                    pl.lit(program.bundle).alias("bundle"),
                    pl.Series("tokens", program.tokens),
                    *(pl.Series(name, getattr(totals, name)) for name in totals._fields),
                    pl.Series("seconds_ar", program.seconds_ar),
                    pl.Series("speedup", program.seconds_ar / totals.seconds),
                    pl.Series("waste_percent", _waste(totals), nan_to_null=True),
                )
            )
        return pl.concat(frames).select(
            "policy", "resolved", "seed", "bundle", pl.exclude("policy", "resolved", "seed", "bundle")
        )

    def _row(self, item: Scored, workload: str, chosen: np.ndarray) -> Row:
        program, entry = self.program, item.entry
        t = Totals(*(column[chosen] for column in item.replay.totals))
        blocks, drafting, drafted, committed = (
            int(column.sum()) for column in (t.blocks, t.drafting_blocks, t.drafted, t.committed)
        )
        seconds_ar = program.seconds_ar[chosen]
        tokens = int(program.tokens[chosen].sum())
        speedups = seconds_ar / t.seconds
        speedup = float(speedups.mean())
        wastes = _waste(t)
        waste = float(np.nanmean(wastes)) if np.isfinite(wastes).any() else None
        cost = self._objective(item.replay.totals, chosen)
        groups = program.requests["source_group"].to_numpy()[chosen]
        prefill = program.requests["prefill_s"].to_numpy()[chosen]
        return {
            "policy": entry.name,
            "resolved": _resolved(entry.name, item.replay.resolved, program.requests["workload"].to_numpy(), chosen),
            "family": entry.family,
            "methods": list(entry.policy.methods),
            "bundle": program.bundle,
            "workload": workload,
            "split": self.split,
            "seed": entry.seed,
            "trained_on": getattr(entry.policy, "trained_on", None),
            "requests": int(chosen.sum()),
            "requests_skipped": program.skipped
            if workload == self.overall
            else program.skipped_by_workload.get(workload, 0),
            "tokens": tokens,
            "blocks": blocks,
            "drafted": drafted,
            "committed": committed,
            "seconds": float(t.seconds.sum()),
            "seconds_ar": float(seconds_ar.sum()),
            "prefill_seconds": float(prefill.sum()) if np.isfinite(prefill).all() else None,
            "speedup": speedup,
            "speedup_ci": metrics.mean_interval(speedups, groups, seed=0),
            "speedup_total": float(seconds_ar.sum() / t.seconds.sum()),
            "waste_percent": waste,
            "waste_percent_total": metrics.waste_percent(drafted, committed),
            "was": metrics.waste_adjusted_speedup(speedup, waste),
            "tokens_per_block": metrics.tokens_per_block(tokens, blocks),
            "acceptance_length": metrics.acceptance_length(committed, drafting),
            "acceptance_rate": metrics.acceptance_rate(committed, drafted),
            "mean_depth": metrics.ratio(int(t.depth.sum()), blocks),
            "objective": cost / tokens,
            "gap_closed": self._gap(cost, self._class(entry.policy), chosen),
            "gap_closed_switch": self._gap(cost, "oracle", chosen),
            "coverage": metrics.ratio(int(t.observed.sum()), blocks),
            "aligned": bool(program.requests["aligned"].to_numpy()[chosen].all()),
            "controller_us_per_block": 1e6 * item.replay.controller_s / max(blocks, 1)
            if workload == self.overall
            else 0.0,
        }

    def _objective(self, totals: Totals, chosen: np.ndarray) -> float:
        wasted = totals.drafted - totals.committed
        j = objective(totals.seconds, wasted, self.program.step_s, self.hindsight.waste_weight)
        return float(j[chosen].sum())

    def _class(self, policy: Policy | Planner) -> str | None:
        """The oracle of the policy's own class; None for plain decoding, which has nothing to choose."""
        if policy.scope == "depth":
            return f"oracle:depth:{policy.methods[0]}" if policy.methods else None
        return "oracle:method" if policy.scope == "method" else "oracle"

    def _gap(self, cost: float, reference: str | None, chosen: np.ndarray) -> float | None:
        """(J_bestfixed - J) / (J_bestfixed - J_oracle); None where best-fixed is as good as that oracle or better."""
        if reference is None:
            return None
        fixed = self._objective(self._reference("best-fixed"), chosen)
        room = fixed - self._objective(self._reference(reference), chosen)
        return (fixed - cost) / room if room > 1e-9 * fixed else None

    def _reference(self, name: str) -> Totals:
        if name not in self._references:
            self._references[name] = replay.run_plan(self.program, self._reference_plan(name)).totals
        return self._references[name]

    def _reference_plan(self, name: str) -> Plan:
        if name == "best-fixed":
            return self.hindsight.best_fixed()
        if name == "oracle":
            return self.hindsight.switch()
        if name == "oracle:method":
            return self.hindsight.method()
        return self.hindsight.depth(name.removeprefix("oracle:depth:"))


def _waste(totals: Totals) -> np.ndarray:
    """(R,) waste percent of each request, NaN where it never drafted."""
    pairs = zip(totals.drafted.tolist(), totals.committed.tolist(), strict=True)
    wastes = (metrics.waste_percent(drafted, committed) for drafted, committed in pairs)
    return np.array([np.nan if waste is None else waste for waste in wastes])


def _resolved(name: str, resolved: tuple[str, ...] | None, workloads: np.ndarray, chosen: np.ndarray) -> str:
    """What the policy came down to: one name, one per workload, or its own name if requests differ within a workload."""
    if resolved is None:
        return name
    pairs = {(w, r) for w, r, keep in zip(workloads.tolist(), resolved, chosen, strict=True) if keep}
    names = {r for _, r in pairs}
    if len(names) == 1:
        return names.pop()
    if len(pairs) == len({w for w, _ in pairs}):
        return "; ".join(f"{w}={r}" for w, r in sorted(pairs))
    return name
