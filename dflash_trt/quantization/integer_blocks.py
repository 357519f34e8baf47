"""Weights as blocks of 8 or 4 bit integers, in the layout of ONNX Runtime's MatMulNBits.

Each row of 32 consecutive inputs of one output shares a scale and a zero point (asymmetric).
"""

from __future__ import annotations

import numpy as np

BLOCK = 32


def quantize(weight: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """weight [K, N] fp32 -> (q [N, K/32, 32*bits/8] uint8, scale [N * K/32] fp32, zero uint8).

    K must be a multiple of 32. `zero` is packed like `q`: one per block, two to a byte at 4 bits.
    """
    inner, outer = weight.shape
    levels = (1 << bits) - 1
    blocks = np.ascontiguousarray(weight.T).reshape(outer, inner // BLOCK, BLOCK)
    low = np.minimum(blocks.min(-1), 0)
    scale = (np.maximum(blocks.max(-1), 0) - low) / np.float32(levels)
    scale[scale == 0] = 1
    zero = np.clip(np.rint(-low / scale), 0, levels).astype(np.uint8)
    q = np.clip(np.rint(blocks / scale[..., None]) + zero[..., None], 0, levels).astype(np.uint8)
    if bits == 4:
        q = _pack_pairs(q)
        zero = _pack_pairs(np.pad(zero, ((0, 0), (0, zero.shape[1] % 2))))
    return q, scale.reshape(-1), zero.reshape(-1)


def _pack_pairs(values: np.ndarray) -> np.ndarray:
    """Two 4-bit values to a byte, the first in the low half."""
    return values[..., 0::2] | (values[..., 1::2] << 4)
