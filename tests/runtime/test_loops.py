"""What counts as a loop."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.runtime.loops import loops


@pytest.mark.parametrize("period", [1, 2, 7, 40])
def test_a_cycle_at_the_end_is_a_loop(period: int) -> None:
    assert loops([*range(100, 150), *(list(range(period)) * 60)])


def test_ordinary_answers_do_not_loop() -> None:
    rng = np.random.default_rng(0)
    assert not loops(rng.integers(0, 50, 200).tolist())
    assert not loops([1, 2] * 5)  # too short to tell
    assert not loops([1, 2, 3] * 30 + list(range(10, 40)))  # came out of it
