"""Public formats in, bundles out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import synthetic

from apexsim import replay, traces
from apexsim.cost import CostProfile, Linear, MethodCost, load_profile
from apexsim.errors import ImportFormatError, UsageError
from apexsim.fitting import fit_profile
from apexsim.importers import FORMATS, frame, import_trace
from apexsim.kernels.match import longest_suffix, repeated_trigrams
from apexsim.program import compile_program
from apexsim.traces import Bundle


def lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def suffix(tokens: list[int], prompt: int, max_match: int = 32, kmax: int = 16):
    count = len(tokens) - prompt - 1
    match, drafted, accepted = (np.zeros(count, dtype=np.uint8) for _ in range(3))
    longest_suffix(np.array(tokens, dtype=np.int32), prompt, max_match, kmax, match, drafted, accepted)
    return match.tolist(), drafted.tolist(), accepted.tolist()


def plain_suffix(tokens: list[int], prompt: int, max_match: int, kmax: int):
    """The rule once more, from its words: longest suffix seen before, most recent occurrence, copy what follows."""
    out = []
    for end in range(prompt + 1, len(tokens)):
        context = tokens[:end]
        best = (0, 0)
        for length in range(1, min(max_match, end - 1) + 1):
            ends = [j for j in range(length, end) if context[j - length : j] == context[end - length :]]
            if not ends:
                break
            best = (length, max(ends))
        draft = context[best[1] :][:kmax] if best[0] else []
        agree = 0
        while agree < len(draft) and end + agree < len(tokens) and draft[agree] == tokens[end + agree]:
            agree += 1
        out.append((best[0], len(draft), agree))
    return tuple(map(list, zip(*out, strict=True)))


@pytest.mark.small
def test_longest_suffix_by_hand():
    """a b c d | a b c d a: after 'a' copies b c d from the prompt, after 'a b' c d, and so on."""
    assert suffix([1, 2, 3, 4, 1, 2, 3, 4, 1], 4) == ([1, 2, 3, 4], [4, 4, 4, 4], [4, 3, 2, 1])
    assert suffix([1, 2, 3], 1) == ([0], [0], [0])


@pytest.mark.small
@pytest.mark.parametrize("seed", range(20))
def test_longest_suffix_equals_its_rule(seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 3, int(rng.integers(6, 60))).tolist()
    max_match, kmax = int(rng.integers(1, 9)), int(rng.integers(1, 9))
    assert suffix(tokens, 3, max_match, kmax) == plain_suffix(tokens, 3, max_match, kmax)


@pytest.mark.small
def test_repeated_trigrams():
    assert repeated_trigrams(np.array([1, 2, 3, 9, 1, 2, 3], dtype=np.int32)) == pytest.approx(1 / 7)
    assert repeated_trigrams(np.array([1, 2], dtype=np.int32)) == 0.0


def test_specdecode_bench_shifts_clips_and_marks(tmp_path):
    rows = [
        {"id": "a", "prompt_len": 3, "gen_len": 5, "acc_eagle": [3, 9, 1, 1, 2], "acc_ngram": [1, 21, 1, 1, 1]},
        {"id": "b", "prompt_len": 3, "gen_len": 5, "acc_eagle": [1, 1, 1], "acc_ngram": [1, 1, 1, 1, 1]},
    ]
    bundle = import_trace("specdecode-bench", [lines(tmp_path / "combined_chat.jsonl", rows)], Path("x"))
    traces.write(bundle, tmp_path / "x")
    first = bundle.positions.filter(pl.col("request") == 0)
    assert first["position"].to_list() == [1, 2, 3, 4]
    assert first["accepted.eagle3"].to_list() == [2, 3, 0, 0]  # one less than obtained, at most T - p
    assert first["accepted.ngram"].to_list() == [0, 3, 0, 0]
    assert bundle.requests["output_tokens"].to_list() == [5, 3]
    assert bundle.requests["aligned"].to_list() == [True, False]
    assert bundle.requests["finish_reason"].to_list() == ["stop", "cut"]
    assert bundle.requests["workload"].unique().to_list() == ["chat"]
    assert bundle.methods == ("eagle3", "ngram")


def test_specdecode_bench_with_tokens_adds_the_suffix_method(tmp_path):
    rows = [{"id": 7, "prompt_len": 4, "gen_len": 5, "acc_eagle": [1] * 5, "acc_ngram": [1] * 5}]
    tokens = pl.DataFrame(
        {"id": ["7"], "prompt_token_ids": [[1, 2, 3, 4]], "generated_token_ids": [[1, 2, 3, 4, 1]]},
        schema={"id": pl.String, "prompt_token_ids": pl.List(pl.Int32), "generated_token_ids": pl.List(pl.Int32)},
    )
    tokens.write_parquet(tmp_path / "combined_chat.tokens.parquet")
    files = [lines(tmp_path / "combined_chat.compact.jsonl", rows), tmp_path / "combined_chat.tokens.parquet"]
    bundle = traces.write(import_trace("specdecode-bench", files, Path("x")), tmp_path / "x")
    assert bundle.methods == ("eagle3", "ngram", "suffix")
    assert bundle.positions["match.suffix"].to_list() == [1, 2, 3, 4]
    assert bundle.positions["match.ngram"].to_list() == [1, 2, 3, 4]
    assert bundle.positions["accepted.suffix"].to_list() == [4, 3, 2, 1]
    assert bundle.positions["token_id"].to_list() == [1, 2, 3, 4]
    with pytest.raises(ImportFormatError, match="token table of 'chat' without its"):
        import_trace("specdecode-bench", [files[1], lines(tmp_path / "combined_code.jsonl", rows)], Path("x"))


GOOD_LIST = {"id": "a", "prompt_len": 3, "gen_len": 2, "acc_eagle": [1, 1], "acc_ngram": [1, 1]}
BAD_LISTS = [
    ({"acc_eagle": [1, 0]}, r"acc_eagle: must be a list of whole numbers in 1\.\."),
    ({"acc_eagle": ["x"]}, "acc_eagle: must be a list"),
    ({"acc_ngram": [1.5, 1]}, "acc_ngram: must be a list"),
    ({"acc_ngram": [True, 1]}, "acc_ngram: must be a list"),
    ({"acc_ngram": None}, "acc_ngram: must be a list"),
    ({"acc_ngram": [2**70]}, "acc_ngram: must be a list"),
    ({"gen_len": "2"}, "gen_len is '2'; must be a whole number"),
    ({"gen_len": None}, "gen_len is None"),
    ({"prompt_len": 2**40}, "prompt_len is 1099511627776"),
    ({"prompt_len": 3.7}, "prompt_len is 3.7"),
    ({"prompt_token_ids": ["x"], "generated_token_ids": [1, 2]}, "prompt_token_ids: must be a list"),
]


@pytest.mark.parametrize(("row", "message"), BAD_LISTS)
def test_a_bad_list_is_refused_by_file_and_request(tmp_path, row, message):
    with pytest.raises(ImportFormatError, match=message) as raised:
        import_trace("specdecode-bench", [lines(tmp_path / "combined_x.jsonl", [GOOD_LIST | row])], Path("x"))
    assert "combined_x.jsonl" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_keys_and_mixed_lines_are_named(tmp_path):
    file = tmp_path / "combined_x.jsonl"
    with pytest.raises(ImportFormatError, match="line 1: missing key 'acc_ngram'"):
        import_trace("specdecode-bench", [lines(file, [{"id": "a", "acc_eagle": [1]}])], Path("x"))
    with pytest.raises(ImportFormatError, match="neither prompt_len nor token ids"):
        import_trace("specdecode-bench", [lines(file, [{"id": "a", "acc_eagle": [1], "acc_ngram": [1]}])], Path("x"))
    with_ids = GOOD_LIST | {"id": "b", "prompt_token_ids": [1, 2, 3], "generated_token_ids": [1, 2]}
    with pytest.raises(ImportFormatError, match="token ids must be in every line, or in none"):
        import_trace("specdecode-bench", [lines(file, [GOOD_LIST, with_ids])], Path("x"))
    file.write_text("\n")
    with pytest.raises(ImportFormatError, match=r"combined_x\.jsonl: empty"):
        import_trace("specdecode-bench", [file], Path("x"))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ImportFormatError, match="not UTF-8 text"):
        import_trace("specdecode-bench", [file], Path("x"))


def test_unknown_formats_files_and_lines_are_named(tmp_path):
    with pytest.raises(
        UsageError, match="format 'csv' is unknown; allowed: specdecode-bench, rounds-jsonl, eagle-lossy"
    ):
        import_trace("csv", [], Path("x"))
    for name in FORMATS:
        with pytest.raises(UsageError, match="no such file"):
            import_trace(name, [tmp_path / "none.jsonl"], Path("x"))
    (tmp_path / "combined_x.jsonl").write_text("{\n")
    with pytest.raises(ImportFormatError, match=r"combined_x\.jsonl, line 1: not JSON"):
        import_trace("specdecode-bench", [tmp_path / "combined_x.jsonl"], Path("x"))


def rounds(folder: Path, accepted: list[int], length: int, eos: bool) -> Path:
    position, rows = 20, []
    for i, a in enumerate(accepted):
        last = eos and i == len(accepted) - 1
        rows.append(
            {
                "uid": 0, "round_idx": i, "start_pos": position, "proposal_len": 4, "accepted_draft": a,
                "recovery_kind": "eos" if last else "correction", "t_propose_ms": 5.0, "t_round_ms": 25.0, "t_update_ms": 0.5,
            }
        )  # fmt: skip
        position += a + (not last)
    sample = {"uid": 0, "dataset": "d", "row_idx": 3, "n_input_tokens": 20, "n_output_tokens": length}
    lines(folder / "run.samples.jsonl", [sample])
    (folder / "run.summary.json").write_text(json.dumps({"algo": "dflash", "temperature": 0.0, "max_new_tokens": 10}))
    return lines(folder / "run.rounds.jsonl", rows)


def test_rounds_jsonl_clips_the_last_block_and_drops_ghosts(tmp_path):
    bundle = import_trace("rounds-jsonl", [rounds(tmp_path, [2, 4, 3, 1], 10, eos=False)], Path("x"))
    traces.write(bundle, tmp_path / "x")
    assert bundle.blocks["position"].to_list() == [1, 4, 9]
    assert bundle.blocks["accepted"].to_list() == [2, 4, 1]
    assert bundle.blocks["emitted"].to_list() == [3, 5, 1]
    assert bundle.meta["import"]["ghost_blocks"] == 1
    assert bundle.requests["finish_reason"].to_list() == ["length"]
    ended = import_trace("rounds-jsonl", [rounds(tmp_path, [2, 4], 8, eos=True)], Path("x"))
    assert ended.blocks["emitted"].to_list() == [3, 4]
    assert ended.requests["finish_reason"].to_list() == ["stop"]


BAD_ROUNDS = [
    ({"accepted_draft": 5}, r"accepted_draft is 5; must be a whole number in 0\.\.4"),
    ({"start_pos": 21}, "starts at p 2; the rounds before end at 1"),
    ({"t_propose_ms": None}, "t_propose_ms is None"),
    ({"round_idx": "0"}, "round_idx is '0'"),
    ({"uid": 9}, "uid '9' has no line in"),
]


@pytest.mark.parametrize(("change", "message"), BAD_ROUNDS)
def test_a_bad_round_is_named(tmp_path, change, message):
    file = rounds(tmp_path, [1], 3, eos=False)
    row = json.loads(file.read_text())
    with pytest.raises(ImportFormatError, match=message):
        import_trace("rounds-jsonl", [lines(file, [row | change])], Path("x"))


@pytest.mark.parametrize("summary", ["{", "[1]", '{"temperature": "hot"}'])
def test_a_bad_summary_is_named(tmp_path, summary):
    file = rounds(tmp_path, [1, 0], 3, eos=False)
    (tmp_path / "run.summary.json").write_text(summary)
    with pytest.raises(ImportFormatError, match=r"run\.summary\.json"):
        import_trace("rounds-jsonl", [file], Path("x"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accepted": [9]}, r"accepted: must be a list of whole numbers in 0\.\.6"),
        ({"accepted": "23"}, "accepted: must be a list"),
        ({"k": "6"}, "k is '6'"),
        ({"temperature": None}, "temperature is None"),
        ({"finish_reason": "tired"}, "finish_reason is 'tired'; allowed: stop, length, cut"),
        ({"output_tokens": 1}, "no request with a round"),
    ],
)
def test_a_bad_lossy_request_is_named(tmp_path, change, message):
    with pytest.raises(ImportFormatError, match=message):
        import_trace("eagle-lossy", [lines(tmp_path / "a.jsonl", [lossy([2, 3, 1], 6) | change])], Path("x"))


def test_rounds_jsonl_needs_its_samples(tmp_path):
    file = rounds(tmp_path, [1], 3, eos=False)
    (tmp_path / "run.samples.jsonl").unlink()
    with pytest.raises(ImportFormatError, match=r"run\.samples\.jsonl: missing"):
        import_trace("rounds-jsonl", [file], Path("x"))


def lossy(accepted: list[int], length: int, arm: str = "strictGreedy") -> dict:
    return {
        "case": "case_1", "source": "s:1", "arm": arm, "k": 6, "temperature": 0.0, "prompt_tokens": 9,
        "output_tokens": length, "finish_reason": "stop", "accepted": accepted,
    }  # fmt: skip


def test_eagle_lossy_drops_the_ghost_round_and_what_follows_the_end(tmp_path):
    bundle = import_trace("eagle-lossy", [lines(tmp_path / "aime.strict.jsonl", [lossy([2, 3, 1], 6)])], Path("x"))
    traces.write(bundle, tmp_path / "x")
    assert bundle.blocks["emitted"].to_list() == [3, 2]
    assert (bundle.meta["import"]["ghost_blocks"], bundle.meta["import"]["accepted_after_end"]) == (1, 1)
    with pytest.raises(ImportFormatError, match="arm 'lenience' is lossy; allowed: strict"):
        import_trace("eagle-lossy", [lines(tmp_path / "a.jsonl", [lossy([2], 3, "lenience")])], Path("x"))
    with pytest.raises(ImportFormatError, match="rounds give 4 of 99 output tokens"):
        import_trace("eagle-lossy", [lines(tmp_path / "a.jsonl", [lossy([2], 99)])], Path("x"))


def flat_profile() -> CostProfile:
    return CostProfile("flat", "analytic", "tests", Linear(1.0, 0.1), {"*": MethodCost(Linear(0.0, 0.2))})


def test_a_blocks_only_replay_is_exact_at_its_own_depth_and_states_coverage(tmp_path):
    bundle = import_trace("rounds-jsonl", [rounds(tmp_path, [2, 4, 3, 1], 10, eos=False)], Path("x"))
    program = compile_program(bundle, flat_profile())
    own = replay.run_constant(program, program.space.index("dflash", 4), 0.0)
    assert (own.blocks[0], own.committed[0], own.observed[0]) == (3, 7, 3)
    # At depth 2 the block at 1 is known, and ends at 4; the one there was fully accepted at 4, so 2 of it are; 7 is not known.
    shallow = replay.run_constant(program, program.space.index("dflash", 2), 0.0)
    assert shallow.observed[0] < shallow.blocks[0]
    plain = replay.run_constant(program, program.space.index(None, 0), 0.0)
    assert plain.observed[0] == plain.blocks[0] == 9


def test_case_04_holds_for_measured_blocks_that_proposed_fewer_than_asked():
    """n-gram blocks at k 7 that drafted 7, 7, 0, 3, 0 and 2 replay as recorded: 6 blocks, 19 drafted, 13 committed, all known."""
    drafted, accepted = [7, 7, 0, 3, 0, 2], [7, 2, 0, 3, 0, 1]
    position, rows = 1, []
    for d, a in zip(drafted, accepted, strict=True):
        rows.append(
            {
                "request": 0, "run": "r", "policy": "fixed:ngram:7", "method": "ngram", "position": position, "depth": 7,
                "drafter_steps": d, "drafted": d, "accepted": a, "emitted": a + 1, "batch_size": 1,
                "context_tokens": 10 + position,
            }
        )  # fmt: skip
        position += a + 1
    plain = synthetic.bundle([{"ngram": [0] * (position - 1)}], kmax=7)
    bundle = Bundle(plain.meta, plain.requests, blocks=frame("blocks", rows))
    program = compile_program(bundle, flat_profile())
    totals = replay.run_constant(program, program.space.index("ngram", 7), 0.0)
    assert (totals.blocks[0], totals.drafted[0], totals.committed[0], totals.observed[0]) == (6, 19, 13, 6)


def test_real_blocks_replay_to_their_own_totals(shared_traces):
    """The A10 run at its own depth: every block observed, counts exact, seconds within 2 % (medians of skewed times are low)."""
    file = shared_traces / "futureoutlier_dflash_a10" / "s1t0_dflash_fresh.rounds.jsonl"
    bundle = import_trace("rounds-jsonl", [file], Path("a10"))
    program = compile_program(bundle, fit_profile(bundle))
    totals = replay.run_constant(program, program.space.index("dflash", 7), 0.0)
    assert totals.observed.sum() == totals.blocks.sum() == bundle.blocks.height
    assert totals.committed.sum() == bundle.blocks["accepted"].sum()
    measured = bundle.blocks.select(pl.sum_horizontal("draft_s", "verify_s", "overhead_s").sum()).item()
    assert totals.seconds.sum() == pytest.approx(measured, rel=0.02)


def test_h100_suffix_lists_agree_with_the_recorded_drafter_at_about_half(h100_bundles):
    """The recorded n-gram drafter is another than the recomputed suffix match: two methods, not one."""
    rows = h100_bundles["sharegpt"].positions
    share = (rows["accepted.suffix"] == rows["accepted.ngram"]).mean()
    assert 0.4 < share < 0.8
    profile = load_profile("llama3.1-8b-h100")
    assert compile_program(h100_bundles["gsm8k"], profile).space.methods == ("eagle3", "ngram", "suffix")
