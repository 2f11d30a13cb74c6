"""Per-request acceptance lists of EAGLE-3 runs on gpt-oss, lossless ("strict") arms; the recorder adds a ghost round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apexsim.errors import ImportFormatError
from apexsim.importers import frame, json_lines, new_meta
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
            length, k = int(row["output_tokens"]), int(row["k"])
            temperature = max(temperature, float(row["temperature"]))
            p = 1
            for got in row["accepted"]:
                if p >= length:
                    ghosts += 1
                    continue
                accepted = min(int(got), length - p)
                after_end += int(got) - accepted
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
                        "context_tokens": int(row["prompt_tokens"]) + p,
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
                    "prompt_tokens": int(row["prompt_tokens"]),
                    "output_tokens": length,
                    "finish_reason": row["finish_reason"],
                    "aligned": True,
                }
            )
    if not requests:
        raise ImportFormatError(f"{paths[0]}: no request")
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
