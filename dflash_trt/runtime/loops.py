"""The test for an answer that goes round in circles, which drafters find easy and nobody wants."""

from __future__ import annotations

from collections.abc import Sequence

MAX_PERIOD = 64
MIN_LOOP = 24


def loops(ids: Sequence[int]) -> bool:
    """True where the answer ends in a cycle: at least 2.5 periods and `MIN_LOOP` tokens of it."""
    return any(_periodic(ids, period) for period in range(1, MAX_PERIOD + 1))


def _periodic(ids: Sequence[int], period: int) -> bool:
    need = max(MIN_LOOP, (5 * period + 1) // 2)
    if len(ids) < need:
        return False
    tail = ids[-need:]
    return all(tail[i] == tail[i - period] for i in range(period, need))
