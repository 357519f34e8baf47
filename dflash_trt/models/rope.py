"""Rotary tables. One table per model: injection, block and target paths all read the same one.

The scalings are those of `rope_scaling` in Hugging Face configurations: `linear`, `llama3` (Llama
3.1) and `yarn` (https://arxiv.org/abs/2309.00071), whose attention factor is part of the tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dflash_trt.config import Rope
from dflash_trt.errors import InputError

Scaling = Mapping[str, Any]


def rope_tables(rope: Rope, head_dim: int, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, fp32 [positions, head_dim / 2], of position times inverse frequency."""
    frequencies, factor = inverse_frequencies(rope, head_dim)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies[None]
    cos, sin = np.cos(angles, dtype=np.float32), np.sin(angles, dtype=np.float32)
    return cos * np.float32(factor), sin * np.float32(factor)


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies, fp32 [head_dim / 2], and the factor by which cos and sin are scaled."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = (1.0 / (np.float32(rope.theta) ** exponents)).astype(np.float32)
    if rope.scaling is None:
        return plain, 1.0
    check_scaling(rope, "rope")
    frequencies, factor = _SCALINGS[rope.kind][0](plain, rope.scaling, rope.theta, head_dim)
    return frequencies.astype(np.float32), factor


def check_scaling(rope: Rope, origin: str) -> None:
    """Refuse an unknown kind of scaling and one without the keys it needs."""
    if rope.scaling is None:
        return
    if rope.kind not in _SCALINGS:
        known = ", ".join(_SCALINGS)
        raise InputError(
            f"{origin}: rotary scaling of type '{rope.kind}' is not supported, only {known}"
        )
    for key in _SCALINGS[rope.kind][1]:
        if not isinstance(rope.scaling.get(key), int | float):
            raise InputError(f"{origin}: rotary scaling '{rope.kind}' needs the number '{key}'")


def _linear(plain: np.ndarray, s: Scaling, theta: float, head_dim: int) -> tuple[np.ndarray, float]:
    return plain / np.float32(s["factor"]), 1.0


def _llama3(plain: np.ndarray, s: Scaling, theta: float, head_dim: int) -> tuple[np.ndarray, float]:
    """Long waves are stretched by `factor`, short ones kept, with a ramp between the two."""
    low, high = float(s["low_freq_factor"]), float(s["high_freq_factor"])
    turns = s["original_max_position_embeddings"] * plain / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - keep) * plain / s["factor"] + keep * plain, 1.0


def _yarn(plain: np.ndarray, s: Scaling, theta: float, head_dim: int) -> tuple[np.ndarray, float]:
    """Dimensions that turn often are kept, those that turn seldom are stretched by `factor`."""

    def dimension(turns: float) -> float:
        length = s["original_max_position_embeddings"]
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(s.get("beta_fast") or 32), dimension(s.get("beta_slow") or 1)
    if s.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretch = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return plain / s["factor"] * stretch + plain * (1 - stretch), _attention_factor(s)


def _attention_factor(s: Scaling) -> float:
    given, first, second = (s.get(k) for k in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return float(given)
    if first and second:
        return _magnitude(s["factor"], first) / _magnitude(s["factor"], second)
    return _magnitude(s["factor"], 1.0)


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


_Rule = Callable[[np.ndarray, Scaling, float, int], tuple[np.ndarray, float]]
_LENGTH = "original_max_position_embeddings"
_SCALINGS: Mapping[str, tuple[_Rule, tuple[str, ...]]] = {
    "linear": (_linear, ("factor",)),
    "llama3": (_llama3, ("factor", "low_freq_factor", "high_freq_factor", _LENGTH)),
    "yarn": (_yarn, ("factor", _LENGTH)),
}
