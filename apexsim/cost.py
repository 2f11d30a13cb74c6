"""Cost profiles: what a block costs in seconds, apart from any trace.

Block seconds = draft(method, k, context) + verify(drafted + 1, context) + overhead(method) + sync of every configured
method the block does not use. A profile is a JSON file (``apexsim/profiles`` holds two), a published set of coefficients
shipped with ApexSim, a table of step times by batch and k, or fitted to the measured blocks of a bundle (``apexsim.fitting``).
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from apexsim.errors import ProfileError, choices

SCHEMA = "apexsim.cost/1"
SHIPPED = Path(__file__).parent / "profiles"
FAR_CONTEXT = 2**20
"""Tokens: beyond any context priced; linear surfaces are exact between 0 and here."""
A_DAY = 86_400.0
"""Seconds: nothing priced takes longer."""
SUSPECT_RATIO = 3.0
"""A table cell this many times both its neighbours, at the next smaller batch and at the next smaller k, is taken for a typo."""


@dataclass(frozen=True)
class Linear:
    """seconds = constant_s + per_token_s * tokens + per_context_token_s * context, whatever the batch."""

    constant_s: float = 0.0
    per_token_s: float = 0.0
    per_context_token_s: float = 0.0

    def knots(self) -> tuple[float, ...]:
        return (0.0, float(FAR_CONTEXT))

    def seconds(self, tokens: float, context: float, batch: float = 1.0) -> float:
        return self.constant_s + self.per_token_s * tokens + self.per_context_token_s * context


@dataclass(frozen=True)
class Table:
    """Measured seconds by batch, tokens and context: linear between the knots, constant outside, but never deeper.

    Attributes:
        batch: Ascending batch sizes.
        tokens: Ascending token counts (verify: tokens in the pass; draft: drafter steps).
        context: Ascending context lengths.
        seconds_by: [batch][tokens][context] seconds.
    """

    batch: tuple[float, ...]
    tokens: tuple[float, ...]
    context: tuple[float, ...]
    seconds_by: tuple[tuple[tuple[float, ...], ...], ...]

    def knots(self) -> tuple[float, ...]:
        return (0.0, *self.context, float(FAR_CONTEXT))

    def seconds(self, tokens: float, context: float, batch: float = 1.0) -> float:
        if tokens > self.tokens[-1]:
            raise ProfileError(f"prices at most {self.tokens[-1]:g} tokens, asked for {tokens:g}; lower --depths")
        b, t, c = _place(self.batch, batch), _place(self.tokens, tokens), _place(self.context, context)
        return sum(bw * tw * cw * self.seconds_by[bi][ti][ci] for bi, bw in b for ti, tw in t for ci, cw in c)


Surface = Linear | Table


@dataclass(frozen=True)
class MethodCost:
    """What drafting with one method costs.

    Attributes:
        draft: Seconds by drafter steps and context.
        verify_share: Further drafting seconds, as a share of the block's verify seconds.
        overhead_s: Seconds of the rest of a block that drafts; None takes the profile's.
        sync_s: Seconds at every block that does not use the method though the engine has it configured.
    """

    draft: Surface = field(default_factory=Linear)
    verify_share: float = 0.0
    overhead_s: float | None = None
    sync_s: float = 0.0


@dataclass(frozen=True)
class CostProfile:
    """A cost profile; see the module's docstring.

    Attributes:
        name: How results call it.
        kind: ``published``, ``measured``, ``table`` or ``analytic``.
        source: Where the figures come from.
        verify: Seconds of one pass of the target, by tokens in it and context.
        overhead_s: Seconds of the rest of a plain decoding step.
        methods: By method name, by method kind for all methods of that kind, or ``*`` for all others.
        tail_draft: The engine drafts once more after a request's last token, and the request pays it.
        sync_mode: ``each``: sync is paid at every block that does not use the method.
        notes: What a reader of a result should know.
    """

    name: str
    kind: str
    source: str
    verify: Surface
    methods: Mapping[str, MethodCost]
    overhead_s: float = 0.0
    tail_draft: bool = False
    sync_mode: str = "each"
    notes: tuple[str, ...] = ()

    def method(self, name: str, kind: str) -> MethodCost:
        """The cost of a trace's method, by its name or else its kind.

        Raises:
            ProfileError: The profile does not price it.
        """
        for key in (name, kind, "*"):
            if key in self.methods:
                return self.methods[key]
        priced = choices(sorted(self.methods))
        raise ProfileError(
            f"cost profile {self.name}: no price for method {name!r} of kind {kind!r}; it prices: {priced}"
        )


def profiles() -> list[str]:
    """Names of the profiles shipped with ApexSim."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def load_profile(name: str | Path) -> CostProfile:
    """Reads a shipped profile by name, or a profile or vLLM step-time table from a JSON file.

    Raises:
        ProfileError: Unknown name, damaged file, or a value out of range; the message names the key.
    """
    file = SHIPPED / f"{name}.json" if str(name) in profiles() else Path(name)
    if not file.is_file():
        raise ProfileError(f"{name}: no such cost profile; give a JSON file or one of: {choices(profiles())}")
    try:
        data = json.loads(file.read_text())
    except ValueError as error:
        raise ProfileError(f"{file}: not JSON: {error}") from error
    if isinstance(data, dict) and "batch_stats" in data:
        try:
            return from_step_table(data, file.stem)
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            raise ProfileError(f"{file}: batch_stats must map batch sizes to k to milliseconds: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ProfileError(f"{file}: key 'schema' must be {SCHEMA!r}, or the file a vLLM table with 'batch_stats'")
    try:
        methods = {
            key: MethodCost(
                **{**value, "draft": _surface(value.get("draft", {"form": "linear"}), f"methods.{key}.draft")}
            )
            for key, value in data["methods"].items()
        }
        keys = {key: value for key, value in data.items() if key not in ("schema", "verify", "methods", "notes")}
        profile = CostProfile(verify=_surface(data["verify"], "verify"), methods=methods, notes=_notes(data), **keys)
    except KeyError as error:
        raise ProfileError(f"{file}: missing key {error}") from error
    except (TypeError, AttributeError, ValueError, IndexError, OverflowError) as error:
        raise ProfileError(f"{file}: {error}") from error
    except ProfileError as error:
        raise ProfileError(f"{file}: {error}") from error
    _check(profile, file)
    return profile


def dump_profile(profile: CostProfile) -> str:
    """The JSON text of a profile, as ``load_profile`` reads it."""

    def surface(value: Surface) -> dict[str, Any]:
        if isinstance(value, Linear):
            return {"form": "linear", **asdict(value)}
        return {"form": "table", **{("seconds" if k == "seconds_by" else k): v for k, v in asdict(value).items()}}

    data = asdict(profile) | {"schema": SCHEMA, "verify": surface(profile.verify)}
    data["methods"] = {
        key: asdict(method) | {"draft": surface(method.draft)} for key, method in profile.methods.items()
    }
    return json.dumps(data, indent=1) + "\n"


def from_step_table(data: Mapping[str, Any], name: str) -> CostProfile:
    """A profile from whole-step milliseconds by batch and k (vLLM dynamic speculative decoding's ``batch_stats``).

    Drafting is part of the step, so every method has the same price and none of its own. A cell more than
    ``SUSPECT_RATIO`` times both its neighbours is flagged in ``notes`` and replaced by the ratio of its neighbours.
    """
    stats = data["batch_stats"]
    batches = sorted(stats, key=float)
    depths = sorted({depth for row in stats.values() for depth in row}, key=float)
    try:
        cells = np.array([[float(stats[b][k]) for k in depths] for b in batches])
    except KeyError as error:
        raise ProfileError(f"{name}: batch_stats has no k {error} at every batch size") from error
    if not cells.size or not np.isfinite(cells).all() or cells.min() <= 0:
        raise ProfileError(f"{name}: batch_stats must hold positive milliseconds")
    notes = ["step times include drafting; every method pays the same"]
    for b in range(1, len(batches)):
        for k in range(1, len(depths)):
            left, above = cells[b, k - 1], cells[b - 1, k]
            if cells[b, k] > SUSPECT_RATIO * max(left, above):
                instead = above * left / cells[b - 1, k - 1]
                notes.append(
                    f"batch {batches[b]}, k {depths[k]}: {cells[b, k]:g} ms is a likely typo; {instead:.2f} ms is used"
                )
                cells[b, k] = instead
    verify = Table(
        batch=tuple(float(b) for b in batches),
        tokens=tuple(float(k) + 1 for k in depths),
        context=(0.0,),
        seconds_by=tuple(tuple((float(ms) / 1e3,) for ms in row) for row in cells),
    )
    profile = CostProfile(name, "table", "step times by batch and k", verify, {"*": MethodCost()}, notes=tuple(notes))
    _check(profile, Path(name))
    return profile


def _notes(data: Mapping[str, Any]) -> tuple[str, ...]:
    notes = data.get("notes", [])
    if not isinstance(notes, list):
        raise ProfileError("notes must be a list of texts")
    return tuple(notes)


def _place(knots: tuple[float, ...], at: float) -> tuple[tuple[int, float], ...]:
    """The knots around a value with their weights, for linear interpolation; the nearest alone outside."""
    high = bisect_left(knots, at)
    if high == 0 or high == len(knots) or knots[high] == at:
        return ((min(high, len(knots) - 1), 1.0),)
    weight = (at - knots[high - 1]) / (knots[high] - knots[high - 1])
    return ((high - 1, 1.0 - weight), (high, weight))


def _surface(data: Mapping[str, Any], key: str) -> Surface:
    form = data.get("form")
    rest = {name: value for name, value in data.items() if name != "form"}
    if form == "linear":
        return Linear(**rest)
    if form != "table":
        raise ProfileError(f"{key}.form is {form!r}; allowed: linear, table")
    axes = {name: tuple(float(v) for v in rest[name]) for name in ("batch", "tokens", "context")}
    for name, knots in axes.items():
        if not knots or list(knots) != sorted(set(knots)) or not all(map(math.isfinite, knots)):
            raise ProfileError(f"{key}.{name} must be ascending and not empty")
    values = np.asarray(rest["seconds"], dtype=float)
    if values.shape != tuple(len(knots) for knots in axes.values()):
        raise ProfileError(f"{key}.seconds has shape {values.shape}; its knots need {tuple(map(len, axes.values()))}")
    return Table(**axes, seconds_by=tuple(tuple(tuple(c) for c in b) for b in values.tolist()))


def _check(profile: CostProfile, file: Path) -> None:
    for name, kind in (("name", str), ("kind", str), ("source", str), ("tail_draft", bool)):
        if type(getattr(profile, name)) is not kind:
            raise ProfileError(f"{file}: {name} is {getattr(profile, name)!r}; must be a {kind.__name__}")
    if not all(isinstance(note, str) for note in profile.notes):
        raise ProfileError(f"{file}: notes must be a list of texts")
    if profile.sync_mode != "each":
        raise ProfileError(f"{file}: sync_mode is {profile.sync_mode!r}; allowed: each")
    _check_surface(profile.verify, f"{file}: verify", positive=True)
    _check_seconds(profile.overhead_s, f"{file}: overhead_s")
    for key, method in profile.methods.items():
        _check_surface(method.draft, f"{file}: methods.{key}.draft")
        for field_name in ("verify_share", "overhead_s", "sync_s"):
            value = getattr(method, field_name)
            if value is not None:
                _check_seconds(value, f"{file}: methods.{key}.{field_name}")


def _check_surface(surface: Surface, where: str, positive: bool = False) -> None:
    if isinstance(surface, Linear):
        for name, value in asdict(surface).items():
            _check_seconds(value, f"{where}.{name}")
        if positive and surface.constant_s + surface.per_token_s <= 0:
            raise ProfileError(f"{where}: a pass of one token must take positive seconds")
        return
    for batch, row in zip(surface.batch, surface.seconds_by, strict=True):
        for tokens, cells in zip(surface.tokens, row, strict=True):
            for value in cells:
                _check_seconds(value, f"{where}, batch {batch:g}, tokens {tokens:g}", positive)


def _check_seconds(value: Any, where: str, positive: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < A_DAY or (positive and value == 0):
        raise ProfileError(f"{where} is {value!r}; must be finite {'positive' if positive else 'non-negative'} seconds")
