"""ApexSpec-v0, many requests at a time: one Numba kernel steps all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.error import InvalidAction, ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from apexsim import features, replay
from apexsim.errors import UsageError
from apexsim.kernels import blocks as kernels
from envs.world import Config, Stream, shared_world

INFO = {
    "method": kernels.METHOD,
    "depth": kernels.DEPTH,
    "drafted": kernels.DRAFTED,
    "accepted": kernels.ACCEPTED,
    "emitted": kernels.EMITTED,
    "position": kernels.POSITION,
}
"""Whole-numbered entries of the step's info, by column of the kernel's counts; ``method`` is an index."""


class SpecVectorEnv(VectorEnv):
    """``num_envs`` requests in lockstep; observations, actions and rewards are those of ``envs.single.SpecEnv``.

    A request that ends is replaced within the same step (AutoresetMode.SAME_STEP): ``infos["final_obs"]`` (n, F) holds its
    last observation where ``infos["_final_obs"]`` is True, and the observation returned is the next request's first.
    All other infos are arrays (n,) about the block just run, of the request that ended where one did: there is no
    ``final_info``, and ``next_request`` names the request that follows. ``method`` is an index into the selected methods.
    Options given to ``reset`` also hold for these automatic resets, until ``reset`` is given others.

    Args:
        num_envs: How many.
        **config: As ``envs.single.SpecEnv``.
    """

    def __init__(self, num_envs: int = 1, render_mode: str | None = None, **config: Any) -> None:
        if num_envs < 1:
            raise UsageError(f"num_envs {num_envs}: must be at least 1")
        self.world = shared_world(Config(**config))
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": []}
        self.render_mode = render_mode
        self.single_observation_space = self.world.observation_space
        self.single_action_space = self.world.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.feature_names = features.FEATURES
        self.stream: Stream | None = None
        self.queue, self.cursor = np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
        self.requests = np.arange(len(self.world.request_ids))
        self.noise = np.ones(num_envs)
        self._actions = len(self.world.program.space.pairs)
        self._ids = np.array(self.world.request_ids, dtype=object)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts ``num_envs`` requests; a seed restarts the order of requests, options restrict it (``World.choose``)."""
        super().reset(seed=seed)
        chosen = self.requests if options is None else self.world.choose(options)
        if self.stream is None or seed is not None or not np.array_equal(chosen, self.requests):
            self.stream = Stream(chosen, self.np_random, self.world.config.replacement)
        else:  # the order goes on where it was read to
            self.stream.left = np.concatenate((self.queue[self.cursor[0] :], self.stream.left))
        self.requests = chosen
        self.slots = replay.make_slots(self.stream.take(self.num_envs))
        self.queue, self.cursor = self.stream.take(2 * self.num_envs), np.zeros(1, dtype=np.int64)
        obs = np.zeros((self.num_envs, len(features.FEATURES)), dtype=np.float32)
        kernels.begin(self.world.program.tables, self.world.episodes, self.slots, np.arange(self.num_envs), obs)
        return obs, {"request": self._ids[self.slots.request], "position": np.ones(self.num_envs, dtype=np.int64)}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """One block of every request; ``actions`` (n,) indices into the (method, depth) pairs."""
        if self.stream is None:
            raise ResetNeeded("call reset() before step()")
        count = self.num_envs
        chosen = self._checked(actions)
        if self.queue.size - self.cursor[0] < count:
            self.queue = np.concatenate((self.queue[self.cursor[0] :], self.stream.take(2 * count)))
            self.cursor[0] = 0
        if self.world.config.cost_noise:
            self.noise = self.np_random.choice(self.world.residuals, count)
        request = self.slots.request.copy()
        steps = replay.make_steps(count)
        kernels.step(
            self.world.program.tables,
            self.world.episodes,
            self.slots,
            chosen,
            self.noise,
            self.queue,
            self.cursor,
            steps,
        )
        counts, times = steps.counts, steps.times
        infos: dict[str, Any] = {name: counts[:, column] for name, column in INFO.items()}
        infos["seconds"] = times[:, kernels.SECONDS]
        infos["wasted"] = counts[:, kernels.DRAFTED] - counts[:, kernels.ACCEPTED]
        infos["request"] = self._ids[request]
        ended = steps.ended > 0
        if ended.any():
            infos["final_obs"], infos["_final_obs"] = steps.final_obs, ended
            infos["next_request"], infos["_next_request"] = self._ids[self.slots.request], ended
        return steps.obs, times[:, kernels.GAIN], steps.ended == 1, steps.ended == 2, infos

    def _checked(self, actions: np.ndarray) -> np.ndarray:
        """The actions as the kernel, which checks no bounds, may be given them."""
        given = np.asarray(actions)
        if given.shape != (self.num_envs,) or given.dtype.kind not in "iu":
            raise InvalidAction(
                f"actions must be {self.num_envs} whole numbers, got {given.dtype} of shape {given.shape}"
            )
        chosen = np.ascontiguousarray(given, dtype=np.int64)
        if chosen.view(np.uint64).max() >= self._actions:  # seen as unsigned, a negative number is a very large one
            raise InvalidAction(f"an action is out of range; allowed: 0..{self._actions - 1}")
        return chosen

    def action_masks(self) -> np.ndarray:
        """(n, actions) bool: what each request may do next."""
        return self.world.masks(self.slots)
