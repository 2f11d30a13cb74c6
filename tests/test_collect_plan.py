"""What a recording is asked for: options, drafters, models and the plan of the engine processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_collect import fake_prompts

from apexsim.errors import ApexSimError, UsageError
from real_runs import drafters, engine, models, recording
from real_runs.collect import collect
from real_runs.drafters import Drafter
from real_runs.options import CollectOptions, check_options, command, fingerprint
from real_runs.plan import make_plan

changed = replace


@pytest.fixture
def options(tmp_path):
    file = tmp_path / "prompts.jsonl"
    rows = [{"id": f"r{i}", "workload": "w", "prompt": f"say {i}"} for i in range(4)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return CollectOptions("smollm2-135m-instruct", ("ngram",), (file,), tmp_path / "out")


def model_folder(path, architecture="LlamaForCausalLM", tokenizer=True, **config):
    path.mkdir()
    settings = {"architectures": [architecture], "vocab_size": 100, "hidden_size": 8, "num_hidden_layers": 4}
    (path / "config.json").write_text(json.dumps(settings | config))
    (path / "model.safetensors").write_bytes(b"weights")
    if tokenizer:
        (path / "tokenizer.json").write_text("{}")
    return path


def test_a_leftover_needs_resume_and_the_same_options(tmp_path):
    folder = tmp_path / "x.partial"
    recording.open_folder(folder, {"kmax": 4, "methods": ("ngram",)}, resume=False)
    recording.open_folder(folder, {"kmax": 4, "methods": ("ngram",)}, resume=True)
    with pytest.raises(UsageError, match="give --resume"):
        recording.open_folder(folder, {"kmax": 4, "methods": ("ngram",)}, resume=False)
    with pytest.raises(UsageError, match="with another kmax"):
        recording.open_folder(folder, {"kmax": 5, "methods": ("ngram",)}, resume=True)


def test_the_fingerprint_covers_what_is_recorded_and_not_where(options, tmp_path):
    same = fingerprint(changed(options, out=tmp_path / "b", resume=True), "0.32.0", "org/m")
    assert fingerprint(options, "0.32.0", "org/m") == same
    assert fingerprint(changed(options, seed=1), "0.32.0", "org/m") != same
    assert fingerprint(options, "0.33.0", "org/m") != same


def test_another_drafter_of_the_same_name_changes_the_fingerprint(options, tmp_path):
    target, head = model_folder(tmp_path / "t"), model_folder(tmp_path / "e", "LlamaForCausalLMEagle3")
    wanted = changed(options, methods=("eagle3",), eagle3_model=str(head))
    before = fingerprint(wanted, "0.32.0", str(target))
    (head / "model.safetensors").write_bytes(b"other weights")
    models.digest.cache_clear()
    assert fingerprint(wanted, "0.32.0", str(target)) != before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ("medusa",)}, "--methods medusa: unknown; allowed: ngram, suffix, draft_model, eagle3"),
        ({"methods": ("ngram", "ngram")}, "name each method once"),
        ({"methods": ("eagle3",)}, "--methods eagle3 needs --eagle3-model MODEL"),
        ({"methods": ("draft_model",)}, "--methods draft_model needs --draft-model MODEL"),
        ({"further_drafters": ("small=ngram:x",)}, "give NAME=KIND:MODEL; kinds: draft_model, eagle3"),
        ({"further_drafters": ("eagle3=eagle3:x",)}, "the name must not be a kind"),
        ({"further_drafters": ("a.b=eagle3:x",)}, "nor hold any of"),
        ({"further_drafters": ("s=eagle3:x", "s=eagle3:y")}, "--drafter: give each name once"),
        ({"further_drafters": ("s=eagle3:x",)}, "--drafter s: not among --methods ngram"),
        ({"methods": ()}, "name each method once"),
        ({"engine": "sglang"}, "--engine sglang: allowed: vllm"),
        ({"kmax": 0}, "--kmax 0: allowed: 1..64"),
        ({"timing_depths": (0, 17)}, r"--timing-depths 17: allowed: 0..16"),
        ({"max_tokens": 0}, "--max-tokens 0: must be at least 1"),
        ({"timing_tokens": 0}, "--timing-tokens 0: must be at least 1"),
        ({"timing_batches": ()}, "--timing-batches 0: must be at least 1"),
        ({"limit_per_workload": 0}, "--limit-per-workload 0: must be at least 1"),
        ({"max_prompt_tokens": 0}, "--max-prompt-tokens 0: must be at least 1"),
        ({"prompts": ()}, "--prompts: give at least one file"),
        ({"draft_model": "x"}, "--draft-model is given, but draft_model is not among --methods ngram"),
        ({"out": Path(__file__).parent}, "exists and is not an earlier output"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, change, message):
    with pytest.raises(UsageError, match=message) as caught:
        check_options(changed(options, **change))
    assert "\n" not in str(caught.value)


def test_a_missing_prompt_file_is_named(options, tmp_path):
    with pytest.raises(UsageError, match=r"nowhere\.jsonl: no such file"):
        collect(changed(options, prompts=(tmp_path / "nowhere.jsonl",)))


def test_the_recorded_command_holds_no_paths(options, monkeypatch):
    monkeypatch.setattr(models.metadata, "version", lambda package: "0.1.2")
    words = command(options)
    assert words[:4] == ["apexsim", "collect", "--target", "smollm2-135m-instruct"]
    assert "prompts.jsonl" in words
    assert not any("/" in word for word in words)
    two = changed(
        options,
        methods=("draft_model", "small"),
        draft_model="layer-skip:3,7",
        further_drafters=("small=draft_model:org/s",),
    )
    assert "layer-skip:3,7" in command(two)
    assert "small=draft_model:org/s" in command(two)


def test_the_plan_times_every_depth_and_a_plain_engine(options, monkeypatch):
    monkeypatch.setattr(models, "context_limit", lambda model, ceiling: ceiling)
    plan = make_plan(options, fake_prompts(20), "model")
    rounds = ["ngram-1", "plain-1", "ngram-2", "plain-2", "ngram-3", "plain-3"]
    assert [job.name for job in plan.jobs] == ["shadow-ngram", *rounds, "prefill"]
    names = [run.name for run in plan.timing[0].runs]
    assert names == [*(f"ngram-k{k}-b1" for k in (0, 1, 2, 4, 8, 16)), "ngram-random-b1"]
    assert plan.timing[1].speculative is None
    assert plan.timing[0].prefix_caching
    assert not plan.shadow["ngram"].prefix_caching
    assert len({row for job in plan.timing for run in job.runs for row in run.requests}) == 12
    assert [len(run.requests) for run in plan.prefill.runs] == [20]


def test_a_full_memory_is_told_in_the_user_s_terms(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0")
    line = engine.plain_words(ValueError("No available memory for the cache blocks. Try this.\nmore"))
    assert line.startswith("too little memory for the KV cache: VLLM_CPU_KVCACHE_SPACE is 0 GiB; give more")
    assert "\n" not in line
    assert engine.plain_words(RuntimeError("\nthis broke\nhere")) == "RuntimeError: this broke"


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


@pytest.mark.parametrize(
    ("kind", "folder", "message"),
    [
        ("eagle3", {}, "--eagle3-model .*: eagle3 needs an EAGLE-3 head; its architecture is LlamaForCausalLM"),
        ("eagle3", {"architecture": "LlamaForCausalLMEagle3", "vocab_size": 7}, "vocab_size 7; the target's is 100"),
        ("eagle3", {"architecture": "Eagle3Llama", "hidden_size": 9}, "hidden_size 9; the target's is 8"),
        ("draft_model", {"architecture": "LlamaForCausalLMEagle3"}, "draft_model needs a language model"),
        ("draft_model", {"vocab_size": 7, "tokenizer": False}, "vocabulary mismatch: 7 tokens, the target has 100"),
    ],
)
def test_a_drafter_made_for_something_else_is_refused(tmp_path, kind, folder, message):
    model = model_folder(tmp_path / "draft", **folder)
    with pytest.raises(UsageError, match=message) as caught:
        drafters.check(Drafter(kind, kind, str(model)), str(model_folder(tmp_path / "target")))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["/nowhere/at/all", "nowhere"])
def test_a_missing_drafter_is_refused(tmp_path, model):
    with pytest.raises(UsageError, match=rf"--draft-model {model}: no such folder"):
        drafters.check(Drafter("draft_model", "draft_model", model), str(model_folder(tmp_path / "target")))


@pytest.mark.parametrize("layers", ["4", "1,1", "0,1,2,3"])
def test_layers_that_cannot_be_left_out_are_refused(tmp_path, layers, monkeypatch):
    monkeypatch.setenv("APEXSIM_CACHE", str(tmp_path / "cache"))
    drafter = Drafter("draft_model", "draft_model", f"layer-skip:{layers}")
    with pytest.raises(UsageError, match=f"layer-skip:{layers}: allowed: different layers 0..3"):
        drafters.check(drafter, str(model_folder(tmp_path / "target")))


def test_another_vocabulary_is_mapped(tmp_path):
    target = str(model_folder(tmp_path / "target"))
    same = Drafter("draft_model", "draft_model", str(model_folder(tmp_path / "same")))
    other = Drafter("small", "draft_model", str(model_folder(tmp_path / "other", vocab_size=7)))
    drafters.check(other, target)
    assert "use_heterogeneous_vocab" not in drafters.speculative(same, target, 4)
    assert drafters.speculative(other, target, 4)["use_heterogeneous_vocab"] is True
    facts = drafters.facts(other, target, 4)
    assert (facts["kind"], facts["drafter"], len(facts["drafter_sha256"])) == ("draft_model", "other", 64)
    assert str(tmp_path) not in json.dumps(facts)


def test_suffix_without_its_package_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(drafters.util, "find_spec", lambda name: None)
    with pytest.raises(ApexSimError, match="method suffix needs arctic-inference: pip install --no-deps"):
        drafters.check(Drafter("suffix", "suffix"), "org/m")
