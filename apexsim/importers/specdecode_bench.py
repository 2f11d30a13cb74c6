"""SpecDecode-Bench's counterfactual acceptance lists (arXiv:2601.11580): a draft at every output position.

``acc[i]`` is the number of tokens obtained, accepted plus one, if a draft starts after output token i + 1: the row of
p = i + 1. The lists of the two methods come from separate runs; where a run's text diverged, the lists differ in length.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from apexsim.errors import ImportFormatError
from apexsim.importers import frame, json_lines, new_meta, whole, wholes
from apexsim.kernels.match import MAX_MATCH, longest_suffix, repeated_trigrams
from apexsim.traces import Bundle, split_of

KMAX = 16
LISTS = {"eagle3": "acc_eagle", "ngram": "acc_ngram"}
TOKEN_COLUMNS = ("id", "prompt_token_ids", "generated_token_ids")


def read(paths: Sequence[Path], name: str) -> Bundle:
    """One bundle from all the given files; with token tables a recomputed ``suffix`` method is added."""
    lists = [path for path in paths if path.suffix == ".jsonl"]
    if not lists:
        raise ImportFormatError("specdecode-bench: no .jsonl file among the paths given")
    tokens = {_workload(path): _tokens(path) for path in paths if path.suffix == ".parquet"}
    unmatched = set(tokens) - {_workload(path) for path in lists}
    if unmatched:
        raise ImportFormatError(f"specdecode-bench: token table of {sorted(unmatched)[0]!r} without its .jsonl file")
    if tokens and len(tokens) < len(lists):
        raise ImportFormatError("specdecode-bench: give the token table of every workload, or of none")
    requests: list[dict[str, Any]] = []
    columns: list[dict[str, np.ndarray]] = []
    clipped = 0
    for path in lists:
        workload = _workload(path)
        for row in json_lines(path, ("id", *LISTS.values())):
            ids = tokens[workload].get(str(row["id"])) if tokens else _inline_tokens(row, path)
            if tokens and ids is None:
                raise ImportFormatError(f"{path}: request {row['id']!r} is not in the token table of {workload!r}")
            obtained = {method: _obtained(path, row, key) for method, key in LISTS.items()}
            lengths = {len(values) for values in obtained.values()}
            if ids is not None:
                lengths.add(len(ids[1]))
            if "gen_len" in row:
                lengths.add(whole(row, "gen_len", f"{path}: request {row['id']!r}"))
            length = min(lengths)
            clipped += len(lengths) > 1
            if length < 1:
                raise ImportFormatError(f"{path}: request {row['id']!r} has no output")
            if columns and ("match.suffix" in columns[0]) != (ids is not None):
                raise ImportFormatError(f"{path}: request {row['id']!r}: token ids must be in every line, or in none")
            if ids is None and "prompt_len" not in row:
                raise ImportFormatError(f"{path}: request {row['id']!r}: neither prompt_len nor token ids")
            identity = f"{workload}/{row['id']}"
            prompt = len(ids[0]) if ids is not None else whole(row, "prompt_len", f"{path}: request {row['id']!r}")
            requests.append(
                {
                    "request_id": identity,
                    "source_group": identity,
                    "workload": workload,
                    "split": split_of(identity),
                    "prompt_tokens": prompt,
                    "output_tokens": length,
                    "finish_reason": "cut" if len(lengths) > 1 else "stop",
                    "aligned": len(lengths) == 1,
                }
                | ({"prompt_repetition": repeated_trigrams(ids[0])} if ids is not None else {})
            )
            columns.append(_positions(len(requests) - 1, length, obtained, ids))
    positions = pl.DataFrame({key: np.concatenate([c[key] for c in columns]) for key in columns[0]})
    methods = {
        "eagle3": {"kind": "eagle3", "settings": {}},
        "ngram": {"kind": "ngram", "settings": {"drafted": "not recorded; taken to be k"}},
    }
    if "match.suffix" in positions.columns:
        methods["suffix"] = {"kind": "suffix", "settings": {"max_match": MAX_MATCH, "recomputed": True}}
    meta = {
        **new_meta(name),
        "target": {"name": "meta-llama/Llama-3.1-8B-Instruct"},
        "methods": methods,
        "engine": {"name": "vllm"},
        "hardware": "1x NVIDIA H100",
        "dtype": "unknown",
        "sampling": {"temperature": 0.0},
        "kmax": KMAX,
        "source": "SpecDecode-Bench simulator data, arXiv:2601.11580",
        "default_cost_profile": "llama3.1-8b-h100",
        "import": {"format": "specdecode-bench", "requests": len(requests), "clipped_requests": clipped},
        "notes": [
            f"{clipped} of {len(requests)} requests have lists of different length: clipped to the shortest, aligned = false",
            "the n-gram method's drafted length was not recorded: every draft is taken to be k tokens",
        ],
    }
    return Bundle(meta, frame("requests", requests), positions)


def _positions(
    request: int, length: int, obtained: dict[str, np.ndarray], ids: tuple[np.ndarray, np.ndarray] | None
) -> dict[str, np.ndarray]:
    count = length - 1
    left = np.arange(count, 0, -1)
    out: dict[str, np.ndarray] = {
        "request": np.full(count, request, dtype=np.int32),
        "position": np.arange(1, count + 1, dtype=np.int32),
    }
    if ids is not None:
        out["token_id"] = ids[1][:count]
    for method, values in obtained.items():
        accepted = np.minimum(np.minimum(values[:count] - 1, KMAX), left)
        out[f"accepted.{method}"] = accepted.astype(np.uint8)
        out[f"drafted.{method}"] = np.full(count, KMAX, dtype=np.uint8)
    if ids is not None:
        match, drafted, accepted = (np.zeros(count, dtype=np.uint8) for _ in range(3))
        context = np.concatenate((ids[0], ids[1][:length]))
        longest_suffix(context, len(ids[0]), MAX_MATCH, KMAX, match, drafted, accepted)
        # The match is a fact of the context, known before drafting: the feature of both copying methods.
        out |= {"match.ngram": match, "accepted.suffix": accepted, "drafted.suffix": drafted, "match.suffix": match}
    return out


def _obtained(path: Path, row: dict[str, Any], key: str) -> np.ndarray:
    values = row[key]
    if isinstance(values, dict) and len(values) == 1:  # the raw files wrap each list in a dict of one drafter setting
        values = next(iter(values.values()))
    return wholes(values, f"{path}: request {row['id']!r}: {key}", low=1)


def _tokens(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    try:
        table = pl.read_parquet(path, columns=list(TOKEN_COLUMNS))
    except Exception as error:
        raise ImportFormatError(f"{path}: not a token table with {', '.join(TOKEN_COLUMNS)}: {error}") from error
    try:
        return {
            str(key): (np.asarray(prompt, dtype=np.int32), np.asarray(output, dtype=np.int32))
            for key, prompt, output in table.select(TOKEN_COLUMNS).iter_rows()
        }
    except (TypeError, ValueError, OverflowError) as error:
        raise ImportFormatError(f"{path}: the id columns must hold lists of whole numbers: {error}") from error


def _inline_tokens(row: dict[str, Any], path: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """The token ids of a raw line, which carries its own."""
    if not all(key in row for key in TOKEN_COLUMNS):
        return None
    prompt, output = (wholes(row[key], f"{path}: request {row['id']!r}: {key}") for key in TOKEN_COLUMNS[1:])
    return prompt.astype(np.int32), output.astype(np.int32)


def _workload(path: Path) -> str:
    return path.name.split(".")[0].removeprefix("combined_")
