"""Published measurements that the planner is held against, with their sources.

`fit` marks the points that the constants were fitted to; the others were kept out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """A measured output rate of all sequences, tokens/s. tau 0: autoregressive decoding."""

    source: str
    plan: str
    gpu: str
    precision: str
    batch: int
    block: int
    tau: float
    rate: float
    fit: bool

    @property
    def label(self) -> str:
        kind = "DFlash" if self.tau else "autoregressive"
        return f"{self.plan} {self.precision}, {self.gpu}, batch {self.batch}, {kind}"


@dataclass(frozen=True)
class Ratio:
    """A measured speed-up of DFlash over autoregressive decoding at equal concurrency."""

    source: str
    plan: str
    gpu: str
    precision: str
    batch: int
    block: int
    tau: float
    speedup: float
    fit: bool

    @property
    def label(self) -> str:
        return f"{self.plan} {self.precision}, {self.gpu}, batch {self.batch}, speed-up"


_PAPER = "DFlash paper (arXiv 2602.06036), SGLang, MATH-500"
_EDGE = "TensorRT Edge-LLM 0.10, MT-Bench"
_CARD = "gpt-oss-120b drafter card, SGLang, GSM8K"

_BATCHES = (1, 4, 8, 16, 32)
_PLAIN = (230, 861, 1666, 3133, 5694)
_DFLASH = (1175, 3884, 7485, 12268, 16076)
_FITTED = (1, 8, 32)

POINTS = (
    *(
        Point(_PAPER, "qwen3-8b", "b200", "bf16", b, 16, 0.0, rate, b in _FITTED)
        for b, rate in zip(_BATCHES, _PLAIN, strict=True)
    ),
    *(
        Point(_PAPER, "qwen3-8b", "b200", "bf16", b, 16, 8.01, rate, b in (1, 16))
        for b, rate in zip(_BATCHES, _DFLASH, strict=True)
    ),
    Point(_EDGE, "qwen3-8b", "gb10", "nvfp4", 1, 16, 0.0, 41.2, False),
    Point(_EDGE, "qwen3-8b", "gb10", "nvfp4", 1, 16, 3.19, 77.2, False),
)

RATIOS = (
    *(
        Ratio(_CARD, "gpt-oss-120b", "h200", "mxfp4", b, 10, 5.3, s, b == 16)
        for b, s in ((1, 1.8), (8, 1.6), (16, 1.6), (32, 1.5))
    ),
)
