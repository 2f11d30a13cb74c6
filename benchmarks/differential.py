"""Replays random blocks with the kernels and with the plain-Python reference and counts the requests that differ.

    python benchmarks/differential.py --blocks 1000000       about a minute; CI
    python benchmarks/differential.py --blocks 10000000      nightly

Every round draws a trace, one of eight cost profiles (linear or staircase, with and without sync and tail draft) and a
random action at every position. Counts must be equal, seconds agree to 1e-9.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

import numpy as np

from apexsim.program import compile_program
from apexsim.reference import Reference, requests
from apexsim.replay import Plan, run_plan

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import synthetic

PROFILES = [
    synthetic.profile(sync, tail, staircase)
    for sync, tail, staircase in itertools.product((0.0, 0.2), (False, True), (False, True))
]


def one_round(seed: int) -> tuple[int, int]:
    """(blocks replayed, requests that differ) of one random trace."""
    bundle = synthetic.random_bundle(seed, count=40, longest=400, kmax=8)
    profile = PROFILES[seed % len(PROFILES)]
    program = compile_program(bundle, profile)
    actions = np.random.default_rng(seed).integers(0, len(program.space.pairs), int(program.tables.start[-1]))
    plan = Plan(actions.astype(np.int16), np.full(program.requests.height, program.sync_s(bundle.methods)), ())
    totals = run_plan(program, plan).totals
    reference = Reference(bundle, profile, bundle.methods)
    different = 0
    for r, request in enumerate(request for request in requests(bundle) if request.length > 1):
        first = int(program.tables.start[r]) - 1

        def act(p: int, first: int = first) -> tuple[str, int]:
            m, k = program.space.pairs[actions[first + p]]
            return bundle.methods[m], k

        blocks = reference.replay(request, act)
        counts = (len(blocks), sum(b.drafted for b in blocks), sum(b.committed for b in blocks))
        seconds = sum(b.seconds for b in blocks)
        same = counts == (totals.blocks[r], totals.drafted[r], totals.committed[r])
        different += not (same and abs(totals.seconds[r] - seconds) <= 1e-9 * seconds)
    return int(totals.blocks.sum()), different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.perf_counter()
    blocks = different = 0
    for seed in itertools.count(options.seed):
        if blocks >= options.blocks:
            break
        replayed, wrong = one_round(seed)
        blocks += replayed
        different += wrong
    print(f"{blocks:,} random blocks, {different} mismatching requests, {time.perf_counter() - started:.0f} s")
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
