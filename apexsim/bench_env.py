"""The environments' speed against their peers', in alternation within one run: medians of five."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

ROUNDS = 5
VECTOR_ENVS = 1024
SB3_ENVS = 64
SECONDS_PER_ROUND = 0.5


def vector_env(bundle: str) -> dict[str, Any]:
    """Our vector environment against Gymnasium's own NumPy CartPole, both of 1,024 environments, one thread."""
    ours: Any = gym.make_vec(
        "ApexSpec-v0", VECTOR_ENVS, vectorization_mode="vector_entry_point", bundle=bundle, split="all"
    )
    peer: Any = gym.make_vec("CartPole-v1", VECTOR_ENVS, vectorization_mode="vector_entry_point")
    rates = _alternate(
        {
            "ours": _vector(ours, ours.single_action_space.n),
            "gymnasium_cartpole": _vector(peer, peer.single_action_space.n),
        }
    )
    return {**rates, "ratio": rates["ours_steps_per_s"] / rates["gymnasium_cartpole_steps_per_s"]}


def single_env(bundle: str) -> dict[str, Any]:
    """``gym.make`` of ours against CartPole-v1, each with the wrappers gym.make puts around it."""
    ours = gym.make("ApexSpec-v0", bundle=bundle, split="all")
    peer = gym.make("CartPole-v1")
    rates = _alternate({"ours": _single(ours), "gymnasium_cartpole": _single(peer)})
    ratio = rates["ours_steps_per_s"] / rates["gymnasium_cartpole_steps_per_s"]
    return {**rates, "ratio": ratio, "first_step_s": first_step_seconds(bundle)}


def sb3_adapter(bundle: str) -> dict[str, Any]:
    """SB3's view of 64 environments: our adapter against SB3's DummyVecEnv over single ones."""
    from stable_baselines3.common.vec_env import DummyVecEnv

    from envs.sb3 import SpecVecEnv

    ours: Any = SpecVecEnv(SB3_ENVS, bundle=bundle, split="all")
    peer: Any = DummyVecEnv([lambda: gym.make("ApexSpec-v0", bundle=bundle, split="all")] * SB3_ENVS)
    rates = _alternate(
        {"adapter": _vector(ours, ours.action_space.n), "dummy_vec_env": _vector(peer, peer.action_space.n)}
    )
    return {**rates, "ratio": rates["adapter_steps_per_s"] / rates["dummy_vec_env_steps_per_s"]}


def first_step_seconds(bundle: str) -> float:
    """Seconds of reset and first step in a fresh process, imports and construction apart, with a warm Numba cache."""
    code = (
        "import time, gymnasium as gym; "
        f"env = gym.make('apexsim:ApexSpec-v0', bundle={bundle!r}); started = time.perf_counter(); "
        "env.reset(seed=0); env.step(1); print(time.perf_counter() - started)"
    )
    run = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    return statistics.median(float(done.stdout) for done in run)


@dataclass(frozen=True)
class Runner:
    """Something that can be stepped: ``run(count)`` calls, each worth ``width`` environment steps."""

    run: Callable[[int], None]
    width: int = 1

    def seconds(self, count: int) -> float:
        started = time.perf_counter()
        self.run(count)
        return time.perf_counter() - started


def _alternate(runners: dict[str, Runner]) -> dict[str, float]:
    """Median steps per second of each, measured in turns so that the machine's drift falls on all alike."""
    counts = {}
    for name, runner in runners.items():
        runner.run(20)  # compiles and warms up
        counts[name] = max(20, int(100 * SECONDS_PER_ROUND / runner.seconds(100)))
    rates: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(ROUNDS):
        for name, runner in runners.items():
            rates[name].append(counts[name] * runner.width / runner.seconds(counts[name]))
    return {f"{name}_steps_per_s": statistics.median(rate) for name, rate in rates.items()}


def _vector(env: Any, actions: int) -> Runner:
    """Steps a vector environment, Gymnasium's or SB3's, with fixed random actions."""
    env.reset()
    chosen = np.random.default_rng(0).integers(0, actions, env.num_envs)

    def run(count: int) -> None:
        for _ in range(count):
            env.step(chosen)

    return Runner(run, env.num_envs)


def _single(env: Any) -> Runner:
    """Steps a single environment with random actions, resetting it at each end."""
    env.reset(seed=0)
    chosen = np.random.default_rng(0).integers(0, env.action_space.n, 1024).tolist()

    def run(count: int) -> None:
        for i in range(count):
            _, _, terminated, truncated, _ = env.step(chosen[i % 1024])
            if terminated or truncated:
                env.reset()

    return Runner(run)
