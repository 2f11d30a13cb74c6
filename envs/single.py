"""ApexSpec-v0: an episode is one request, a step one draft-verify block, replayed exactly from a trace."""

from __future__ import annotations

from operator import index
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.error import InvalidAction, ResetNeeded

from apexsim import features, replay
from apexsim.kernels import blocks as kernels
from envs.world import Config, Stream, shared_world

OBSERVATIONS = 256
"""Observations are allocated so many at a time: one allocation a step would be a tenth of it."""


class SpecEnv(gym.Env):
    """Speculative decoding as an environment.

    Each step decides how deep to draft, and with which method, for one block of one request; the trace knows how many tokens are
    accepted, the cost profile how long the block takes.

    **Actions.** ``Discrete`` over (method, depth) pairs, row-major: index = method index * number of depths + depth index; depth 0
    is plain decoding and stands once per method. ``env.unwrapped.world.program.space.pairs`` lists them.

    | control | methods | meaning |
    |---|---|---|
    | depth | exactly one | the depth of every block |
    | apex | any number | the first action picks the request's method and first depth; later ones only the depth (their method part is ignored). Only the picked method is configured, so no other's sync is paid |
    | switch | any number | any method at every block; all are configured and pay their sync where they are not used |

    ``action_masks()`` tells which actions count next.

    **Observations.** ``Box`` of float32, always finite; where a feature is undefined it is 0 and its mask says so. The names are in
    ``env.unwrapped.feature_names``, and ``apexsim.features`` documents each with unit and range:

    | features | what |
    |---|---|
    | progress, has_limit, remaining | p / max_tokens and max_tokens - p, with a mask where the limit is unknown; never p / T, which is not known |
    | position, context, prompt | ln(1 + tokens) emitted, in the context, in the prompt |
    | prompt_repetition | share of prompt tokens that end a repeated 3-gram |
    | has_entropy, entropy, probability, entropy_recent | the target's entropy (nats) and the probability of the last token; mean entropy of the last 8 |
    | has_match, match, repetition | longest context suffix seen before (tokens / 32), share of repeating tokens of the last 32 |
    | has_history, blocks, method, last_* | blocks so far, method, depth, drafted and accepted of the last one (tokens / 16) |
    | accepted, accepted_spread, rejected, full, first_rejection, time_per_token | means over the request's blocks that drafted; time in plain steps a token |
    | recent_* | the same over the last 8 blocks |

    **Rewards.** ``reward=``

    | rule | per block | |
    |---|---|---|
    | time | (plain seconds of the emitted tokens - block seconds) / c_0 - waste_weight * wasted | the default: additive, the undiscounted return is the time saved over plain decoding, less the price of waste, whatever the number of blocks |
    | utility | APEX's u (arXiv:2610.07780, Eq. 25, profile APEX-B) | it ranks depths within a block; **summed, it pays for taking more blocks**, since it is positive for nearly all. Measured on the test split of smollm2-cpu, depths 0..16: never drafting sums to 13,989 in 74 s, depth 8 to 7,887 in 45 s (docs/environment.md) |
    | goodput | emitted * c_0 / block seconds | the same warning: 4,560 and 3,543 |

    **Endings.** A request that ends (end of sequence, or its recorded max_tokens) is terminated; one whose log was cut short is
    truncated. The reward of the last block counts its whole latency. The last observation repeats the context signals (entropy, match)
    of the position before: nothing is recorded where nothing is decided.

    **Episodes.** Every request of the split comes once, in an order drawn from the seed, before any comes again; with
    ``replacement=True`` each is drawn independently. ``reset(options={"request": id})`` picks a request (or a list of them),
    ``{"workload": name}`` a workload; options hold for all later resets, automatic ones included, until others are given.

    **Info.** request (id), position, method, depth, drafted, accepted, emitted, wasted, seconds.

    Version history: v0, first.

    Args:
        bundle: A trace: bundled name, directory, or a ``Bundle``.
        control: ``depth``, ``apex`` or ``switch``.
        methods: Method names; None takes all of the trace.
        depths: Depths to choose from, those deeper than the trace's K_max left out; None takes 0..K_max.
        waste_weight: lambda of the time reward, plain steps per wasted token.
        reward: ``time``, ``utility`` or ``goodput``.
        cost_profile: Shipped name or JSON file; None takes the trace's own.
        split: ``train``, ``validation``, ``test`` or ``all``.
        workload: Only this workload.
        cost_noise: Multiply block seconds by factors drawn from those measured on the trace's own blocks, of mean 1; plain decoding,
            which the reward compares with, stays without noise.
        replacement: Draw requests with replacement.
        render_mode: ``ansi`` (the ribbon in characters) or ``rgb_array`` (the report's drawing).

    Raises:
        ApexSimError: An argument does not fit; the message lists what is allowed.
    """

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}  # noqa: RUF012 (gymnasium's own form)

    def __init__(self, render_mode: str | None = None, **config: Any) -> None:
        self.world = shared_world(Config(**config))
        self.render_mode = render_mode
        self.observation_space = self.world.observation_space
        self.action_space = self.world.action_space
        self.feature_names = features.FEATURES
        self.requests = np.arange(len(self.world.request_ids))
        self.stream: Stream | None = None
        self.slots = replay.make_slots(np.zeros(1, dtype=np.int64))
        self.request = self.position = self.length = 0
        self._request_id = "none yet"
        self._blocks: list[tuple[int, int, int, int]] = []
        space = self.world.program.space
        self._methods, self._depths, self._actions = space.methods, len(space.depths), len(space.pairs)
        self._noisy, self._per_request = self.world.config.cost_noise, self.world.per_request
        self._width, self._count, self._state = len(features.FEATURES), len(space.methods), self.slots.state
        self._rows, self._next_row = np.empty((0, self._width), dtype=np.float32), OBSERVATIONS

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        chosen = self.requests if options is None else self.world.choose(options)
        if self.stream is None or seed is not None or not np.array_equal(chosen, self.requests):
            self.stream = Stream(chosen, self.np_random, self.world.config.replacement)
        self.requests = chosen
        self.request = r = int(self.stream.take(1)[0])
        tables, episodes = self.world.program.tables, self.world.episodes
        first, self.length, self.position = int(tables.start[r]) + r, int(tables.length[r]), 1
        self._context = episodes.context[first : first + self.length]
        self._request_id = self.world.request_ids[r]
        self._cut = bool(episodes.cut[r])
        self._unrolled = np.empty((self.length - 1, self._actions), dtype=kernels.UNROLLED)
        if not self._noisy:
            kernels.unroll(tables, episodes, r, 1, self.length - 1, 1.0, self._unrolled)
        self._blocks = []
        self.slots.request[0] = r
        self.slots.state[:] = 0.0
        obs = np.zeros(self._width, dtype=np.float32)  # without a past, every feature of it is 0
        obs[: self._context.shape[1]] = self._context[0]
        return obs, {"request": self._request_id, "position": 1}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        position = self.position
        if position >= self.length:
            raise ResetNeeded("the request has ended: call reset() before step()")
        try:
            action = index(action)
        except TypeError:
            action = -1
        if not 0 <= action < self._actions:
            raise InvalidAction(f"the action is no whole number in 0..{self._actions - 1}")
        if self._per_request and position > 1:  # the method of the first block stays
            method = int(self.slots.state[0, kernels.LAST_METHOD]) - 1
            action = method * self._depths + action % self._depths
        unrolled = self._unrolled
        if self._noisy:
            noise = float(self.np_random.choice(self.world.residuals))
            here = unrolled[position - 1 : position]
            kernels.unroll(
                self.world.program.tables, self.world.episodes, self.request, position, position, noise, here
            )
        seconds, gain, _, method, depth, drafted, accepted, emitted = unrolled.item(position - 1, action)
        if self._next_row == OBSERVATIONS:  # rows already handed out are never written again
            self._rows, self._next_row = np.empty((OBSERVATIONS, self._width), dtype=np.float32), 0
        rows, at = self._rows, self._next_row
        kernels.follow(unrolled, self._context, self._state, rows, at, position, action, self._count)
        self._next_row = at + 1
        self.position = after = position + emitted
        ended = after >= self.length
        if self.render_mode is not None:
            self._blocks.append((position, drafted, accepted, emitted))
        info = {
            "request": self._request_id,
            "position": position,
            "method": self._methods[method],
            "depth": depth,
            "drafted": drafted,
            "accepted": accepted,
            "emitted": emitted,
            "wasted": drafted - accepted,
            "seconds": seconds,
        }
        return rows[at].copy() if ended else rows[at], gain, ended and not self._cut, ended and self._cut, info

    def action_masks(self) -> np.ndarray:
        """(actions,) bool: what counts next; for MaskablePPO."""
        return np.asarray(self.world.masks(self.slots)[0])

    def render(self) -> Any:
        from apexsim import figures  # matplotlib, which most runs never need

        if self.render_mode == "ansi":
            return figures.ribbon_text(self._blocks)
        if self.render_mode == "rgb_array":
            title = f"{self.world.program.bundle}: {self._request_id}"
            return figures.pixels(figures.ribbon(self._blocks, self.position, title))
        return None
