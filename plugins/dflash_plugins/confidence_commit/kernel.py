"""Second launch of ConfidenceCommit: confidences of all slots, and which of them are settled.

The first launch is `vocabulary.kernel.best_of_tile`. One program per sequence puts the tiles of its
M slots together, ranks the open slots by comparing each with each (M is at most a few dozen) and
writes the tokens of the next pass.

Bytes: `B * M * tiles * 12` read, `B * M * 9` read and written for drafts and flags. That is the
minimum for this launch.

Tolerance: tokens and flags are exact where confidences differ by more than the fp32 rounding of a
log-sum-exp (1e-5 relative); closer ones may be ranked the other way round than by the reference.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

NOWHERE = 2147483647


@triton.jit
def settle(
    best, index, total, drafts, committed, share, new_drafts, new_committed, slots,
    TILES: tl.constexpr, TILES_PAD: tl.constexpr, SLOTS_PAD: tl.constexpr, FINAL: tl.constexpr,
    NOWHERE: tl.constexpr,
):  # fmt: skip
    """Program (sequence). best, index, total [B*M, tiles]; drafts, committed [B, M]; share [1]."""
    b = tl.program_id(0)
    j = tl.arange(0, SLOTS_PAD)
    t = tl.arange(0, TILES_PAD)
    live = j < slots
    cell = (b * slots + j)[:, None] * TILES + t[None, :]
    mask = live[:, None] & (t < TILES)[None, :]
    value = tl.load(best + cell, mask=mask, other=-float("inf"))
    ids = tl.load(index + cell, mask=mask, other=NOWHERE)
    top = tl.max(value, axis=1)
    token = tl.min(tl.where(value == top[:, None], ids, NOWHERE), axis=1)

    slot = b * slots + j
    done = tl.load(committed + slot, mask=live, other=1) != 0
    draft = tl.load(drafts + slot, mask=live, other=0)
    taken = live & (done == 0)
    if not FINAL:
        # log confidence = max - logsumexp = -log(sum of exp(x - max))
        part = tl.load(total + cell, mask=mask, other=0.0) * tl.exp(value - top[:, None])
        confidence = -tl.log(tl.sum(tl.where(mask, part, 0.0), axis=1))
        confidence = tl.where(taken, confidence, -float("inf"))
        other, own = confidence[None, :], confidence[:, None]
        ahead = (other > own) | ((other == own) & (j[None, :] < j[:, None]))
        rank = tl.sum(ahead.to(tl.int32), axis=1)
        taken = taken & (rank < tl.load(share))
    tl.store(new_drafts + slot, tl.where(taken, token.to(tl.int64), draft), mask=live)
    tl.store(new_committed + slot, (taken | done).to(tl.int8), mask=live)


def launch_settle(
    best: Any, index: Any, total: Any, drafts: Any, committed: Any, share: Any,
    new_drafts: Any, new_committed: Any, final: bool,
) -> None:  # fmt: skip
    """Checks and launches on torch tensors; shapes as in the op `ConfidenceCommit`, flags int8."""
    batch, slots = drafts.shape
    if best.shape[0] != batch * slots or index.shape != best.shape or total.shape != best.shape:
        raise ValueError(f"{best.shape[0]} rows of tiles for {batch} x {slots} slots")
    for name, tensor in (
        ("committed", committed), ("new_drafts", new_drafts), ("new_committed", new_committed),
    ):  # fmt: skip
        if tensor.shape != drafts.shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, {(batch, slots)} is needed")
    settle[(batch,)](
        best, index, total, drafts, committed, share, new_drafts, new_committed, slots,
        **constants(best.shape[1], slots, final),
    )  # fmt: skip


def constants(tile_count: int, most_slots: int, final: bool) -> dict[str, int | bool]:
    """Compile-time sizes for rows of `tile_count` tiles and at most `most_slots` slots."""
    return {
        "TILES": tile_count,
        "TILES_PAD": triton.next_power_of_2(tile_count),
        "SLOTS_PAD": triton.next_power_of_2(most_slots),
        "FINAL": final,
        "NOWHERE": NOWHERE,
    }
