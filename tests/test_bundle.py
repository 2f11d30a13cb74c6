"""Bundles on disk: what is written comes back, and what is damaged is refused by name."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest
import synthetic

from apexsim import schema, traces
from apexsim.errors import BundleError, UsageError
from apexsim.traces import Bundle

BLOCK = {
    "request": 0, "run": "run", "policy": "fixed:eagle3:2", "method": "eagle3", "position": 1, "depth": 2,
    "drafter_steps": 2, "drafted": 2, "accepted": 1, "emitted": 2, "draft_s": 0.1, "verify_s": 0.2, "overhead_s": 0.01,
    "batch_size": 1, "context_tokens": 11,
}  # fmt: skip


def blocks(**changes) -> pl.DataFrame:
    return pl.DataFrame([BLOCK | changes], schema={c.name: c.dtype for c in schema.BLOCKS if c.required})


@pytest.fixture
def good() -> Bundle:
    plain = synthetic.random_bundle(1)
    return Bundle(plain.meta, plain.requests, plain.positions)


def test_round_trip(good, tmp_path):
    good = synthetic.bundle([{"eagle3": [2, 1, 0]}])
    good = Bundle(good.meta, good.requests, good.positions, blocks())
    written = traces.write(good, tmp_path / "b")
    read = traces.load(tmp_path / "b")
    assert (read.requests.equals(good.requests), read.positions.equals(good.positions)) == (True, True)
    assert read.blocks.equals(good.blocks)
    assert read.digest == written.digest
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == [
        "blocks.parquet", "meta.json", "positions.parquet", "requests.parquet",
    ]  # fmt: skip


def test_the_same_bundle_gives_the_same_bytes(good, tmp_path):
    one, two = traces.write(good, tmp_path / "one"), traces.write(good, tmp_path / "two")
    assert one.digest == two.digest


def test_writing_replaces_a_bundle_but_nothing_else(good, tmp_path):
    traces.write(good, tmp_path / "b")
    traces.write(good, tmp_path / "b")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="not an earlier output"):
        traces.write(good, tmp_path / "other")
    assert (tmp_path / "other" / "thesis.txt").read_text() == "mine"
    (tmp_path / "other" / "meta.json").write_text("{}")  # a common name is no licence
    with pytest.raises(UsageError, match="not an earlier output"):
        traces.write(good, tmp_path / "other")
    (tmp_path / "b" / "notes.txt").write_text("mine")  # a bundle somebody keeps other things in
    with pytest.raises(UsageError, match=r"not an earlier output \(notes\.txt\)"):
        traces.write(good, tmp_path / "b")
    assert (tmp_path / "b" / "notes.txt").read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {"b", "other"}


def test_a_link_is_followed_to_the_bundle_it_names(good, tmp_path):
    traces.write(good, tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    traces.write(good, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert {p.name for p in tmp_path.iterdir()} == {"real", "link"}


@pytest.mark.parametrize("file", ["requests.parquet", "positions.parquet", "meta.json"])
def test_any_flipped_byte_is_noticed(good, tmp_path, file):
    traces.write(good, tmp_path / "b")
    path = tmp_path / "b" / file
    raw = path.read_bytes()
    for at in np.random.default_rng(0).integers(0, len(raw), 40).tolist():
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])
        with pytest.raises(BundleError, match=file.replace(".", r"\.")):
            traces.load(tmp_path / "b")
    path.write_bytes(raw)
    traces.load(tmp_path / "b")


@pytest.mark.parametrize("file", ["requests.parquet", "positions.parquet", "meta.json"])
@pytest.mark.parametrize("keep", [0, 7, 100])
def test_a_truncated_file_is_noticed(good, tmp_path, file, keep):
    traces.write(good, tmp_path / "b")
    path = tmp_path / "b" / file
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BundleError, match=file.replace(".", r"\.")):
        traces.load(tmp_path / "b")


def test_a_missing_file_is_named(good, tmp_path):
    traces.write(good, tmp_path / "b")
    (tmp_path / "b" / "positions.parquet").unlink()
    with pytest.raises(BundleError, match=r"positions\.parquet: missing"):
        traces.load(tmp_path / "b")
    with pytest.raises(BundleError, match="no such bundle"):
        traces.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BundleError, match=r"meta\.json: missing"):
        traces.load(tmp_path / "empty")


def set_row(frame: pl.DataFrame, column: str, row: int, value) -> pl.DataFrame:
    values = frame[column].to_list()
    values[row] = value
    return frame.with_columns(pl.Series(column, values, dtype=frame[column].dtype))


REQUEST_DAMAGE = [
    ("split", 1, "holdout", "allowed: train, validation, test"),
    ("output_tokens", 0, 0, "at least 1"),
    ("prompt_tokens", 2, -1, "at least 0"),
    ("prefill_s", 1, float("nan"), "finite"),
    ("finish_reason", 0, "bored", "allowed: stop, length, cut"),
    ("workload", 1, None, "must not be null"),
    ("request_id", 1, "r0", "must be unique"),
]


@pytest.mark.parametrize(("column", "row", "value", "rule"), REQUEST_DAMAGE)
def test_a_bad_request_is_named_by_column_and_row(good, tmp_path, column, row, value, rule):
    bad = Bundle(good.meta, set_row(good.requests, column, row, value), good.positions)
    with pytest.raises(BundleError, match=rule) as raised:
        traces.write(bad, tmp_path / "b")
    assert f"requests.parquet: column '{column}', row " in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())  # nothing half-written


POSITION_DAMAGE = [
    ("accepted.eagle3", 200, "at most drafted.eagle3"),
    ("drafted.eagle3", 200, "at most kmax 6"),
    ("position", 40, "p = 1..T-1"),
    ("request", -1, "at least 0"),
    ("accepted.eagle3", None, "null exactly where"),
]


@pytest.mark.parametrize(("column", "value", "rule"), POSITION_DAMAGE)
def test_a_bad_position_is_named_by_column_and_row(good, tmp_path, column, value, rule):
    bad = Bundle(good.meta, good.requests, set_row(good.positions, column, 3, value))
    with pytest.raises(BundleError, match=rule) as raised:
        traces.write(bad, tmp_path / "b")
    assert f"positions.parquet: column '{column}', row 3" in str(raised.value)


def test_accepting_more_than_follows_is_refused(tmp_path):
    bad = synthetic.bundle([{"eagle3": [2, 2]}])
    with pytest.raises(BundleError, match=r"column 'accepted\.eagle3', row 1: 2: must be at most T - p"):
        traces.write(bad, tmp_path / "b")


def test_a_missing_column_or_row_is_named(good, tmp_path):
    for table, column in (("requests", "workload"), ("positions", "drafted.ngram")):
        frames = {"requests": good.requests, "positions": good.positions}
        frames[table] = frames[table].drop(column)
        with pytest.raises(BundleError, match=rf"{table}\.parquet: missing column '{column}'"):
            traces.write(Bundle(good.meta, **frames), tmp_path / "b")
    with pytest.raises(BundleError, match=r"the output lengths in requests\.parquet need"):
        traces.write(Bundle(good.meta, good.requests, good.positions.slice(1)), tmp_path / "b")
    with pytest.raises(BundleError, match="is Int64; expected Int32"):
        traces.write(Bundle(good.meta, good.requests.cast({"output_tokens": pl.Int64}), good.positions), tmp_path / "b")
    with pytest.raises(BundleError, match="no requests: the bundle is empty"):
        traces.write(Bundle(good.meta, good.requests.clear()), tmp_path / "b")


BLOCK_DAMAGE = [
    ({"verify_s": 0.0}, "verify_s", "positive seconds"),
    ({"verify_s": float("nan")}, "verify_s", "finite"),
    ({"draft_s": -0.1}, "draft_s", "at least 0"),
    ({"draft_s": float("inf")}, "draft_s", "finite"),
    ({"accepted": 3}, "accepted", "at most drafted"),
    ({"drafted": 3}, "drafted", "at most drafter_steps"),
    ({"emitted": 1}, "emitted", r"min\(accepted \+ 1, T - p\)"),
    ({"method": "medusa"}, "method", "allowed: '', 'eagle3'"),
    ({"request": 7}, "request", "below the number of requests"),
    ({"position": 4}, "position", "below output_tokens"),
]


@pytest.mark.parametrize(("change", "column", "rule"), BLOCK_DAMAGE)
def test_a_bad_block_is_named_by_column_and_row(tmp_path, change, column, rule):
    good = synthetic.bundle([{"eagle3": [2, 1, 0]}])
    with pytest.raises(BundleError, match=rule) as raised:
        traces.write(Bundle(good.meta, good.requests, good.positions, blocks(**change)), tmp_path / "b")
    assert f"blocks.parquet: column '{column}', row 0" in str(raised.value)


META_DAMAGE = [
    ({"kmax": 0}, "kmax is 0; allowed: 1..255"),
    ({"kmax": "deep"}, "kmax is 'deep'"),
    ({"methods": {"a:b": {"kind": "ngram"}}}, "method name 'a:b'"),
    ({"methods": {"eagle3": {}}}, "methods.eagle3: missing key 'kind'"),
    ({"methods": []}, "methods must map"),
]


@pytest.mark.parametrize(("change", "rule"), META_DAMAGE)
def test_bad_meta_is_refused(good, tmp_path, change, rule):
    with pytest.raises(BundleError, match=rule):
        traces.write(Bundle(good.meta | change, good.requests, good.positions), tmp_path / "b")


def test_another_schema_is_refused(good, tmp_path):
    traces.write(good, tmp_path / "b")
    file = tmp_path / "b" / "meta.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema": "apexsim.trace/9"}))
    with pytest.raises(BundleError, match=r"schema is 'apexsim.trace/9'; this version reads 'apexsim.trace/1'"):
        traces.load(tmp_path / "b")


def test_splits_are_stable_and_about_60_20_20():
    assert [traces.split_of(g) for g in ("a", "b", "gsm8k/134")] == ["validation", "train", "train"]
    counts = dict.fromkeys(schema.SPLITS, 0)
    for i in range(5000):
        counts[traces.split_of(f"group {i}")] += 1
    shares = [counts[s] / 5000 for s in schema.SPLITS]
    assert shares == pytest.approx([0.6, 0.2, 0.2], abs=0.02)


def test_a_group_in_two_splits_is_refused(tmp_path):
    bad = synthetic.bundle(
        [{"eagle3": [0]}] * 2, source_group=["g", "g"], split=["train", "test"], request_id=["a", "b"]
    )
    with pytest.raises(BundleError, match="source group 'g' lies in more than one split"):
        traces.write(bad, tmp_path / "b")


@pytest.mark.parametrize("codec", ["entropy", "probability"])
def test_codes_round_trip_within_half_a_step(codec):
    encode, decode = getattr(schema, f"encode_{codec}"), getattr(schema, f"decode_{codec}")
    codes = np.arange(256)
    assert (encode(decode(codes)) == codes).all()
    values = np.linspace(0, 1, 1001)
    step = np.abs(decode(codes[1:]) - decode(codes[:-1])).max()
    assert np.abs(decode(encode(values)) - values).max() <= step


def test_every_bundled_trace_is_valid():
    assert "smollm2-cpu" in traces.bundled()
    for name in traces.bundled():
        bundle = traces.load(name)
        for facts in bundle.meta["exactness"].values():
            assert facts["share_equal"] >= 0.999
            assert facts["drafting_blocks"] > 1000
