"""What a recording leaves on disk while it runs: one small file per request and run, and the description of a job.

The engine process writes them, the collector reads them; neither needs vLLM for it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from apexsim.files import write_atomic


@dataclass
class Block:
    """One measured block as the engine saw it: ``accepted`` may run past the end of the text."""

    position: int
    depth: int
    drafted: int
    accepted: int
    emitted: int
    draft_s: float | None
    verify_s: float | None
    overhead_s: float | None
    batch_size: int
    context_tokens: int
    step: int


@dataclass
class Part:
    """One request of one run.

    ``entropy``, ``probability``, ``gap`` (one per token: nats, probability of the token, lead of its log-probability over
    the second best), ``drafts`` and ``signals`` (name to position to one value per draft token, if the drafter has any) exist
    in shadow runs only, ``embedding`` in prefill runs. ``foreign_cores`` is the load of other processes while it was timed.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    prefill_s: float | None = None
    foreign_cores: float | None = None
    entropy: list[float] = field(default_factory=list)
    probability: list[float] = field(default_factory=list)
    gap: list[float] = field(default_factory=list)
    drafts: dict[int, list[int]] = field(default_factory=dict)
    signals: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    embedding: list[float] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """One pass over requests.

    Attributes:
        name: Name of the run, for example ``ngram-k4-b1``.
        policy: Name of the policy that chooses the depths.
        mode: ``shadow``, ``fixed``, ``random`` or ``prefill``.
        depth: The fixed depth; the largest one of a random run.
        batch: Requests that run together.
        max_tokens: Output limit.
        requests: Rows of the prompt list.
    """

    name: str
    policy: str
    mode: str
    depth: int
    batch: int
    max_tokens: int
    requests: tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """The work of one engine process.

    ``method`` names the drafter and ``speculative`` is vLLM's speculative_config for it; empty and None: a plain engine.
    ``prefix_caching`` spares timed runs of the same prompts their prefill.
    """

    name: str
    model: str
    dtype: str
    max_model_len: int
    method: str
    speculative: dict[str, Any] | None
    seed: int
    prefix_caching: bool
    runs: tuple[Run, ...]

    def write(self, path: Path) -> None:
        write_atomic(path, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, path: Path) -> Job:
        raw = json.loads(path.read_bytes())
        runs = tuple(Run(**{**run, "requests": tuple(run["requests"])}) for run in raw.pop("runs"))
        return cls(**raw, runs=runs)


def part_path(folder: Path, run: str, row: int) -> Path:
    """Where the part of one request of a run lies."""
    return folder / run / f"{row:05d}.json"


def write_part(path: Path, part: Part) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(asdict(part)).encode())


def read_part(path: Path) -> Part:
    raw = json.loads(path.read_bytes())
    raw["drafts"] = _by_position(raw["drafts"])
    raw["signals"] = {name: _by_position(values) for name, values in raw["signals"].items()}
    raw["blocks"] = [Block(**block) for block in raw["blocks"]]
    return Part(**raw)


def _by_position(values: dict[str, Any]) -> dict[int, Any]:
    return {int(position): value for position, value in values.items()}
