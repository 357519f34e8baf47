"""The first two launches of MixtureOfExperts: who computes what.

`route` chooses the experts of each token. `group` sorts the pairs (token, chosen expert) by expert,
in order of tokens, and cuts each expert's pairs into tiles of ROWS. Nothing is counted by atomics,
so that the order, and with it every later sum, is the same in every run.

Bytes: `route` reads the logits once, `T * E * size`, and writes `T * k * 8`. `group` reads the
`T * k * 4` of the chosen experts twice and writes as much once, and 12 for each tile. That is little
next to the weights: 0.01% of what 16 tokens read in gpt-oss-120b.

Tolerance: chosen experts, order and tiles are exact (ties: the lower expert); shares 1e-6.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def route(
    logits, chosen, shares, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr
):
    """Program (token). logits [T, E]; chosen, shares [T, k], in order of falling logits."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS_PAD)
    value = tl.load(logits + token * EXPERTS + expert, mask=expert < EXPERTS, other=-float("inf"))
    value = value.to(tl.float32)
    other, own = value[None, :], value[:, None]
    ahead = (other > own) | ((other == own) & (expert[None, :] < expert[:, None]))
    rank = tl.sum(ahead.to(tl.int32), axis=1)
    taken = rank < TOP_K
    power = tl.where(taken, tl.exp(value - tl.max(value, axis=0)), 0.0)
    slot = token * TOP_K + rank
    tl.store(chosen + slot, expert, mask=taken)
    tl.store(shares + slot, power / tl.sum(power, axis=0), mask=taken)


@triton.jit
def group(
    chosen, order, tile_expert, tile_first, tile_rows, tile_count, pairs,
    EXPERTS_PAD: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program. chosen [pairs]; order [pairs]: pairs sorted by expert; tile_count [1].

    Tile i holds the `tile_rows[i]` pairs from `order[tile_first[i]]` on, all of `tile_expert[i]`.
    """
    expert = tl.arange(0, EXPERTS_PAD)
    column = tl.arange(0, STEP)
    count = tl.zeros((EXPERTS_PAD,), tl.int32)
    for begin in range(0, pairs, STEP):
        pair = begin + column
        mine = tl.load(chosen + pair, mask=pair < pairs, other=-1)
        count += tl.sum((mine[None, :] == expert[:, None]).to(tl.int32), axis=1)
    first = tl.cumsum(count, axis=0) - count

    tiles = tl.cdiv(count, ROWS)
    tile = tl.cumsum(tiles, axis=0) - tiles
    tl.store(tile_count, tl.sum(tiles, axis=0))
    for i in range(0, tl.max(tiles, axis=0)):
        live = i < tiles
        tl.store(tile_expert + tile + i, expert, mask=live)
        tl.store(tile_first + tile + i, first + i * ROWS, mask=live)
        tl.store(tile_rows + tile + i, tl.minimum(count - i * ROWS, ROWS), mask=live)

    for begin in range(0, pairs, STEP):
        pair = begin + column
        mine = tl.load(chosen + pair, mask=pair < pairs, other=-1)
        same = (mine[None, :] == expert[:, None]).to(tl.int32)
        place = first[:, None] + tl.cumsum(same, axis=1) - 1
        tl.store(order + tl.sum(same * place, axis=0), pair, mask=pair < pairs)
        first += tl.sum(same, axis=1)
