"""vLLM's per-request speculative metrics: responses of a server run with ``--per-request-spec-decode-metrics detailed``.

They list accepted and drafted tokens of every step that had a draft. Steps without one are not in the list, so where a block
stood is known only if the listed blocks fill the output: steps + accepted = output tokens - 1. Other requests are known in
aggregate only; they are counted in meta ``import`` and left out of the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apexsim.errors import ImportFormatError, choices
from apexsim.importers import frame, json_lines, new_meta, whole, wholes
from apexsim.schema import KMAX_LIMIT
from apexsim.traces import Bundle, split_of

KEYS = ("id", "usage", "choices", "metrics")
METHODS = ("ngram", "suffix", "draft_model", "eagle3")
FINISH = {"stop": "stop", "length": "length", "tool_calls": "stop", "function_call": "stop", "abort": "cut"}


def read(paths: Sequence[Path], name: str) -> Bundle:
    """A blocks-only bundle without times, of the requests whose positions can be recovered.

    Args:
        paths: Files called ``<workload>.<method>.jsonl``, one response object of the OpenAI-compatible server a line.
        name: Name of the bundle.
    """
    requests: list[dict[str, Any]] = []
    blocks: list[dict[str, Any]] = []
    methods: list[str] = []
    aggregate = {"requests": 0, "output_tokens": 0, "steps": 0, "drafted": 0, "accepted": 0}
    for path in paths:
        workload, method = _names(path)
        if method not in methods:
            methods.append(method)
        for row in json_lines(path, KEYS):
            where = f"{path}: request {row['id']!r}"
            request = _request(row, workload, where)
            accepted, drafted, kmax = _steps(row, where)
            length = request["output_tokens"]
            if accepted.size + accepted.sum() != length - 1:
                figures = (1, length, accepted.size, drafted.sum(), accepted.sum())
                aggregate = {key: aggregate[key] + int(f) for key, f in zip(aggregate, figures, strict=True)}
                continue
            p = 1
            for got, sent in zip(accepted.tolist(), drafted.tolist(), strict=True):
                blocks.append(
                    {
                        "request": len(requests),
                        "run": path.stem,
                        "policy": f"fixed:{method}:{kmax}",
                        "method": method,
                        "position": p,
                        "depth": kmax,
                        "drafter_steps": sent,
                        "drafted": sent,
                        "accepted": got,
                        "emitted": got + 1,
                        "batch_size": 1,
                        "context_tokens": request["prompt_tokens"] + p,
                    }
                )
                p += got + 1
            requests.append(request)
    if not blocks:
        raise ImportFormatError(
            f"{paths[0]}: no request whose listed steps fill its output (steps + accepted = output tokens - 1), so no block's "
            f"position is known; {aggregate['requests']} requests are known in aggregate only"
        )
    return Bundle(
        _meta(name, paths, methods, requests, blocks, aggregate),
        frame("requests", requests),
        blocks=frame("blocks", blocks),
    )


def _names(path: Path) -> tuple[str, str]:
    parts = path.name.split(".")
    if len(parts) != 3 or parts[1] not in METHODS or parts[2] != "jsonl":
        raise ImportFormatError(f"{path}: must be called <workload>.<method>.jsonl; methods: {choices(METHODS)}")
    return parts[0], parts[1]


def _request(row: dict[str, Any], workload: str, where: str) -> dict[str, Any]:
    usage, answers = row["usage"], row["choices"]
    if not isinstance(usage, dict):
        raise ImportFormatError(f"{where}: usage is {usage!r}; must hold prompt_tokens and completion_tokens")
    if not isinstance(answers, list) or len(answers) != 1 or not isinstance(answers[0], dict):
        raise ImportFormatError(f"{where}: choices must hold one answer: vLLM reports the metrics of n = 1 only")
    reason = answers[0].get("finish_reason")
    if reason not in FINISH:
        raise ImportFormatError(f"{where}: finish_reason is {reason!r}; allowed: {choices(FINISH)}")
    return {
        "request_id": f"{workload}/{row['id']}",
        "source_group": str(row["id"]),
        "workload": workload,
        "split": split_of(str(row["id"])),
        "prompt_tokens": whole(usage, "prompt_tokens", f"{where}: usage"),
        "output_tokens": whole(usage, "completion_tokens", f"{where}: usage", low=1),
        "finish_reason": FINISH[reason],
        "aligned": True,
    }


def _steps(row: dict[str, Any], where: str) -> tuple[Any, Any, int]:
    """Accepted and drafted tokens of each listed step, and the configured depth."""
    metrics = row["metrics"]
    spec = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if not isinstance(spec, dict):
        raise ImportFormatError(
            f"{where}: metrics holds no speculative_decoding: serve with --per-request-spec-decode-metrics"
        )
    kmax = whole(spec, "num_spec_tokens", where, low=1, high=KMAX_LIMIT)
    steps = whole(spec, "num_spec_steps", where)
    if steps and "per_step_accepted" not in spec:
        raise ImportFormatError(f"{where}: no per_step_accepted: serve with --per-request-spec-decode-metrics detailed")
    accepted = wholes(spec.get("per_step_accepted") or [], f"{where}: per_step_accepted", high=kmax)
    drafted = wholes(spec.get("per_step_drafted") or [], f"{where}: per_step_drafted", high=kmax)
    if not accepted.size == drafted.size == steps:
        raise ImportFormatError(
            f"{where}: {accepted.size} accepted, {drafted.size} drafted and {steps} steps must be as many"
        )
    if (accepted > drafted).any():
        raise ImportFormatError(f"{where}: a step accepted more tokens than it drafted")
    return accepted, drafted, kmax


def _meta(
    name: str,
    paths: Sequence[Path],
    methods: Sequence[str],
    requests: Sequence[dict[str, Any]],
    blocks: Sequence[dict[str, Any]],
    aggregate: dict[str, int],
) -> dict[str, Any]:
    tokens = sum(request["output_tokens"] for request in requests)
    share = tokens / (tokens + aggregate["output_tokens"])
    return {
        **new_meta(name),
        "target": {"name": "unknown"},
        "methods": {method: {"kind": method, "settings": {}} for method in methods},
        "engine": {"name": "vllm"},
        "hardware": "unknown",
        "dtype": "unknown",
        "sampling": {},
        "kmax": max(block["depth"] for block in blocks),
        "source": ", ".join(path.name for path in paths),
        "import": {
            "format": "vllm-metrics",
            "requests": len(requests),
            "blocks": len(blocks),
            "output_tokens_share": share,
            "aggregate_only": aggregate,
        },
        "notes": [
            "blocks without times: give a cost profile; positions between blocks are modelled",
            f"{aggregate['requests']} requests are known in aggregate only (a step without a draft is not logged, or the last "
            f"draft ran past the end) and left out; the rest holds {100 * share:.1f} % of the output tokens",
            "the log does not tell temperature or batch size: greedy decoding at batch 1 is assumed",
        ],
    }
