"""Kernels against the plain-Python reference, which shares nothing with them."""

from __future__ import annotations

import numpy as np
import pytest
import synthetic

from apexsim import replay
from apexsim.hindsight import Hindsight
from apexsim.program import compile_program
from apexsim.reference import Reference, requests
from apexsim.replay import Plan

pytestmark = pytest.mark.small
PROFILES = [
    synthetic.profile(),
    synthetic.profile(sync=0.2, tail_draft=True),
    synthetic.profile(sync=0.05, tail_draft=True, staircase=True),
]


@pytest.mark.parametrize("profile", PROFILES, ids=("linear", "sync-tail", "staircase"))
@pytest.mark.parametrize("seed", range(6))
def test_random_actions_replay_alike(seed, profile):
    bundle = synthetic.random_bundle(seed, count=8)
    program = compile_program(bundle, profile)
    rng = np.random.default_rng(seed)
    actions = rng.integers(0, len(program.space.pairs), int(program.tables.start[-1])).astype(np.int16)
    plan = Plan(actions, np.full(program.requests.height, program.sync_s(bundle.methods)), ())
    totals = replay.run_plan(program, plan).totals
    reference = Reference(bundle, profile, bundle.methods)
    kept = [request for request in requests(bundle) if request.length > 1]
    for r, request in enumerate(kept):
        first = int(program.tables.start[r])

        def act(p: int, first: int = first) -> tuple[str, int]:
            m, k = program.space.pairs[actions[first + p - 1]]
            return bundle.methods[m], k

        blocks = reference.replay(request, act)
        assert totals.blocks[r] == len(blocks)
        assert totals.drafted[r] == sum(b.drafted for b in blocks)
        assert totals.committed[r] == sum(b.committed for b in blocks)
        assert 1 + sum(b.emitted for b in blocks) == request.length
        assert totals.seconds[r] == pytest.approx(sum(b.seconds for b in blocks), rel=1e-12)


@pytest.mark.parametrize("profile", PROFILES, ids=("linear", "sync-tail", "staircase"))
@pytest.mark.parametrize("waste_weight", [0.0, 0.1])
def test_the_oracle_is_the_reference_optimum(profile, waste_weight):
    bundle = synthetic.random_bundle(21, count=5)
    program = compile_program(bundle, profile)
    hindsight = Hindsight(program, waste_weight)
    kept = [request for request in requests(bundle) if request.length > 1]
    for methods in ((), ("eagle3",), ("ngram",), ("eagle3", "ngram")):
        reference = Reference(bundle, profile, methods)
        expected = [reference.oracle(r, program.space.depths, program.step_s, waste_weight) for r in kept]
        assert hindsight.cost(methods) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("depths", [(0, 1, 2, 4), (1, 3), (2,)])
def test_a_restricted_action_space_is_kept(depths):
    bundle = synthetic.random_bundle(8)
    program = compile_program(bundle, synthetic.profile(), depths=depths)
    reference = Reference(bundle, synthetic.profile(), ("eagle3",))
    kept = [request for request in requests(bundle) if request.length > 1]
    expected = [reference.oracle(r, depths, program.step_s, 0.0) for r in kept]
    assert Hindsight(program).cost(("eagle3",)) == pytest.approx(expected, rel=1e-12)
