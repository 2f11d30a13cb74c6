"""The command line: what it writes, what it answers, and how it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import synthetic

from apexsim import cli, cost, traces

RESULT_KEYS = {
    "policy", "resolved", "family", "methods", "bundle", "workload", "split", "seed", "trained_on", "requests",
    "requests_skipped", "tokens", "blocks", "drafted", "committed", "seconds", "seconds_ar", "prefill_seconds", "speedup",
    "speedup_ci", "speedup_total", "waste_percent", "waste_percent_total", "was", "tokens_per_block", "acceptance_length",
    "acceptance_rate", "mean_depth", "objective", "gap_closed", "gap_closed_switch", "coverage", "aligned",
    "controller_us_per_block",
}  # fmt: skip


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command in this process: (exit status, standard output, standard error)."""

    def command(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["apexsim", *map(str, args)])
        monkeypatch.setenv("SOURCE_DATE_EPOCH", "1800000000")
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return command


@pytest.fixture
def bundle(tmp_path) -> Path:
    traces.write(synthetic.random_bundle(7, count=40), tmp_path / "trace")
    (tmp_path / "costs.json").write_text(cost.dump_profile(synthetic.profile(sync=0.1)))
    return tmp_path / "trace"


def test_compare_writes_everything(run, bundle, tmp_path):
    out = tmp_path / "out"
    status, table, notes = run("compare", bundle, "--cost-profile", tmp_path / "costs.json", "--out", out)
    assert (status, "hf-heuristic:eagle3" in table, "report.html" in notes) == (0, True, True)
    found = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file())
    assert found == [
        "figures/speed_waste.png", "figures/speed_waste.svg", "report.html", "requests.parquet", "results.json",
        "results.parquet",
    ]  # fmt: skip
    results = json.loads((out / "results.json").read_text())
    assert results["schema"] == "apexsim.results/1"
    assert set(results["rows"][0]) == RESULT_KEYS
    facts = results["provenance"]
    assert facts["argv"][:2] == ["apexsim", "compare"]
    assert [(b["name"], b["sha256"]) for b in facts["bundles"]] == [("synthetic", traces.load(bundle).digest)]
    assert facts["cost_profile"] == "synthetic"
    policies = {row["policy"] for row in results["rows"]}
    assert {
        "ar",
        "best-fixed",
        "best-fixed:hindsight",
        "fixed:ngram:4",
        "oracle:request",
        "oracle:depth:ngram",
    } <= policies
    assert pl.read_parquet(out / "results.parquet").height == len(results["rows"])
    requests = pl.read_parquet(out / "requests.parquet")
    assert requests.height == len(policies) * results["rows"][0]["requests"]
    page = (out / "report.html").read_text()
    assert "<svg" in page
    assert "http-equiv" not in page
    assert "<script" not in page
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".out")]


def test_the_same_command_gives_the_same_bytes_on_one_thread_or_two(run, bundle, tmp_path):
    command = ("compare", bundle, "--cost-profile", tmp_path / "costs.json", "--split", "all", "--seeds", 2, "--quiet")
    written = []
    for jobs in (1, 1, 2):
        out = tmp_path / "out"
        assert run(*command, "--jobs", jobs, "--out", out)[0] == 0
        written.append({str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()})
    assert written[0] == written[1]
    for files in written:  # the command, which both hold, differs by its --jobs
        files["results.json"] = json.loads(files["results.json"])["rows"]
        files["report.html"] = files["report.html"].split(b"<h2>Provenance")[0]
    assert written[0] == written[2]


@pytest.mark.parametrize("depths", ["3", "1,6", "0"])
def test_all_policies_fit_any_choice_of_depths(run, bundle, tmp_path, depths):
    args = (
        "--cost-profile",
        tmp_path / "costs.json",
        "--depths",
        depths,
        "--out",
        tmp_path / "out",
        "--json",
        "--quiet",
    )
    status, out, _ = run("compare", bundle, *args)
    names = {row["policy"] for row in json.loads(out)["rows"]}
    assert status == 0
    assert ("ar" in names) == (depths == "0")
    assert {"oracle", "best-fixed"} <= names


def test_a_profile_that_ends_too_early_is_named(run, bundle, tmp_path):
    rows = {"1": {"0": 10.0, "1": 11.0, "2": 12.0}}
    (tmp_path / "itl.json").write_text(json.dumps({"batch_stats": rows}))
    status, _, error = run("compare", bundle, "--cost-profile", tmp_path / "itl.json", "--out", tmp_path / "out")
    assert (status, "cost profile itl: prices at most 3 tokens, asked for 4; lower --depths" in error) == (1, True)


def test_results_keep_their_caveats_and_name_the_workload(run, bundle, tmp_path):
    args = (
        "--cost-profile",
        tmp_path / "costs.json",
        "--workload",
        "b",
        "--policies",
        "ar,oracle",
        "--out",
        tmp_path / "out",
    )
    status, out, _ = run("compare", bundle, *args, "--json", "--quiet")
    assert status == 0
    assert {row["workload"] for row in json.loads(out)["rows"]} == {"b"}
    rows = [{"id": i, "prompt_len": 5, "gen_len": 9, "acc_eagle": [2] * 9, "acc_ngram": [1] * 9} for i in range(20)]
    file = tmp_path / "combined_chat.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("import", "specdecode-bench", file, "--out", tmp_path / "chat")
    _, out, _ = run("compare", tmp_path / "chat", "--split", "all", "--out", tmp_path / "out", "--json", "--quiet")
    notes = json.loads(out)["provenance"]["bundles"][0]["notes"]
    assert any("drafted length was not recorded" in note for note in notes)
    assert "drafted length was not recorded" in (tmp_path / "out" / "report.html").read_text()


def test_two_bundles_of_one_name_are_refused(run, bundle, tmp_path):
    status, _, error = run(
        "compare", bundle, bundle, "--cost-profile", tmp_path / "costs.json", "--out", tmp_path / "out", "--quiet"
    )
    assert (status, "two bundles are called 'synthetic'" in error) == (2, True)
    assert not (tmp_path / "out").exists()


def test_compare_json_is_the_results_file(run, bundle, tmp_path):
    args = ("--cost-profile", tmp_path / "costs.json", "--policies", "all-fixed", "--out", tmp_path / "out")
    status, out, _ = run("compare", bundle, *args, "--json", "--quiet")
    assert status == 0
    assert json.loads(out) == json.loads((tmp_path / "out" / "results.json").read_text())
    assert {row["family"] for row in json.loads(out)["rows"]} == {"fixed"}


def test_json_shapes(run, bundle):
    status, out, _ = run("policies", "--json")
    assert status == 0
    ucb = {row["name"]: row for row in json.loads(out)}["hf-heuristic"]
    assert ucb == {
        "name": "hf-heuristic", "family": "heuristics", "live": True, "signals": ["accepted"],
        "source": "Hugging Face transformers, assisted generation",
    }  # fmt: skip
    rows = json.loads(run("policies", "--bundle", bundle, "--json")[1])
    assert all(row["replayable"] and row["missing"] == [] for row in rows)
    listed = json.loads(run("traces", "ls", "--json")[1])
    assert [row["name"] for row in listed] == traces.bundled()
    assert all(set(row) == {"name", "path", "requests", "methods"} for row in listed)
    facts = json.loads(run("traces", "describe", bundle, "--json")[1])
    assert {"name", "schema", "target", "hardware", "engine", "kmax", "requests", "positions", "blocks", "workloads",
            "methods", "splits", "aligned_requests"} <= set(facts)  # fmt: skip
    assert {"positions", "mean_accepted", "mean_accepted_visited", "empty_draft_share", "exactness"} <= set(
        facts["methods"]["ngram"]
    )


def test_import_then_compare(run, tmp_path):
    rows = [{"id": i, "prompt_len": 5, "gen_len": 9, "acc_eagle": [2] * 9, "acc_ngram": [1] * 9} for i in range(30)]
    file = tmp_path / "combined_chat.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, _, notes = run("import", "specdecode-bench", file, "--out", tmp_path / "chat")
    assert (status, "clipped_requests: 0" in notes) == (0, True)
    assert run("traces", "check", tmp_path / "chat")[0] == 0
    status, out, _ = run("compare", tmp_path / "chat", "--policies", "ar,oracle", "--out", tmp_path / "out", "--json")
    assert status == 0
    assert json.loads(out)["provenance"]["cost_profile"] == "llama3.1-8b-h100"
    assert "specdecode-bench" in run("import", "--list")[1]


FAILURES = [
    (("nonsense",), 2, "No such command"),
    (("compare",), 2, "BUNDLE"),
    (("compare", "BUNDLE", "--nonsense"), 2, "No such option"),
    (("compare", "nowhere"), 1, "no such bundle"),
    (("compare", "BUNDLE"), 1, "give --cost-profile"),
    (("compare", "BUNDLE", "--cost-profile", "nope"), 1, "no such cost profile"),
    (("compare", "BUNDLE", "COSTS", "--policies", "nope"), 1, "policy 'nope' is unknown; allowed: apex-b, "),
    (("compare", "BUNDLE", "COSTS", "--policies", ","), 2, "not a comma-separated list"),
    (("compare", "BUNDLE", "COSTS", "--workload", "poetry"), 2, "allowed: a, b"),
    (("compare", "BUNDLE", "COSTS", "--split", "holdout"), 2, "allowed: train, validation, test, all"),
    (("compare", "BUNDLE", "COSTS", "--methods", "medusa"), 2, "allowed: eagle3, ngram"),
    (("compare", "BUNDLE", "COSTS", "--depths", "0,x"), 2, "not a whole number"),
    (("compare", "BUNDLE", "COSTS", "--depths", "0-99"), 2, "allowed: 0..6"),
    (("compare", "BUNDLE", "COSTS", "--seeds", "0"), 2, "--seeds"),
    (("compare", "BUNDLE", "COSTS", "--waste-weight", "-1"), 2, "at least 0"),
    (("compare", "BUNDLE", "COSTS", "--waste-weight", "nan"), 2, "at least 0"),
    (("compare", "BUNDLE", "COSTS", "--concurrency", "8"), 2, "allowed: 1"),
    (("import", "csv", "x", "--out", "y"), 2, "format 'csv' is unknown"),
    (("import", "rounds-jsonl"), 2, "import needs FORMAT"),
    (("traces", "check", "nowhere"), 1, "no such bundle"),
    (("bench", "--only", "speed"), 2, "allowed: vector, single, sb3, replay, oracle, import"),
]


@pytest.mark.parametrize(("args", "status", "message"), FAILURES, ids=[" ".join(f[0]) for f in FAILURES])
def test_a_mistake_is_one_clear_line(run, bundle, tmp_path, args, status, message):
    known = {"BUNDLE": [bundle], "COSTS": ["--cost-profile", tmp_path / "costs.json"]}
    words = [word for arg in args for word in known.get(arg, [arg])]
    out = [] if "--out" in args or args[0] != "compare" or len(args) < 2 else ["--out", tmp_path / "out"]
    got, output, error = run(*words, *out)
    lines = [line for line in error.splitlines() if line.strip() and not line.startswith("note:")]
    assert (got, output, len(lines)) == (status, "", 1)
    assert lines[0].startswith("apexsim: ")
    assert message in lines[0]
    assert not (tmp_path / "out").exists()


def test_results_never_replace_what_is_not_ours(run, bundle, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "keep.txt").write_text("x")
    status, _, error = run("compare", bundle, "--cost-profile", tmp_path / "costs.json", "--out", mine, "--quiet")
    assert (status, "choose another --out" in error) == (2, True)
    assert [p.name for p in mine.iterdir()] == ["keep.txt"]


def test_every_command_has_an_example(run):
    for command in (["compare"], ["policies"], ["import"], ["collect"], ["bench"], ["traces", "ls"], ["traces", "describe"],
                    ["traces", "check"]):  # fmt: skip
        status, out, _ = run(*command, "--help")
        assert (status, "Example: apexsim" in out) == (0, True), command


def fresh(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **env}
    )
    return done.stdout


def test_start_up_imports_nothing_heavy():
    heavy = "{'torch', 'vllm', 'matplotlib', 'numba', 'polars', 'stable_baselines3', 'scipy'}"
    assert fresh(f"import sys, apexsim; print({heavy} & set(sys.modules))").strip() == "set()"
    assert fresh(f"import sys, apexsim.cli; print({heavy} & set(sys.modules))").strip() == "set()"


def test_a_decoy_package_is_noticed(tmp_path):
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "__init__.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "apexsim", "traces", "ls"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 1
    assert "a folder called envs shadows it" in done.stderr
    assert "Traceback" not in done.stderr
