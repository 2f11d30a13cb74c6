"""ApexSpec-v0: the environment's contract, against the replay it must equal."""

from __future__ import annotations

import subprocess
import sys
import warnings

import gymnasium as gym
import numpy as np
import polars as pl
import pytest
import synthetic
from gymnasium.utils.env_checker import check_env

import apexsim  # noqa: F401 (registers the environment)
from apexsim import features, replay, traces
from apexsim.cost import dump_profile
from apexsim.errors import ApexSimError
from apexsim.features import FEATURES
from apexsim.fitting import fit_profile
from apexsim.program import compile_program
from apexsim.traces import Bundle
from envs.single import SpecEnv
from envs.vector import SpecVectorEnv

OURS = sorted(spec.id for spec in gym.registry.values() if str(spec.entry_point).startswith("envs."))
SETTINGS = [
    {"control": control, "reward": reward, "methods": ["eagle3"] if control == "depth" else None}
    for control in ("depth", "apex", "switch")
    for reward in ("time", "utility", "goodput")
]


@pytest.fixture
def costs(tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(dump_profile(synthetic.profile(sync=0.1)))
    return str(file)


def config(costs, seed=3, count=12, **changes):
    settings = {
        "bundle": synthetic.random_bundle(seed, count=count),
        "depths": None,
        "split": "all",
        "control": "switch",
    }
    return settings | {"cost_profile": costs} | changes


def play(env, seed=0, steps=200, options=None):
    """Everything a seeded random run of a single environment shows, as bytes."""
    rng = np.random.default_rng(seed)
    obs, info = env.reset(seed=seed, options=options)
    seen = [obs.tobytes(), str(info)]
    for _ in range(steps):
        obs, reward, terminated, truncated, info = env.step(int(rng.integers(env.action_space.n)))
        assert env.observation_space.contains(obs)
        seen += [obs.tobytes(), reward, terminated, truncated, str(info)]
        if terminated or truncated:
            obs, info = env.reset()
            seen += [obs.tobytes(), str(info)]
    return seen


@pytest.mark.parametrize("env_id", OURS)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s['control']}-{s['reward']}")
def test_checkers_pass_without_a_warning(env_id, setting, costs):
    from stable_baselines3.common.env_checker import check_env as check_sb3

    env = gym.make(env_id, **config(costs, **setting), render_mode="rgb_array")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)
        check_sb3(env.unwrapped)
    assert env.unwrapped.feature_names == FEATURES
    assert len(FEATURES) == env.observation_space.shape[0] <= 32


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s['control']}-{s['reward']}")
def test_the_same_seed_gives_the_same_bytes(setting, costs):
    one, two, other = (play(SpecEnv(**config(costs, **setting)), seed) for seed in (5, 5, 6))
    assert one == two
    assert one != other


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s['control']}-{s['reward']}")
def test_vector_equals_single_bit_for_bit(setting, costs):
    """Five requests in lockstep against each alone, with the same actions; then the automatic reset's next request."""
    settings = config(costs, **setting)
    vector = SpecVectorEnv(5, **settings)
    rng = np.random.default_rng(1)
    obs, infos = vector.reset(seed=9)
    singles = [SpecEnv(**settings) for _ in range(5)]
    own = [env.reset(options={"request": infos["request"][i]})[0] for i, env in enumerate(singles)]
    for _ in range(120):
        assert obs.tobytes() == np.stack(own).tobytes()
        assert (vector.action_masks() == np.stack([env.action_masks() for env in singles])).all()
        actions = rng.integers(0, vector.single_action_space.n, 5)
        obs, rewards, terminated, truncated, infos = vector.step(actions)
        for i, env in enumerate(singles):
            own[i], reward, done, cut, info = env.step(int(actions[i]))
            assert (reward, done, cut) == (rewards[i], terminated[i], truncated[i])
            assert info["request"] == infos["request"][i]
            assert info["method"] == vector.world.program.space.methods[int(infos["method"][i])]
            for key in ("position", "depth", "drafted", "accepted", "emitted", "wasted", "seconds"):
                assert info[key] == infos[key][i]
            if done or cut:
                assert infos["_final_obs"][i]
                assert infos["final_obs"][i].tobytes() == own[i].tobytes()
                following = vector.world.request_ids[vector.slots.request[i]]
                own[i] = env.reset(options={"request": following})[0]


@pytest.mark.parametrize(("method", "depth"), [("eagle3", 0), ("eagle3", 3), ("ngram", 6)])
def test_an_episode_at_constant_action_equals_the_replay_to_the_last_bit(method, depth, costs):
    env = SpecEnv(**config(costs, control="depth", methods=[method]))
    program = env.world.program
    totals = replay.run_constant(program, program.space.index(method, depth), program.sync_s((method,)))
    for r, request in enumerate(env.world.request_ids):
        env.reset(options={"request": request})
        seconds, blocks, drafted, done = 0.0, 0, 0, False
        while not done:
            _, _, done, _, info = env.step(depth)
            seconds, blocks, drafted = seconds + info["seconds"], blocks + 1, drafted + info["drafted"]
        assert (seconds, blocks, drafted) == (totals.seconds[r], totals.blocks[r], totals.drafted[r])


def test_the_time_reward_adds_up_to_the_time_saved(costs):
    env = SpecEnv(**config(costs, waste_weight=0.3))
    rng = np.random.default_rng(0)
    for r, request in enumerate(env.world.request_ids):
        env.reset(options={"request": request})
        gains, seconds, wasted, done = [], 0.0, 0, False
        while not done:
            _, gain, done, _, info = env.step(int(rng.integers(env.action_space.n)))
            gains.append(gain)
            seconds, wasted = seconds + info["seconds"], wasted + info["wasted"]
        program = env.world.program
        saved = (program.seconds_ar[r] - seconds) / program.step_s - 0.3 * wasted
        assert sum(gains) == pytest.approx(saved, rel=1e-9, abs=1e-9)


def test_the_other_rewards_by_hand(costs):
    """k 2 at T 4: accepts 2 of 2. Best constant rates follow from the replay of every depth."""
    bundle = synthetic.bundle([{"eagle3": [2, 0, 1]}], kmax=2)
    settings = {"bundle": bundle, "control": "depth", "depths": None, "split": "all", "cost_profile": costs}
    env = SpecEnv(reward="goodput", **settings)
    env.reset()
    _, gain, _, _, info = env.step(2)
    assert gain == pytest.approx(3 * env.world.program.step_s / info["seconds"])
    env = SpecEnv(reward="utility", **settings)
    env.reset()
    _, gain, _, _, info = env.step(1)  # one of one accepted, two tokens
    rate = 2 / info["seconds"]
    program = env.world.program
    best = max(3 / replay.run_constant(program, k, 0.1).seconds[0] for k in range(3))
    short = max(0.0, best - rate) / best
    assert gain == pytest.approx(np.log(rate) + 0.30 * np.log(1.1) - 0.15 * short - 0.20 * short)


def test_case_12_ended_or_cut_short(costs):
    """EOS terminates, nothing to bootstrap; a log that stops early truncates, with its last observation; both: terminated."""
    from envs.sb3 import SpecVecEnv

    lists = [{"eagle3": [0, 0]}, {"eagle3": [0, 0]}]
    bundle = synthetic.bundle(lists, kmax=2, finish_reason=["stop", "cut"])
    settings = {"bundle": bundle, "control": "depth", "depths": None, "split": "all", "cost_profile": costs}
    for request, flags in (("r0", (True, False)), ("r1", (False, True))):
        env = SpecEnv(**settings)
        env.reset(options={"request": request})
        env.step(1)
        assert env.step(1)[2:4] == flags
        with pytest.raises(gym.error.ResetNeeded):
            env.step(1)
        adapter = SpecVecEnv(2, full_info=True, **settings)
        adapter.set_options({"request": request})
        adapter.reset()
        adapter.step(np.array([1, 1]))
        first_of_next, _, dones, infos = adapter.step(np.array([1, 1]))
        assert dones.tolist() == [True, True]
        assert [info["TimeLimit.truncated"] for info in infos] == [flags[1]] * 2
        for i, info in enumerate(infos):
            assert info["terminal_observation"].shape == (len(FEATURES),)
            assert info["terminal_observation"].tobytes() != first_of_next[i].tobytes()
            assert info["request"] == request
    from stable_baselines3.common.vec_env import DummyVecEnv

    both = DummyVecEnv([lambda: gym.wrappers.TimeLimit(SpecEnv(**settings), 2)])
    both.set_options({"request": "r0"})
    both.reset()
    both.step(np.array([1]))
    assert both.step(np.array([1]))[3][0]["TimeLimit.truncated"] is False


def test_case_13_options_reach_the_automatic_reset(costs):
    vector = SpecVectorEnv(3, **config(costs))
    ids = list(vector.world.request_ids)

    def walk(seed, options, episodes):
        _, infos = vector.reset(seed=seed, options=options)
        order = infos["request"].tolist()
        while len(order) < episodes:
            *_, infos = vector.step(np.zeros(3, dtype=int))
            if "_final_obs" in infos:
                order += [vector.world.request_ids[r] for r in vector.slots.request[infos["_final_obs"]]]
        return order

    assert set(walk(0, {"request": ids[2]}, 9)) == {ids[2]}
    workload = vector.world.program.requests.filter(request_id=ids[1])["workload"][0]
    kept = set(vector.world.program.requests.filter(workload=workload)["request_id"])
    assert set(walk(0, {"workload": workload}, 20)) <= kept
    free = walk(4, {}, len(ids))
    assert sorted(free[: len(ids)]) == sorted(ids)  # every request once before any comes again
    assert free == walk(4, {}, len(ids))
    assert free != walk(5, {}, len(ids))
    single = SpecEnv(**config(costs))
    single.reset(seed=1, options={"request": ids[:2]})
    assert {single.reset()[1]["request"] for _ in range(8)} == set(ids[:2])


def test_statistics_wrappers_agree_with_the_replay(costs):
    """Automatic reset loses and repeats nothing: episode lengths and returns are those of the replayed policy."""
    from stable_baselines3.common.vec_env import VecMonitor

    from envs.sb3 import SpecVecEnv

    settings = config(costs, control="depth", methods=["eagle3"], count=20)
    env = SpecEnv(**settings)
    program = env.world.program
    totals = replay.run_constant(program, 4, program.sync_s(("eagle3",)))
    saved = (program.seconds_ar - totals.seconds) / program.step_s
    expected = {request: (int(totals.blocks[r]), saved[r]) for r, request in enumerate(env.world.request_ids)}

    vector = gym.wrappers.vector.RecordEpisodeStatistics(SpecVectorEnv(4, **settings))
    vector.reset(seed=0)
    seen = 0
    while seen < 40:
        *_, infos = vector.step(np.full(4, 4))
        for i in np.flatnonzero(infos.get("_episode", [])):
            length, gain = expected[infos["request"][i]]
            assert infos["episode"]["l"][i] == length
            assert infos["episode"]["r"][i] == pytest.approx(gain, abs=1e-6)
            seen += 1
    monitored = VecMonitor(SpecVecEnv(4, full_info=True, **settings))
    monitored.seed(0)
    monitored.reset()
    seen = 0
    while seen < 40:
        *_, infos = monitored.step(np.full(4, 4))
        for info in infos:
            if "episode" in info:
                length, gain = expected[info["request"]]
                assert info["episode"]["l"] == length
                assert info["episode"]["r"] == pytest.approx(gain, abs=1e-3)
                seen += 1


def test_observations_know_nothing_of_the_future(costs):
    """Two texts that agree up to p show the same observations up to the block that runs past it."""
    rng = np.random.default_rng(0)
    n = 50
    left = np.arange(n, 0, -1)
    first = np.minimum(rng.integers(0, 5, n), left)
    for p in (5, 20, 35):
        second = first.copy()
        second[p:] = np.minimum(rng.integers(0, 5, n - p), left[p:])
        shown = []
        for accepted in (first, second):
            bundle = synthetic.bundle([{"eagle3": accepted.tolist()}], max_tokens=[n + 9])
            env = SpecEnv(bundle=bundle, control="depth", depths=None, split="all", cost_profile=costs)
            obs, info = env.reset()
            seen, position = [], 1
            while position <= p + 1:
                seen.append(obs.tobytes())
                obs, _, done, cut, info = env.step(4)
                position = info["position"] + info["emitted"]
                if done or cut:
                    break
            shown.append(seen)
        assert shown[0] == shown[1]


def test_features_by_hand(costs):
    """Depth 4 accepts 4 of 4, then 1 of 4: every history feature from those two blocks."""
    bundle = synthetic.bundle([{"eagle3": [4, 0, 0, 0, 0, 1, 0, 0, 0]}], kmax=4, prompts=[20], max_tokens=[40])
    env = SpecEnv(bundle=bundle, control="depth", depths=None, split="all", cost_profile=costs)
    obs, _ = env.reset()
    value = dict(zip(FEATURES, obs.tolist(), strict=True))
    assert value["progress"] == pytest.approx(1 / 40)
    assert value["remaining"] == pytest.approx(39 / 255)
    assert (value["has_limit"], value["has_entropy"], value["has_match"], value["has_history"]) == (1, 0, 0, 0)
    assert value["context"] == pytest.approx(np.log1p(21))
    spent = [env.step(4)[4]["seconds"]]
    obs, *_, info = env.step(4)
    spent.append(info["seconds"])
    value = dict(zip(FEATURES, obs.tolist(), strict=True))
    plain_steps = sum(spent) / env.world.program.step_s
    expected = {
        "has_history": 1, "blocks": 2 / 18, "method": 1, "last_depth": 4 / 16, "last_drafted": 4 / 16,
        "last_accepted": 1 / 16, "accepted": 2.5 / 16, "accepted_spread": 1.5 / 16, "rejected": 1.5 / 16, "full": 0.5,
        "first_rejection": 2 / 16, "time_per_token": plain_steps / 7, "recent_accepted": 2.5 / 16,
        "recent_rejected": 1.5 / 16, "recent_full": 0.5, "recent_first_rejection": 2 / 16,
        "recent_time_per_token": plain_steps / 7, "position": np.log1p(8), "progress": 8 / 40,
    }  # fmt: skip
    for name, number in expected.items():
        assert value[name] == pytest.approx(number, rel=1e-6), name


def test_the_recent_window_forgets(costs):
    """After eight plain blocks nothing recent was drafted, while the request's own means stay."""
    bundle = synthetic.bundle([{"eagle3": [3] + [0] * 30}], kmax=4)
    env = SpecEnv(bundle=bundle, control="depth", depths=None, split="all", cost_profile=costs)
    env.reset()
    obs = env.step(3)[0]
    assert obs[FEATURES.index("recent_accepted")] == pytest.approx(3 / 16)
    for _ in range(8):
        obs = env.step(0)[0]
    assert obs[FEATURES.index("recent_accepted")] == 0.0
    assert obs[FEATURES.index("accepted")] == pytest.approx(3 / 16)


def test_apex_keeps_the_first_method_and_masks_the_others(costs):
    env = SpecEnv(**config(costs, control="apex"))
    depths = len(env.world.program.space.depths)
    env.reset(seed=0, options={"request": max(env.world.request_ids, key=lambda i: env.world.program.requests.filter(
        request_id=i)["output_tokens"][0])})  # fmt: skip
    assert env.action_masks().all()
    assert env.step(depths + 2)[4]["method"] == "ngram"
    assert env.action_masks().tolist() == [False] * depths + [True] * depths
    assert env.step(1)[4]["method"] == "ngram"  # eagle3's depth 1: the method part is ignored
    plain = env.step(0)[4]
    assert plain["depth"] == 0
    # Only ngram is configured, so eagle3's sync of 0.1 s is not paid.
    context = env.world.program.requests.filter(request_id=plain["request"])["prompt_tokens"][0] + plain["position"]
    assert plain["seconds"] == pytest.approx(1.03 + 0.0001 * context)


def test_cost_noise_is_measured_seeded_and_centred():
    runs = []
    for noise, seed in ((True, 1), (True, 1), (False, 1)):
        env = gym.make("ApexSpec-v0", bundle="smollm2-cpu", control="depth", methods=("ngram",), cost_noise=noise)
        env.reset(seed=seed)
        seconds = []
        for _ in range(400):
            _, _, done, cut, info = env.step(3)
            seconds.append(info["seconds"])
            if done or cut:
                env.reset()
        runs.append(seconds)
    assert runs[0] == runs[1] != runs[2]
    factors = np.random.default_rng(0).choice(env.unwrapped.world.residuals, 3)
    assert (factors == 1.0).all()  # without noise
    noisy = gym.make(
        "ApexSpec-v0", bundle="smollm2-cpu", control="depth", methods=("ngram",), cost_noise=True
    ).unwrapped.world.residuals
    assert noisy.mean() == pytest.approx(1.0)  # else drafting would look slower than plain decoding, which has no noise
    assert noisy.std() > 0.01


@pytest.mark.parametrize("action", [0, 5])
def test_noise_leaves_the_order_of_requests_alone(action):
    orders = []
    for noise in (True, False):
        env = SpecEnv(bundle="smollm2-cpu", control="depth", methods=("ngram",), split="test", cost_noise=noise)
        order = [env.reset(seed=3)[1]["request"]]
        while len(order) < 12:
            _, _, done, cut, _ = env.step(action)
            if done or cut:
                order.append(env.reset()[1]["request"])
        orders.append(order)
    assert orders[0] == orders[1]


def test_every_request_comes_once_before_any_comes_again_across_resets(costs):
    single = SpecEnv(**config(costs, count=20))
    ids = sorted(single.world.request_ids)
    single.reset(seed=0)
    first = single.world.request_ids[single.request]
    assert sorted([first, *(single.reset(options={})[1]["request"] for _ in range(len(ids) - 1))]) == ids
    vector = SpecVectorEnv(4, **config(costs, count=20))
    vector.reset(seed=0)
    seen = [vector.world.request_ids[r] for r in vector.slots.request]
    while len(seen) + 4 <= len(ids):
        seen += vector.reset()[1]["request"].tolist()
    assert len(set(seen)) == len(seen) >= len(ids) - 3


def test_no_context_feature_knows_the_future():
    """Signals and the text's length after a cut are replaced: no row up to the cut changes, on the recorded trace."""
    whole = traces.load("smollm2-cpu")
    rng = np.random.default_rng(0)
    cut = 40
    after = whole.positions["position"] > cut
    noise = {
        name: pl.Series(name, rng.integers(0, 200, whole.positions.height), dtype=pl.UInt8)
        for name in ("target_entropy", "target_prob", "match.ngram")
    }
    changed = whole.positions.with_columns(
        pl.when(after).then(series).otherwise(pl.col(name)).alias(name) for name, series in noise.items()
    )
    rows = np.arange(whole.requests.height)
    longest = int(whole.requests["output_tokens"].max())
    one, other = (
        compile_program(Bundle(whole.meta, whole.requests, positions, whole.blocks), fit_profile(whole), rows)
        for positions in (whole.positions, changed)
    )
    position = np.concatenate([np.arange(1, n + 1) for n in one.tables.length])
    past = position <= cut
    assert one.context[past].tobytes() == other.context[past].tobytes()
    assert (one.context[~past] != other.context[~past]).any(axis=0).sum() >= 4
    assert longest > cut


def test_entropy_recent_is_the_mean_of_the_last_eight_known():
    values = np.array([4.0, np.nan, 2.0, 6.0, *range(10)])
    got = features.trailing_mean(values, features.ENTROPY_WINDOW)
    for i in range(values.size):
        assert got[i] == pytest.approx(np.nanmean(values[max(0, i - 7) : i + 1]))
    assert np.isnan(features.trailing_mean(np.array([np.nan, 1.0]), 3)).tolist() == [True, False]
    env = SpecEnv(bundle="smollm2-cpu", control="depth", methods=("ngram",), split="all")
    start = int(env.world.program.tables.start[3]) + 3
    rows = env.world.program.context[start : start + 30]
    entropy, recent = rows[:, FEATURES.index("entropy")], rows[:, FEATURES.index("entropy_recent")]
    for i in range(30):
        assert recent[i] == pytest.approx(entropy[max(0, i - 7) : i + 1].mean(), rel=1e-5)


def mean(values):
    return float(np.mean(values)) if values else 0.0


@pytest.mark.parametrize("seed", range(4))
def test_history_features_equal_their_definition(costs, seed):
    """Every history feature, recomputed from the blocks themselves, over runs much longer than the window."""
    n = 150
    rng = np.random.default_rng(seed)
    left = np.arange(n, 0, -1)
    lists = {m: np.minimum(rng.integers(0, 7, n), left).tolist() for m in ("eagle3", "ngram")}
    env = SpecEnv(
        bundle=synthetic.bundle([lists], kmax=6), depths=None, control="switch", split="all", cost_profile=costs
    )
    env.reset(seed=0)
    blocks, done = [], False
    while not done:
        obs, _, done, _, info = env.step(int(rng.integers(env.action_space.n)))
        blocks.append(info)
        value = dict(zip(FEATURES, obs.tolist(), strict=True))
        methods = env.world.program.space.methods
        expected = {
            "blocks": len(blocks) / (len(blocks) + 16),
            "method": (1 + methods.index(info["method"])) / len(methods),
            **{f"last_{key}": info[key] / 16 for key in ("depth", "drafted", "accepted")},
        }
        for prefix, part in (("", blocks), ("recent_", blocks[-8:])):
            sent = [b for b in part if b["drafted"]]
            lost = [b for b in sent if b["accepted"] < b["drafted"]]
            seconds = sum(b["seconds"] for b in part) / env.world.program.step_s
            expected |= {
                f"{prefix}accepted": mean([b["accepted"] for b in sent]) / 16,
                f"{prefix}rejected": mean([b["wasted"] for b in sent]) / 16,
                f"{prefix}full": mean([b["accepted"] == b["drafted"] for b in sent]),
                f"{prefix}first_rejection": mean([b["accepted"] + 1 for b in lost]) / 16,
                f"{prefix}time_per_token": seconds / sum(b["emitted"] for b in part),
            }
        expected["accepted_spread"] = float(np.std([b["accepted"] for b in blocks if b["drafted"]] or [0])) / 16
        expected["has_history"] = float(any(b["drafted"] for b in blocks))
        for name, number in expected.items():
            assert value[name] == pytest.approx(number, rel=1e-5, abs=1e-6), name
    assert len(blocks) > 30


def test_the_utility_weighs_each_of_its_terms(costs):
    """A wasteful block of the slower of two methods: accepted, waste, and a different gap to each best rate."""
    lists = {"eagle3": [1] + [0] * 8, "ngram": np.minimum(6, np.arange(9, 0, -1)).tolist()}
    bundle = synthetic.bundle([lists], kmax=6)
    env = SpecEnv(bundle=bundle, depths=None, control="switch", reward="utility", split="all", cost_profile=costs)
    env.reset()
    program = env.world.program
    best = [
        max(
            9 / replay.run_constant(program, program.space.index(m, k), program.sync_s((m,))).seconds[0]
            for k in program.space.depths
        )
        for m in ("eagle3", "ngram")
    ]
    assert best[1] > 1.5 * best[0]
    _, gain, _, _, info = env.step(program.space.index("eagle3", 4))
    rate = info["emitted"] / info["seconds"]
    assert (info["accepted"], info["wasted"]) == (1, 3)
    gap_any, gap_own = ((top - rate) / top for top in (max(best), best[0]))
    expected = np.log(rate) + 0.30 * np.log(1.1) - 0.35 * 3 / 4 - 0.15 * max(0, gap_any) - 0.20 * max(0, gap_own)
    assert gain == pytest.approx(expected)


def test_render_draws_the_ribbon(costs):
    bundle = synthetic.bundle([{"eagle3": [2, 0, 0, 1, 0, 0]}], kmax=3)
    settings = {"bundle": bundle, "control": "depth", "depths": None, "split": "all", "cost_profile": costs}
    env = SpecEnv(render_mode="ansi", **settings)
    env.reset()
    env.step(3)
    env.step(2)
    assert env.render() == "##.x|#.x"
    picture = SpecEnv(render_mode="rgb_array", **settings)
    picture.reset()
    picture.step(3)
    pixels = picture.render()
    assert pixels.dtype == np.uint8
    assert pixels.shape[2] == 3
    assert pixels.std() > 5


BAD = [
    ({"control": "tree"}, "control 'tree' is unknown; allowed: depth, apex, switch"),
    ({"reward": "joy"}, "reward 'joy' is unknown; allowed: time, utility, goodput"),
    ({"control": "depth"}, "takes exactly one method, got eagle3, ngram"),
    ({"methods": ["medusa"]}, "method 'medusa' is not in synthetic; allowed: eagle3, ngram"),
    ({"split": "holdout"}, "split 'holdout' is unknown"),
    ({"workload": "poetry"}, "workload 'poetry' is not in synthetic"),
    ({"waste_weight": -1}, "waste_weight -1"),
    ({"cost_profile": "nope"}, "no such cost profile"),
    ({"cost_noise": True}, "has no timed blocks that draft"),
    ({"methods": []}, "must be a list that is not empty"),
    ({"methods": "ngram"}, "methods 'ngram': must be a list"),
    ({"depths": 4}, "depths 4: must be a list"),
    ({"depths": (17,)}, "all deeper than synthetic was recorded; allowed: 0..6"),
    ({"waste_weight": "a"}, "waste_weight 'a'"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_argument_is_answered_with_what_is_allowed(costs, change, message):
    for make in (SpecEnv, SpecVectorEnv):
        with pytest.raises(ApexSimError, match=message):
            make(**config(costs, **change))


def test_a_selection_without_anything_to_replay_is_refused(costs):
    bundle = synthetic.bundle([{"eagle3": []}, {"eagle3": [1, 0]}], kmax=4, split=["train", "test"])
    with pytest.raises(ApexSimError, match="no request of two output tokens or more in split 'train'"):
        SpecEnv(bundle=bundle, control="depth", depths=None, cost_profile=costs)
    with pytest.raises(ApexSimError, match="num_envs 0: must be at least 1"):
        SpecVectorEnv(0, **config(costs))


def test_stepping_before_a_reset_is_refused(costs):
    with pytest.raises(gym.error.ResetNeeded):
        SpecEnv(**config(costs)).step(0)
    with pytest.raises(gym.error.ResetNeeded):
        SpecVectorEnv(2, **config(costs)).step(np.zeros(2, dtype=int))


def test_bad_reset_options_are_answered(costs):
    env = SpecEnv(**config(costs))
    for options, message in (
        ({"request": "r99"}, "not among"),
        ({"workload": "poetry"}, "allowed: a, b"),
        ({"request": None}, "must be a request id or a list of them"),
        ({"workload": None}, "allowed: a, b"),
        ({"speed": 1}, "option 'speed' is unknown; allowed: request, workload"),
    ):
        with pytest.raises(ApexSimError, match=message):
            env.reset(options=options)


@pytest.mark.parametrize("action", [-1, 14, 1.5, None, "deep"])
@pytest.mark.parametrize("control", ["apex", "switch"])
def test_an_action_out_of_range_is_refused_and_moves_nothing(costs, control, action):
    env = SpecEnv(**config(costs, control=control))
    assert env.action_space.n == 14
    env.reset(seed=0)
    env.step(1)
    before = env.position
    with pytest.raises(gym.error.InvalidAction):
        env.step(action)
    assert env.position == before
    vector = SpecVectorEnv(3, **config(costs, control=control))
    vector.reset(seed=0)
    state = vector.slots.state.copy()
    for actions in (np.array([0, action, 1]), np.zeros(2, dtype=int), np.zeros((3, 1), dtype=int)):
        with pytest.raises(gym.error.InvalidAction):
            vector.step(actions)
    assert (vector.slots.state == state).all()


def test_the_sb3_adapter_shows_what_the_vector_environment_does(costs):
    from envs.sb3 import SpecVecEnv

    vector, adapter = SpecVectorEnv(4, **config(costs)), SpecVecEnv(4, full_info=True, seed=5, **config(costs))
    assert vector.reset(seed=5)[0].tobytes() == adapter.reset().tobytes()
    rng = np.random.default_rng(0)
    for _ in range(60):
        actions = rng.integers(0, vector.single_action_space.n, 4)
        obs, rewards, terminated, truncated, infos = vector.step(actions)
        mine, gains, dones, each = adapter.step(actions)
        assert obs.tobytes() == mine.tobytes()
        assert gains.tobytes() == rewards.astype(np.float32).tobytes()
        assert (dones == (terminated | truncated)).all()
        assert [info["request"] for info in each] == infos["request"].tolist()
        for key in ("method", "depth", "drafted", "accepted", "emitted", "wasted", "position"):
            assert infos[key].dtype == np.int64
            assert [info[key] for info in each] == infos[key].tolist()
        for i in np.flatnonzero(infos.get("_final_obs", [])):
            assert each[i]["terminal_observation"].tobytes() == infos["final_obs"][i].tobytes()
            assert infos["next_request"][i] == vector.world.request_ids[vector.slots.request[i]]


def test_sb3_options_hold_until_lifted_and_are_the_same_for_all(costs):
    from envs.sb3 import SpecVecEnv

    adapter = SpecVecEnv(3, seed=0, **config(costs))
    ids = adapter.vector.world.request_ids
    with pytest.raises(ApexSimError, match="the same for all environments"):
        adapter.set_options([{"request": ids[0]}, {"request": ids[1]}, {"request": ids[2]}])
    adapter.set_options({"request": ids[1]})
    for _ in range(2):  # SB3 forgets options at each reset; ours hold
        adapter.reset()
        assert {info["request"] for info in adapter.reset_infos} == {ids[1]}
    adapter.set_options({})
    adapter.reset()
    assert len({info["request"] for info in adapter.reset_infos}) == 3
    assert len(adapter.get_attr("action_masks", [0, 2])) == len(adapter.env_method("action_masks", indices=[0, 2])) == 2


def test_forked_workers_start(tmp_path):
    """Polars' threads do not survive a fork: a worker must find its trace compiled by the parent, or it waits for ever."""
    code = (
        "import gymnasium as gym, numpy as np; import apexsim\n"
        "vec = gym.make_vec('ApexSpec-v0', num_envs=2, vectorization_mode='async', vector_kwargs={'context': 'fork'})\n"
        "vec.reset(seed=0, options={'workload': 'swe'}); vec.step(np.array([1, 2])); vec.close(); print('stepped')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "stepped"


def test_a_world_is_compiled_once_and_anew_when_its_file_changes(costs, tmp_path):
    traces.write(synthetic.random_bundle(1), tmp_path / "t")
    settings = {"bundle": tmp_path / "t", "control": "switch", "depths": None, "split": "all", "cost_profile": costs}
    one, same, other = SpecEnv(**settings), SpecEnv(**settings), SpecEnv(**settings | {"waste_weight": 1.0})
    assert one.world is same.world is not other.world
    traces.write(synthetic.random_bundle(2), tmp_path / "t")
    assert SpecEnv(**settings).world is not one.world


def test_gym_make_needs_no_import():
    code = (
        "import gymnasium as gym; e = gym.make('apexsim:ApexSpec-v0'); e.reset(seed=0); print(e.step(2)[4]['request'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip()
    vec = gym.make_vec("ApexSpec-v0", num_envs=3, vectorization_mode="vector_entry_point")
    assert vec.reset(seed=0)[0].shape == (3, len(features.FEATURES))
