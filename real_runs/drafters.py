"""The drafters of a recording: which method a name stands for, its model, and vLLM's settings for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import util
from typing import Any

from apexsim.errors import ApexSimError, UsageError, choices
from real_runs import models

COPYING = ("ngram", "suffix")
"""Kinds that copy from the text so far: no model, no signal of their own but the length of the match."""
NEURAL = {"draft_model": "--draft-model", "eagle3": "--eagle3-model"}
"""Kinds with a model, and the option that names it."""
KINDS = (*COPYING, *NEURAL)
NGRAM = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
SUFFIX = {"suffix_decoding_max_cached_requests": 0}
"""No cache across requests: with one, a draft depends on what was served before, and no replay could be exact."""


@dataclass(frozen=True)
class Drafter:
    """A named method: ``kind`` is vLLM's word for it; ``model`` is what the user gave, None for copying methods."""

    name: str
    kind: str
    model: str | None = None

    @property
    def option(self) -> str:
        """The option that names its model, for messages."""
        return NEURAL[self.kind] if self.name == self.kind else "--drafter"


def choose(names: Sequence[str], own: Mapping[str, str | None], further: Sequence[str]) -> tuple[Drafter, ...]:
    """The drafters of a recording.

    Args:
        names: Methods to record, in order; names of ``further`` drafters among them.
        own: Model of each neural kind, as given by its own option.
        further: ``NAME=KIND:MODEL`` texts, for a second drafter of a kind.

    Raises:
        UsageError: A name is unknown or twice there, a model is missing, or one is given that nothing uses.
    """
    named = {drafter.name: drafter for drafter in map(_parse, further)}
    if len(named) < len(further):
        raise UsageError("--drafter: give each name once")
    if not names or len(set(names)) != len(names):
        raise UsageError(f"--methods: name each method once; allowed: {choices((*KINDS, *named))}")
    for name in names:
        if name not in KINDS and name not in named:
            raise UsageError(f"--methods {name}: unknown; allowed: {choices((*KINDS, *named))}")
    for name in named:
        if name not in names:
            raise UsageError(f"--drafter {name}: not among --methods {','.join(names)}")
    for kind, option in NEURAL.items():
        if kind in names and not own.get(kind):
            raise UsageError(f"--methods {kind} needs {option} MODEL: a Hugging Face folder or id")
        if own.get(kind) and kind not in names:
            raise UsageError(f"{option} is given, but {kind} is not among --methods {','.join(names)}")
    return tuple(named.get(name) or Drafter(name, name, own.get(name)) for name in names)


def _parse(text: str) -> Drafter:
    name, _, rest = text.partition("=")
    kind, _, model = rest.partition(":")
    if not name or kind not in NEURAL or not model:
        raise UsageError(f"--drafter {text}: give NAME=KIND:MODEL; kinds: {choices(NEURAL)}")
    if name in KINDS or any(c in name for c in ":@,. /"):
        raise UsageError(
            f"--drafter {text}: the name must not be a kind ({choices(KINDS)}) nor hold any of ':@,./' or a space"
        )
    return Drafter(name, kind, model)


def check(drafter: Drafter, target: str) -> None:
    """Refuses, before any engine starts, a drafter that cannot work with the target.

    Args:
        drafter: Its model may be a folder, a hub id or ``layer-skip:...``.
        target: The resolved target.

    Raises:
        UsageError: Its model is missing or was made for another target.
        ApexSimError: A package it needs is missing.
    """
    if drafter.kind == "suffix" and util.find_spec("arctic_inference") is None:
        raise ApexSimError("method suffix needs arctic-inference: pip install --no-deps arctic-inference==0.1.1")
    if drafter.model is None:
        return
    model = models.resolve_drafter(drafter.model, target, drafter.option)
    theirs, ours = models.config(model, drafter.option), models.config(target, "--target")
    where = f"{drafter.option} {drafter.model}"
    architectures = theirs.get("architectures") or []
    if (drafter.kind == "eagle3") != any("eagle3" in str(name).lower() for name in architectures):
        wanted = "an EAGLE-3 head" if drafter.kind == "eagle3" else "a language model"
        raise UsageError(
            f"{where}: {drafter.kind} needs {wanted}; its architecture is {choices(map(str, architectures))}"
        )
    if drafter.kind == "eagle3":
        for key in ("vocab_size", "hidden_size"):
            expected = theirs.get(f"target_{key}", theirs.get(key))
            if expected != ours.get(key):
                raise UsageError(f"{where}: made for a target of {key} {expected}; the target's is {ours.get(key)}")
    elif heterogeneous(theirs, ours) and not models.has_tokenizer(model):
        raise UsageError(
            f"{where}: vocabulary mismatch: {theirs.get('vocab_size')} tokens, the target has {ours.get('vocab_size')},"
            " and it has no tokenizer to map them by"
        )


def heterogeneous(draft: Mapping[str, Any], target: Mapping[str, Any]) -> bool:
    """Whether two model configurations have different vocabularies."""
    return draft.get("vocab_size") != target.get("vocab_size")


def speculative(drafter: Drafter, target: str, kmax: int) -> dict[str, Any]:
    """The speculative_config of vLLM for a drafter that passed ``check``."""
    settings: dict[str, Any] = {"method": drafter.kind, "num_speculative_tokens": kmax}
    if drafter.kind == "ngram":
        return settings | NGRAM
    if drafter.kind == "suffix":
        return settings | SUFFIX
    model = models.resolve_drafter(str(drafter.model), target, drafter.option)
    settings["model"] = model
    if drafter.kind == "draft_model" and heterogeneous(models.config(model), models.config(target)):
        settings["use_heterogeneous_vocab"] = True
    return settings


def facts(drafter: Drafter, target: str, kmax: int) -> dict[str, Any]:
    """What meta.json says of a method: its kind and settings; a model by name and checksum, not by where it lay."""
    settings = speculative(drafter, target, kmax)
    settings.pop("method")
    path = settings.pop("model", None)
    if path is None:
        return {"kind": drafter.kind, "settings": settings}
    return {
        "kind": drafter.kind,
        "settings": settings,
        "drafter": models.display_name(str(drafter.model)),
        "drafter_sha256": models.digest(path),
    }
