"""vLLM's per-request speculative metrics as a trace."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
import synthetic
from test_importers import lines

from apexsim import replay, traces
from apexsim.cost import CostProfile, Linear, MethodCost
from apexsim.errors import ImportFormatError
from apexsim.importers import import_trace
from apexsim.program import compile_program


def response(accepted, drafted, output, kmax=4, request="r0", reason="stop"):
    """One response of vLLM's server, as ``--per-request-spec-decode-metrics detailed`` writes it."""
    histogram = np.bincount(accepted, minlength=kmax + 1).tolist()
    spec = {
        "mean_acceptance_length": 1 + sum(accepted) / max(1, len(accepted)),
        "draft_acceptance_rate": sum(accepted) / max(1, sum(drafted)),
        "acceptance_histogram": histogram,
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": kmax,
    }
    steps = {"per_step_accepted": accepted, "per_step_drafted": drafted} if accepted else {}
    return {
        "id": request,
        "usage": {"prompt_tokens": 7, "completion_tokens": output},
        "choices": [{"finish_reason": reason}],
        "metrics": {"speculative_decoding": spec | steps},
    }


def test_vllm_metrics_recovers_positions_where_the_steps_fill_the_output(tmp_path):
    full = response([2, 0, 4], [4, 4, 4], 10)
    gap = response([2, 0], [4, 4], 10, request="r1")  # six tokens came from steps that are not listed
    none = response([], [], 5, request="r2", reason="length")
    bundle = import_trace("vllm-metrics", [lines(tmp_path / "chat.eagle3.jsonl", [full, gap, none])], tmp_path / "b")
    assert bundle.requests["request_id"].to_list() == ["chat/r0"]
    assert bundle.blocks["position"].to_list() == [1, 4, 5]
    assert bundle.blocks["emitted"].to_list() == [3, 1, 5]
    assert bundle.blocks["context_tokens"].to_list() == [8, 11, 12]
    aggregate = bundle.meta["import"]["aggregate_only"]
    assert aggregate == {"requests": 2, "output_tokens": 15, "steps": 2, "drafted": 8, "accepted": 2}
    assert bundle.meta["import"]["output_tokens_share"] == 10 / 25
    assert "2 requests are known in aggregate only" in bundle.meta["notes"][1]
    traces.write(bundle, tmp_path / "b")
    profile = CostProfile("p", "analytic", "t", Linear(1.0, 0.0, 0.0), {"eagle3": MethodCost(Linear(0.1, 0.0, 0.0))})
    program = compile_program(traces.load(tmp_path / "b"), profile)
    totals = replay.run_constant(program, program.space.index("eagle3", 4), 0.0)
    assert totals.blocks.tolist() == totals.observed.tolist() == [3]


def test_vllm_metrics_equal_the_replay_they_were_written_from(tmp_path):
    """A replay written down as vLLM would log it, imported again, gives the same blocks, unless a draft was empty."""
    source = synthetic.random_bundle(3, count=12, methods=1)
    rows, whole = [], 0
    for r, length in enumerate(source.requests["output_tokens"].to_list()):
        at = source.positions.filter(pl.col("request") == r)
        accepted, drafted, p = [], [], 1
        while p < length:
            a, d = at["accepted.eagle3"][p - 1], at["drafted.eagle3"][p - 1]
            if d:
                accepted.append(a)
                drafted.append(d)
            p += a + 1
        rows.append(response(accepted, drafted, length, source.kmax, f"r{r}"))
        whole += len(accepted) + sum(accepted) == length - 1 and length > 1
    bundle = import_trace("vllm-metrics", [lines(tmp_path / "w.eagle3.jsonl", rows)], tmp_path / "b")
    assert bundle.requests.height >= whole > 3
    expected = source.positions.with_columns(request_id=pl.format("w/r{}", "request"))
    found = bundle.blocks.join(bundle.requests.with_row_index("request").cast({"request": pl.Int32}), on="request")
    joined = found.join(expected, on=["request_id", "position"], how="left")
    assert (joined["accepted"] == joined["accepted.eagle3"]).all()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("chat.jsonl", {}, "must be called <workload>.<method>.jsonl; methods: ngram, suffix, draft_model, eagle3"),
        ("chat.medusa.jsonl", {}, "must be called"),
        ("chat.eagle3.jsonl", {"usage": 3}, "usage is 3; must hold prompt_tokens"),
        ("chat.eagle3.jsonl", {"usage": {"prompt_tokens": 7, "completion_tokens": "10"}}, "completion_tokens is '10'"),
        ("chat.eagle3.jsonl", {"choices": []}, "choices must hold one answer"),
        ("chat.eagle3.jsonl", {"choices": [{"finish_reason": "error"}]}, "finish_reason is 'error'; allowed: stop"),
        ("chat.eagle3.jsonl", {"metrics": None}, "holds no speculative_decoding"),
    ],
)
def test_bad_vllm_metrics_are_refused(tmp_path, name, change, message):
    file = lines(tmp_path / name, [response([2, 0, 4], [4, 4, 4], 10) | change])
    with pytest.raises(ImportFormatError, match=message):
        import_trace("vllm-metrics", [file], tmp_path / "b")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"per_step_accepted": [2, 0, 5]}, "per_step_accepted: must be a list of whole numbers in 0..4"),
        ({"per_step_drafted": [4, 4]}, "3 accepted, 2 drafted and 3 steps must be as many"),
        ({"per_step_drafted": [1, 4, 4]}, "accepted more tokens than it drafted"),
        ({"num_spec_tokens": 0}, "num_spec_tokens is 0"),
    ],
)
def test_bad_vllm_steps_are_refused(tmp_path, spec, message):
    row = response([2, 0, 4], [4, 4, 4], 10)
    row["metrics"]["speculative_decoding"] |= spec
    with pytest.raises(ImportFormatError, match=message):
        import_trace("vllm-metrics", [lines(tmp_path / "chat.eagle3.jsonl", [row])], tmp_path / "b")


def test_summary_metrics_and_nothing_recovered_are_refused(tmp_path):
    row = response([2, 0, 4], [4, 4, 4], 10)
    del row["metrics"]["speculative_decoding"]["per_step_accepted"]
    with pytest.raises(ImportFormatError, match="serve with --per-request-spec-decode-metrics detailed"):
        import_trace("vllm-metrics", [lines(tmp_path / "chat.eagle3.jsonl", [row])], tmp_path / "b")
    with pytest.raises(ImportFormatError, match="1 requests are known in aggregate only"):
        import_trace("vllm-metrics", [lines(tmp_path / "chat.ngram.jsonl", [response([1], [4], 10)])], tmp_path / "b")
