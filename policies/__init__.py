"""The policies and their registry. A policy is one decorated builder in a file of this folder; nothing else lists it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from apexsim.errors import PolicyError, choices
from apexsim.hindsight import Hindsight
from apexsim.protocol import ActionSpace, Policy
from apexsim.replay import Planner


@dataclass(frozen=True)
class Context:
    """What a policy is built from.

    Attributes:
        space: The actions selected.
        seed: Of the policy's own randomness.
        train: Optima of the train split; None where the bundle has none.
        test: Optima of the scored requests: for sim-only policies.
        checkpoint: Directory of trained weights: what followed ``@`` in the policy's name.
    """

    space: ActionSpace
    seed: int = 0
    train: Hindsight | None = None
    test: Hindsight | None = None
    checkpoint: Path | None = None

    def one_method(self, name: str, args: tuple[str, ...]) -> str:
        """The method of ``family:method``; if only one is selected it may be left out."""
        if len(args) > 1:
            raise PolicyError(f"policy {name!r} takes one method, got {':'.join(args)!r}")
        if not args and len(self.space.methods) != 1:
            raise PolicyError(f"policy {name!r} needs a method: {name}:METHOD; allowed: {choices(self.space.methods)}")
        method = args[0] if args else self.space.methods[0]
        if method not in self.space.methods:
            raise PolicyError(f"policy {name}:{method}: no such method here; allowed: {choices(self.space.methods)}")
        return method


Builder = Callable[[Context, tuple[str, ...]], Policy | Planner]


def _per_method(name: str, space: ActionSpace) -> list[str]:
    return [f"{name}:{method}" for method in space.methods]


@dataclass(frozen=True)
class Spec:
    """A registered policy.

    Attributes:
        name: First part of its policy names.
        family: Group in tables and figures.
        signals: What a trace must hold for it, beyond the accepted lengths.
        source: Paper or project the rule comes from.
        live: It can drive a live engine; False for policies that read the trace.
        build: Makes the policy from a context and the rest of its name.
        variants: The names ``--policies all`` expands to.
        trained: It needs a checkpoint, ``name@DIR``.
    """

    name: str
    family: str
    signals: tuple[str, ...]
    source: str
    live: bool
    build: Builder
    variants: Callable[[str, ActionSpace], list[str]]
    trained: bool = False

    def summary(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "family": self.family,
            "live": self.live,
            "signals": list(self.signals),
            "source": self.source,
        }


_SPECS: dict[str, Spec] = {}


def register(
    name: str,
    *,
    family: str,
    source: str,
    signals: tuple[str, ...] = (),
    live: bool = True,
    variants: Callable[[str, ActionSpace], list[str]] = _per_method,
    trained: bool = False,
) -> Callable[[Builder], Builder]:
    """Registers the builder of a policy under the first part of its name."""

    def add(build: Builder) -> Builder:
        if name in _SPECS:
            raise ValueError(f"policy {name!r} is registered twice")
        _SPECS[name] = Spec(name, family, signals, source, live, build, variants, trained)
        return build

    return add


def registry() -> dict[str, Spec]:
    """All policies by name; imports every file of this folder once."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(_SPECS.items(), key=lambda item: (item[1].family, item[0])))


def find(name: str) -> tuple[Spec, tuple[str, ...]]:
    """The spec of a policy name, ``family[:method[:depth]][@checkpoint]``, and what lies between family and ``@``.

    Raises:
        PolicyError: No such policy, or one that takes no checkpoint is given one.
    """
    plain, at, _ = name.partition("@")
    family, *args = plain.split(":")
    specs = registry()
    if family not in specs:
        raise PolicyError(f"policy {name!r} is unknown; allowed: {choices(specs)}")
    if at and not specs[family].trained:
        raise PolicyError(f"policy {name!r}: {family} is not trained and takes no checkpoint")
    return specs[family], tuple(args)


def expand(names: Iterable[str], space: ActionSpace) -> list[str]:
    """Policy names with ``all`` (every policy) and ``all-fixed`` (plain decoding and the fixed sweep) written out."""
    specs = registry()
    out: list[str] = []
    for name in names:
        if name in ("all", "all-fixed"):
            wanted = [s for s in specs.values() if name == "all" or s.family == "fixed"]
            out += [variant for spec in wanted for variant in spec.variants(spec.name, space)]
        else:
            find(name)
            out.append(name)
    return list(dict.fromkeys(out))


def build(name: str, context: Context) -> Policy | Planner:
    """Makes the policy called ``name``.

    Raises:
        PolicyError: Unknown, or it does not fit the methods and depths selected.
    """
    spec, args = find(name)
    checkpoint = name.partition("@")[2]
    return spec.build(replace(context, checkpoint=Path(checkpoint)) if checkpoint else context, args)
