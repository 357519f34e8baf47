"""Constants of serving programs, fitted to published rates or chosen; which, each says.

`fit_error` is what the fit minimised: the mean square of the log of modelled over published rate.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log

from dflash_trt.planner.hardware import find_gpu
from dflash_trt.planner.published import Point, Ratio
from dflash_trt.planner.roofline import Setting, Software, cycle
from dflash_trt.planner.shapes import find_plan

CONTEXT = 2048  # tokens; the sources do not say how long their sequences were on average

# Fitted to the five points of `published.POINTS` marked `fit`; e_bw was held at 0.95 or less. Then
# e_moe to the one of `published.RATIOS`: kernels of a GPU that has no products in 4 bits.
SGLANG = Software(
    "sglang", "fitted to published rates of SGLang",
    e_bw=0.95, e_ops=0.431, e_moe=0.067, layer=60.9e-6, pass_=185e-6, host=1.455e-3,
)  # fmt: skip

# Whole passes as one CUDA graph: launch floors chosen, not fitted, so that plain decoding of
# gpt-oss-120b on eight B300 ends near 650 tokens/s per user; efficiencies as fitted above, and experts
# as good as other products, which the GPU's own 4-bit units are for.
GRAPHS = Software(
    "graphs", "efficiencies fitted to published rates of SGLang, launch floors chosen",
    e_bw=0.95, e_ops=0.431, e_moe=0.431, layer=20e-6, pass_=150e-6, host=0.2e-3,
)  # fmt: skip

SOFTWARE = {s.name: s for s in (SGLANG, GRAPHS)}


def modelled_rate(point: Point, software: Software) -> float:
    """The modelled output rate of a published point, tokens/s."""
    setting = Setting(
        find_plan(point.plan), find_gpu(point.gpu), software, point.precision,
        point.batch, CONTEXT, point.block,
    )  # fmt: skip
    modelled = cycle(setting, point.tau or 1.0)
    return modelled.dflash_rate if point.tau else modelled.plain_rate


def modelled_speedup(ratio: Ratio, software: Software) -> float:
    """The modelled speed-up of a published ratio."""
    setting = Setting(
        find_plan(ratio.plan), find_gpu(ratio.gpu), software, ratio.precision,
        ratio.batch, CONTEXT, ratio.block,
    )  # fmt: skip
    return cycle(setting, ratio.tau).speedup


def fit_error(points: Iterable[Point], software: Software) -> float:
    errors = [log(modelled_rate(p, software) / p.rate) ** 2 for p in points]
    return sum(errors) / len(errors)
