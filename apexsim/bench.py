"""This project's speed as ratios measured in one run: kernels against the plain-Python reference."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from apexsim.cost import CostProfile
from apexsim.hindsight import Hindsight
from apexsim.program import compile_program
from apexsim.reference import Reference, requests
from apexsim.replay import run_constant
from apexsim.traces import Bundle
from policies.fixed import SWEEP

REPEATS = 5


def replay(bundle: Bundle, profile: CostProfile) -> dict[str, Any]:
    """The fixed sweep of every method and the oracles together: kernels against reference."""
    sweep, best = _sweep(bundle, profile), oracle(bundle, profile)
    kernel_s, reference_s = (sweep[key] + best[key] for key in ("kernel_s", "reference_s"))
    return {
        "kernel_s": kernel_s,
        "reference_s": reference_s,
        "ratio_to_reference": reference_s / kernel_s,
        "sweep_ratio": sweep["ratio_to_reference"],
        "oracle_ratio": best["ratio_to_reference"],
        "first_call_s": sweep["first_call_s"] + best["first_call_s"],
        "relative_difference": max(sweep["relative_difference"], best["relative_difference"]),
    }


def oracle(bundle: Bundle, profile: CostProfile) -> dict[str, Any]:
    """The oracle of each method alone and of all together: kernels against reference."""
    program = compile_program(bundle, profile)
    configurations = [(m,) for m in bundle.methods] + ([bundle.methods] if len(bundle.methods) > 1 else [])

    def fast() -> float:
        hindsight = Hindsight(program)
        return float(sum(hindsight.cost(methods).sum() for methods in configurations))

    def slow() -> float:
        total = 0.0
        for methods in configurations:
            reference = Reference(bundle, profile, methods)
            for request in requests(bundle):
                total += reference.oracle(request, program.space.depths, program.step_s, 0.0)
        return total

    return _compared(fast, slow)


def _sweep(bundle: Bundle, profile: CostProfile) -> dict[str, Any]:
    """Every method at the depths of the fixed sweep."""
    program = compile_program(bundle, profile)
    depths = [k for k in SWEEP if k <= bundle.kmax]

    def fast() -> float:
        total = 0.0
        for method in bundle.methods:
            sync_s = program.sync_s((method,))
            for k in depths:
                total += float(run_constant(program, program.space.index(method, k), sync_s).seconds.sum())
        return total

    def slow() -> float:
        total = 0.0
        for method in bundle.methods:
            reference = Reference(bundle, profile, (method,))
            for request in requests(bundle):
                for k in depths:
                    total += sum(block.seconds for block in reference.constant(request, method, k))
        return total

    return _compared(fast, slow)


def import_seconds() -> float:
    """Median seconds of a fresh ``import apexsim``, the interpreter's own start taken off."""

    def fresh(code: str) -> float:
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - started

    return max(0.0, statistics.median(fresh("import apexsim") - fresh("pass") for _ in range(REPEATS)))


def _compared(fast: Callable[[], float], slow: Callable[[], float]) -> dict[str, Any]:
    started = time.perf_counter()
    ours = fast()
    compile_s = time.perf_counter() - started
    times = [_timed(fast) for _ in range(REPEATS)]
    started = time.perf_counter()
    theirs = slow()
    reference_s = time.perf_counter() - started
    kernel_s = statistics.median(times)
    return {
        "kernel_s": kernel_s,
        "first_call_s": compile_s,
        "reference_s": reference_s,
        "ratio_to_reference": reference_s / kernel_s,
        "relative_difference": abs(ours - theirs) / theirs,
    }


def _timed(run: Callable[[], float]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
