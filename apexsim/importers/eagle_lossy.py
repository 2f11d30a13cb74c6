"""Per-request acceptance lists of EAGLE-3 runs on gpt-oss, lossless ("strict") arms; the recorder adds a ghost round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apexsim.errors import ImportFormatError, choices
from apexsim.importers import frame, json_lines, new_meta, whole, wholes
from apexsim.schema import FINISH_REASONS, KMAX_LIMIT
from apexsim.traces import Bundle, split_of

KEYS = ("case", "source", "arm", "k", "temperature", "prompt_tokens", "output_tokens", "finish_reason", "accepted")
METHOD = "eagle3"


def read(paths: Sequence[Path], name: str) -> Bundle:
    """A blocks-only bundle without times; rounds after the output's end are dropped and counted."""
    requests: list[dict[str, Any]] = []
    blocks: list[dict[str, Any]] = []
    ghosts = after_end = 0
    temperature = 0.0
    for path in paths:
        workload = path.name.split(".")[0]
        for row in json_lines(path, KEYS):
            if not str(row["arm"]).startswith("strict"):
                raise ImportFormatError(
                    f"{path}: request {row['case']!r}: arm {row['arm']!r} is lossy; allowed: strict*"
                )
            where = f"{path}: request {row['case']!r}"
            length, k = whole(row, "output_tokens", where, low=1), whole(row, "k", where, low=1, high=KMAX_LIMIT)
            prompt = whole(row, "prompt_tokens", where)
            if not isinstance(row["temperature"], int | float) or not 0 <= row["temperature"] < 100:
                raise ImportFormatError(
                    f"{where}: temperature is {row['temperature']!r}; must be a non-negative number"
                )
            if row["finish_reason"] not in FINISH_REASONS:
                raise ImportFormatError(
                    f"{where}: finish_reason is {row['finish_reason']!r}; allowed: {choices(FINISH_REASONS)}"
                )
            temperature = max(temperature, float(row["temperature"]))
            p = 1
            for got in wholes(row["accepted"], f"{where}: accepted", high=k).tolist():
                if p >= length:
                    ghosts += 1
                    continue
                accepted = min(got, length - p)
                after_end += got - accepted
                emitted = min(accepted + 1, length - p)
                blocks.append(
                    {
                        "request": len(requests),
                        "run": path.stem,
                        "policy": f"fixed:{METHOD}:{k}",
                        "method": METHOD,
                        "position": p,
                        "depth": k,
                        "drafter_steps": k,
                        "drafted": k,
                        "accepted": accepted,
                        "emitted": emitted,
                        "batch_size": 1,
                        "context_tokens": prompt + p,
                    }
                )
                p += emitted
            if p < length:
                raise ImportFormatError(f"{path}: request {row['case']!r}: rounds give {p} of {length} output tokens")
            requests.append(
                {
                    "request_id": f"{workload}/{row['case']}",
                    "source_group": str(row["source"]),
                    "workload": workload,
                    "split": split_of(str(row["source"])),
                    "prompt_tokens": prompt,
                    "output_tokens": length,
                    "finish_reason": row["finish_reason"],
                    "aligned": True,
                }
            )
    if not blocks:
        raise ImportFormatError(f"{paths[0]}: no request with a round")
    meta = {
        **new_meta(name),
        "target": {"name": "openai/gpt-oss-20b"},
        "methods": {METHOD: {"kind": METHOD, "settings": {"drafter": "nebius/EAGLE3-gpt-oss-20b"}}},
        "engine": {"name": "vllm", "version": "0.26.0"},
        "hardware": "1x NVIDIA H100 PCIe",
        "dtype": "unknown",
        "sampling": {"temperature": temperature},
        "kmax": max(block["depth"] for block in blocks),
        "source": ", ".join(path.name for path in paths),
        "import": {
            "format": "eagle-lossy",
            "requests": len(requests),
            "blocks": len(blocks),
            "ghost_blocks": ghosts,
            "accepted_after_end": after_end,
        },
        "notes": [
            "blocks of one fixed depth without times: give a cost profile; positions between blocks are modelled",
            f"sampled at temperature {temperature:g}: a replay at other depths is an approximation",
            f"{ghosts} recorded rounds lie after the end of the output: dropped",
        ],
    }
    return Bundle(meta, frame("requests", requests), blocks=frame("blocks", blocks))
