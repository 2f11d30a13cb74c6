"""The controller as a whole: examples, training, the decision path, checkpoints, the command line."""

from __future__ import annotations

import json
import shutil

import numpy as np
import polars as pl
import pytest
import synthetic
import torch
from typer.testing import CliRunner

import policies
from apexsim import replay
from apexsim.cli import app
from apexsim.cost import dump_profile
from apexsim.errors import ApexSimError, PolicyError, UsageError
from apexsim.features import FEATURES
from apexsim.kernels import network as kernels
from apexsim.program import compile_program
from apexsim.traces import Bundle, write
from policies import Context
from policies.apex import checkpoint, inputs, samples
from policies.apex.network import weights
from policies.apex.policy import Apex
from policies.apex.samples import Labels
from policies.apex.training import Settings, predict, tensors, train_depth, train_router

CANDIDATES = (1, 2, 4, 6)
QUICK = Settings(epochs=4, groups=400, rounds=1)


def trace(count: int = 30) -> Bundle:
    """Two methods; how much is accepted depends on the prompt's entropy, which the requests record."""
    rng = np.random.default_rng(5)
    accepted, drafted, entropy = [], [], []
    for r in range(count):
        n = int(rng.integers(12, 40))
        good = r % 2 == 0
        left = np.arange(n, 0, -1)
        got = np.minimum(rng.geometric(0.15 if good else 0.9, n) - 1, 6)
        accepted.append({m: np.minimum(got, left).tolist() for m in ("eagle3", "ngram")})
        drafted.append({"eagle3": [6] * n, "ngram": [6] * n})
        entropy.append(1.0 if good else 6.0)
    split = [("train", "train", "train", "validation", "test")[r // 2 % 5] for r in range(count)]
    return synthetic.bundle(accepted, drafted, 6, prompt_entropy=entropy, split=split)


def program(bundle: Bundle, split: str, depths: tuple[int, ...] | None = CANDIDATES):
    rows = np.flatnonzero((bundle.requests["split"] == split).to_numpy())
    return compile_program(bundle, synthetic.profile(sync=0.1), rows, None, depths)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return trace()


@pytest.fixture(scope="module")
def parts(bundle):
    data = [program(bundle, "train")], [program(bundle, "validation")]
    return train_router(*data, QUICK), train_depth(*data, QUICK)


def test_every_candidate_of_a_group_is_what_the_replay_says(bundle):
    """Counterfactual outcomes are the replay's own: seconds, accepted tokens and censoring at visited blocks."""
    p = program(bundle, "train")
    policy = policies.build("fixed:eagle3:4", Context(p.space))
    visited = samples.visits(p, policy)
    groups = Labels(p, "b").at(visited, 0)
    totals = replay.run_policy(p, policy).totals
    at = p.space.depths.index(4)
    for r in range(p.requests.height):
        mine = visited.request == r
        assert groups.seconds[mine, at].sum() == pytest.approx(totals.seconds[r])
        assert groups.accepted[mine, at].sum() == totals.committed[r]
    last = visited.position + groups.accepted[:, at] >= p.tables.length[visited.request]
    assert not groups.rejected[last, at].any()  # the end of the text is no rejection


def test_on_policy_groups_share_a_block_index_and_keep_their_own_states(bundle):
    p = program(bundle, "train")
    groups = samples.on_policy(Labels(p, "b"))[0]
    assert groups.states.shape[1] == len(CANDIDATES)
    assert groups.known.any(axis=1).all()
    blocks = FEATURES.index("blocks")
    for states, known in zip(groups.states, groups.known, strict=True):
        assert len({float(v) for v in states[known, blocks]}) == 1


def test_the_decision_path_equals_torch(bundle, parts):
    p = program(bundle, "test")
    for part in parts:
        groups = samples.join(samples.counterfactual(Labels(p, "b"), np.random.default_rng(0)))
        data = tensors(groups, part.inputs, len(CANDIDATES))
        theirs = predict(part.scorer, data).utility.numpy()
        out = np.empty((groups.method.size, 2, len(CANDIDATES)), dtype=np.float32)
        obs, prompts = groups.states[:, 0, : len(FEATURES)], groups.states[:, 0, len(FEATURES) :]
        kernels.scores(part.network, np.ascontiguousarray(obs), np.ascontiguousarray(prompts), out)
        ours = out[np.arange(groups.method.size), groups.method]
        assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


def test_the_router_picks_the_method_and_the_controller_keeps_it(bundle, parts):
    router, depth = parts
    p = program(bundle, "test", None)
    policy = Apex(p.space, p.space.methods, CANDIDATES, router.network, depth.network)
    visited: list[np.ndarray] = []
    act = policy.act
    policy.act = lambda obs, slots: (
        visited.append(np.column_stack((slots, act(obs, slots)))) or policy._out[: slots.size]
    )
    replay.run_policy(p, policy)
    chosen = np.concatenate(visited)
    method = p.tables.action_method[chosen[:, 1]]
    for slot in np.unique(chosen[:, 0]):
        assert len(set(method[chosen[:, 0] == slot].tolist())) == 1
    assert set(p.tables.action_depth[chosen[:, 1]].tolist()) <= set(CANDIDATES)


def test_a_decision_knows_nothing_of_what_comes(bundle, parts):
    """Other outcomes from position 20 on: every decision up to there stays."""
    logs = []
    for seed in (1, 2):
        rng = np.random.default_rng(seed)
        tail = [m for m in bundle.positions.columns if m.startswith("accepted.")]
        late = (bundle.positions["position"] > 20).to_numpy()
        lengths = bundle.requests["output_tokens"].to_numpy()
        left = lengths[bundle.positions["request"].to_numpy()] - bundle.positions["position"].to_numpy()
        other = {m: np.where(late, np.minimum(rng.integers(0, 7, late.size), left), bundle.positions[m]) for m in tail}
        changed = bundle.positions.with_columns(pl.Series(m, v.astype(np.uint8)) for m, v in other.items())
        p = compile_program(Bundle(bundle.meta, bundle.requests, changed), synthetic.profile(), depths=range(7))
        policy = Apex(p.space, p.space.methods, CANDIDATES, parts[0].network, parts[1].network)
        visited = samples.visits(p, policy)
        logs.append({(int(r), int(q)) for r, q in zip(visited.request, visited.position, strict=True) if q <= 21})
    assert logs[0] == logs[1]


def test_a_batch_decides_as_its_requests_do_alone(bundle, parts):
    """Slots do not influence one another, and come back to other requests as new."""
    p = program(bundle, "test", None)
    lockstep = replay.run_policy(p, Apex(p.space, p.space.methods, CANDIDATES, parts[0].network, parts[1].network))
    alone = replay.run_policy(
        p, Apex(p.space, p.space.methods, CANDIDATES, parts[0].network, parts[1].network), lockstep=False
    )
    for one, other in zip(lockstep.totals, alone.totals, strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_separable_trace_is_learned(bundle, parts):
    """Even requests accept long drafts, odd ones none; the prompt's entropy tells: deep there, shallow here."""
    p = program(bundle, "test", None)
    policy = Apex(p.space, p.space.methods, CANDIDATES, parts[0].network, parts[1].network)
    totals = replay.run_policy(p, policy).totals
    mean = totals.depth / totals.blocks
    good = p.requests["prompt_entropy"].to_numpy() < 3
    assert mean[good].min() > mean[~good].max()


def test_the_same_seed_gives_the_same_weights(bundle, parts):
    data = [program(bundle, "train")], [program(bundle, "validation")]
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if threads == 1 else 1)
    try:
        again = train_router(*data, QUICK), train_depth(*data, QUICK)
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(parts, again, strict=True):
        first, second = weights(one.scorer), weights(other.scorer)
        assert all(first[name].tobytes() == second[name].tobytes() for name in first)


def test_one_survival_does_not_depend_on_the_depth(bundle):
    data = [program(bundle, "train")], [program(bundle, "validation")]
    settings = Settings(epochs=1, groups=200, rounds=0, one_survival=True)
    trained = train_depth(*data, settings)
    groups = samples.counterfactual(Labels(data[0][0], "b"), np.random.default_rng(0))[0]
    hazard = predict(trained.scorer, tensors(groups, trained.inputs, len(CANDIDATES))).hazard
    assert torch.equal(hazard[:, 0], hazard[:, -1])


def test_unknown_features_are_left_out_and_named(parts):
    for part in parts:
        assert "embedding_0" in part.dropped
        assert "prompt_entropy" in part.inputs.names
    assert parts[0].inputs.signals == ("prompt_entropy",)
    assert "entropy" in parts[1].dropped


def test_an_ablation_takes_its_features_away():
    states = np.random.default_rng(0).random((50, len(inputs.ALL))).astype(np.float32)
    full, _ = inputs.fit(states, inputs.BLOCK)
    less, _ = inputs.fit(states, inputs.BLOCK, ("history", "entropy"))
    gone = {name for group in ("history", "entropy") for name in inputs.GROUPS[group]}
    assert set(full.names) - set(less.names) == gone
    with pytest.raises(PolicyError, match="feature group 'luck' is unknown"):
        inputs.fit(states, inputs.BLOCK, ("luck",))


def test_requests_of_one_block_have_no_depth_to_learn():
    short = synthetic.bundle([{"eagle3": [6]}] * 4, kmax=6, split=["train"] * 4)
    with pytest.raises(PolicyError, match="no request of the train split has a second block"):
        train_depth([program(short, "train")], [], QUICK)


@pytest.mark.parametrize("accepted", [0, 6])
def test_nothing_or_everything_accepted_trains(accepted):
    """A method with no positive acceptance, and an all-censored trace."""
    n = 24
    lists = [min(accepted, n - p) for p in range(n)]
    same = synthetic.bundle(
        [{"eagle3": lists}] * 6, kmax=6, split=["train"] * 4 + ["validation"] * 2, prompts=[5, 6, 7, 8, 9, 10]
    )
    data = [program(same, "train")], [program(same, "validation")]
    trained = train_depth(*data, QUICK)
    assert all(np.isfinite(value).all() for value in weights(trained.scorer).values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(profile="x"), "--profile 'x' is unknown; allowed: s, b, e"),
        (Settings(source="x"), "--source 'x' is unknown; allowed: counterfactual, on-policy"),
        (Settings(without=("x",)), "--without 'x' is unknown; allowed: survival, cost-rate"),
        (Settings(first=(("eagle3", 3),)), "--first eagle3:3: no such candidate; allowed: eagle3:1"),
    ],
)
def test_bad_settings_are_named(bundle, settings, message):
    with pytest.raises(UsageError, match=message):
        train_router([program(bundle, "train")], [program(bundle, "validation")], settings)


@pytest.fixture(scope="module")
def saved(bundle, tmp_path_factory):
    """A bundle and a checkpoint on disk, both by the command line."""
    folder = tmp_path_factory.mktemp("apex")
    costs = folder / "costs.json"
    costs.write_text(dump_profile(synthetic.profile(sync=0.1)))
    write(bundle, folder / "trace")
    result = run(
        "train",
        "apex",
        folder / "trace",
        "--profile",
        "s",
        "--depths",
        "1,2,4,6",
        "--cost-profile",
        costs,
        "--out",
        folder / "s",
    )
    assert result.exit_code == 0, result.output
    return folder, costs


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words], standalone_mode=False)


def compare(folder, costs, policy, *more):
    return run(
        "compare",
        folder / "trace",
        "--policies",
        f"ar,{policy}",
        "--cost-profile",
        costs,
        "--out",
        folder / "out",
        *more,
    )


def test_train_then_compare(saved):
    folder, costs = saved
    result = compare(folder, costs, f"apex-s@{folder / 's'}")
    assert result.exit_code == 0, result.exception
    row = next(r for r in json.loads((folder / "out" / "results.json").read_text())["rows"] if r["family"] == "apex")
    assert row["trained_on"] == "synthetic"
    assert row["drafted"] > 0


@pytest.mark.parametrize(
    ("policy", "more", "message"),
    [
        ("apex-s", (), "needs a checkpoint: apex-s@DIR"),
        ("apex-b@{s}", (), "profile is 's'; policy 'apex-b' needs 'b'"),
        ("apex-s@{s}", ("--split", "train"), "was trained on 18 of the requests it would be scored on"),
        ("apex-s@{s}", ("--depths", "0-4"), "trained for depth 6, not among those selected"),
        ("apex-s@{s}", ("--methods", "ngram"), "trained for method eagle3, not among those selected"),
        ("apex-s@{s}/none", (), "no checkpoint there"),
        ("ar@{s}", (), "ar is not trained and takes no checkpoint"),
    ],
)
def test_a_checkpoint_that_does_not_fit_says_so(saved, policy, more, message):
    folder, costs = saved
    result = compare(folder, costs, policy.format(s=folder / "s"), *more)
    assert isinstance(result.exception, ApexSimError)
    assert message in str(result.exception)


def test_overlap_is_scored_when_asked_for(saved):
    folder, costs = saved
    assert compare(folder, costs, f"apex-s@{folder / 's'}", "--split", "train", "--allow-train-overlap").exit_code == 0


def test_a_damaged_checkpoint_names_the_field(saved, tmp_path):
    folder, _ = saved
    broken = tmp_path / "broken"
    shutil.copytree(folder / "s", broken)
    file = broken / "checkpoint.json"
    whole = json.loads(file.read_text())

    def damaged(change) -> str:
        meta = json.loads(json.dumps(whole))
        change(meta)
        file.write_text(json.dumps(meta))
        with pytest.raises(PolicyError) as raised:
            checkpoint.load(broken)
        return str(raised.value)

    assert "depths has shape" in damaged(lambda meta: meta["depths"].append(9))
    assert "'luck' is not a feature" in damaged(lambda meta: meta["parts"]["depth"]["features"].append("luck"))
    assert "missing key 'methods'" in damaged(lambda meta: meta.pop("methods"))
    assert "profile is 'x'" in damaged(lambda meta: meta.update(profile="x"))
    assert "schema is 'y'" in damaged(lambda meta: meta.update(schema="y"))
    file.write_text(json.dumps(whole))
    (broken / "depth.safetensors").write_bytes(b"x")
    with pytest.raises(PolicyError, match="missing or damaged"):
        checkpoint.load(broken)


def test_parts_can_be_trained_one_after_the_other(saved, tmp_path):
    folder, costs = saved
    common = ("--depths", "1,2,4,6", "--cost-profile", costs, "--profile", "s", "--out", tmp_path / "two")
    assert run("train", "apex-router", folder / "trace", *common).exit_code == 0
    result = compare(folder, costs, f"apex-s@{tmp_path / 'two'}")
    assert "has no depth: apexsim train apex-depth makes it" in str(result.exception)
    assert run("train", "apex-depth", folder / "trace", *common).exit_code == 0
    whole, two = checkpoint.load(folder / "s"), checkpoint.load(tmp_path / "two")
    for part in checkpoint.PARTS:
        assert all(
            (whole.parts[part].weights[n] == two.parts[part].weights[n]).all() for n in whole.parts[part].weights
        )
    other = ("--depths", "1,2,4", "--cost-profile", costs, "--profile", "s", "--out", tmp_path / "two")
    assert "depths of its other part differs" in str(run("train", "apex-router", folder / "trace", *other).exception)


def test_a_signal_the_trace_lacks_is_named(saved, bundle, tmp_path):
    """Trained with the prompts' entropy, asked to decide without."""
    folder, costs = saved
    poorer = Bundle(bundle.meta, bundle.requests.drop("prompt_entropy"), bundle.positions)
    write(poorer, tmp_path / "trace")
    result = compare(tmp_path, costs, f"apex-s@{folder / 's'}")
    assert "needs prompt_entropy" in str(result.exception)
