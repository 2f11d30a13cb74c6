"""Real recordings with vLLM (marked live): exact, and whole again after kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib import util
from pathlib import Path

import polars as pl
import pytest

from apexsim import traces
from apexsim.errors import UsageError
from real_runs import models
from real_runs.collect import collect
from real_runs.options import CollectOptions

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
