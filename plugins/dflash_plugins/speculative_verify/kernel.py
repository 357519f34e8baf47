"""Second launch of SpeculativeVerify: from the best token of every tile to the accepted count.

The first launch is `vocabulary.kernel.best_of_tile`; its sums are not used here. One program per
sequence puts the tiles of W rows together, compares with the drafts and writes three numbers.

Bytes: `B * W * tiles * 8` read (the tiles' best values and their ids), `B * (W * 16 + 8)` for rows
and drafts, `B * 16` written. That is the minimum for this launch.

Tolerance: none, all outputs are integers.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

NOWHERE = 2147483647


@triton.jit
def accept(
    best, index, tokens, rows, lengths, accepted, anchor, context, width, size,
    TILES: tl.constexpr, TILES_PAD: tl.constexpr, WIDTH_PAD: tl.constexpr, NOWHERE: tl.constexpr,
):  # fmt: skip
    """Program (sequence). best, index [B*W, tiles]; tokens [B, size]; rows [B, width]."""
    b = tl.program_id(0)
    j = tl.arange(0, WIDTH_PAD)
    t = tl.arange(0, TILES_PAD)
    live = j < width
    cell = (b * width + j)[:, None] * TILES + t[None, :]
    mask = live[:, None] & (t < TILES)[None, :]
    value = tl.load(best + cell, mask=mask, other=-float("inf"))
    ids = tl.load(index + cell, mask=mask, other=NOWHERE)
    top = tl.max(value, axis=1)
    # Tiles are in order of token ids: the lowest id among the equally best wins.
    greedy = tl.min(tl.where(value == top[:, None], ids, NOWHERE), axis=1)

    # Row j answers for the draft in row j + 1.
    place = tl.load(rows + b * width + j + 1, mask=j + 1 < width, other=0)
    draft = tl.load(tokens + b * size + place, mask=j + 1 < width, other=-1)
    miss = tl.where((j + 1 < width) & (draft == greedy), NOWHERE, j)
    agreed = tl.min(miss, axis=0)

    first = tl.load(rows + b * width).to(tl.int32)
    taken = first + 1 + agreed
    tl.store(accepted + b, taken)
    tl.store(context + b, tl.load(lengths + b) + taken)
    chosen = tl.sum(tl.where(j == agreed, greedy, 0), axis=0)
    tl.store(anchor + b, chosen.to(tl.int64))


def launch_accept(
    best: Any, index: Any, tokens: Any, rows: Any, lengths: Any,
    accepted: Any, anchor: Any, context: Any,
) -> None:  # fmt: skip
    """Checks and launches on torch tensors; shapes as in the op `SpeculativeVerify`."""
    batch, width = rows.shape
    if best.shape[0] != batch * width or index.shape != best.shape:
        raise ValueError(f"{best.shape[0]} rows of tiles for {batch} x {width} rows of logits")
    for name, tensor in (
        ("lengths", lengths), ("accepted", accepted), ("anchor", anchor), ("context", context),
    ):  # fmt: skip
        if tuple(tensor.shape) != (batch,):
            raise ValueError(f"{name} is {tuple(tensor.shape)}, ({batch},) is needed")
    tile_count = best.shape[1]
    accept[(batch,)](
        best, index, tokens, rows, lengths, accepted, anchor, context, width, tokens.shape[1],
        **constants(tile_count, width),
    )  # fmt: skip


def constants(tile_count: int, widest: int) -> dict[str, int]:
    """Compile-time sizes for rows of `tile_count` tiles and at most `widest` rows."""
    return {
        "TILES": tile_count,
        "TILES_PAD": triton.next_power_of_2(tile_count),
        "WIDTH_PAD": triton.next_power_of_2(widest),
        "NOWHERE": NOWHERE,
    }
