"""What ``apexsim traces describe`` says, on traces small enough to count by hand."""

from __future__ import annotations

import polars as pl
import pytest
import synthetic

from apexsim import schema
from apexsim.describe import MIN_BLOCKS, describe
from apexsim.traces import Bundle

BLOCK = {
    "request": 0, "position": 1, "depth": 0, "drafter_steps": 0, "drafted": 0, "accepted": 0, "emitted": 1,
    "draft_s": 0.0, "verify_s": 0.01, "overhead_s": 0.001, "batch_size": 1, "context_tokens": 9,
}  # fmt: skip


def blocks(run, policy, method, count=MIN_BLOCKS, **changes):
    row = BLOCK | {"run": run, "policy": policy, "method": method} | changes
    return pl.DataFrame([row] * count, schema={c.name: c.dtype for c in schema.BLOCKS if c.required})


@pytest.fixture
def bundle():
    made = synthetic.bundle(
        [{"ngram": [2, 0, 0, 1, 0]}, {"ngram": [0, 0]}],
        [{"ngram": [3, 0, 4, 4, 4]}, {"ngram": [0, 4]}],
        kmax=4,
        workload=["code", "chat"],
    )
    measured = pl.concat(
        [
            blocks("ar", "ar", ""),
            blocks("k0", "fixed:ngram:0", "ngram", draft_s=0.002),
            blocks("k4", "fixed:ngram:4", "ngram", depth=4, verify_s=0.02),
            blocks("k4b", "fixed:ngram:4", "ngram", count=3, batch_size=4),
            blocks("random", "random:ngram", "ngram", depth=2, verify_s=9.0),
        ]
    )
    return Bundle(made.meta, made.requests, made.positions, measured)


def test_acceptance_by_workload(bundle):
    ngram = describe(bundle)["methods"]["ngram"]
    assert (ngram["positions"], ngram["mean_accepted"]) == (7, pytest.approx(3 / 7))
    assert ngram["empty_draft_share"] == pytest.approx(2 / 7)
    code, chat = ngram["workloads"]["code"], ngram["workloads"]["chat"]
    # A run at depth 4 visits p = 1 (2 accepted) and p = 4 (1): then the text has ended.
    assert code["mean_accepted_visited"] == 1.5
    assert code["mean_drafted"] == 3.0
    assert (chat["positions"], chat["mean_accepted_visited"]) == (2, 0.0)


def test_times_come_from_fixed_runs_and_show_the_idle_tax(bundle):
    facts = describe(bundle)
    (plain,) = facts["plain"]["times"]
    assert (plain["batch_size"], plain["verify_ms"], plain["blocks"]) == (1, pytest.approx(10.0), MIN_BLOCKS)
    idle, deep = facts["methods"]["ngram"]["times"]  # neither the random run nor three blocks of batch 4
    assert (idle["depth"], idle["idle_tax_ms"]) == (0, pytest.approx(2.0))
    assert (deep["depth"], deep["verify_ms"]) == (4, pytest.approx(20.0))
    assert "idle_tax_ms" not in deep


def test_a_trace_of_blocks_only():
    made = synthetic.bundle([{"ngram": [0, 0, 0]}], kmax=4)
    rows = pl.concat([blocks("a", "x", "ngram", 1, depth=4, drafter_steps=4, drafted=4, accepted=2, emitted=3),
                      blocks("a", "x", "ngram", 1, depth=4)])  # fmt: skip
    facts = describe(Bundle(made.meta, made.requests, blocks=rows))["methods"]["ngram"]
    assert (facts["positions"], facts["mean_accepted"], facts["mean_accepted_visited"]) == (0, None, 1.0)
    assert (facts["empty_draft_share"], facts["times"]) == (0.5, [])
