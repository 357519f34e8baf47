"""Integer forms of weights for the CPU: what is stored, and under which names nodes read it.

Blocks (8 or 4 bits) have the layout of ONNX Runtime's MatMulNBits: 32 consecutive inputs of one
output share a scale and a zero point (asymmetric), and activations are rounded block by block too.
Columns (8 bits, symmetric) have one scale per output, activations one per row: a product is one
integer dot product, which makes a block's rows two to three times as fast as with blocks, and rounds
half as much again. That is for CPUs with units for it: without VNNI or AMX an x86 CPU adds pairs of
products in 16 bits, which overflow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

BLOCK = 32
_AT_ONCE = 1 << 20  # weights; a few fp32 arrays of as many stand beside what is made


@dataclass(frozen=True)
class IntegerForm:
    """One way to store a weight [K, N] fp32. K must be a multiple of 32 for blocks.

    name: suffix of the arrays' names; bits: of a weight; parts: the arrays in the order that nodes read them;
    element_bytes: stored bytes per weight; quantize: makes the arrays.
    """

    name: str
    bits: int
    parts: tuple[str, ...]
    element_bytes: float
    quantize: Callable[[np.ndarray], tuple[np.ndarray, ...]]

    def labels(self, weight: str) -> list[str]:
        """The names of a weight's arrays."""
        return [f"{weight}.{part}.{self.name}" for part in self.parts]

    def arrays(self, weight: str, array: np.ndarray) -> dict[str, np.ndarray]:
        """A weight's arrays by their names."""
        return dict(zip(self.labels(weight), self.quantize(array), strict=True))


def _column_by_column(
    quantize: Callable[[np.ndarray], tuple[np.ndarray, ...]], weight: np.ndarray, axis: int
) -> tuple[np.ndarray, ...]:
    """`quantize(weight)`, a few of its columns at a time; `axis` is theirs in each result."""
    inner, outer = weight.shape
    step = max(1, _AT_ONCE // inner)
    made = [quantize(weight[:, first : first + step]) for first in range(0, outer, step)]
    return tuple(np.concatenate(pieces, axis) for pieces in zip(*made, strict=True))


def _blocks8(weight: np.ndarray) -> tuple[np.ndarray, ...]:
    return _column_by_column(lambda columns: _blocks(columns, 255), weight, axis=0)


def _blocks4(weight: np.ndarray) -> tuple[np.ndarray, ...]:
    return _column_by_column(_packed_blocks, weight, axis=0)


def _packed_blocks(weight: np.ndarray) -> tuple[np.ndarray, ...]:
    q, scale, zero = _blocks(weight, 15)
    zero = _pack_pairs(np.pad(zero, ((0, 0), (0, zero.shape[1] % 2))))
    return _pack_pairs(q), scale, zero


def _blocks(weight: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q uint8 [N, K/32, 32], scale fp32 and zero uint8 [N, K/32]."""
    inner, outer = weight.shape
    blocks = np.ascontiguousarray(weight.T).reshape(outer, inner // BLOCK, BLOCK)
    low = np.minimum(blocks.min(-1), 0)
    scale = (np.maximum(blocks.max(-1), 0) - low) / np.float32(levels)
    scale[scale == 0] = 1
    zero = np.clip(np.rint(-low / scale), 0, levels).astype(np.uint8)
    q = np.clip(np.rint(blocks / scale[..., None]) + zero[..., None], 0, levels).astype(np.uint8)
    return q, scale, zero


def _pack_pairs(values: np.ndarray) -> np.ndarray:
    """Two 4-bit values to a byte, the first in the low half."""
    return values[..., 0::2] | (values[..., 1::2] << 4)


def _columns8(weight: np.ndarray) -> tuple[np.ndarray, ...]:
    """q int8 [K, N], scale fp32 [N]."""
    return _column_by_column(_columns, weight, axis=-1)


def _columns(weight: np.ndarray) -> tuple[np.ndarray, ...]:
    scale = np.abs(weight).max(0) / np.float32(127)
    scale[scale == 0] = 1
    return np.rint(weight / scale).astype(np.int8), scale


BLOCKS8 = IntegerForm("blocks8", 8, ("q", "scale", "zero"), 1 + 5 / BLOCK, _blocks8)
BLOCKS4 = IntegerForm("blocks4", 4, ("q", "scale", "zero"), 0.5 + 4.5 / BLOCK, _blocks4)
COLUMNS8 = IntegerForm("columns8", 8, ("q", "scale"), 1.0, _columns8)
