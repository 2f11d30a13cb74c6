"""Measured blocks of ordinary fixed-depth runs, one JSON object a line, with draft and round milliseconds."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apexsim.errors import ImportFormatError
from apexsim.importers import frame, json_lines, new_meta, seconds, whole
from apexsim.schema import KMAX_LIMIT
from apexsim.traces import Bundle, split_of

ROUND_KEYS = (
    "uid", "round_idx", "start_pos", "proposal_len", "accepted_draft", "recovery_kind", "t_propose_ms", "t_round_ms",
)  # fmt: skip
SAMPLE_KEYS = ("uid", "dataset", "row_idx", "n_input_tokens", "n_output_tokens")
SUFFIX = ".rounds.jsonl"


def read(paths: Sequence[Path], name: str) -> Bundle:
    """A blocks-only bundle of one run."""
    rounds = [path for path in paths if path.name.endswith(SUFFIX)]
    if len(rounds) != 1:
        raise ImportFormatError(f"rounds-jsonl: give one <run>{SUFFIX}, got {len(rounds)}")
    stem = rounds[0].name.removesuffix(SUFFIX)
    samples, summary = (rounds[0].with_name(f"{stem}.{kind}") for kind in ("samples.jsonl", "summary.json"))
    if not samples.is_file():
        raise ImportFormatError(f"{samples}: missing; it must stand beside {rounds[0].name}")
    facts = _summary(summary)
    method = str(facts.get("algo", "draft"))
    by_request = defaultdict(list)
    for row in json_lines(rounds[0], ROUND_KEYS):
        by_request[str(row["uid"])].append(row)
    requests: list[dict[str, Any]] = []
    blocks: list[dict[str, Any]] = []
    ghosts = 0
    for sample in json_lines(samples, SAMPLE_KEYS):
        where = f"{samples}: uid {sample['uid']!r}"
        length, prompt = whole(sample, "n_output_tokens", where, low=1), whole(sample, "n_input_tokens", where)
        where = f"{rounds[0]}: uid {sample['uid']!r}"
        mine = sorted(by_request.pop(str(sample["uid"]), []), key=lambda row: whole(row, "round_idx", where))
        group = f"{sample['dataset']}/{sample['row_idx']}"
        expected = 1
        ended = any(row["recovery_kind"] == "eos" for row in mine)
        for row in mine:
            p = whole(row, "start_pos", where) - prompt + 1
            if p >= length:  # the run was over: max_tokens was reached in the block before
                ghosts += 1
                continue
            if p != expected:
                raise ImportFormatError(
                    f"{where}: round {row['round_idx']} starts at p {p}; the rounds before end at {expected}"
                )
            k = whole(row, "proposal_len", where, low=1, high=KMAX_LIMIT)
            accepted = min(whole(row, "accepted_draft", where, high=k), length - p)
            expected += min(accepted + 1, length - p)
            blocks.append(
                {
                    "request": len(requests),
                    "run": stem,
                    "policy": f"fixed:{method}:{k}",
                    "method": method,
                    "position": p,
                    "depth": k,
                    "drafter_steps": k,
                    "drafted": k,
                    "accepted": accepted,
                    "emitted": min(accepted + 1, length - p),
                    "draft_s": seconds(row, "t_propose_ms", where),
                    "verify_s": seconds(row, "t_round_ms", where) - seconds(row, "t_propose_ms", where),
                    "overhead_s": seconds({"t_update_ms": 0.0} | row, "t_update_ms", where),
                    "batch_size": 1,
                    "context_tokens": prompt + p,
                }
            )
        requests.append(
            {
                "request_id": f"{group}#{sample['uid']}",
                "source_group": group,
                "workload": sample["dataset"],
                "split": split_of(group),
                "prompt_tokens": prompt,
                "output_tokens": length,
                "max_tokens": facts.get("max_new_tokens"),
                "finish_reason": "stop" if ended else "length" if length == facts.get("max_new_tokens") else "cut",
                "aligned": True,
            }
        )
    if by_request:
        raise ImportFormatError(f"{rounds[0]}: uid {next(iter(by_request))!r} has no line in {samples.name}")
    if not blocks:
        raise ImportFormatError(f"{rounds[0]}: no round of any request of {samples.name}")
    temperature = facts.get("temperature", 0.0)
    if not isinstance(temperature, int | float) or not 0 <= temperature < 100:
        raise ImportFormatError(f"{summary}: temperature is {temperature!r}; must be a non-negative number")
    notes = ["blocks of one fixed depth: positions are known where a block started; the rest of a replay is modelled"]
    if temperature > 0:
        notes.append(f"sampled at temperature {temperature:g}: a replay at other depths is an approximation")
    meta = {
        **new_meta(name),
        "target": {"name": facts.get("target", "unknown"), "revision": facts.get("target_revision")},
        "methods": {
            method: {
                "kind": method,
                "settings": {"drafter": facts.get("draft"), "revision": facts.get("draft_revision")},
            }
        },
        "engine": {"name": "transformers", "version": facts.get("transformers_version")},
        "hardware": facts.get("gpu_name", "unknown"),
        "dtype": facts.get("dtype", "unknown"),
        "sampling": {"temperature": temperature, "max_tokens": facts.get("max_new_tokens")},
        "kmax": max(block["depth"] for block in blocks),
        "source": rounds[0].name,
        "import": {"format": "rounds-jsonl", "requests": len(requests), "blocks": len(blocks), "ghost_blocks": ghosts},
        "notes": notes,
    }
    return Bundle(meta, frame("requests", requests), blocks=frame("blocks", blocks))


def _summary(file: Path) -> dict[str, Any]:
    """What the run says about itself; nothing if it has no summary."""
    if not file.is_file():
        return {}
    try:
        facts = json.loads(file.read_bytes())
    except ValueError as error:
        raise ImportFormatError(f"{file}: not JSON: {error}") from error
    if not isinstance(facts, dict):
        raise ImportFormatError(f"{file}: must be a JSON object")
    return facts
