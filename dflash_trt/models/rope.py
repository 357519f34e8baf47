"""Rotary tables. One table per model: injection, block and target paths all read the same one."""

from __future__ import annotations

import numpy as np

from dflash_trt.config import Rope
from dflash_trt.errors import InputError


def rope_tables(rope: Rope, head_dim: int, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, fp32 [positions, head_dim / 2], of position times inverse frequency."""
    if rope.scaling is not None:
        kind = rope.scaling.get("rope_type", rope.scaling.get("type"))
        raise InputError(f"rotary scaling of type '{kind}' is not supported")
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = (1.0 / (np.float32(rope.theta) ** exponents)).astype(np.float32)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies[None]
    return np.cos(angles, dtype=np.float32), np.sin(angles, dtype=np.float32)
