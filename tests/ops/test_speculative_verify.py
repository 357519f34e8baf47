"""SpeculativeVerify's reference function against the rule written out in Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.run import run_op

VERIFY = ("accepted", "anchor", "context")


def expected(
    logits: np.ndarray, tokens: np.ndarray, rows: np.ndarray, lengths: np.ndarray
) -> list[list[int]]:
    found: list[list[int]] = [[], [], []]
    for b in range(len(tokens)):
        greedy = [int(np.argmax(row)) for row in logits[b]]
        agreed = 0
        while agreed < len(greedy) - 1 and tokens[b][rows[b][agreed + 1]] == greedy[agreed]:
            agreed += 1
        accepted = int(rows[b][0]) + 1 + agreed
        for out, value in zip(
            found, (accepted, greedy[agreed], int(lengths[b]) + accepted), strict=True
        ):
            out.append(value)
    return found


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_matches_the_rule(data: st.DataObject) -> None:
    batch, width = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    first = data.draw(st.integers(0, 3))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    logits = random.integers(0, 3, (batch, width, 3)).astype(np.float32)  # few values: ties happen
    tokens = random.integers(0, 3, (batch, first + width))
    rows = np.tile(first + np.arange(width), (batch, 1))
    lengths = random.integers(0, 100, batch).astype(np.int32)
    got = run_op("SpeculativeVerify", [logits, tokens, rows, lengths], VERIFY)
    assert [list(map(int, x)) for x in got] == expected(logits, tokens, rows, lengths)


@pytest.mark.parametrize("agreed", range(8))
def test_every_accepted_length(agreed: int) -> None:
    """Rejection at the first draft, at each later one, and none at all."""
    greedy = np.arange(10, 18)
    logits = np.eye(32, dtype=np.float32)[greedy][None]
    tokens = np.concatenate([[5], greedy[:7]])[None]
    if agreed < 7:
        tokens[0, agreed + 1] = 31
    got = run_op(
        "SpeculativeVerify", [logits, tokens, np.arange(8)[None], np.array([100], np.int32)], VERIFY
    )
    assert [int(x[0]) for x in got] == [agreed + 1, 10 + agreed, 101 + agreed]
