"""One pass over the logits: best token and sum of exponentials of each tile of the vocabulary.

A row of 201088 logits is too long for one block of threads and a GPU has more than a hundred of
them, so a row is cut into tiles. Each program reads one tile once and leaves three numbers; a
second, small kernel of each plugin puts the tiles of a row together.

Bytes: logits once, `rows * V * size`, and `rows * tiles * 12` written and read again. The minimum is
the logits once: at V = 201088, bf16, the excess is 2 * 50 * 12 / 402176 = 0.3%.

Tolerance: the best token is exact (ties: lowest id). The sum is one fp32 sum per tile instead of one
over the row: 1e-5 relative on the log confidence.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from dflash_plugins.vocabulary.partials import TILE, tiles


@triton.jit
def best_of_tile(logits, best, index, total, V: tl.constexpr, TILE: tl.constexpr):
    """Program (row, tile). logits [rows, V]; best, index, total [rows, tiles]."""
    row = tl.program_id(0)
    tile = tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    values = tl.load(logits + row.to(tl.int64) * V + column, mask=column < V, other=-float("inf"))
    values = values.to(tl.float32)
    top, where = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
    # A tile of -inf only has no exponentials; -inf - -inf must not become NaN.
    centre = tl.where(top == -float("inf"), 0.0, top)
    out = row * tl.cdiv(V, TILE) + tile
    tl.store(best + out, top)
    tl.store(index + out, tile * TILE + where)
    tl.store(total + out, tl.sum(tl.exp(values - centre), axis=0))


def launch_best_of_tile(logits: Any, best: Any, index: Any, total: Any) -> None:
    """Checks and launches on torch tensors: logits [rows, V] contiguous, the rest [rows, tiles]."""
    rows, vocabulary = logits.shape
    shape = (rows, tiles(vocabulary))
    for name, tensor in (("best", best), ("index", index), ("total", total)):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, {shape} is needed")
    if not logits.is_contiguous():
        raise ValueError("logits must be contiguous")
    best_of_tile[(rows, shape[1])](logits, best, index, total, V=vocabulary, TILE=TILE)
