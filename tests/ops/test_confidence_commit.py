"""ConfidenceCommit's reference function against the rule written out in Python."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.run import run_op


def expected(
    logits: np.ndarray, drafts: np.ndarray, committed: np.ndarray, share: int
) -> tuple[np.ndarray, np.ndarray]:
    drafts, committed = drafts.copy(), committed.copy()
    for b in range(len(drafts)):
        shifted = logits[b] - logits[b].max(-1, keepdims=True)
        confidence = 1 / np.exp(shifted.astype(np.float64)).sum(-1)
        open_slots = [s for s in range(drafts.shape[1]) if not committed[b, s]]
        for slot in sorted(open_slots, key=lambda s: (-confidence[s], s))[:share]:
            drafts[b, slot] = logits[b, slot].argmax()
            committed[b, slot] = True
    return drafts, committed


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_matches_the_rule(data: st.DataObject) -> None:
    batch, slots = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 7))
    share = data.draw(st.integers(0, slots))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    logits = random.standard_normal((batch, slots, 11)).astype(np.float32) * 4
    committed = random.random((batch, slots)) < 0.3
    drafts = np.where(committed, random.integers(0, 11, (batch, slots)), 99)
    inputs = [logits, drafts, committed, np.array([share])]
    got = run_op("ConfidenceCommit", inputs, ("drafts", "committed"), final=0)
    for mine, theirs in zip(got, expected(logits, drafts, committed, share), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_equal_confidence_takes_the_lower_slot() -> None:
    logits = np.tile(np.array([0, 3, 0], np.float32), (1, 4, 1))
    open_slots = np.zeros((1, 4), bool)
    drafts = np.full((1, 4), 9)
    got, _ = run_op(
        "ConfidenceCommit", [logits, drafts, open_slots, np.array([2])], ("d", "c"), final=0
    )
    assert got.tolist() == [[1, 1, 9, 9]]


def test_the_last_pass_settles_every_slot() -> None:
    logits = np.random.default_rng(0).standard_normal((2, 5, 7)).astype(np.float32)
    drafts = np.full((2, 5), 99)
    drafts[0, 1] = 3
    committed = drafts != 99
    got, settled = run_op(
        "ConfidenceCommit", [logits, drafts, committed, np.array([5])], ("d", "c"), final=1
    )
    np.testing.assert_array_equal(got, np.where(committed, drafts, logits.argmax(-1)))
    assert settled.all()
