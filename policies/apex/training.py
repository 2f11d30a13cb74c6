"""Training of the router and the depth controller: deterministic by seed, early stopping on the validation requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from apexsim.errors import PolicyError, UsageError, choices
from apexsim.kernels.network import Network
from apexsim.objective import PROFILES
from apexsim.program import Program
from policies.apex import inputs, samples
from policies.apex.inputs import Inputs
from policies.apex.losses import LossWeights, Observed, Predicted, total_loss
from policies.apex.network import Scorer, weights
from policies.apex.policy import Apex, decision_path
from policies.apex.samples import Groups, Labels

ABLATIONS = ("survival", "cost-rate", "entropy", "repetition", "history", "embedding")
"""What can be left out: the first two are loss terms, the others feature groups."""
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Settings:
    """How to train.

    Attributes:
        profile: ``s``, ``b`` or ``e`` (Eq. 25).
        source: ``counterfactual`` or ``on-policy``: see ``policies.apex.samples``.
        seed: Of sampling, initial weights and batches.
        without: Ablations, of ``ABLATIONS``.
        rounds: Rounds on the learner's own trajectories; with source ``on-policy`` there are none.
        groups: Most groups a method adds per round.
        epochs: Most passes over the examples per round.
        patience: Epochs without a better validation loss before a round ends.
        one_survival: Hazards that cannot depend on the candidate depth.
        first: Admissible first (method, depth) pairs of the router; None takes all.
    """

    profile: str = "b"
    source: str = "counterfactual"
    seed: int = 0
    without: tuple[str, ...] = ()
    rounds: int = 2
    groups: int = 8000
    epochs: int = 20
    patience: int = 3
    one_survival: bool = False
    first: tuple[tuple[str, int], ...] | None = None

    def check(self) -> None:
        """Refuses what is not allowed, by option."""
        for option, value, allowed in (
            ("--profile", self.profile, tuple(PROFILES)),
            ("--source", self.source, samples.SOURCES),
            *(("--without", name, ABLATIONS) for name in self.without),
        ):
            if value not in allowed:
                raise UsageError(f"{option} {value!r} is unknown; allowed: {choices(allowed)}")

    @property
    def losses(self) -> LossWeights:
        survival = 0.0 if "survival" in self.without else 1.0
        kept = 0.0 if "cost-rate" in self.without else 1.0
        return LossWeights(survival=survival, cost=0.2 * kept, rate=0.3 * kept)

    @property
    def hidden_groups(self) -> tuple[str, ...]:
        return tuple(name for name in self.without if name in inputs.GROUPS)


BATCH = 256
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 1e-3
HELD_SHARE = 0.5
"""Validation needs fewer examples."""
ROUTER_EPOCHS = 10
"""The router has one example a request: an epoch is a handful of steps."""
ROUTER_LOSSES = LossWeights(survival=0.0, cost=0.0, rate=0.0)
"""The router predicts request utilities only."""


@dataclass(frozen=True)
class Trained:
    """A trained network.

    Attributes:
        scorer: With all heads.
        inputs: What it sees.
        admissible: (M, A) bool candidates it may choose.
        dropped: Features left out: unknown or constant in the training requests.
        losses: Validation loss after each epoch, all rounds.
        examples: Groups trained on.
    """

    scorer: Scorer
    inputs: Inputs
    admissible: np.ndarray
    dropped: tuple[str, ...]
    losses: list[float] = field(default_factory=list)
    examples: int = 0

    @property
    def network(self) -> Network:
        """Its decision path."""
        return decision_path(weights(self.scorer), self.inputs, self.admissible)


@dataclass(frozen=True)
class Data:
    """Groups as tensors."""

    states: Tensor
    method: Tensor
    depth: Tensor
    observed: Observed

    @property
    def size(self) -> int:
        return int(self.states.shape[0])


def train_depth(
    train: Sequence[Program], validation: Sequence[Program], settings: Settings, progress: Progress = lambda *_: None
) -> Trained:
    """Trains the depth controller (Eqs. 14-33).

    Args:
        train: Programs of the training requests: one per bundle, with the same methods and, as depths, the candidates.
        validation: The same of the validation requests, for early stopping.
        settings: How.
        progress: Called with what is done, the epoch, and the most there can be.

    Raises:
        PolicyError: The programs differ, or no request has a second block.
    """
    settings.check()
    space = _common(train, validation).space
    rng = np.random.default_rng(settings.seed)
    labels = [[Labels(p, settings.profile) for p in part] for part in (train, validation)]
    pools: list[list[Groups]] = [[], []]
    _grow(pools, labels, settings, rng)
    fitted = samples.join(pools[0])
    if not fitted.method.size:
        raise PolicyError("no request of the train split has a second block: there is no depth to learn")
    raw = fitted.states[fitted.known] if fitted.states.shape[1] > 1 else fitted.states[:, 0]
    chosen, dropped = inputs.fit(raw, inputs.BLOCK, settings.hidden_groups)
    losses: list[float] = []
    examples = 0
    with _one_thread():
        torch.manual_seed(settings.seed)
        size = (len(chosen.names), len(space.methods), len(space.depths), space.depths[-1])
        scorer = Scorer(*size, settings.one_survival)
        _start_heads(scorer, fitted)
        rounds = 1 + (settings.rounds if settings.source == "counterfactual" else 0)
        for number in range(rounds):
            if number:
                _grow(pools, labels, settings, rng, scorer, chosen)
            data = [_data(pool, chosen, len(space.depths)) for pool in pools]
            assert data[0] is not None
            examples = data[0].size
            title = f"depth, round {number + 1} of {rounds}"
            losses += _fit(scorer, data[0], data[1], settings.losses, settings, partial(progress, title))
    allowed = np.ones((len(space.methods), len(space.depths)), dtype=bool)
    return Trained(scorer, chosen, allowed, dropped, losses, examples)


def train_router(
    train: Sequence[Program], validation: Sequence[Program], settings: Settings, progress: Progress = lambda *_: None
) -> Trained:
    """Trains the router (Eqs. 6, 7): one example per training request, method and first depth; arguments as ``train_depth``."""
    settings.check()
    program = _common(train, validation)
    space = program.space
    examples = [[Labels(p, settings.profile).requests() for p in part] for part in (train, validation)]
    states, utility = (np.concatenate(column) for column in zip(*examples[0], strict=True))
    admissible = _admissible(space.methods, space.depths, settings.first)
    with _one_thread():
        torch.manual_seed(settings.seed)
        chosen, dropped = inputs.fit(states, inputs.REQUEST, settings.hidden_groups)
        scorer = Scorer(len(chosen.names), len(space.methods), len(space.depths), space.depths[-1])
        with torch.no_grad():
            scorer.utility.bias.fill_(float(utility[:, admissible].mean()))
        fitted = _router_data(chosen(states), utility, admissible)
        held = None
        if examples[1]:
            states, utility = (np.concatenate(column) for column in zip(*examples[1], strict=True))
            held = _router_data(chosen(states), utility, admissible)
        many = replace(settings, epochs=ROUTER_EPOCHS * settings.epochs)
        losses = _fit(scorer, fitted, held, ROUTER_LOSSES, many, partial(progress, "router"))
    return Trained(scorer, chosen, admissible, dropped, losses, fitted.size)


def tensors(groups: Groups, chosen: Inputs, depths: int) -> Data:
    """Groups as the network takes them."""
    observed = Observed(
        torch.from_numpy(groups.known),
        torch.from_numpy(groups.accepted),
        torch.from_numpy(groups.rejected),
        torch.from_numpy(groups.drafted),
        *(
            torch.from_numpy(np.asarray(values, dtype=np.float32))
            for values in (
                np.log(np.where(groups.known, groups.seconds, 1.0)),
                np.log1p(groups.rate),
                groups.utility,
            )
        ),
    )
    method = torch.from_numpy(groups.method)[:, None].expand(-1, depths)
    return Data(torch.from_numpy(chosen(groups.states)), method, torch.arange(depths), observed)


def _data(pool: Sequence[Groups], chosen: Inputs, depths: int) -> Data | None:
    """All groups of a pool; None if there are none."""
    groups = samples.join(pool) if pool else None
    return tensors(groups, chosen, depths) if groups is not None and groups.method.size else None


@torch.no_grad()
def predict(scorer: Scorer, data: Data) -> Predicted:
    """What the heads say of all groups, in batches."""
    parts = [
        scorer(data.states[i : i + 4096], data.method[i : i + 4096], data.depth) for i in range(0, data.size, 4096)
    ]
    return Predicted(*(torch.cat([getattr(p, name) for p in parts]) for name in ("hazard", "cost", "rate", "utility")))


def _router_data(states: np.ndarray, utility: np.ndarray, admissible: np.ndarray) -> Data:
    count, methods, depths = utility.shape
    known = torch.from_numpy(np.broadcast_to(admissible.ravel(), (count, methods * depths)).copy())
    none = torch.zeros(known.shape)
    whole = none.to(torch.int64)
    label = torch.from_numpy(utility.reshape(count, -1).astype(np.float32))
    observed = Observed(known, whole, known & False, whole, none, none, label)
    method = torch.arange(methods).repeat_interleave(depths)[None, :].expand(count, -1)
    return Data(torch.from_numpy(states)[:, None, :], method, torch.arange(depths).repeat(methods), observed)


def _fit(
    scorer: Scorer,
    train: Data,
    held: Data | None,
    terms: LossWeights,
    settings: Settings,
    progress: Callable[[int, int], None],
) -> list[float]:
    """Adam until the validation loss has not improved for ``patience`` epochs; the best weights are kept."""
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    watched = train if held is None else held
    best, kept, since, losses = float("inf"), scorer.state_dict(), 0, []
    for epoch in range(settings.epochs):
        order = torch.randperm(train.size)
        for at in range(0, train.size, BATCH):
            rows = order[at : at + BATCH]
            predicted = scorer(train.states[rows], train.method[rows], train.depth)
            loss = total_loss(predicted, train.observed.rows(rows), terms)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            losses.append(float(total_loss(predict(scorer, watched), watched.observed, terms)))
        progress(epoch + 1, settings.epochs)
        if losses[-1] < best:
            best, since = losses[-1], 0
            kept = {name: value.clone() for name, value in scorer.state_dict().items()}
        else:
            since += 1
            if since > settings.patience:
                break
    scorer.load_state_dict(kept)
    return losses


def _grow(
    pools: list[list[Groups]],
    labels: list[list[Labels]],
    settings: Settings,
    rng: np.random.Generator,
    scorer: Scorer | None = None,
    chosen: Inputs | None = None,
) -> None:
    """Adds a round of groups to the training and validation pools: of random-depth runs, or of the scorer's own."""
    for pool, sources, share in zip(pools, labels, (1.0, HELD_SHARE), strict=True):
        for source in sources:
            if settings.source == "on-policy":
                new = samples.on_policy(source)
            else:
                learner = _learner(source.program, scorer, chosen, labels[0]) if scorer and chosen else None
                new = samples.counterfactual(source, rng, learner)
            pool += [samples.sample(groups, int(settings.groups * share), rng) for groups in new]


def _learner(program: Program, scorer: Scorer, chosen: Inputs, labels: Sequence[Labels]) -> list[Apex]:
    """The controller as it stands, once per method; first depths are the best constants over the training requests."""
    space = program.space
    mean = np.concatenate([label.requests()[1] for label in labels]).mean(axis=0)
    first = np.zeros(mean.shape, dtype=bool)
    first[np.arange(mean.shape[0]), mean.argmax(axis=1)] = True
    controller = decision_path(weights(scorer), chosen, np.ones(mean.shape, dtype=bool))
    router = controller._replace(admissible=first)
    return [Apex(space, space.methods, space.depths, router, controller, method) for method in space.methods]


def _start_heads(scorer: Scorer, groups: Groups) -> None:
    """Starts the heads at the means, so that training need not find them."""
    known = groups.known
    with torch.no_grad():
        scorer.cost.bias.fill_(float(np.log(groups.seconds[known]).mean()))
        scorer.rate.bias.fill_(float(np.log1p(groups.rate[known]).mean()))
        scorer.utility.bias.fill_(float(groups.utility[known].mean()))


def _admissible(methods: Sequence[str], depths: Sequence[int], pairs: Sequence[tuple[str, int]] | None) -> np.ndarray:
    allowed = np.full((len(methods), len(depths)), pairs is None)
    for method, depth in pairs or ():
        if method not in methods or depth not in depths:
            every = choices(f"{m}:{k}" for m in methods for k in depths)
            raise UsageError(f"--first {method}:{depth}: no such candidate; allowed: {every}")
        allowed[methods.index(method), depths.index(depth)] = True
    return allowed


def _common(train: Sequence[Program], validation: Sequence[Program]) -> Program:
    """The first program, if all agree in methods and depths."""
    first = train[0]
    for program in (*train, *validation):
        if program.space != first.space:
            raise PolicyError(
                f"{program.bundle} has methods {choices(program.space.methods)} and depths up to {program.space.depths[-1]}; "
                f"{first.bundle} has {choices(first.space.methods)} and {first.space.depths[-1]}: give --methods and --depths"
            )
    if not first.space.methods:
        raise PolicyError("no method to choose from: give --methods")
    return first


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums in another order are other sums: on one thread the same seed gives the same weights."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
