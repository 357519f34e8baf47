"""Acceptance over the block length: measured per slot, or from one acceptance length.

The slots' shares of cycles are those of `bench`: a slot counts only if all before it were accepted,
so a block of b tokens has the acceptance length 1 + the sum of its first b - 1 shares.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_trt.errors import InputError


def acceptance_length(shares: Sequence[float], block: int) -> float:
    """Tokens per cycle of a block of so many tokens, the target's own included."""
    if block - 1 > len(shares):
        raise InputError(f"block {block}: acceptance was measured for {len(shares)} drafted slots")
    return 1 + sum(shares[: block - 1])


def from_length(tau: float, block: int) -> list[float]:
    """Shares that give `tau` at `block`, each draft accepted as often as the one before it."""
    if not 1 <= tau <= block:
        raise InputError(f"tau {tau:g}: a block of {block} commits 1 to {block} tokens")
    low, high = 0.0, 1.0
    for _ in range(60):  # halvings, down to rounding
        middle = (low + high) / 2
        short = acceptance_length([middle**i for i in range(1, block)], block) < tau
        low, high = (middle, high) if short else (low, middle)
    return [high**i for i in range(1, block)]
