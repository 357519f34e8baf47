"""Throughput over interactivity: two curves, and the ratios that people read from them.

Interactivity is output tokens per second and user, throughput output tokens per second of all users
on one GPU. At equal concurrency the two programs serve the same users, at equal interactivity the
same experience; near the interactivity where plain decoding ends the second ratio has no bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from dflash_trt.planner.roofline import Cycle, Setting, cycle


@dataclass(frozen=True)
class CurvePoint:
    """Rates at one batch: per user, and per GPU."""

    batch: int
    interactivity: float
    throughput: float


@dataclass(frozen=True)
class Curves:
    plain: tuple[CurvePoint, ...]
    dflash: tuple[CurvePoint, ...]
    cycles: tuple[Cycle, ...]

    @property
    def plain_end(self) -> float:
        """Interactivity beyond which plain decoding serves nobody."""
        return max(p.interactivity for p in self.plain)

    def throughput_ratio(self, interactivity: float) -> float:
        """DFlash over plain throughput where both give each user this many tokens/s."""
        mine, theirs = (throughput_at(c, interactivity) for c in (self.dflash, self.plain))
        return mine / theirs if theirs else float("inf")


def curves(setting: Setting, tau: float, batches: Sequence[int]) -> Curves:
    """Both curves over `batches`, at one acceptance length."""
    cycles = tuple(cycle(replace(setting, batch=b), tau) for b in batches)
    plain = tuple(_point(c.batch, c.plain_rate, setting.ranks) for c in cycles)
    dflash = tuple(_point(c.batch, c.dflash_rate, setting.ranks) for c in cycles)
    return Curves(plain, dflash, cycles)


def _point(batch: int, rate: float, ranks: int) -> CurvePoint:
    return CurvePoint(batch, rate / batch, rate / ranks)


def throughput_at(curve: Sequence[CurvePoint], interactivity: float) -> float:
    """Throughput where the curve crosses `interactivity`, between its points; 0 where it never does."""
    ordered = sorted(curve, key=lambda p: p.interactivity)
    if interactivity > ordered[-1].interactivity:
        return 0.0
    if interactivity <= ordered[0].interactivity:
        return ordered[0].throughput
    for low, high in pairwise(ordered):
        if low.interactivity <= interactivity <= high.interactivity:
            share = (interactivity - low.interactivity) / (high.interactivity - low.interactivity)
            return low.throughput + share * (high.throughput - low.throughput)
    raise AssertionError("an ordered curve has no gap")
