"""Throughput over interactivity: two curves, and the ratios that people read from them.

Interactivity is output tokens per second and user, throughput output tokens per second of all users
on one GPU. At equal concurrency the two programs serve the same users, at equal interactivity the
same experience; near the interactivity where plain decoding ends the second ratio has no bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from dflash_trt.planner.roofline import Cycle, Setting, cycle


class Rates(Protocol):
    """A point of a curve, modelled or measured."""

    @property
    def interactivity(self) -> float: ...
    @property
    def throughput(self) -> float: ...


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


def throughput_at(curve: Sequence[Rates], interactivity: float) -> float:
    """Throughput where the curve crosses `interactivity`, between its points; 0 where it never does."""
    points = sorted((p.interactivity, p.throughput) for p in curve)
    if interactivity > points[-1][0]:
        return 0.0
    xs, ys = zip(*points, strict=True)
    return float(np.interp(interactivity, xs, ys))
