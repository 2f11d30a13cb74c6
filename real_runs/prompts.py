"""Prompt files: reading them, grouping near-duplicates, splitting, choosing the ones that are timed."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from apexsim.errors import UsageError
from apexsim.provenance import sha256
from apexsim.traces import split_of

_SONNET_WINDOW = re.compile(r"sonnet-\d+")


@dataclass(frozen=True)
class Prompt:
    """One prompt. ``token_ids`` holds it under the target's chat template, once that is known."""

    request_id: str
    workload: str
    source_group: str
    text: str
    split: str = ""
    token_ids: tuple[int, ...] = ()


def read(files: Sequence[Path]) -> list[Prompt]:
    """Reads prompt files: JSON lines with ``id``, ``workload`` and ``prompt``, optionally ``source_group``.

    Raises:
        UsageError: A file or line does not fit; the message names both.
    """
    prompts: list[Prompt] = []
    for file in files:
        if not file.is_file():
            raise UsageError(f"--prompts {file}: no such file")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            if line.strip():
                prompts.append(_parse(line, f"{file}, line {number}"))
    if not prompts:
        raise UsageError(f"--prompts {' '.join(map(str, files))}: no prompts in it")
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.request_id in seen:
            raise UsageError(f"--prompts: id {prompt.request_id!r} occurs twice")
        seen.add(prompt.request_id)
    return _join_duplicates(prompts)


def _parse(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UsageError(f"--prompts {where}: not JSON: {error}") from error
    for key in ("id", "workload", "prompt"):
        if not isinstance(row, dict) or not isinstance(row.get(key), str) or not row[key]:
            raise UsageError(f"--prompts {where}: needs a text under {key!r}")
    return Prompt(row["id"], row["workload"], str(row.get("source_group") or group_of(row["id"])), row["prompt"])


def group_of(request_id: str) -> str:
    """The source group of a prompt that states none: its own id, but one for the overlapping windows of the sonnets."""
    return "sonnet" if _SONNET_WINDOW.fullmatch(request_id) else request_id


def _join_duplicates(prompts: list[Prompt]) -> list[Prompt]:
    """Gives prompts whose texts differ in white space only the group of the first of them."""
    first: dict[str, str] = {}
    return [
        replace(prompt, source_group=first.setdefault(" ".join(prompt.text.split()), prompt.source_group))
        for prompt in prompts
    ]


def spread(count: int, wanted: int) -> list[int]:
    """``wanted`` of the indices 0..count-1, evenly spaced, all of them if there are no more."""
    return list(range(count)) if wanted >= count else [(2 * i + 1) * count // (2 * wanted) for i in range(wanted)]


def limit_per_workload(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """At most ``limit`` prompts of each workload, evenly spaced, in their order."""
    if limit is None:
        return list(prompts)
    kept = {rows[i] for rows in _rows_by_workload(prompts).values() for i in spread(len(rows), limit)}
    return [prompt for row, prompt in enumerate(prompts) if row in kept]


def assign_splits(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Splits by source group, 60/20/20, so that each workload of three or more groups has all three splits.

    The groups of a workload are ordered by a hash of their name and cut: the order does not depend on the prompt file.
    With fewer than three groups, or a group in two workloads, the split is that of the hash alone (``traces.split_of``).
    """
    workloads: dict[str, set[str]] = defaultdict(set)
    for prompt in prompts:
        workloads[prompt.source_group].add(prompt.workload)
    split = {group: split_of(group) for group in workloads}
    for workload in {prompt.workload for prompt in prompts}:
        groups = [group for group, homes in workloads.items() if homes == {workload}]
        if len(groups) >= 3:
            groups.sort(key=lambda group: hashlib.sha256(group.encode()).hexdigest())
            held_out = max(1, round(0.2 * len(groups)))
            split.update(dict.fromkeys(groups, "train"))
            split.update(dict.fromkeys(groups[-2 * held_out : -held_out], "validation"))
            split.update(dict.fromkeys(groups[-held_out:], "test"))
    return [replace(prompt, split=split[prompt.source_group]) for prompt in prompts]


def stratified(prompts: Sequence[Prompt], count: int) -> tuple[int, ...]:
    """Rows of ``count`` prompts, as many of each workload as possible, evenly spaced within it."""
    groups = list(_rows_by_workload(prompts).values())
    share = [0] * len(groups)
    while sum(share) < min(count, len(prompts)):
        for g, rows in enumerate(groups):
            if share[g] < len(rows) and sum(share) < count:
                share[g] += 1
    picked = [[rows[i] for i in spread(len(rows), n)] for rows, n in zip(groups, share, strict=True)]
    return tuple(sorted(row for rows in picked for row in rows))


def tokenize(prompts: Iterable[Prompt], tokenizer: Any) -> list[Prompt]:
    """Applies the tokenizer's chat template: the prompt becomes one user turn."""
    done = []
    for prompt in prompts:
        turn = [{"role": "user", "content": prompt.text}]
        ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]
        done.append(replace(prompt, token_ids=tuple(map(int, ids))))
    return done


def sources(files: Sequence[Path], prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """What meta.json says about the prompt files: name, checksum, sources, and the licence a PROVENANCE.md beside it states."""
    used = {prompt.request_id for prompt in prompts}
    facts = []
    for file in files:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        taken = [row for row in rows if row["id"] in used]
        names = sorted({str(row["source"]) for row in taken if row.get("source")})
        facts.append(
            {"file": file.name, "sha256": sha256(file), "requests": len(taken), "sources": names, **_provenance(file)}
        )
    return facts


def _provenance(file: Path) -> dict[str, str]:
    """The row of ``file`` in a PROVENANCE.md beside it, a Markdown table whose header names the columns."""
    table = file.with_name("PROVENANCE.md")
    if not table.is_file():
        return {}
    header: list[str] = []
    for line in table.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and not header:
            header = cells
        elif header and cells[0] == file.name:
            row = dict(zip(header, cells, strict=False))
            return {
                "licence" if "licen" in key else "origin": row[key] for key in row if "licen" in key or "source" in key
            }
    return {}


def from_json(rows: Iterable[dict[str, Any]]) -> list[Prompt]:
    return [Prompt(**{**row, "token_ids": tuple(row["token_ids"])}) for row in rows]


def to_json(prompts: Iterable[Prompt]) -> list[dict[str, Any]]:
    return [asdict(prompt) for prompt in prompts]


def _rows_by_workload(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = defaultdict(list)
    for row, prompt in enumerate(prompts):
        rows[prompt.workload].append(row)
    return rows
