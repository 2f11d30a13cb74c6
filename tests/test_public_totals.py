"""Totals on public H100 lists (SpecDecode-Bench, Llama-3.1-8B) that were computed independently of this code."""

from __future__ import annotations

import pytest

from apexsim import replay
from apexsim.cost import load_profile
from apexsim.hindsight import Hindsight
from apexsim.program import compile_program

TOTALS = [
    ("gsm8k", 300, 48_413, "ar", 0, 344.755765, None),
    ("gsm8k", 300, 48_413, "eagle3", 4, 178.284488, (19_080, 76_320, 29_516)),
    ("gsm8k", 300, 48_413, "ngram", 8, 299.900741, (40_943, 327_544, 7_497)),
    ("sharegpt", 310, 210_540, "ar", 0, 1507.625184, None),
    ("sharegpt", 310, 210_540, "eagle3", 8, 759.475344, (80_092, 640_736, 130_629)),
    ("sharegpt", 310, 210_540, "ngram", 16, 1070.33348, (142_334, 2_277_344, 68_248)),
]
ORACLES = [("gsm8k", (140.977133, 291.084886, 136.208681)), ("sharegpt", (641.464345, 1018.190657, 507.917312))]


@pytest.mark.parametrize(("name", "requests", "tokens", "method", "k", "seconds", "counts"), TOTALS)
def test_constant_totals(h100_bundles, name, requests, tokens, method, k, seconds, counts):
    program = compile_program(h100_bundles[name], load_profile("llama3.1-8b-h100"))
    assert (program.requests.height, program.tokens.sum()) == (requests, tokens)
    totals = replay.run_constant(program, program.space.index(None if method == "ar" else method, k), 0.0)
    assert totals.seconds.sum() == pytest.approx(seconds, rel=1e-6)
    if counts:
        assert (totals.blocks.sum(), totals.drafted.sum(), totals.committed.sum()) == counts
    else:
        assert program.seconds_ar.sum() == pytest.approx(seconds, rel=1e-6)


@pytest.mark.parametrize(("name", "seconds"), ORACLES)
def test_oracle_totals(h100_bundles, name, seconds):
    """Depths 0..16, no sync: EAGLE-3 only, n-gram only, both."""
    profile = load_profile("llama3.1-8b-h100")
    for methods, expected in zip((("eagle3",), ("ngram",), ("eagle3", "ngram")), seconds, strict=True):
        program = compile_program(h100_bundles[name], profile, methods=methods)
        assert replay.run_plan(program, Hindsight(program).switch()).totals.seconds.sum() == pytest.approx(
            expected, rel=1e-6
        )


def test_sync_makes_switching_dearer_but_never_worse_than_not_configuring(h100_bundles):
    free, synced = (load_profile(name) for name in ("llama3.1-8b-h100", "llama3.1-8b-h100-sync"))
    seconds = {}
    for profile in (free, synced):
        program = compile_program(h100_bundles["gsm8k"], profile)
        hindsight = Hindsight(program)
        seconds[profile.name] = replay.run_plan(program, hindsight.switch()).totals.seconds
        for plan in (hindsight.method(), hindsight.depth("ngram"), hindsight.request(), hindsight.best_fixed()):
            narrower = replay.run_plan(program, plan).totals.seconds
            assert (seconds[profile.name] <= narrower * (1 + 1e-12)).all()
    assert seconds[synced.name].sum() > 1.02 * seconds[free.name].sum()
