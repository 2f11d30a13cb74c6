"""Laws that hold for every trace, profile and policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import synthetic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import policies
from apexsim import replay
from apexsim.evaluate import Entry, Evaluation
from apexsim.features import FEATURES
from apexsim.hindsight import Hindsight
from apexsim.kernels.blocks import Totals
from apexsim.objective import objective
from apexsim.program import Program, compile_program
from apexsim.protocol import Policy
from policies import Context

pytestmark = pytest.mark.small
seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
profiles = st.builds(synthetic.profile, st.sampled_from([0.0, 0.2]), st.booleans(), st.booleans()).map(
    lambda p: replace(p, methods=dict(p.methods) | {"draft_model": p.methods["eagle3"]})
)


def totals_of(program: Program, name: str, seed: int = 0) -> Totals:
    hindsight = Hindsight(program)
    policy = policies.build(name, Context(program.space, seed, hindsight, hindsight))
    scored = Evaluation(program, hindsight).score([Entry(name, "any", policy, seed)])
    return scored[0].replay.totals


def all_names(program: Program) -> list[str]:
    return policies.expand(["all"], program.space)


@quick
@given(seeds, profiles)
def test_tokens_are_conserved_and_waste_is_not_negative(seed, profile):
    program = compile_program(synthetic.random_bundle(seed), profile)
    for name in all_names(program):
        t = totals_of(program, name)
        # Every block emits its committed tokens and one more, but for a last block that ends inside its draft.
        assert ((t.committed <= program.tokens) & (program.tokens <= t.committed + t.blocks)).all(), name
        assert (program.tokens >= t.committed + t.blocks - 1).all(), name
        assert ((t.drafted >= t.committed) & (t.committed >= 0)).all(), name
        assert ((t.seconds > 0) & (t.observed == t.blocks) & (t.drafting_blocks <= t.blocks)).all(), name


@quick
@given(seeds, profiles, st.sampled_from([0.0, 0.05, 1.0]))
def test_an_oracle_is_never_worse_than_a_policy_of_its_class(seed, profile, waste_weight):
    program = compile_program(synthetic.random_bundle(seed, methods=3), profile)
    hindsight = Hindsight(program, waste_weight)

    def cost(t: Totals) -> np.ndarray:
        return objective(t.seconds, t.drafted - t.committed, program.step_s, waste_weight)

    def of(plan) -> np.ndarray:
        return cost(replay.run_plan(program, plan).totals)

    every = of(hindsight.switch())
    per_method = of(hindsight.method())
    assert (every <= per_method * (1 + 1e-12)).all()
    assert (of(hindsight.request()) >= per_method * (1 - 1e-12)).all()
    for name in all_names(program):
        context = Context(program.space, 0, hindsight, hindsight)
        policy = policies.build(name, context)
        assert (cost(totals_of(program, name)) >= every * (1 - 1e-12)).all() or name.startswith("oracle")
        if policy.scope == "depth" and policy.methods and not name.startswith("oracle"):
            bound = of(hindsight.depth(policy.methods[0]))
            assert (cost(totals_of(program, name)) >= bound * (1 - 1e-12)).all(), name
    best = of(hindsight.best_fixed()).sum()
    assert best <= min(cost(totals_of(program, n)).sum() for n in all_names(program) if n.startswith("fixed"))


class Recorder:
    """Wraps a policy and writes down each decision with the position it was taken at."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.log = policy, []
        self.methods, self.scope, self.persistent = policy.methods, policy.scope, policy.persistent

    def reset(self, slots, prompts):
        self.policy.reset(slots, prompts)

    def act(self, obs, slots):
        actions = self.policy.act(obs, slots)
        positions = np.rint(np.expm1(obs[:, FEATURES.index("position")].astype(float)))
        self.log += [(int(p), int(a)) for p, a in zip(positions, actions, strict=True)]
        return actions

    def update(self, slots, actions, outcome):
        self.policy.update(slots, actions, outcome)


@quick
@given(seeds, st.data())
def test_a_change_of_future_tokens_changes_no_past_decision(seed, data):
    """Perturbs what is accepted after p: every live policy's decisions up to the block that runs past p stay."""
    rng = np.random.default_rng(seed)
    n = 60
    left = np.arange(n, 0, -1)
    first = np.minimum(rng.integers(0, 6, n), left)
    p = data.draw(st.integers(1, n - 1))
    second = first.copy()
    second[p:] = np.minimum(rng.integers(0, 6, n - p), left[p:])  # positions p + 1.. of a draft from p or before
    for spec in policies.registry().values():
        if not spec.live or spec.trained:  # test_apex.py has the trained ones
            continue
        logs = []
        for accepted in (first, second):
            bundle = synthetic.bundle([{"eagle3": accepted.tolist()}], kmax=16, max_tokens=[n + 5])
            program = compile_program(bundle, synthetic.profile())
            name = spec.variants(spec.name, program.space)[0]
            policy = Recorder(policies.build(name, Context(program.space)))
            replay.run_policy(program, policy)
            logs.append([entry for entry in policy.log if entry[0] <= p + 1])
        assert logs[0] == logs[1], spec.name


@quick
@given(seeds, st.randoms(use_true_random=False))
def test_the_order_of_requests_does_not_matter_without_memory(seed, shuffler):
    bundle = synthetic.random_bundle(seed, count=6)
    profile = synthetic.profile(sync=0.1)
    order = list(range(bundle.requests.height))
    shuffler.shuffle(order)
    straight = compile_program(bundle, profile)
    shuffled = compile_program(bundle, profile, np.array(order))
    ids = straight.requests["request_id"].to_list()
    back = [shuffled.requests["request_id"].to_list().index(i) for i in ids]
    for name in all_names(straight):
        policy = policies.build(name, Context(straight.space, 0, Hindsight(straight), Hindsight(straight)))
        if getattr(policy, "persistent", False):
            continue
        one, other = totals_of(straight, name), totals_of(shuffled, name)
        for field in Totals._fields:
            assert np.array_equal(getattr(one, field), getattr(other, field)[back]), (name, field)


def test_results_do_not_depend_on_the_number_of_jobs():
    program = compile_program(synthetic.random_bundle(3, count=30), synthetic.profile(sync=0.1))
    rows = []
    for jobs in (1, 2, 4):
        hindsight = Hindsight(program)
        context = Context(program.space, 0, hindsight, hindsight)
        entries = [Entry(n, "any", policies.build(n, context)) for n in all_names(program)]
        evaluation = Evaluation(program, hindsight)
        rows.append(evaluation.rows(evaluation.score(entries, jobs)))
    assert rows[0] == rows[1] == rows[2]


def test_a_policy_with_memory_depends_on_the_seed_of_arrivals_only():
    program = compile_program(synthetic.random_bundle(5, count=40), synthetic.profile())
    one, again, other = (totals_of(program, "hf-heuristic:eagle3", seed) for seed in (1, 1, 2))
    assert one.seconds.tobytes() == again.seconds.tobytes()
    assert one.seconds.tobytes() != other.seconds.tobytes()


def test_slots_are_reused_without_a_leak():
    """One request at a time, three at a time and all at once give a memory-free policy the same result."""
    bundle = synthetic.random_bundle(11, count=9)
    program = compile_program(bundle, synthetic.profile())
    expected = totals_of(program, "hf-heuristic-transient:eagle3")
    for concurrency in (1, 3):
        policy = policies.build("hf-heuristic-transient:eagle3", Context(program.space))
        policy.persistent = True  # only to be given slots one after the other
        policy.carried = 5
        policy.update = _forgetful(policy)
        got = replay.run_policy(program, policy, seed=4, concurrency=concurrency).totals
        assert got.seconds.tobytes() == expected.seconds.tobytes()


def _forgetful(policy):
    update = type(policy).update

    def wrapped(slots, actions, outcome):
        update(policy, slots, actions, outcome)
        policy.carried = 5

    return wrapped


def test_bundles_of_one_token_are_skipped_and_counted():
    bundle = synthetic.bundle([{"eagle3": []}, {"eagle3": [1, 0]}])
    program = compile_program(bundle, synthetic.profile())
    assert (program.skipped, program.requests.height) == (1, 1)
    assert isinstance(program.requests, pl.DataFrame)
