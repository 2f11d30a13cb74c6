"""Checkpoints of the controller: weights as safetensors, the rest as JSON. Nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from apexsim import provenance
from apexsim.errors import PolicyError, choices
from apexsim.files import Kind, atomic_directory
from apexsim.kernels.network import Network
from apexsim.objective import PROFILES
from policies.apex.inputs import ALL, Inputs
from policies.apex.policy import decision_path

SCHEMA = "apexsim.checkpoint/1"
PARTS = ("router", "depth")
DIRECTORY = Kind("checkpoint.json", SCHEMA, frozenset({"checkpoint.json", *(f"{part}.safetensors" for part in PARTS)}))
SHARED = ("profile", "methods", "depths", "cost_profile", "bundles", "trained_on")
"""What the parts of one checkpoint must agree in."""


@dataclass(frozen=True)
class Part:
    """The router or the depth controller.

    Attributes:
        weights: All of the network, by name.
        inputs: What it sees.
        admissible: (M, A) bool candidates.
        facts: How it was trained: settings, dropped features, losses; JSON.
    """

    weights: dict[str, np.ndarray]
    inputs: Inputs
    admissible: np.ndarray
    facts: dict[str, Any]

    @property
    def network(self) -> Network:
        return decision_path(self.weights, self.inputs, self.admissible)


@dataclass(frozen=True)
class Checkpoint:
    """A trained controller, or one part of it.

    Attributes:
        profile: ``s``, ``b`` or ``e``.
        methods: Methods it chooses among.
        depths: Candidate depths.
        cost_profile: Name of the costs it was trained under.
        bundles: Name and digest of the traces it was trained on.
        trained_on: (id, prompt tokens, output tokens) of every request it was trained on.
        parts: By name, of ``PARTS``.
    """

    profile: str
    methods: tuple[str, ...]
    depths: tuple[int, ...]
    cost_profile: str
    bundles: tuple[tuple[str, str], ...]
    trained_on: tuple[tuple[str, int, int], ...]
    parts: Mapping[str, Part]


def write(checkpoint: Checkpoint, out: Path) -> None:
    """Writes a checkpoint atomically. A part that is not given is kept, if ``out`` holds one that agrees in the rest.

    Raises:
        PolicyError: ``out`` holds a part that was trained otherwise; the message names the field.
        UsageError: ``out`` is something else than an earlier checkpoint.
    """
    from safetensors.numpy import save_file

    DIRECTORY.check(out)
    if (out / "checkpoint.json").is_file() and set(checkpoint.parts) != set(PARTS):
        earlier = load(out)
        for name in SHARED:
            old, new = getattr(earlier, name), getattr(checkpoint, name)
            if old != new and set(earlier.parts) - set(checkpoint.parts):
                raise PolicyError(f"{out}: {name} of its other part differs; train both alike, or choose another --out")
        checkpoint = replace(checkpoint, parts={**earlier.parts, **checkpoint.parts})
    with atomic_directory(out, DIRECTORY) as scratch:
        described = {}
        for name, part in checkpoint.parts.items():
            save_file(part.weights, scratch / f"{name}.safetensors")
            described[name] = {
                "features": list(part.inputs.names),
                "mean": [float(v) for v in part.inputs.mean],
                "scale": [float(v) for v in part.inputs.scale],
                "admissible": part.admissible.astype(int).tolist(),
                "weights_sha256": provenance.sha256(scratch / f"{name}.safetensors"),
                **part.facts,
            }
        facts = {name: getattr(checkpoint, name) for name in SHARED}
        meta = {"schema": SCHEMA, "version": provenance.version(), **facts, "parts": described}
        (scratch / "checkpoint.json").write_text(json.dumps(meta, indent=1, sort_keys=True) + "\n")


def load(path: Path) -> Checkpoint:
    """Reads and checks a checkpoint.

    Raises:
        PolicyError: It is missing, damaged, or its fields do not fit together; the message names the file and the field.
    """
    file = path / "checkpoint.json"
    try:
        meta = json.loads(file.read_bytes())
    except OSError as error:
        raise PolicyError(f"{path}: no checkpoint there: checkpoint.json cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise PolicyError(f"{file}: damaged: not JSON: {error}") from error
    if not isinstance(meta, dict) or meta.get("schema") != SCHEMA:
        found = meta.get("schema") if isinstance(meta, dict) else type(meta).__name__
        raise PolicyError(f"{file}: schema is {found!r}; this version reads {SCHEMA!r}")
    missing = [name for name in (*SHARED, "parts") if name not in meta]
    if missing:
        raise PolicyError(f"{file}: missing key {missing[0]!r}")
    if meta["profile"] not in PROFILES:
        raise PolicyError(f"{file}: profile is {meta['profile']!r}; allowed: {choices(PROFILES)}")
    try:
        methods, depths = tuple(map(str, meta["methods"])), tuple(map(int, meta["depths"]))
        bundles = tuple((str(name), str(digest)) for name, digest in meta["bundles"])
        trained_on = tuple((str(i), int(prompt), int(output)) for i, prompt, output in meta["trained_on"])
        parts = {name: _part(path, name, facts, (len(methods), len(depths))) for name, facts in meta["parts"].items()}
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise PolicyError(f"{file}: damaged: {type(error).__name__}: {error}") from error
    return Checkpoint(meta["profile"], methods, depths, str(meta["cost_profile"]), bundles, trained_on, parts)


def _part(path: Path, name: str, facts: Mapping[str, Any], size: tuple[int, int]) -> Part:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    where = f"{path / 'checkpoint.json'}: parts.{name}"
    if name not in PARTS:
        raise PolicyError(f"{where}: no such part; allowed: {choices(PARTS)}")
    unknown = [feature for feature in facts["features"] if feature not in ALL]
    if unknown:
        raise PolicyError(f"{where}.features: {unknown[0]!r} is not a feature of this version")
    weights_file = path / f"{name}.safetensors"
    if not weights_file.is_file() or provenance.sha256(weights_file) != facts["weights_sha256"]:
        raise PolicyError(f"{weights_file}: missing or damaged: its SHA-256 is not weights_sha256 of checkpoint.json")
    try:
        weights = load_file(weights_file)
    except SafetensorError as error:
        raise PolicyError(f"{weights_file}: not readable: {error}") from error
    inputs = Inputs(tuple(facts["features"]), *(np.array(facts[key], dtype=np.float32) for key in ("mean", "scale")))
    admissible = np.array(facts["admissible"], dtype=bool)
    hidden = weights["second.bias"].size
    expected = {
        "mean": (inputs.mean, (len(inputs.names),)),
        "scale": (inputs.scale, (len(inputs.names),)),
        "first.weight": (weights["first.weight"], (hidden, len(inputs.names))),
        "first.bias": (weights["first.bias"], (hidden,)),
        "methods": (weights["methods"], (size[0], hidden)),
        "depths": (weights["depths"], (size[1], hidden)),
        "admissible": (admissible, size),
        "second.weight": (weights["second.weight"], (hidden, hidden)),
        "utility.weight": (weights["utility.weight"], (1, hidden)),
        "utility.bias": (weights["utility.bias"], (1,)),
    }
    for field, (array, shape) in expected.items():
        if array.shape != shape:
            raise PolicyError(f"{where}: {field} has shape {array.shape}; methods, depths and features need {shape}")
        if not np.isfinite(array).all():
            raise PolicyError(f"{where}: {field} holds numbers that are not finite")
    kept = {"features", "mean", "scale", "admissible", "weights_sha256"}
    return Part(weights, inputs, admissible, {key: value for key, value in facts.items() if key not in kept})
