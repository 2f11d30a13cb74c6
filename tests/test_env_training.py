"""Stable-Baselines3 trains on ApexSpec-v0 through its adapter, with no wrapper of the user's."""

from __future__ import annotations

import numpy as np
import pytest
import synthetic

from apexsim import replay
from apexsim.cost import dump_profile


def best_depth_bundle():
    """Depth 3 is obviously best: three tokens are always accepted, never a fourth."""
    accepted = [{"eagle3": np.minimum(np.full(40, 3), np.arange(40, 0, -1)).tolist()} for _ in range(12)]
    return synthetic.bundle(accepted, kmax=8, split=["train"] * 12)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["PPO", "A2C", "DQN"])
def test_stable_baselines_solves_an_obvious_bundle(algorithm, tmp_path):
    """20,000 steps reach 95 % of what always drafting 3 saves; drafting 1 or 8 saves less, and nothing saves nothing."""
    import stable_baselines3 as sb3
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecMonitor

    from envs.sb3 import SpecVecEnv

    profile = tmp_path / "costs.json"
    profile.write_text(dump_profile(synthetic.profile()))
    settings = {"bundle": best_depth_bundle(), "control": "depth", "depths": (0, 1, 3, 8), "cost_profile": str(profile)}
    env = SpecVecEnv(4, seed=0, **settings)
    program = env.vector.world.program
    saved = [
        float(((program.seconds_ar - replay.run_constant(program, k, 0.0).seconds) / program.step_s).mean())
        for k in range(4)
    ]
    assert np.argmax(saved) == 2
    assert sorted(saved)[-2] < 0.9 * saved[2]
    extra = {"gradient_steps": -1, "learning_starts": 500} if algorithm == "DQN" else {}
    model = getattr(sb3, algorithm)("MlpPolicy", env, seed=0, device="cpu", **extra)
    model.learn(20_000)
    reached, _ = evaluate_policy(model, VecMonitor(SpecVecEnv(4, seed=1, **settings)), n_eval_episodes=12)
    assert reached > 0.95 * saved[2]


@pytest.mark.slow
@pytest.mark.parametrize("control", ["apex", "switch", "depth"])
@pytest.mark.parametrize("algorithm", ["PPO", "A2C", "DQN"])
def test_stable_baselines_trains_on_the_bundled_trace(algorithm, control):
    import stable_baselines3 as sb3

    from envs.sb3 import SpecVecEnv

    env = SpecVecEnv(16, seed=0, control=control)
    model = getattr(sb3, algorithm)("MlpPolicy", env, seed=0, device="cpu")
    model.learn(20_000)
    assert model.num_timesteps >= 20_000
