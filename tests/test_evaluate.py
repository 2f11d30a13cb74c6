"""Rows of results.json: every figure recomputed by hand from the blocks."""

from __future__ import annotations

import numpy as np
import pytest
import synthetic

import policies
from apexsim import metrics
from apexsim.evaluate import Entry, Evaluation
from apexsim.hindsight import Hindsight
from apexsim.program import compile_program, select
from policies import Context


def rows_of(bundle, names, profile=None, waste_weight=0.0, **selection):
    program = compile_program(bundle, profile or synthetic.profile(), **selection)
    known = Hindsight(program, waste_weight)
    context = Context(program.space, 0, known, known)
    evaluation = Evaluation(program, known, "test")
    entries = [Entry(name, policies.find(name)[0].family, policies.build(name, context)) for name in names]
    scored = evaluation.score(entries)
    return evaluation.rows(scored), evaluation.requests(scored), program


def test_a_row_by_hand():
    """T 4 and T 3, prompts 10; depth 2: blocks (d 2, a 2), and (d 2, a 0), (d 2, a 1 and the end)."""
    bundle = synthetic.bundle([{"eagle3": [2, 0, 1]}, {"eagle3": [0, 1]}], kmax=2)
    rows, requests, program = rows_of(bundle, ["fixed:eagle3:2", "ar"])
    row = rows[0]
    block = 1.0 + 0.01 * 3 + 0.1 + 0.05 * 2 + 0.03
    slope = 0.0001 + 0.00001
    seconds = [block + 11 * slope, 2 * block + (11 + 12) * slope]
    plain = [3 * 1.03 + 0.0001 * (11 + 12 + 13), 2 * 1.03 + 0.0001 * (11 + 12)]
    assert (row["requests"], row["tokens"], row["blocks"], row["drafted"], row["committed"]) == (2, 5, 3, 6, 3)
    assert row["seconds"] == pytest.approx(sum(seconds))
    assert row["seconds_ar"] == pytest.approx(sum(plain))
    assert row["speedup"] == pytest.approx((plain[0] / seconds[0] + plain[1] / seconds[1]) / 2)
    assert row["speedup_total"] == pytest.approx(sum(plain) / sum(seconds))
    assert row["waste_percent"] == pytest.approx((0 + 75) / 2)
    assert row["waste_percent_total"] == pytest.approx(50)
    assert row["was"] == pytest.approx(row["speedup"] / 0.375)
    assert (row["tokens_per_block"], row["acceptance_length"], row["acceptance_rate"]) == (5 / 3, 2.0, 0.5)
    assert (row["mean_depth"], row["coverage"], row["aligned"], row["prefill_seconds"]) == (2.0, 1.0, True, None)
    assert row["objective"] == pytest.approx(sum(seconds) / program.step_s / 5)
    assert row["speedup_ci"][0] < row["speedup"] < row["speedup_ci"][1]
    ar = rows[1]
    assert (ar["speedup"], ar["waste_percent"], ar["was"], ar["acceptance_length"]) == (1.0, None, None, None)
    assert ar["gap_closed"] is None
    assert requests["speedup"].to_list()[:2] == pytest.approx([p / s for p, s in zip(plain, seconds, strict=True)])
    assert requests["waste_percent"].to_list() == [0.0, 75.0, None, None]


def test_the_waste_weight_prices_wasted_tokens():
    bundle = synthetic.bundle([{"eagle3": [2, 0, 1]}, {"eagle3": [0, 1]}], kmax=2)
    free = rows_of(bundle, ["fixed:eagle3:2"])[0][0]["objective"]
    priced = rows_of(bundle, ["fixed:eagle3:2"], waste_weight=0.5)[0][0]["objective"]
    assert priced == pytest.approx(free + 0.5 * 3 / 5)


def test_gaps_start_at_best_fixed_and_end_at_the_oracle_of_the_class():
    bundle = synthetic.random_bundle(4, count=30)
    names = ["best-fixed:hindsight", "oracle", "oracle:method", "oracle:depth:eagle3", "hf-heuristic:eagle3", "ar"]
    rows, _, _ = rows_of(bundle, names)
    by_name = {row["policy"]: row for row in rows if row["workload"] == "all"}
    assert by_name["best-fixed:hindsight"]["gap_closed"] == pytest.approx(0.0)
    assert by_name["oracle"]["gap_closed"] == by_name["oracle"]["gap_closed_switch"] == pytest.approx(1.0)
    assert by_name["oracle:method"]["gap_closed"] == pytest.approx(1.0)
    assert 0 < by_name["oracle:method"]["gap_closed_switch"] < 1
    fixed, mine, best = (
        by_name[n]["objective"] for n in ("best-fixed:hindsight", "hf-heuristic:eagle3", "oracle:depth:eagle3")
    )
    assert by_name["hf-heuristic:eagle3"]["gap_closed"] == pytest.approx((fixed - mine) / (fixed - best))
    assert {row["workload"] for row in rows} == {"all", "a", "b"}
    for name in names:
        parts = [row for row in rows if row["policy"] == name and row["workload"] != "all"]
        for key in ("tokens", "blocks", "drafted", "committed", "requests"):
            assert sum(row[key] for row in parts) == by_name[name][key]


def test_best_fixed_names_what_it_chose_per_workload():
    rows, requests, _ = rows_of(synthetic.random_bundle(4, count=30), ["best-fixed:hindsight"])
    parts = {row["workload"]: row["resolved"] for row in rows}
    assert parts["a"].startswith("fixed:") or parts["a"] == "ar"
    if parts["a"] != parts["b"]:
        assert parts["all"] == f"a={parts['a']}; b={parts['b']}"
    assert set(requests["resolved"]) == {parts["a"], parts["b"]}


def test_an_oracle_that_equals_best_fixed_leaves_no_gap():
    """Nothing is ever accepted: plain decoding is the best there is, and the gap undefined, not infinite."""
    rows, _, _ = rows_of(synthetic.bundle([{"eagle3": [0] * 9}]), ["ar", "oracle", "fixed:eagle3:4"])
    assert [row["gap_closed"] for row in rows] == [None, None, None]


def test_selection_by_split_workload_and_alignment():
    bundle = synthetic.bundle(
        [{"eagle3": [0]}] * 4, workload=["a", "a", "b", "b"], split=["train", "test", "test", "train"],
        aligned=[True, True, False, True],
    )  # fmt: skip
    assert select(bundle, "test").tolist() == [1, 2]
    assert select(bundle, "all", "b").tolist() == [2, 3]
    assert select(bundle, "test", aligned=True).tolist() == [1]


@pytest.mark.small
def test_intervals_are_seeded_and_degenerate_cases_defined():
    values = np.random.default_rng(0).random(50)
    groups = np.arange(50)
    assert metrics.mean_interval(values, groups, 3) == metrics.mean_interval(values, groups, 3)
    assert metrics.mean_interval(values[:1], groups[:1], 0) is None
    assert metrics.mean_interval(np.ones(5), np.arange(5), 0) == [1.0, 1.0]
    low, high = metrics.mean_interval(values, groups, 0)
    width = 2 * 1.96 * values.std() / np.sqrt(50)
    assert high - low == pytest.approx(width, rel=0.1)
