"""What shadow drafting records of a drafter's and the target's certainty, on logits small enough to check by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from apexsim.embedding import DIMENSIONS, project

torch = pytest.importorskip("torch", reason="skipped: needs torch")
signals = pytest.importorskip("real_runs.signals")


def logits(*rows):
    return torch.tensor(rows, dtype=torch.float64).log()


def test_certainty_of_known_distributions():
    rows = signals.certainty(logits([0.5, 0.25, 0.25, 0.0], [0.97, 0.01, 0.01, 0.01]))
    assert rows.entropy[0] == pytest.approx(1.5 * math.log(2), rel=1e-6)
    assert rows.top == pytest.approx([0.5, 0.97], rel=1e-6)
    assert [rows.margin(0), rows.margin(1)] == pytest.approx([0.25, 0.96], rel=1e-5)


def test_one_possible_token_is_certain():
    rows = signals.certainty(logits([1.0, 0.0, 0.0]))
    assert (rows.entropy, rows.top, rows.margin(0)) == ([0.0], [1.0], 1.0)


Q = [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]]  # the drafter's two steps: it says 0, then 1
P = [[0.6, 0.3, 0.1], [0.2, 0.5, 0.3]]  # the target's


def kl(q, p):
    return float(np.sum(np.array(q) * np.log(np.array(q) / np.array(p))))


def drafted(log):
    log.begin()
    for step in Q:
        log.step(logits(step))
    log.end(["a"])
    return log.take("a", [0, 1])


def test_divergence_goes_on_to_the_first_rejection():
    log = signals.DraftLog()
    taken = drafted(log)
    assert taken["prob"] == pytest.approx([0.7, 0.8])
    log.compare(["a"], logits(P[0]))
    log.decided("a", 0)  # the draft's first token came true
    log.compare(["a"], logits(P[1]))
    log.decided("a", 2)  # its second did not
    log.compare(["a"], logits(P[0]))
    assert taken["kl"] == pytest.approx([kl(Q[0], P[0]), kl(Q[1], P[1])], rel=1e-5)


def test_a_rejected_draft_is_compared_once():
    log = signals.DraftLog()
    taken = drafted(log)
    log.compare(["a"], logits(P[0]))
    log.decided("a", 1)
    log.compare(["a"], logits(P[1]))
    assert taken["kl"] == pytest.approx([kl(Q[0], P[0])], rel=1e-5)


def test_drafts_of_several_positions_wait_side_by_side():
    log = signals.DraftLog()
    first = drafted(log)
    log.compare(["a"], logits(P[0]))
    log.decided("a", 0)
    second = drafted(log)
    log.compare(["a"], logits(P[1]))
    assert first["kl"][1] == pytest.approx(kl(Q[1], P[1]), rel=1e-5)
    assert second["kl"] == pytest.approx([kl(Q[0], P[1])], rel=1e-5)


def test_a_smaller_vocabulary_is_compared_by_its_target_ids():
    log = signals.DraftLog()
    log.to_target = torch.tensor([2, 0, -1])
    log.begin()
    log.step(logits([0.75, 0.25, 0.0]))
    log.end(["a"])
    taken = log.take("a", [2])
    log.compare(["a"], logits([0.3, 0.2, 0.5]))
    assert taken["kl"] == pytest.approx([kl([0.75, 0.25], [0.5, 0.3])], rel=1e-5)


def test_an_ended_request_and_a_silent_drafter_leave_nothing():
    log = signals.DraftLog()
    taken = drafted(log)
    log.forget("a")
    log.compare(["a"], logits(P[0]))
    assert taken["kl"] == []
    log.begin()
    log.end(["a"])
    assert log.take("a", [1, 2]) == {}


def test_embeddings_are_fixed_and_keep_distances():
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, 576))
    assert project(x) == project(x.tolist())
    assert len(project(x)) == DIMENSIONS
    shrink = np.linalg.norm(np.subtract(project(x), project(y))) / np.linalg.norm(x - y)
    assert 0.7 < shrink < 1.3
