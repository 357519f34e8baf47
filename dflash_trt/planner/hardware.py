"""GPUs as a roofline sees them. Dense peak rates and memory from NVIDIA's data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.errors import InputError


@dataclass(frozen=True)
class Gpu:
    """capability: such as 120 for compute capability 12.0; memory: bytes; bandwidth: bytes/s; bf16,
    fp8, fp4: dense FLOP/s, 0 where there is no such unit; link: bytes/s to the other GPUs
    of a node, 0 where there are none."""

    name: str
    capability: int
    memory: float
    bandwidth: float
    bf16: float
    fp8: float
    fp4: float
    link: float = 0.0
    source: str = "NVIDIA's data sheet, dense peak rates"

    def peak(self, precision: str) -> float:
        """FLOP/s of matrix products in `precision`; weights in 4 bits without such a unit run in 8
        or 16, as their dequantised form does."""
        rates = {"bf16": self.bf16, "fp8": self.fp8, "nvfp4": self.fp4, "mxfp4": self.bf16}
        return rates[precision] or self.fp8


_T, _G = 1e12, 1e9

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h200", 90, 141 * _G, 4.8 * _T, 989 * _T, 1979 * _T, 0, 0.9 * _T),
        Gpu("b200", 100, 180 * _G, 8.0 * _T, 2250 * _T, 4500 * _T, 9000 * _T, 1.8 * _T),
        Gpu("b300", 103, 288 * _G, 8.0 * _T, 2250 * _T, 4500 * _T, 13000 * _T, 1.8 * _T),
        Gpu("gb200", 100, 186 * _G, 8.0 * _T, 2500 * _T, 5000 * _T, 10000 * _T, 1.8 * _T),
        Gpu("gb300", 103, 288 * _G, 8.0 * _T, 2500 * _T, 5000 * _T, 15000 * _T, 1.8 * _T),
        Gpu("rtx-pro-6000", 120, 96 * _G, 1.79 * _T, 500 * _T, 1000 * _T, 2000 * _T),
        Gpu("gb10", 121, 128 * _G, 0.273 * _T, 125 * _T, 250 * _T, 500 * _T),
    )
}


def find_gpu(name: str) -> Gpu:
    """The GPU called `name`, whatever the case."""
    if name.lower() not in GPUS:
        raise InputError(f"gpu '{name}': the planner knows {', '.join(GPUS)}")
    return GPUS[name.lower()]
