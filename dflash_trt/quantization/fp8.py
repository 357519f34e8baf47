"""FP8 (E4M3): weights with one scale for each output column, activations with one scale.

    weight [K, N] ~ codes [K, N] * column scale [1, N]
    activation    ~ E4M3(activation / input scale) * input scale

The input scale is a power of two, so that dividing by it is exact in bf16. A floating point code
loses nothing by that but the headroom it wants anyway.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = 448.0
# Calibration sees a few prompts; activations of others may be somewhat larger.
HEADROOM = 1.25
# A scale below this is a denormal number: dividing by it is inexact or impossible.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)


def encode(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """weight fp32 [K, N] -> (codes E4M3 [K, N], scale fp32 [1, N])."""
    peak = np.abs(weight).max(axis=0, keepdims=True)
    scale = np.where(peak > 0, np.maximum(peak / LARGEST, SMALLEST_SCALE), 1.0).astype(np.float32)
    return to_e4m3(weight / scale), scale


def decode(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return codes.astype(np.float32) * scale


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """Round to nearest even and saturate: a bare cast turns what is too large into NaN."""
    return np.clip(values, -LARGEST, LARGEST).astype(E4M3)


def input_scale(peak: float) -> float:
    """The power of two that brings activations of this peak, and some more, into range."""
    return power_of_two(peak * HEADROOM / LARGEST)


def power_of_two(value: float) -> float:
    """The smallest power of two that is `value` or more and no denormal fp32; 1 for nothing."""
    return 2.0 ** math.ceil(math.log2(max(value, SMALLEST_SCALE))) if value > 0 else 1.0


def simulate(activation: np.ndarray, scale: float) -> np.ndarray:
    """What the GEMM sees of an activation."""
    return to_e4m3(activation / np.float32(scale)).astype(np.float32) * np.float32(scale)
