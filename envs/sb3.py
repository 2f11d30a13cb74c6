"""ApexSpec-v0 for Stable-Baselines3: its VecEnv over the native vector environment, no wrapper needed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from apexsim.errors import UsageError
from envs.vector import SpecVectorEnv


class SpecVecEnv(VecEnv):
    """``num_envs`` requests at a time, as SB3 wants them.

    A request that ended leaves ``infos[i]["terminal_observation"]`` and ``TimeLimit.truncated``: only a log that was cut short is
    a truncation, whose value is bootstrapped. With ``full_info`` every info also holds the numbers of ``envs.single.SpecEnv``.

    Args:
        num_envs: How many.
        full_info: Fill every info; costs a dict of nine entries per environment and step.
        seed: Of the order of requests.
        **config: As ``envs.single.SpecEnv``.
    """

    def __init__(self, num_envs: int = 64, full_info: bool = False, seed: int | None = None, **config: Any) -> None:
        self.vector = SpecVectorEnv(num_envs, **config)
        self.full_info = full_info
        self.actions = np.zeros(num_envs, dtype=np.int64)
        self._given: dict[str, Any] | None = None
        self.render_mode = None
        super().__init__(num_envs, self.vector.single_observation_space, self.vector.single_action_space)
        if seed is not None:
            self.seed(seed)

    def reset(self) -> np.ndarray:
        obs, infos = self.vector.reset(seed=self._seeds[0], options=self._given)
        self._given = None
        self.reset_infos = [{"request": request} for request in infos["request"].tolist()]
        self._reset_seeds()
        self._reset_options()
        return obs

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        """Options of the next reset and all automatic ones after it; ``{}`` lifts an earlier restriction.

        Raises:
            UsageError: A list with different entries: all environments draw from one order of requests.
        """
        super().set_options(options)
        if any(given != self._options[0] for given in self._options):
            raise UsageError("options must be the same for all environments of a SpecVecEnv")
        self._given = self._options[0]

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        obs, rewards, terminated, truncated, batch = self.vector.step(self.actions)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if self.full_info:
            columns = {key: value.tolist() for key, value in batch.items() if not key.endswith("final_obs")}
            infos = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        if "final_obs" in batch:
            for i in np.flatnonzero(batch["_final_obs"]):
                infos[i]["terminal_observation"] = batch["final_obs"][i]
                infos[i]["TimeLimit.truncated"] = bool(truncated[i])
        return obs, rewards.astype(np.float32), terminated | truncated, infos

    def close(self) -> None:
        self.vector.close()

    def get_attr(self, attr_name: str, indices: int | Iterable[int] | None = None) -> list[Any]:
        if attr_name == "action_masks":
            return [self.vector.action_masks for _ in self._get_indices(indices)]
        return [getattr(self.vector, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: int | Iterable[int] | None = None) -> None:
        setattr(self.vector, attr_name, value)

    def env_method(
        self, method_name: str, *args: Any, indices: int | Iterable[int] | None = None, **kwargs: Any
    ) -> list[Any]:
        if method_name == "action_masks":
            masks = self.vector.action_masks()
            return [masks[i] for i in self._get_indices(indices)]
        result = getattr(self.vector, method_name)(*args, **kwargs)
        return [result for _ in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type, indices: int | Iterable[int] | None = None) -> list[bool]:
        return [False for _ in self._get_indices(indices)]
