"""What every environment of ApexSpec-v0 is made of: the compiled requests, the reward rule, masks and the order of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from apexsim import features, replay, traces
from apexsim.errors import ApexSimError, UsageError, choices
from apexsim.fitting import profile_for, residuals
from apexsim.hindsight import best_rates
from apexsim.kernels import blocks as kernels
from apexsim.objective import PROFILES
from apexsim.program import Program, compile_program, select
from apexsim.traces import Bundle

CONTROLS = ("depth", "apex", "switch")
REWARDS = {"time": kernels.REWARD_TIME, "utility": kernels.REWARD_UTILITY, "goodput": kernels.REWARD_GOODPUT}


@dataclass(frozen=True)
class Config:
    """The arguments of ``gym.make("ApexSpec-v0", ...)``; see ``envs.single.SpecEnv``."""

    bundle: str | Path | Bundle = "smollm2-cpu"
    control: str = "apex"
    methods: Sequence[str] | None = None
    depths: Sequence[int] | None = (0, 1, 2, 4, 8, 16)
    waste_weight: float = 0.0
    reward: str = "time"
    cost_profile: str | None = None
    split: str = "train"
    workload: str | None = None
    cost_noise: bool = False
    replacement: bool = False


class World:
    """The compiled side of an environment, shared by all its slots.

    Attributes:
        program: The requests that can be episodes.
        episodes: What the stepping kernel needs beside the program's tables.
        residuals: (q,) factors measured on block seconds; one 1.0 without cost noise.
    """

    def __init__(self, config: Config) -> None:
        if config.control not in CONTROLS:
            raise UsageError(f"control {config.control!r} is unknown; allowed: {choices(CONTROLS)}")
        if config.reward not in REWARDS:
            raise UsageError(f"reward {config.reward!r} is unknown; allowed: {choices(REWARDS)}")
        weight = config.waste_weight
        if not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
            raise UsageError(f"waste_weight {weight!r}: must be a finite number of at least 0")
        for name in ("methods", "depths"):
            given = getattr(config, name)
            if given is not None and (isinstance(given, str) or not isinstance(given, Sequence) or not given):
                raise UsageError(f"{name} {given!r}: must be a list that is not empty, or None for all")
        bundle = config.bundle if isinstance(config.bundle, Bundle) else traces.load(config.bundle)
        methods = tuple(config.methods) if config.methods is not None else bundle.methods
        if config.control == "depth" and len(methods) != 1:
            raise UsageError(f"control 'depth' takes exactly one method, got {choices(methods)}; give methods=[...]")
        profile = profile_for(bundle, config.cost_profile)
        rows = select(bundle, config.split, config.workload)
        depths = None if config.depths is None else [k for k in config.depths if k <= bundle.kmax]
        if depths is not None and not depths:
            raise UsageError(
                f"depths {config.depths}: all deeper than {bundle.name} was recorded; allowed: 0..{bundle.kmax}"
            )
        self.config = config
        self.program: Program = compile_program(bundle, profile, rows, methods, depths)
        if not self.program.requests.height:
            where = f"split {config.split!r}, workload {config.workload or 'all'}"
            raise UsageError(f"{bundle.name}: no request of two output tokens or more in {where}")
        self.residuals = residuals(bundle, profile) if config.cost_noise else np.ones(1)
        self.workloads = self.program.requests["workload"].to_numpy()
        self.request_ids: list[str] = self.program.requests["request_id"].to_list()
        self.per_request = config.control == "apex"
        rule = np.zeros(kernels.RULES)
        rule[kernels.STEP_S], rule[kernels.WASTE_WEIGHT] = self.program.step_s, config.waste_weight
        rule[kernels.REWARD], rule[kernels.PER_REQUEST] = REWARDS[config.reward], self.per_request
        rule[kernels.SYNC_S] = self.program.sync_s(methods)
        rule[kernels.WEIGHT_ACCEPTED : kernels.WEIGHT_METHOD + 1] = PROFILES["b"]  # the paper's default
        best_rate = best_rates(self.program) if config.reward == "utility" else None
        self.episodes = replay.make_episodes(self.program, rule, best_rate)
        low, high = (np.array([getattr(f, side) for f in features.CONTEXT + features.HISTORY], dtype=np.float32)
                     for side in ("low", "high"))  # fmt: skip
        self.observation_space = spaces.Box(low, high, dtype=np.float32)
        self.action_space = spaces.Discrete(len(self.program.space.pairs))

    def masks(self, slots: kernels.Slots) -> np.ndarray:
        """(n, actions) bool: with control ``apex`` only the chosen method's actions count after the first block."""
        actions = len(self.program.space.pairs)
        allowed = np.ones((slots.request.size, actions), dtype=bool)
        if self.per_request:
            chosen = slots.state[:, kernels.LAST_METHOD] - 1
            started = slots.state[:, kernels.N_BLOCKS] > 0
            allowed[started] = self.program.tables.action_method[None, :] == chosen[started, None]
        return allowed

    def choose(self, options: Mapping[str, Any]) -> np.ndarray:
        """The requests that episodes are drawn from, by the options of ``reset``: ``request`` (an id or ids), ``workload``."""
        unknown = set(options) - {"request", "workload"}
        if unknown:
            raise UsageError(f"reset option {sorted(unknown)[0]!r} is unknown; allowed: request, workload")
        keep = np.ones(len(self.request_ids), dtype=bool)
        if "request" in options:
            wanted = options["request"]
            if not isinstance(wanted, str | list | tuple | set):
                raise UsageError(f"reset option request {wanted!r}: must be a request id or a list of them")
            ids = [wanted] if isinstance(wanted, str) else list(wanted)
            missing = [i for i in ids if i not in self.request_ids]
            if missing or not ids:
                raise UsageError(
                    f"reset option request {missing or wanted}: not among the {keep.size} requests selected"
                )
            keep &= np.isin(self.request_ids, ids)
        if "workload" in options:
            keep &= self.workloads == options["workload"]
            if not keep.any():
                known = sorted(set(self.workloads.tolist()))
                raise UsageError(f"reset option workload {options['workload']!r}: allowed: {choices(known)}")
        return np.flatnonzero(keep)


_WORLDS: dict[tuple[Any, ...], World] = {}


def shared_world(config: Config) -> World:
    """The world of a configuration, compiled once per process: it never changes, and many environments can share it.

    A forked worker inherits it. That matters beyond speed: Polars' threads do not survive a fork, and a worker that had
    to read a trace after its parent did would wait for them for ever. A trace given as an object is compiled each time.
    """
    if isinstance(config.bundle, Bundle):
        return World(config)
    try:
        stamps = [file.stat().st_mtime_ns for file in _files(config)]
    except (ApexSimError, OSError):
        return World(config)  # which says what is wrong
    key = (str(config.bundle), *stamps, *(str(getattr(config, f.name)) for f in fields(config)))
    if key not in _WORLDS:
        _WORLDS[key] = World(config)
    return _WORLDS[key]


def _files(config: Config) -> list[Path]:
    """The files a configuration is read from: another content makes another world."""
    assert not isinstance(config.bundle, Bundle)
    profile = Path(config.cost_profile) if config.cost_profile else None
    return [traces.locate(config.bundle) / "meta.json", *([profile] if profile and profile.is_file() else [])]


class Stream:
    """The order of episodes: every request once before any comes again, or with replacement; seeded.

    Args:
        requests: (q,) the requests to draw from.
        rng: What the order's own generator is spawned from: other draws, of noise say, then leave the order alone.
        replacement: Draw independently.
    """

    def __init__(self, requests: np.ndarray, rng: np.random.Generator, replacement: bool) -> None:
        self.requests, self.rng, self.replacement = requests, rng.spawn(1)[0], replacement
        self.left = np.empty(0, dtype=np.int64)

    def take(self, count: int) -> np.ndarray:
        """(count,) int64 the next requests."""
        if self.replacement:
            return self.rng.choice(self.requests, count).astype(np.int64)
        while self.left.size < count:
            self.left = np.concatenate((self.left, self.rng.permutation(self.requests)))
        taken, self.left = self.left[:count], self.left[count:]
        return taken
