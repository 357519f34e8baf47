"""Whether something fits into the memory of GPUs, and on how many."""

from __future__ import annotations

from collections.abc import Callable

from dflash_trt.errors import InputError
from dflash_trt.planner.hardware import Gpu

RANKS = (1, 2, 4, 8)
_ROOM = 0.9  # of the memory; the rest is left to the program and its scratch


def fits(needed: float, gpu: Gpu) -> bool:
    """Whether `needed` bytes fit on one GPU."""
    return needed <= _ROOM * gpu.memory


def verdict(needed: float, gpu: Gpu) -> str:
    said = f"{needed / 1e9:.1f} GB of {gpu.memory / 1e9:.0f} GB on one {gpu.name}"
    if fits(needed, gpu):
        return f"fits: {said}"
    return f"does NOT fit: {said}, of which a tenth is kept free"


def ranks_that_fit(needed: Callable[[int], float], gpu: Gpu) -> str:
    """A line about each number of ranks in `RANKS`. `needed` gives bytes per GPU, or raises
    `InputError` where the target cannot be cut so."""
    return f"--tp on {gpu.name}: " + "; ".join(_of(ranks, needed, gpu) for ranks in RANKS)


def _of(ranks: int, needed: Callable[[int], float], gpu: Gpu) -> str:
    try:
        size = needed(ranks)
    except InputError:
        return f"{ranks} cannot be"
    return f"{ranks} {'fits' if fits(size, gpu) else 'does NOT fit'} ({size / 1e9:.1f} GB per GPU)"
