"""Cost profiles: shipped, from files, from step tables, and fitted to measured blocks."""

from __future__ import annotations

import json
import re

import numpy as np
import polars as pl
import pytest
import synthetic

from apexsim import cost, schema
from apexsim.cost import Linear, MethodCost, Table, load_profile
from apexsim.errors import ProfileError
from apexsim.fitting import fit_profile, outliers
from apexsim.traces import Bundle


def test_the_published_h100_coefficients():
    """arXiv:2601.11580's simulator: seconds of a pass of 5 tokens over 1,000 tokens of context, and of a 4-token draft."""
    profile = load_profile("llama3.1-8b-h100")
    assert profile.verify.seconds(5, 1000) == pytest.approx(5.88590713e-3 + 5 * 2.10103129e-5 + 1000 * 3.92645679e-8)
    eagle = profile.method("eagle3", "eagle3")
    assert eagle.draft.seconds(4, 1000) == pytest.approx(2.13526175e-3 + 4 * 8.41429603e-7 + 1000 * 2.37768493e-9)
    assert (eagle.sync_s, load_profile("llama3.1-8b-h100-sync").method("eagle3", "eagle3").sync_s) == (
        0.0,
        2.13526175e-3,
    )
    assert profile.method("my-copier", "ngram").verify_share == 0.005875  # by kind
    with pytest.raises(
        ProfileError, match="no price for method 'medusa' of kind 'medusa'; it prices: eagle3, ngram, suffix"
    ):
        profile.method("medusa", "medusa")


def test_a_table_is_linear_between_knots_flat_outside_and_never_deeper():
    table = Table((1.0, 3.0), (1.0, 5.0), (100.0, 200.0), (((1.0, 2.0), (3.0, 4.0)), ((3.0, 4.0), (5.0, 6.0))))
    assert table.seconds(1, 100) == 1.0
    assert table.seconds(3, 150) == 2.5
    assert table.seconds(3, 150, batch=2) == 3.5
    assert (table.seconds(0, 50), table.seconds(5, 900, batch=9)) == (1.0, 6.0)
    with pytest.raises(ProfileError, match="prices at most 5 tokens, asked for 6"):
        table.seconds(6, 100)


def test_a_profile_survives_its_json(tmp_path):
    for profile in (
        synthetic.profile(sync=0.1, tail_draft=True, staircase=True),
        load_profile("llama3.1-8b-h100-sync"),
    ):
        file = tmp_path / "profile.json"
        file.write_text(cost.dump_profile(profile))
        assert load_profile(file) == profile


GOOD = json.loads(cost.dump_profile(synthetic.profile()))
BAD = [
    (GOOD | {"schema": "x"}, "key 'schema' must be 'apexsim.cost/1'"),
    ({k: v for k, v in GOOD.items() if k != "verify"}, "missing key 'verify'"),
    (GOOD | {"verify": {"form": "spline"}}, "verify.form is 'spline'; allowed: linear, table"),
    (GOOD | {"verify": {"form": "linear", "constant_s": 0.0}}, "must take positive seconds"),
    (GOOD | {"verify": {"form": "linear", "constant_s": -1.0}}, "verify.constant_s is -1.0"),
    (GOOD | {"overhead_s": float("nan")}, "overhead_s is nan"),
    (GOOD | {"sync_mode": "sometimes"}, "sync_mode is 'sometimes'; allowed: each"),
    (GOOD | {"colour": "red"}, "colour"),
    (GOOD | {"tail_draft": "no"}, "tail_draft is 'no'; must be a bool"),
    (GOOD | {"overhead_s": True}, "overhead_s is True"),
    (GOOD | {"overhead_s": 1e300}, "overhead_s is 1e+300"),
    (GOOD | {"notes": "abc"}, "notes must be a list of texts"),
    (GOOD | {"name": 5}, "name is 5; must be a str"),
    (
        GOOD | {"verify": {"form": "table", "batch": ["x"], "tokens": [1], "context": [0], "seconds": [[[1]]]}},
        "bad.json",
    ),
    (
        GOOD | {"verify": {"form": "table", "batch": [1], "tokens": [1], "context": [0], "seconds": [[1], 2]}},
        "bad.json",
    ),
    ({"batch_stats": {}}, "batch_stats must"),
    ({"batch_stats": []}, "batch_stats must"),
    ({"batch_stats": {"1": {"0": "fast"}}}, "batch_stats must"),
    ({"batch_stats": {"one": {"0": 1.0}}}, "batch_stats must"),
    ({"batch_stats": {"1": 3}}, "batch_stats must"),
    ({"batch_stats": {"1": {"0": 0.0}}}, "bad: batch_stats must hold positive milliseconds"),
    (GOOD | {"methods": {"ngram": {"sync_s": -0.5}}}, "methods.ngram.sync_s is -0.5"),
    (GOOD | {"verify": {"form": "table", "batch": [1], "tokens": [2, 1], "context": [0], "seconds": []}}, "ascending"),
    (GOOD | {"verify": {"form": "table", "batch": [1], "tokens": [1], "context": [0], "seconds": [[1.0]]}}, "shape"),
    (
        GOOD | {"verify": {"form": "table", "batch": [1], "tokens": [1], "context": [0], "seconds": [[[0.0]]]}},
        "positive",
    ),
]


@pytest.mark.parametrize(("data", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_profile_is_refused_by_file_and_key(tmp_path, data, message):
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ProfileError, match=re.escape(message)) as raised:
        load_profile(file)
    assert "bad" in str(raised.value)
    assert "\n" not in str(raised.value)
    file.write_text("{")
    with pytest.raises(ProfileError, match=r"bad\.json: not JSON"):
        load_profile(file)
    with pytest.raises(ProfileError, match="no such cost profile; give a JSON file or one of: llama3"):
        load_profile("nope")


def test_a_step_table_flags_a_typo_and_keeps_the_rest(tmp_path):
    rows = {"1": {"0": 10.0, "1": 11.0, "2": 12.0}, "8": {"0": 12.0, "1": 14.0, "2": 160.0}}
    file = tmp_path / "itl.json"
    file.write_text(json.dumps({"batch_stats": rows}))
    profile = load_profile(file)
    assert profile.notes[1] == "batch 8, k 2: 160 ms is a likely typo; 15.27 ms is used"
    assert profile.verify.seconds(2, 0, batch=8) == 0.014
    assert profile.method("anything", "any").draft == Linear()
    del rows["8"]["1"]
    file.write_text(json.dumps({"batch_stats": rows}))
    with pytest.raises(ProfileError, match="no k '1' at every batch size"):
        load_profile(file)


def measured(seed: int = 0, noise: float = 0.03, plain: bool = True) -> Bundle:
    """Blocks drawn from known costs: verify 10 ms + a step of 2 ms every 4 tokens + 1 us a context token; draft 1 ms a step."""
    rng = np.random.default_rng(seed)
    bundle = synthetic.bundle([{"eagle3": [0] * 3000}], kmax=16)
    rows = []
    for run, method, depth in [("ar", "", 0)] * plain + [(f"k{k}", "eagle3", k) for k in (0, 1, 2, 4, 8, 16)]:
        for i in range(400):
            context = int(rng.integers(20, 2000))
            noisy = np.exp(noise * rng.standard_normal(3))
            rows.append(
                {
                    "request": 0, "run": run, "policy": run, "method": method, "position": i + 1, "depth": depth,
                    "drafter_steps": depth, "drafted": depth, "accepted": 0, "emitted": 1,
                    "draft_s": 0.001 * depth * noisy[0] + (0.0005 if method and not depth else 0.0),
                    "verify_s": (0.010 + 0.002 * (depth // 4) + 1e-6 * context) * noisy[1],
                    "overhead_s": 0.0004 * noisy[2], "batch_size": 1, "context_tokens": context, "step": i,
                }
            )  # fmt: skip
    rows[0]["verify_s"] = 0.5  # a warm-up
    schema_of = {c.name: c.dtype for c in schema.BLOCKS}
    return Bundle(bundle.meta, bundle.requests, bundle.positions, pl.DataFrame(rows, schema=schema_of))


def test_a_step_of_several_requests_is_one_measurement_of_their_mean_tokens():
    alone = measured(noise=0.0)
    rows = alone.blocks.filter(pl.col("depth") == 4)
    drafted = pl.Series("drafted", [6, 2] * (rows.height // 2), dtype=pl.Int32)
    pair = rows.with_columns(
        run=pl.lit("pair"), step=pl.col("step") // 2, batch_size=pl.lit(2, pl.Int32), verify_s=pl.lit(0.05),
        drafted=drafted, depth=drafted, drafter_steps=drafted, draft_s=pl.lit(0.006),
    )  # fmt: skip
    few = rows.head(20).with_columns(run=pl.lit("ending"), batch_size=pl.lit(3, pl.Int32))
    profile = fit_profile(Bundle(alone.meta, alone.requests, alone.positions, pl.concat([alone.blocks, pair, few])))
    assert isinstance(profile.verify, Table)
    assert profile.verify.batch == (1.0, 2.0)  # too few blocks of batch 3
    assert profile.verify.seconds(5, 1000, 2) == pytest.approx(0.05)
    assert profile.verify.seconds(5, 1000) == pytest.approx(fit_profile(alone).verify.seconds(5, 1000), rel=1e-3)
    draft = profile.method("eagle3", "eagle3").draft
    assert draft.seconds(6, 1000, 2) == pytest.approx(0.006)  # the deeper of the two drafts


def test_known_costs_are_recovered():
    profile = fit_profile(measured())
    for tokens, step in ((1, 0), (2, 0), (3, 0), (5, 1), (9, 2), (17, 4)):
        for context in (300, 1000, 1700):
            expected = 0.010 + 0.002 * step + 1e-6 * context
            assert profile.verify.seconds(tokens, context) == pytest.approx(expected, rel=0.02)
    eagle = profile.method("eagle3", "eagle3")
    assert [eagle.draft.seconds(k, 1000) for k in (1, 4, 16)] == pytest.approx([0.001, 0.004, 0.016], rel=0.02)
    assert eagle.sync_s == pytest.approx(0.0005, rel=0.05)
    assert profile.overhead_s == pytest.approx(0.0004, rel=0.02)
    assert profile.notes[0].startswith("1 of 2800 blocks left out")


def test_a_fit_is_monotone_and_keeps_steps():
    table = fit_profile(measured(noise=0.2)).verify
    assert isinstance(table, Table)
    seconds = np.array(table.seconds_by)
    assert (np.diff(seconds, axis=1) >= 0).all()
    assert (np.diff(seconds, axis=2) >= 0).all()


def test_a_fit_says_what_was_not_measured():
    bundle = measured(plain=False)
    notes = fit_profile(bundle).notes
    assert any("no run without a drafter" in note for note in notes)
    deep = Bundle(bundle.meta, bundle.requests, bundle.positions, bundle.blocks.filter(pl.col("depth") == 8))
    notes = fit_profile(deep).notes
    assert any("plain decoding is priced as 9 tokens" in note for note in notes)
    assert any("all are priced as 8" in note for note in notes)
    with pytest.raises(ProfileError, match="no timed blocks to fit a cost profile to; give --cost-profile"):
        fit_profile(Bundle(bundle.meta, bundle.requests, bundle.positions))
    plain = Bundle(bundle.meta, bundle.requests, bundle.positions, bundle.blocks.filter(pl.col("depth") == 0))
    with pytest.raises(ProfileError, match="method 'eagle3' has no timed block that drafts"):
        fit_profile(plain)


def test_outliers_are_judged_within_run_and_depth():
    blocks = measured(noise=0.0).blocks
    flagged = outliers(blocks)
    assert flagged.arg_true().to_list() == [0]
    assert MethodCost().sync_s == 0.0
