"""Real recordings with vLLM (marked live): exact, and whole again after kills."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from importlib import util
from pathlib import Path

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


def live_options(folder, out, resume=False):
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
        timing_requests=2,
        timing_batches=(2,),
        batch_size=2,
        resume=resume,
    )


def without_times(bundle):
    """What two recordings of the same must have in common, to the last bit."""
    times = ("draft_s", "verify_s", "overhead_s", "prefill_s")
    tables = {name: table.drop(times, strict=False) for name, table in bundle.tables.items()}
    timed = ("seconds", "created", "checksums", "meta_sha256", "name")
    meta = {key: value for key, value in bundle.meta.items() if key not in timed}
    meta["timing"] = {key: value for key, value in meta["timing"].items() if key != "foreign_load"}
    meta["argv"] = [word for word in meta["argv"] if word not in ("whole", "killed")]
    return tables, meta


@pytest.mark.live
@needs_vllm
def test_live_recording_is_exact_and_the_same_after_five_kills(tmp_path):
    seen = []
    whole = collect(live_options(tmp_path / "prompts", tmp_path / "whole"), lambda *state: seen.append(state))
    whole = traces.load(tmp_path / "whole")
    assert whole.requests.height == 6
    assert whole.positions["drafted.ngram"].sum() > 0
    assert whole.meta["exactness"]["ngram"]["drafting_blocks"] > 0
    assert whole.meta["exactness"]["ngram"]["share_equal"] >= 0.999
    assert set(whole.blocks["run"]) == {"ngram-k0-b2", "ngram-k4-b2", "ngram-random-b2", "ar-b2"}
    assert whole.requests["prefill_s"].null_count() == whole.requests["prompt_embedding"].null_count() == 0
    assert ("prefill", 6, 6) in seen
    assert not (tmp_path / "whole.partial").exists()

    killed = tmp_path / "killed"
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from test_collect_live import *\n"
        "collect(live_options(Path(sys.argv[2]), Path(sys.argv[3]), resume=sys.argv[4] == 'resume'))"
    )
    rng, found = random.Random(3), []
    for attempt in range(5):
        how = "resume" if attempt else "first"
        arguments = [str(Path(__file__).parent), str(tmp_path / "prompts"), str(killed), how]
        process = subprocess.Popen([sys.executable, "-c", script, *arguments])
        before = parts_of(killed)
        deadline = time.monotonic() + 120
        while parts_of(killed) <= before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(rng.uniform(0.0, 2.0))  # somewhere in the passes, or in the start of the next engine
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        time.sleep(1.0)  # the engine notices that its collector is gone
        found.append(parts_of(killed))
    assert found == sorted(found)
    assert found[0] > 0
    if killed.exists():
        pytest.fail("the recording was done before the fifth kill: kill earlier")

    with pytest.raises(UsageError, match="give --resume"):
        collect(live_options(tmp_path / "prompts", killed))
    collect(live_options(tmp_path / "prompts", killed, resume=True))
    tables, meta = without_times(traces.load(killed))
    expected, expected_meta = without_times(whole)
    assert all(tables[name].equals(expected[name]) for name in expected)
    assert meta == expected_meta


def parts_of(out):
    return len(list(out.with_name(out.name + ".partial").glob("*/*/*.json")))
