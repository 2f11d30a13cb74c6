"""One contract for every registered policy, and the golden sequences of each rule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import synthetic

import policies
from apexsim import replay
from apexsim.errors import ApexSimError, PolicyError, UsageError
from apexsim.features import FEATURES, PROMPT
from apexsim.hindsight import Hindsight
from apexsim.program import compile_program
from apexsim.protocol import ActionSpace, Outcome, Policy
from apexsim.replay import Planner
from policies import Context

pytestmark = pytest.mark.small
DOCS = Path(__file__).parent.parent / "docs"
SPECS = list(policies.registry().values())
LIVE = [spec for spec in SPECS if spec.live]
NO_PROMPTS = np.full((6, len(PROMPT)), np.nan, dtype=np.float32)


@pytest.fixture(scope="module")
def program():
    return compile_program(synthetic.random_bundle(2, count=12), synthetic.profile(sync=0.1))


def context(program, seed: int = 0) -> Context:
    known = Hindsight(program)
    return Context(program.space, seed, known, known)


def names(spec, program) -> list[str]:
    return spec.variants(spec.name, program.space)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_every_variant_builds_and_declares_what_it_configures(spec, program):
    assert spec.source
    for name in names(spec, program):
        policy = policies.build(name, context(program))
        assert policies.find(name)[0] is spec
        assert set(policy.methods) <= set(program.space.methods)
        assert policy.scope in ("depth", "method", "switch")
        assert isinstance(policy, Policy) or not spec.live
        assert isinstance(policy, Policy | Planner)


@pytest.mark.parametrize("spec", LIVE, ids=lambda s: s.name)
def test_actions_are_valid_and_a_batch_equals_singles(spec, program):
    """Shapes, dtypes, seed determinism, and no slot that influences another within a request."""
    rng = np.random.default_rng(0)
    n = 6
    slots = np.arange(n)
    for name in names(spec, program)[:2]:
        batch = policies.build(name, context(program))
        singles = [policies.build(name, context(program)) for _ in range(n)]
        if batch.persistent:
            continue
        batch.reset(slots, NO_PROMPTS[slots])
        for i, single in enumerate(singles):
            single.reset(slots[i : i + 1], NO_PROMPTS[i : i + 1])
        for _ in range(20):
            obs = rng.random((n, len(FEATURES)), dtype=np.float32)
            before = obs.copy()
            actions = batch.act(obs, slots)
            assert (obs == before).all()
            assert actions.shape == (n,)
            assert actions.dtype == np.int64
            assert ((actions >= 0) & (actions < len(program.space.pairs))).all()
            each = [int(single.act(obs[i : i + 1], slots[i : i + 1])[0]) for i, single in enumerate(singles)]
            assert actions.tolist() == each
            depth = np.array([program.space.pairs[a][1] for a in actions])
            drafted = np.minimum(depth, rng.integers(0, 7, n))
            accepted = np.minimum(drafted, rng.integers(0, 7, n))
            outcome = Outcome(depth, drafted, accepted, accepted + 1, rng.random(n))
            batch.update(slots, actions, outcome)
            for i, single in enumerate(singles):
                single.update(slots[i : i + 1], actions[i : i + 1], Outcome(*(o[i : i + 1] for o in outcome)))


@pytest.mark.parametrize("name", ["ar", "fixed:eagle3:4", "fixed:ngram:6"])
def test_a_constant_acting_block_by_block_equals_the_constant_replay(program, name):
    policy = policies.build(name, context(program))
    stepped = replay.run_policy(program, policy).totals
    direct = replay.run_constant(program, policy.action, program.sync_s(policy.methods))
    for one, other in zip(stepped, direct, strict=True):
        assert one.tobytes() == other.tobytes()


def test_ar_equals_plain_decoding_to_the_last_bit(program):
    totals = replay.run_policy(program, policies.build("ar", context(program))).totals
    assert totals.seconds.tobytes() == program.seconds_ar.tobytes()


def test_a_method_configured_and_not_used_pays_its_sync(program):
    policy = policies.build("fixed:eagle3:0", context(program))
    totals = replay.run_policy(program, policy).totals
    assert totals.seconds == pytest.approx(program.seconds_ar + 0.1 * program.tokens)


def test_hf_heuristic_by_hand():
    """accepted 5 of 5, 3 of 7, 0 of 6 gives depths 5, 7, 6, 5."""
    accepted = [5] + [0] * 5 + [3] + [0] * 3 + [0] + [1] + [0] * 4
    bundle = synthetic.bundle([{"eagle3": accepted}])
    program = compile_program(bundle, synthetic.profile())
    policy = policies.build("hf-heuristic-transient", context(program))
    seen = []
    act = policy.act
    where = FEATURES.index("position")
    policy.act = lambda obs, slots: seen.append(round(np.expm1(float(obs[0, where])))) or act(obs, slots)
    totals = replay.run_policy(program, policy).totals
    assert seen == [1, 7, 11, 12, 14, 15, 16]
    assert totals.depth[0] == 5 + 7 + 6 + 5 + 4 + 3 + 2


def test_hf_heuristic_takes_the_deepest_selected_depth_that_is_not_deeper():
    space = ActionSpace(("eagle3",), (0, 1, 2, 4, 8, 16))
    policy = policies.build("hf-heuristic", Context(space))
    policy.reset(np.array([0]), NO_PROMPTS[:1])
    obs = np.ones((1, len(FEATURES)), dtype=np.float32)  # remaining = 1: no known limit
    assert space.pairs[int(policy.act(obs, np.array([0]))[0])] == (0, 4)


def test_best_fixed_is_chosen_on_the_train_split(program):
    other = compile_program(synthetic.random_bundle(99, count=12), synthetic.profile(sync=0.1))
    train = Hindsight(other)
    policy = policies.build("best-fixed", Context(program.space, 0, train, Hindsight(program)))
    assert policy.chosen == train.best_fixed_names()
    with pytest.raises(PolicyError, match="needs requests in the train split"):
        policies.build("best-fixed", Context(program.space, 0, None, Hindsight(program)))


BAD_NAMES = [
    ("nope", "policy 'nope' is unknown; allowed: apex-b, "),
    ("ar:eagle3", "takes no further parts"),
    ("fixed", "written fixed:METHOD:K"),
    ("fixed:eagle3:x", "written fixed:METHOD:K"),
    ("fixed:medusa:2", "method 'medusa' is not selected; allowed: eagle3, ngram"),
    ("fixed:eagle3:17", "depth 17 is not selected; allowed: 0, 1"),
    ("hf-heuristic", "needs a method: hf-heuristic:METHOD; allowed: eagle3, ngram"),
    ("hf-heuristic:medusa", "no such method here"),
    ("hf-heuristic:eagle3:4", "takes one method"),
    ("oracle:tree", "allowed: oracle, oracle:method, oracle:depth:METHOD, oracle:request"),
    ("oracle:depth:medusa", "no such method here"),
    ("best-fixed:luck", "is unknown; allowed"),
]


@pytest.mark.parametrize(("name", "message"), BAD_NAMES)
def test_a_bad_name_is_answered_with_what_is_allowed(program, name, message):
    with pytest.raises(ApexSimError, match=message) as raised:
        policies.build(name, context(program))
    assert "\n" not in str(raised.value)


def test_depths_must_be_ascending():
    for depths in ((), (2, 1), (1, 1), (-1, 2)):
        with pytest.raises(UsageError, match="--depths"):
            ActionSpace(("eagle3",), depths)


def test_a_new_policy_is_one_decorated_builder(program):
    """What docs/add_a_policy.md promises: nothing but the registration names it."""
    namespace: dict = {}
    source = (DOCS / "add_a_policy.md").read_text().split("```python\n")[1].split("```")[0]
    try:
        exec(source, namespace)
        assert "additive-increase" in policies.registry()
        policy = policies.build("additive-increase:eagle3", context(program))
        totals = replay.run_policy(program, policy).totals
        assert totals.blocks.sum() > 0
        assert len(source.splitlines()) <= 32
    finally:
        policies._SPECS.pop("additive-increase", None)


@pytest.mark.parametrize("action", [14, -1])
def test_a_policy_that_acts_out_of_range_is_named(program, action):
    policy = policies.build("ar", context(program))
    policy.action = action
    with pytest.raises(PolicyError, match="policy Fixed gave an action out of range"):
        replay.run_policy(program, policy)
    policy.act = lambda obs, slots: np.zeros(slots.size)
    with pytest.raises(PolicyError, match="whole numbers"):
        replay.run_policy(program, policy)


def test_a_policy_pays_for_every_method_it_uses(program):
    """Without its sync a method would be cheaper than any oracle allows."""
    policy = policies.build("fixed:eagle3:2", context(program))
    policy.methods = ("ngram",)
    with pytest.raises(PolicyError, match="used method 'eagle3', which it does not configure"):
        replay.run_policy(program, policy)


def test_methods_must_differ():
    with pytest.raises(UsageError, match="each method once"):
        ActionSpace(("ngram", "ngram"), (0, 1))


def test_hf_heuristic_needs_depth_one():
    with pytest.raises(PolicyError, match="needs depth 1 among --depths, got 0, 16"):
        policies.build("hf-heuristic", Context(ActionSpace(("eagle3",), (0, 16))))
