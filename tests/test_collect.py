"""Recording bundles: the pure parts without an engine, and one real recording (marked live)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib import util
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from apexsim import traces
from apexsim.checks import check_bundle
from apexsim.errors import ApexSimError, UsageError
from real_runs import assemble, engine, models, prompts, recording
from real_runs.assemble import MeasuredRun
from real_runs.collect import CollectOptions, check_options, collect, command, fingerprint, make_plan, speculative
from real_runs.parts import Block, Job, Part, Run, part_path, read_part, write_part
from real_runs.prompts import Prompt

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
OUTPUT = [7, 5, 6, 8, 2]


def fake_prompts(count, workload="w", prefix="p"):
    return [Prompt(f"{prefix}{i}", workload, f"{prefix}{i}", f"text {i}", "train", tuple(PROMPT)) for i in range(count)]


def shadow_part(request="p0"):
    drafts = {1: [5, 6, 7], 2: [6, 8, 2, 9], 3: [], 4: [2, 9]}
    return Part(
        request, list(OUTPUT), "stop", None, None, [0.0, 1.0, 2.0, 0.5, 0.1], [1.0, 0.5, 0.2, 0.9, 0.99], drafts
    )


def block(position, depth, drafted, accepted, emitted, draft_s=0.001):
    return Block(position, depth, drafted, accepted, emitted, draft_s, 0.02, 0.001, 1, len(PROMPT) + position)


def measured(blocks, tokens=OUTPUT, name="ngram-k2-b1", method="ngram"):
    run = Run(name, "fixed:ngram:2", "fixed", 2, 1, 16, (0,))
    return MeasuredRun(run, method, (Part("p0", list(tokens), "stop", 0.1, 0.0, blocks=blocks),))


@pytest.fixture
def options(tmp_path):
    file = tmp_path / "prompts.jsonl"
    rows = [{"id": f"r{i}", "workload": "w", "prompt": f"say {i}"} for i in range(4)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return CollectOptions("smollm2-135m-instruct", ("ngram",), (file,), tmp_path / "out")


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
    table = assemble.position_table(fake_prompts(1), {"ngram": (shadow_part(),)})
    assert table["position"].to_list() == [1, 2, 3, 4]
    assert table["token_id"].to_list() == OUTPUT[:4]
    assert table["drafted.ngram"].to_list() == [3, 4, 0, 2]
    # At p = 2 the draft goes on past the end of the text: three tokens of it match, no more can.
    assert table["accepted.ngram"].to_list() == [2, 3, 0, 1]
    assert table["match.ngram"].to_list() == [6, 7, 8, 0]


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
        assemble.position_table(fake_prompts(1), {"ngram": (part,)})


def test_assembled_tables_pass_the_checks(tmp_path):
    texts = (shadow_part(),)
    # The engine accepted four draft tokens at p = 2, one of them past the end of the text.
    run = measured([block(1, 2, 2, 2, 3), block(4, 2, 2, 1, 1)])
    tail = measured([block(1, 0, 0, 0, 1), block(2, 4, 4, 4, 3)], name="other")
    blocks, dropped = assemble.block_table([run, tail], texts)
    requests = assemble.request_table(fake_prompts(1), texts, {"p0": 0.1}, 16)
    positions = assemble.position_table(fake_prompts(1), {"ngram": texts})
    meta = {"kmax": 16, "methods": {"ngram": {"kind": "ngram"}}}
    check_bundle(meta, {"requests": requests, "positions": positions, "blocks": blocks}, tmp_path)
    assert dropped == 0
    assert blocks["accepted"].to_list() == [2, 1, 0, 3]
    assert blocks["emitted"].to_list() == [3, 1, 1, 3]


def test_exactness_counts_mismatches_censoring_and_trivial_blocks():
    texts = (shadow_part(),)
    positions = assemble.position_table(fake_prompts(1), {"ngram": texts})
    right = measured([block(1, 2, 2, 2, 3), block(4, 2, 2, 1, 1)])
    wrong = measured([block(1, 1, 1, 0, 1), block(2, 1, 1, 1, 2), block(3, 2, 0, 0, 1)])
    figures = assemble.exactness([right, wrong], texts, positions, "ngram")
    assert figures == {
        "blocks": 4,
        "drafting_blocks": 3,
        "mismatches": 1,
        "share_equal": pytest.approx(2 / 3),
        "censored_blocks": 1,
        "first_divergence": {},
    }


def test_blocks_after_a_divergence_are_dropped_and_reported():
    texts = (shadow_part(),)
    positions = assemble.position_table(fake_prompts(1), {"ngram": texts})
    run = measured([block(1, 1, 1, 1, 2), block(3, 0, 0, 0, 1), block(4, 0, 0, 0, 1)], tokens=[7, 5, 6, 9, 2])
    blocks, dropped = assemble.block_table([run], texts)
    assert (blocks["position"].to_list(), dropped) == ([1], 2)
    figures = assemble.exactness([run], texts, positions, "ngram")
    assert figures["first_divergence"] == {"ngram-k2-b1": {"p0": 4}}
    assert (figures["blocks"], figures["mismatches"]) == (2, 0)


def test_parts_and_jobs_survive_the_disk(tmp_path):
    part = shadow_part()
    part.blocks.append(block(1, 2, 2, 2, 3))
    write_part(part_path(tmp_path, "run", 3), part)
    assert read_part(part_path(tmp_path, "run", 3)) == part
    run = Run("a", "fixed:ngram:1", "fixed", 1, 2, 8, (0, 1))
    job = Job("j", "model", "float32", 64, "ngram", speculative("ngram", 4), 0, (run,))
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job


def test_depths_take_turns_and_each_request_comes_once_per_run():
    runs = [Run(f"k{k}", "", "fixed", k, 2, 8, (0, 1, 2)) for k in (0, 1, 2)]
    order = [(run.name, rows) for run, rows in engine.schedule(runs)]
    assert order[:4] == [("k0", (0, 1)), ("k1", (0, 1)), ("k2", (0, 1)), ("k1", (2,))]
    assert sorted(order) == sorted((f"k{k}", rows) for k in (0, 1, 2) for rows in ((0, 1), (2,)))


def test_random_depths_are_reproducible_and_cover_the_range():
    depths = [engine.random_depth(0, "r", p, 4) for p in range(200)]
    assert depths == [engine.random_depth(0, "r", p, 4) for p in range(200)]
    assert set(depths) == {0, 1, 2, 3, 4}
    assert depths != [engine.random_depth(1, "r", p, 4) for p in range(200)]


def test_a_leftover_needs_resume_and_the_same_options(tmp_path):
    folder = tmp_path / "x.partial"
    recording.open_folder(folder, {"kmax": 4, "methods": ("ngram",)}, resume=False)
    recording.open_folder(folder, {"kmax": 4, "methods": ("ngram",)}, resume=True)
    with pytest.raises(UsageError, match="give --resume"):
        recording.open_folder(folder, {"kmax": 4, "methods": ("ngram",)}, resume=False)
    with pytest.raises(UsageError, match="with another kmax"):
        recording.open_folder(folder, {"kmax": 5, "methods": ("ngram",)}, resume=True)


def test_the_fingerprint_covers_what_is_recorded_and_not_where(options, tmp_path):
    same = fingerprint(CollectOptions(**{**vars(options), "out": tmp_path / "b", "resume": True}), "0.32.0")
    assert fingerprint(options, "0.32.0") == same
    assert fingerprint(CollectOptions(**{**vars(options), "seed": 1}), "0.32.0") != same
    assert fingerprint(options, "0.33.0") != same


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ("suffix",)}, "--methods suffix: .*allowed: ngram"),
        ({"methods": ()}, "name each method once"),
        ({"engine": "sglang"}, "--engine sglang: allowed: vllm"),
        ({"kmax": 0}, "--kmax 0: allowed: 1..64"),
        ({"timing_depths": (0, 17)}, r"--timing-depths 17: allowed: 0..16"),
        ({"max_tokens": 0}, "--max-tokens 0: must be at least 1"),
        ({"timing_batches": ()}, "--timing-batches 0: must be at least 1"),
        ({"limit_per_workload": 0}, "--limit-per-workload 0: must be at least 1"),
        ({"prompts": ()}, "--prompts: give at least one file"),
        ({"draft_model": "x"}, "cannot be recorded yet"),
        ({"out": Path(__file__).parent}, "exists and is not an earlier output"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, change, message):
    with pytest.raises(UsageError, match=message) as caught:
        check_options(CollectOptions(**{**vars(options), **change}))
    assert "\n" not in str(caught.value)


def test_a_missing_prompt_file_is_named(options, tmp_path):
    with pytest.raises(UsageError, match=r"nowhere\.jsonl: no such file"):
        collect(CollectOptions(**{**vars(options), "prompts": (tmp_path / "nowhere.jsonl",)}))


def test_the_recorded_command_holds_no_paths(options, monkeypatch):
    monkeypatch.setattr(models.metadata, "version", lambda package: "0.1.2")
    words = command(options)
    assert words[:4] == ["apexsim", "collect", "--target", "smollm2-135m-instruct"]
    assert "prompts.jsonl" in words
    assert not any("/" in word for word in words)


def test_the_plan_times_every_depth_and_a_plain_engine(options, monkeypatch):
    monkeypatch.setattr(models, "context_limit", lambda model, ceiling: ceiling)
    plan = make_plan(options, fake_prompts(20), "model")
    rounds = ["ngram-1", "plain-1", "ngram-2", "plain-2", "ngram-3", "plain-3"]
    assert [job.name for job in plan.jobs] == ["shadow-ngram", *rounds, "prefill"]
    names = [run.name for run in plan.timing[0].runs]
    assert names == [*(f"ngram-k{k}-b1" for k in (0, 1, 2, 4, 8, 16)), "ngram-random-b1"]
    assert plan.timing[1].speculative is None
    assert len({row for job in plan.timing for run in job.runs for row in run.requests}) == 12
    assert [len(run.requests) for run in plan.prefill.runs] == [20]


@pytest.mark.parametrize("target", ["/nowhere/at/all", "not-a-model", "./x"])
def test_an_unknown_target_is_refused(target):
    with pytest.raises(UsageError, match="no such folder"):
        models.resolve(target)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"no config\.json in it"):
        models.resolve(str(tmp_path))


def test_targets_that_pass_through(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert models.resolve(str(tmp_path)) == str(tmp_path.resolve())
    assert models.resolve("org/model-1b") == "org/model-1b"


def test_an_untried_vllm_is_refused(monkeypatch):
    monkeypatch.setattr(engine.util, "find_spec", lambda name: object())
    monkeypatch.setattr(engine.metadata, "version", lambda package: "0.31.1")
    with pytest.raises(ApexSimError, match=r"vLLM 0\.31\.1 is installed; .* 0\.32\.x, 0\.33\.x only"):
        engine.installed_version()


needs_vllm = pytest.mark.skipif(util.find_spec("vllm") is None, reason="skipped: needs vllm")

CODE = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n"
LIVE_PROMPTS = {
    "code": [f"Repeat this code and add a function {name}:\n{CODE}" for name in ("mul", "div", "power")],
    "chat": [f"Name five {things} and say one sentence about each." for things in ("planets", "rivers", "metals")],
}


def live_options(folder, out, timing_requests=2, resume=False):
    folder.mkdir(exist_ok=True)
    files = []
    for workload, texts in LIVE_PROMPTS.items():
        file = folder / f"{workload}.jsonl"
        rows = [{"id": f"{workload}-{i}", "workload": workload, "prompt": text} for i, text in enumerate(texts)]
        file.write_text("\n".join(map(json.dumps, rows)))
        files.append(file)
    return CollectOptions(
        models.SMOLLM2,
        ("ngram",),
        tuple(files),
        out,
        max_tokens=32,
        timing_depths=(0, 4),
        timing_requests=timing_requests,
        batch_size=2,
        resume=resume,
    )


@pytest.mark.live
@needs_vllm
def test_live_recording_is_exact_and_survives_a_kill(tmp_path):
    seen = []
    collect(live_options(tmp_path / "prompts", tmp_path / "whole"), lambda *state: seen.append(state))
    bundle = traces.load(tmp_path / "whole")
    assert bundle.requests.height == 6
    assert bundle.positions["drafted.ngram"].sum() > 0
    assert bundle.meta["exactness"]["ngram"]["drafting_blocks"] > 0
    assert bundle.meta["exactness"]["ngram"]["share_equal"] >= 0.999
    assert set(bundle.blocks["run"]) == {"ngram-k0-b1", "ngram-k4-b1", "ngram-random-b1", "ar-b1"}
    assert bundle.requests["prefill_s"].null_count() == 0
    assert ("prefill", 6, 6) in seen
    assert not (tmp_path / "whole.partial").exists()

    killed = tmp_path / "killed"
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from test_collect import *\n"
        "collect(live_options(Path(sys.argv[2]), Path(sys.argv[3]), timing_requests=1))"
    )
    arguments = [str(Path(__file__).parent), str(tmp_path / "prompts"), str(killed)]
    process = subprocess.Popen([sys.executable, "-c", script, *arguments])
    parts = tmp_path / "killed.partial" / "shadow-ngram" / "shadow"
    deadline = time.monotonic() + 120
    while not list(parts.glob("*.json")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(1.0)  # the engine notices that its collector is gone
    assert 0 < len(list(parts.glob("*.json"))) < 6

    with pytest.raises(UsageError, match="give --resume"):
        collect(live_options(tmp_path / "prompts", killed, timing_requests=1))
    resumed = collect(live_options(tmp_path / "prompts", killed, timing_requests=1, resume=True))
    assert resumed.positions.equals(bundle.positions)
    keys = pl.col("request_id", "split", "output_tokens", "finish_reason")
    assert resumed.requests.select(keys).equals(bundle.requests.select(keys))
