"""NVFP4: E2M1 codes in blocks of 16 along K, an E4M3 scale for each block, one scale over all
(which stands once for each column, since matrices with scales of their own may lie side by side).

    weight [K, N] ~ (codes [N, K] * block scale [N, K/16])^T * scale [1, N]
    activation    ~ the same along its last axis, block scales made while running

Two codes share a byte, the one with the lower index in the low half.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from dflash_trt.quantization.fp8 import E4M3, HEADROOM, SMALLEST_SCALE, power_of_two, to_e4m3
from dflash_trt.quantization.fp8 import LARGEST as LARGEST_SCALE

E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
BLOCK = 16
LARGEST = 6.0
# The sixteen values in the order of their codes.
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def encode(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """weight fp32 [K, N] -> (packed uint8 [N, K/2], block scale E4M3 [N, K/16], scale [1, N])."""
    peak = float(np.abs(weight).max())
    scale = np.float32(max(peak / (LARGEST * LARGEST_SCALE), SMALLEST_SCALE) if peak > 0 else 1)
    codes, block_scale = encode_rows(weight.T / scale)
    return pack(codes), block_scale, np.full((1, weight.shape[1]), scale, np.float32)


def encode_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """rows fp32 [.., K] -> (codes uint8 [.., K], block scales E4M3 [.., K/16])."""
    blocks = rows.reshape(*rows.shape[:-1], -1, BLOCK)
    scales = to_e4m3(np.abs(blocks).max(axis=-1) / LARGEST)
    divisor = scales.astype(np.float32)[..., None]
    # A block of tiny values rounds its scale to zero: its codes are zero as well.
    safe = np.where(divisor > 0, divisor, 1)
    ratio = np.where(divisor > 0, blocks / safe, 0)
    codes = np.clip(ratio, -LARGEST, LARGEST).astype(E2M1).view(np.uint8)
    return codes.reshape(rows.shape), scales


def decode(packed: np.ndarray, block_scale: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The inverse of `encode`, fp32 [K, N]."""
    rows = decode_rows(unpack(packed), block_scale)
    return np.ascontiguousarray(rows.T) * scale


def decode_rows(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return VALUES[codes] * np.repeat(scales.astype(np.float32), BLOCK, axis=-1)


def pack(codes: np.ndarray) -> np.ndarray:
    """codes [.., K] of four bits -> bytes [.., K/2], lower index in the low half."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def input_scale(peak: float) -> float:
    """The power of two that keeps the block scales of activations of this peak in range."""
    return power_of_two(peak * HEADROOM / (LARGEST * LARGEST_SCALE))


def simulate(activation: np.ndarray, scale: float) -> np.ndarray:
    """What the GEMM sees of an activation [.., K]."""
    codes, scales = encode_rows(activation / np.float32(scale))
    return decode_rows(codes, scales) * np.float32(scale)


__all__ = [
    "BLOCK", "E2M1", "E4M3", "decode", "encode", "input_scale", "pack", "simulate", "unpack",
]  # fmt: skip
