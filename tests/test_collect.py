"""Recording bundles: from prompts and parts on disk to tables and exactness figures, without an engine."""

from __future__ import annotations

import json
import math

import numpy as np
import polars as pl
import pytest

from apexsim import schema, traces
from apexsim.checks import check_bundle
from apexsim.errors import ApexSimError, BundleError, UsageError
from real_runs import assemble, engine, prompts
from real_runs.assemble import MeasuredRun
from real_runs.exactness import exactness
from real_runs.parts import Block, Job, Part, Run, part_path, read_part, write_part
from real_runs.prompts import Prompt

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
OUTPUT = [7, 5, 6, 8, 2]


def fake_prompts(count, workload="w", prefix="p"):
    return [Prompt(f"{prefix}{i}", workload, f"{prefix}{i}", f"text {i}", "train", tuple(PROMPT)) for i in range(count)]


def shadow_part(request="p0"):
    return Part(
        request,
        list(OUTPUT),
        "stop",
        entropy=[0.0, 1.0, 2.0, 0.5, 0.1],
        probability=[1.0, 0.5, 0.2, 0.9, 0.99],
        gap=[30.0, math.log(2), 0.1, 2.5, 5.0],
        drafts={1: [5, 6, 7], 2: [6, 8, 2, 9], 3: [], 4: [2, 9]},
    )


def neural_part():
    """A drafter with signals: one value per draft token, divergences up to the first rejection."""
    part = shadow_part()
    lengths = {p: len(draft) for p, draft in part.drafts.items()}
    part.signals = {
        "prob": {p: [0.5] * n for p, n in lengths.items()},
        "margin": {p: [0.25] * n for p, n in lengths.items()},
        "kl": {1: [0.0, 0.1, 3.0], 2: [0.2, 0.2, 0.2], 4: [0.0, 0.5]},
    }
    return part


def block(position, depth, drafted, accepted, emitted, draft_s=0.001):
    return Block(position, depth, drafted, accepted, emitted, draft_s, 0.02, 0.001, 1, len(PROMPT) + position, position)


def measured(blocks, tokens=OUTPUT, name="ngram-k2-b1", method="ngram"):
    run = Run(name, "fixed:ngram:2", "fixed", 2, 1, 16, (0,))
    return MeasuredRun(run, method, (Part("p0", list(tokens), "stop", 0.1, 0.0, blocks=blocks),))


@pytest.mark.parametrize("count", [3, 4, 5, 10, 20, 61])
def test_each_workload_of_three_groups_or_more_has_every_split(count):
    rows = prompts.assign_splits(fake_prompts(count, "a", "a") + fake_prompts(count, "b", "b"))
    for workload in "ab":
        splits = [row.split for row in rows if row.workload == workload]
        assert set(splits) == {"train", "validation", "test"}
        assert splits.count("validation") == splits.count("test") == max(1, round(0.2 * count))


def test_splits_never_cut_a_group_and_do_not_depend_on_the_order():
    rows = [Prompt(f"sonnet-{i}", "w", prompts.group_of(f"sonnet-{i}"), str(i)) for i in range(8)] + fake_prompts(9)
    split = {row.request_id: row.split for row in prompts.assign_splits(rows)}
    assert len({split[f"sonnet-{i}"] for i in range(8)}) == 1
    assert {row.request_id: row.split for row in prompts.assign_splits(rows[::-1])} == split


def test_two_groups_take_the_split_of_their_hash():
    rows = prompts.assign_splits(fake_prompts(2))
    assert [row.split for row in rows] == [traces.split_of(row.source_group) for row in rows]


def test_groups():
    assert prompts.group_of("sonnet-3") == "sonnet"
    assert prompts.group_of("kv75-20") == "kv75-20"
    assert prompts.group_of("HumanEval/3") == "HumanEval/3"


def test_read_joins_identical_prompts(tmp_path):
    file = tmp_path / "p.jsonl"
    rows = [("a", "same  text"), ("b", "same text"), ("c", "other")]
    file.write_text("\n".join(json.dumps({"id": i, "workload": "w", "prompt": t}) for i, t in rows))
    assert [row.source_group for row in prompts.read([file])] == ["a", "a", "c"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "line 1: not JSON"),
        ('{"id": "a", "prompt": "x"}', "line 1: needs a text under 'workload'"),
        ('{"id": "a", "workload": "w", "prompt": 3}', "line 1: needs a text under 'prompt'"),
        ('{"id":"a","workload":"w","prompt":"x"}\n{"id":"a","workload":"w","prompt":"y"}', "'a' occurs twice"),
        ("", "no prompts in it"),
    ],
)
def test_bad_prompt_files_are_named(tmp_path, text, message):
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        prompts.read([file])


def test_limit_and_timing_selection_are_even_and_stratified():
    rows = fake_prompts(10, "a", "a") + fake_prompts(3, "b", "b")
    limited = prompts.limit_per_workload(rows, 5)
    assert [row.request_id for row in limited] == ["a1", "a3", "a5", "a7", "a9", "b0", "b1", "b2"]
    picked = [limited[i].workload for i in prompts.stratified(limited, 4)]
    assert picked.count("a") == picked.count("b") == 2
    assert len(prompts.stratified(limited, 100)) == len(limited)


def test_licences_come_from_the_provenance_table(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"id": "a", "workload": "w", "prompt": "x", "source": "somewhere"}))
    (tmp_path / "PROVENANCE.md").write_text(
        "| file | n | source | licence |\n|---|---|---|---|\n| p.jsonl | 1 | X | MIT |\n"
    )
    (facts,) = prompts.sources([file], prompts.read([file]))
    assert (facts["file"], facts["licence"], facts["origin"], facts["sources"]) == (
        "p.jsonl",
        "MIT",
        "X",
        ["somewhere"],
    )


def test_positions_from_drafts():
    table = assemble.position_table(fake_prompts(1), {"ngram": (shadow_part(),)}, {"ngram"})
    assert table["position"].to_list() == [1, 2, 3, 4]
    assert table["token_id"].to_list() == OUTPUT[:4]
    assert table["drafted.ngram"].to_list() == [3, 4, 0, 2]
    # At p = 2 the draft goes on past the end of the text: three tokens of it match, no more can.
    assert table["accepted.ngram"].to_list() == [2, 3, 0, 1]
    assert table["match.ngram"].to_list() == [6, 7, 8, 0]
    # The second-best token of y_2 has half the probability of the best: 0.5 - 0.25.
    assert table["target_margin"].to_list()[:2] == [255, 64]


def test_draft_signals_are_coded_one_list_per_position(tmp_path):
    table = assemble.position_table(fake_prompts(1), {"draft": (neural_part(),)}, set())
    assert table["draft_prob.draft"].to_list() == [[128] * 3, [128] * 4, [], [128] * 2]
    assert table["draft_margin.draft"].to_list()[0] == [64] * 3
    assert [len(codes) for codes in table["draft_kl.draft"].to_list()] == [3, 3, 0, 2]
    assert table["draft_kl.draft"].to_list()[0] == schema.encode_entropy(np.array([0.0, 0.1, 3.0])).tolist()
    assert "match.draft" not in table.columns
    check(table, tmp_path, "draft")


@pytest.mark.parametrize(
    ("column", "values", "rule"),
    [
        ("draft_prob.draft", [[1] * 3, [1] * 3, [], [1] * 2], "row 1: 3: .*must be one value per draft token"),
        ("draft_kl.draft", [[1] * 4, [], [], []], "row 0: 4: .*must be at most one value per draft token"),
        ("draft_margin.draft", [[1, None, 1], [1] * 4, [], [1] * 2], "row 0: 3: .*none of them may be null"),
    ],
)
def test_wrong_draft_signals_are_refused(tmp_path, column, values, rule):
    table = assemble.position_table(fake_prompts(1), {"draft": (neural_part(),)}, set())
    table = table.with_columns(pl.Series(column, values, dtype=pl.List(pl.UInt8)))
    with pytest.raises(BundleError, match=f"column '{column}', {rule}"):
        check(table, tmp_path, "draft")


def check(positions, path, method):
    requests = assemble.request_table(fake_prompts(1), (shadow_part(),), (prefill_part(),), 16)
    tables = {"requests": requests, "positions": positions, "blocks": schema.empty("blocks")}
    check_bundle({"kmax": 16, "methods": {method: {"kind": "draft_model"}}}, tables, path)


def prefill_part():
    return Part("p0", [7], "length", prefill_s=0.1, embedding=[1.0] * 64)


def test_a_method_whose_own_pass_left_the_text_was_not_asked_after_that():
    own = shadow_part()
    own.token_ids = [7, 5, 9, 8, 2]
    table = assemble.position_table(fake_prompts(1), {"a": (shadow_part(),), "b": (own,)}, set())
    assert table["drafted.b"].to_list() == [3, 4, None, None]
    assert table["accepted.b"].to_list() == [2, 3, None, None]
    figures = exactness([], (shadow_part(),), (own,), table, "b")
    assert figures["first_divergence"] == {"shadow": {"p0": 3}}


def test_token_entropy():
    assert assemble.token_entropy([]) == assemble.token_entropy([4, 4, 4]) == 0.0
    assert assemble.token_entropy([1, 2, 3, 4]) == pytest.approx(math.log(4))


def test_match_lengths_equal_a_plain_search():
    rng = np.random.default_rng(0)
    prompt, output = rng.integers(0, 3, 60).tolist(), rng.integers(0, 3, 40).tolist()
    text = prompt + output

    def longest(context):
        lengths = range(min(32, len(context) - 1), 0, -1)
        return next((n for n in lengths if any(context[i : i + n] == context[-n:] for i in range(len(context) - n))), 0)

    expected = [longest(text[: len(prompt) + p]) for p in range(1, len(output))]
    assert assemble.match_lengths(prompt, output).tolist() == expected


def test_a_missing_draft_is_an_error():
    part = shadow_part()
    del part.drafts[3]
    with pytest.raises(ApexSimError, match="no draft was recorded at position 3"):
        assemble.position_table(fake_prompts(1), {"ngram": (part,)}, set())


def test_assembled_tables_pass_the_checks(tmp_path):
    texts = (shadow_part(),)
    # The engine accepted four draft tokens at p = 2, one of them past the end of the text.
    run = measured([block(1, 2, 2, 2, 3), block(4, 2, 2, 1, 1)])
    tail = measured([block(1, 0, 0, 0, 1), block(2, 4, 4, 4, 3)], name="other")
    blocks, dropped = assemble.block_table([run, tail], texts)
    requests = assemble.request_table(fake_prompts(1), texts, (prefill_part(),), 16)
    positions = assemble.position_table(fake_prompts(1), {"ngram": texts}, {"ngram"})
    meta = {"kmax": 16, "methods": {"ngram": {"kind": "ngram"}}}
    check_bundle(meta, {"requests": requests, "positions": positions, "blocks": blocks}, tmp_path)
    assert dropped == 0
    assert blocks["accepted"].to_list() == [2, 1, 0, 3]
    assert blocks["emitted"].to_list() == [3, 1, 1, 3]


def test_exactness_counts_mismatches_censoring_and_trivial_blocks():
    texts = (shadow_part(),)
    positions = assemble.position_table(fake_prompts(1), {"ngram": texts}, {"ngram"})
    right = measured([block(1, 2, 2, 2, 3), block(4, 2, 2, 1, 1)])
    wrong = measured([block(1, 1, 1, 0, 1), block(2, 1, 1, 1, 2), block(3, 2, 0, 0, 1)])
    figures = exactness([right, wrong], texts, texts, positions, "ngram")
    assert figures == {
        "blocks": 4,
        "drafting_blocks": 3,
        "mismatches": 1,
        "share_equal": pytest.approx(2 / 3),
        "censored_blocks": 1,
        "first_divergence": {},
        "mismatch_list": [
            {
                "run": "ngram-k2-b1",
                "request_id": "p0",
                "position": 1,
                "depth": 1,
                "expected": 1,
                "accepted": 0,
                "target_logit_gap": math.log(2),
                "draft_margin": None,
            }
        ],
    }


def test_a_mismatch_names_the_margin_of_the_drafter():
    part = neural_part()
    table = assemble.position_table(fake_prompts(1), {"draft": (part,)}, set())
    figures = exactness([measured([block(2, 2, 2, 1, 2)], method="draft")], (part,), (part,), table, "draft")
    (item,) = figures["mismatch_list"]
    assert (item["expected"], item["accepted"], item["target_logit_gap"], item["draft_margin"]) == (2, 1, 2.5, 0.25)


def test_a_timed_run_may_be_shorter_than_the_text():
    texts = (shadow_part(),)
    positions = assemble.position_table(fake_prompts(1), {"ngram": texts}, {"ngram"})
    run = Run("short", "fixed:ngram:2", "fixed", 2, 1, 2, (0,))
    short = MeasuredRun(run, "ngram", (Part("p0", OUTPUT[:2], "length", blocks=[block(1, 2, 2, 2, 1)]),))
    assert exactness([short], texts, texts, positions, "ngram")["first_divergence"] == {}
    blocks, dropped = assemble.block_table([short], texts)
    assert (blocks["accepted"].to_list(), blocks["emitted"].to_list(), dropped) == ([2], [3], 0)


def test_blocks_after_a_divergence_are_dropped_and_reported():
    texts = (shadow_part(),)
    positions = assemble.position_table(fake_prompts(1), {"ngram": texts}, {"ngram"})
    run = measured([block(1, 1, 1, 1, 2), block(3, 0, 0, 0, 1), block(4, 0, 0, 0, 1)], tokens=[7, 5, 6, 9, 2])
    blocks, dropped = assemble.block_table([run], texts)
    assert (blocks["position"].to_list(), dropped) == ([1], 2)
    figures = exactness([run], texts, texts, positions, "ngram")
    assert figures["first_divergence"] == {"ngram-k2-b1": {"p0": 4}}
    assert (figures["blocks"], figures["mismatches"]) == (2, 0)


def test_parts_and_jobs_survive_the_disk(tmp_path):
    part = neural_part()
    part.blocks.append(block(1, 2, 2, 2, 3))
    write_part(part_path(tmp_path, "run", 3), part)
    assert read_part(part_path(tmp_path, "run", 3)) == part
    run = Run("a", "fixed:ngram:1", "fixed", 1, 2, 8, (0, 1))
    job = Job("j", "model", "float32", 64, "ngram", {"method": "ngram"}, 0, True, (run,))
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job


def test_depths_take_turns_and_each_request_comes_once_per_run():
    runs = [Run(f"k{k}", "", "fixed", k, 2, 8, (0, 1, 2)) for k in (0, 1, 2)]
    order = [(run.name, rows) for run, rows in engine.schedule(runs)]
    assert order[:4] == [("k0", (0, 1)), ("k1", (0, 1)), ("k2", (0, 1)), ("k1", (2,))]
    assert sorted(order) == sorted((f"k{k}", rows) for k in (0, 1, 2) for rows in ((0, 1), (2,)))


def test_shadow_groups_take_every_nth_request():
    run = Run("shadow", "", "shadow", 16, 3, 8, tuple(range(8)))
    assert engine.chunks(run) == [(0, 3, 6), (1, 4, 7), (2, 5)]


def test_random_depths_are_reproducible_and_cover_the_range():
    depths = [engine.random_depth(0, "r", p, 4) for p in range(200)]
    assert depths == [engine.random_depth(0, "r", p, 4) for p in range(200)]
    assert set(depths) == {0, 1, 2, 3, 4}
    assert depths != [engine.random_depth(1, "r", p, 4) for p in range(200)]
