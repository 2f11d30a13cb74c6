"""Surprises people reported in public, as small inputs with the right answer; the numbers are those of the collection.

Cases 12 and 13 concern the environment: ``test_env.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import synthetic

from apexsim import metrics, replay
from apexsim.cost import load_profile
from apexsim.features import FEATURES, PROMPT, REMAINING_CAP
from apexsim.fitting import fit_profile, outliers
from apexsim.importers import import_trace
from apexsim.program import compile_program
from apexsim.protocol import ActionSpace, Outcome
from policies.heuristics import HfHeuristic

NO_PROMPTS = np.full((1, len(PROMPT)), np.nan, dtype=np.float32)


def constant(bundle, method: str, k: int, profile=None):
    program = compile_program(bundle, profile or synthetic.profile())
    return replay.run_constant(program, program.space.index(method, k), program.sync_s((method,)))


@pytest.mark.small
def test_case_01_end_of_sequence_inside_the_accepted_prefix():
    """k 5, draft [d, d, EOS, d, d], all five match: 3 tokens for the block, not 6; 2 wasted, no bonus, the end."""
    totals = constant(synthetic.bundle([{"eagle3": [3, 2, 1]}], kmax=5), "eagle3", 5)
    assert (totals.blocks[0], totals.committed[0], totals.drafted[0] - totals.committed[0]) == (1, 3, 2)


@pytest.mark.small
def test_case_02_max_tokens_inside_a_block():
    """Limit 8, prefill gives 1, two blocks could emit 5 and 5: 1 + 5 + 2, and the last block pays its full latency."""
    bundle = synthetic.bundle([{"eagle3": [4, 0, 0, 0, 0, 2, 1]}], kmax=4, max_tokens=[8], finish_reason=["length"])
    program = compile_program(bundle, synthetic.profile())
    totals = replay.run_constant(program, program.space.index("eagle3", 4), 0.0)
    assert (totals.blocks[0], totals.committed[0]) == (2, 4 + 2)
    one = 1.0 + 0.01 * 5 + 0.1 + 0.05 * 4 + 0.03  # both blocks at full price, contexts 11 and 16
    assert totals.seconds[0] == pytest.approx(2 * one + 0.00011 * (11 + 16), rel=1e-12)


@pytest.mark.small
def test_case_03_bonus_token_counted_or_not():
    assert metrics.acceptance_rate(167, 259) == pytest.approx(0.645, abs=5e-4)
    assert metrics.acceptance_length(167, 87) == pytest.approx(2.92, abs=5e-3)
    assert metrics.acceptance_length(167, 87, bonus=False) == pytest.approx(1.92, abs=5e-3)


@pytest.mark.small
def test_case_04_drafted_counts_what_was_proposed_not_the_maximum():
    """Drafted [7, 7, 3], accepted [7, 2, 3]: 12 of 17, not of 21."""
    accepted = [7, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 3, 2, 1]
    sent = [7] * 11 + [3, 3, 3]
    totals = constant(synthetic.bundle([{"ngram": accepted}], [{"ngram": sent}], kmax=7), "ngram", 7)
    assert (totals.blocks[0], totals.committed[0], totals.drafted[0]) == (3, 12, 17)


@pytest.mark.small
def test_case_05_skipped_drafting_is_not_rejection():
    """Blocks [k 3, accepted 2], [no draft], [no draft]: rate 2/3, 1.667 tokens per step."""
    bundle = synthetic.bundle([{"ngram": [2, 0, 0, 0, 0]}], [{"ngram": [3, 0, 0, 0, 0]}], kmax=3)
    totals = constant(bundle, "ngram", 3)
    assert metrics.acceptance_rate(totals.committed[0], totals.drafted[0]) == pytest.approx(2 / 3)
    assert metrics.tokens_per_block(5, totals.blocks[0]) == pytest.approx(1.667, abs=5e-4)
    assert metrics.waste_percent(0, 0) is None


@pytest.mark.small
def test_case_06_steps_without_a_match_count_as_steps():
    drafts, accepted, without = 993, 3562, 821
    assert metrics.acceptance_length(accepted, drafts) == pytest.approx(4.59, abs=5e-3)
    tokens = accepted + drafts + without
    assert metrics.tokens_per_block(tokens, drafts + without) == pytest.approx(2.96, abs=5e-3)


def test_case_07_best_depth_flips_with_batch_size(shared_traces):
    """The acceptance is flat while the best k goes 3, 3, 3, 2, 0; the cell of batch 64, k 7 is flagged as a typo."""
    file = shared_traces / "vllm_dynamic_sd_itl" / "itl_table.json"
    acceptance = json.loads(file.read_text())["acceptance_rate_per_pos"]["eagle1_low"]
    profile = load_profile(file)
    gain = metrics.expected_tokens(np.array(acceptance))
    best = [
        int(np.argmax([gain[k] / profile.verify.seconds(k + 1, 0, batch) for k in range(8)]))
        for batch in (1, 4, 16, 32, 64)
    ]
    assert best == [3, 3, 3, 2, 0]
    flagged = [note for note in profile.notes if "typo" in note]
    assert flagged == ["batch 64, k 7: 120.57 ms is a likely typo; 20.35 ms is used"]


@pytest.mark.small
def test_case_08_the_depth_schedules_memory():
    """Start 5; full, full, reject: 7, 9, 8; the next request starts at 8 (persistent) or 5 (transient)."""
    space = ActionSpace(("eagle3",), tuple(range(17)))
    slot = np.array([0])

    def block(policy, remaining: float, drafted: int | None, accepted: int | None) -> int:
        obs = np.full((1, len(FEATURES)), remaining / REMAINING_CAP, dtype=np.float32)
        depth = int(policy.act(obs, slot)[0])
        sent = depth if drafted is None else drafted
        got = sent if accepted is None else accepted
        outcome = Outcome(*(np.array([v]) for v in (depth, sent, got, got + 1)), np.array([1.0]))
        policy.update(slot, np.array([depth]), outcome)
        return depth

    for transient, start in ((False, 8), (True, 5)):
        policy = HfHeuristic(space, "eagle3", transient)
        policy.reset(slot, NO_PROMPTS)
        asked = [block(policy, 255, None, None), block(policy, 255, None, None), block(policy, 255, None, 0)]
        assert asked == [5, 7, 9]
        assert policy.depth[0] == 8
        policy.reset(slot, NO_PROMPTS)
        assert block(policy, 255, None, 0) == start
    policy = HfHeuristic(space, "eagle3", True)
    policy.reset(slot, NO_PROMPTS)
    assert block(policy, 3, None, 0) == 3  # never more than max_tokens less the tokens emitted
    policy.reset(slot, NO_PROMPTS)
    block(policy, 255, 2, 2)  # asked 5, proposed 2, both accepted: not a full acceptance of k
    assert policy.depth[0] == 4
    block(policy, 255, 0, 0)  # nothing drafted leaves k unchanged
    assert policy.depth[0] == 4


@pytest.mark.small
def test_case_09_an_aggregate_is_a_ratio_of_sums():
    """908 new tokens in 374 steps (last index 373): 2.428 tokens per step, and not the mean of two requests' ratios."""
    assert metrics.tokens_per_block(908, 374) == pytest.approx(2.428, abs=5e-4)
    totals = constant(synthetic.bundle([{"eagle3": [2, 1, 0]}, {"eagle3": [0] * 7}], kmax=2), "eagle3", 2)
    assert metrics.tokens_per_block(10, int(totals.blocks.sum())) == 10 / 8
    assert metrics.tokens_per_block(10, int(totals.blocks.sum())) != pytest.approx((3 / 1 + 7 / 7) / 2)


@pytest.mark.small
def test_case_10_repeats_of_one_prompt_are_not_independent_samples():
    """Four runs of each prompt, in its group, give no narrower an interval than one."""
    values = np.random.default_rng(1).random(12)
    once = metrics.mean_interval(values, np.arange(12), seed=0)
    repeated = metrics.mean_interval(np.repeat(values, 4), np.repeat(np.arange(12), 4), seed=0)
    assert repeated == pytest.approx(once, rel=1e-12)
    naive = metrics.mean_interval(np.repeat(values, 4), np.arange(48), seed=0)
    assert naive[1] - naive[0] < 0.7 * (once[1] - once[0])


def test_case_11_warm_up_outliers_are_flagged_by_one_rule(shared_traces):
    file = shared_traces / "futureoutlier_dflash_a10" / "s1_dflash_fresh.rounds.jsonl"
    bundle = import_trace("rounds-jsonl", [file], Path("a10"))
    flagged = outliers(bundle.blocks)
    rows = bundle.blocks.with_row_index().filter(flagged)
    assert rows.select("index", "position").rows() == [(0, 1)]  # request 0, round 0: the only one
    total = pl.col("draft_s") + pl.col("verify_s")
    assert rows.select(total).item() == pytest.approx(0.197152)
    with_it, without = (f.select(total.median()).item() for f in (bundle.blocks, bundle.blocks.filter(~flagged)))
    assert without == pytest.approx(with_it, rel=1e-3)
    assert with_it == pytest.approx(43.584e-3, rel=2e-3)
    assert "1 of 5095 blocks left out" in fit_profile(bundle).notes[0]


def test_case_14_a_ghost_round_after_the_end(shared_traces):
    folder = shared_traces / "lossy_gptoss_eagle3_h100"
    files = [folder / "aime24.strict.jsonl", folder / "humaneval.strict.jsonl"]
    bundle = import_trace("eagle-lossy", files, Path("gptoss"))
    facts = bundle.meta["import"]
    assert facts["ghost_blocks"] == facts["requests"] == 182
    emitted = bundle.blocks.group_by("request").agg(pl.col("emitted").sum()).sort("request")["emitted"]
    assert (1 + emitted == bundle.requests["output_tokens"].cast(pl.Int64)).all()
    worked = bundle.requests["request_id"].to_list().index("humaneval/case_131")
    assert emitted[worked] == 1612
    assert bundle.requests["output_tokens"][worked] == 1613


def test_case_15_lists_of_different_length_are_clipped_and_reported(h100_bundles):
    """Over gsm8k and sharegpt 126 + 241 requests have an EAGLE-3 list unlike the output; none is read past the end."""
    for name, clipped in (("gsm8k", 126), ("sharegpt", 241)):
        bundle = h100_bundles[name]
        assert bundle.meta["import"]["clipped_requests"] == clipped
        assert int((~bundle.requests["aligned"]).sum()) == clipped
        program = compile_program(bundle, load_profile("llama3.1-8b-h100"))
        totals = replay.run_constant(program, program.space.index("ngram", 16), 0.0)
        assert totals.committed.sum() + totals.blocks.sum() >= program.tokens.sum()
        over_positions = bundle.positions["accepted.ngram"].mean()
        visited = totals.committed.sum() / totals.blocks.sum()
        assert over_positions > 1.3 * visited  # the mean over positions is not the mean over visited blocks
