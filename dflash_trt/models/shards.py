"""How a target is cut over the ranks of a tensor parallel mesh.

A rank has some key/value heads with all their query heads, some columns of the MLP (the same columns
of every expert), and some tokens of the vocabulary. Where a size cannot be divided, rank 0 has less
than the others. Where one plan is to serve all ranks, its weights end in zeros then: a head of zeros
has values of zero, a column of zeros an activation of zero, and both add exactly nothing to the sum
over the ranks. Where every rank has a graph of its own, rank 0's is smaller, which has the drafter to
hold as well. The vocabulary has no such zeros, because a logit of zero could be the largest: the last
shards begin earlier instead, and a token in two of them does no harm to a maximum.

Experts are cut by columns and not dealt out whole: each rank then reads the same number of bytes
whichever experts the tokens choose, which is what counts when few tokens are verified at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.config import TargetConfig
from dflash_trt.errors import InputError
from dflash_trt.models.shard import Shard
from dflash_trt.ops.mixture_of_experts import MXFP4_BLOCK


@dataclass(frozen=True)
class Share:
    """What a rank of `ranks` has of a target: query heads, key/value heads, MLP columns, tokens.
    With one rank it is the target itself, and nothing is cut."""

    ranks: int
    heads: int
    kv_heads: int
    inner: int
    tokens: int

    def cut(self, axis: int, *sizes: tuple[int, int], overlap: bool = False) -> Shard | None:
        """The shard of a weight whose sources have (whole, part) entries along `axis`."""
        if self.ranks == 1:
            return None
        whole, parts = (tuple(size[i] for size in sizes) for i in range(2))
        return Shard(self.ranks, axis, whole, parts, overlap)

    def last_rank_only(self, axis: int, size: int) -> Shard | None:
        """The whole source on the last rank, zeros elsewhere: what must be added up once."""
        return self.cut(axis, (size, size))


def share_of(c: TargetConfig, ranks: int, rank: int | None = None) -> Share:
    """The share of `rank`; None: one for all ranks, padding included. Refused where a rank would be
    left without a head or a column."""
    if ranks == 1:
        return Share(1, c.num_heads, c.num_kv_heads, c.intermediate_size, c.token_count)
    block = MXFP4_BLOCK if c.experts else 1
    kv_heads = part_of(ranks, rank, c.num_kv_heads, "key/value heads")
    inner = part_of(ranks, rank, c.intermediate_size // block, "columns in the MLP") * block
    heads = kv_heads * (c.num_heads // c.num_kv_heads)
    return Share(ranks, heads, kv_heads, inner, -(-c.token_count // ranks))


def part_of(ranks: int, rank: int | None, whole: int, what: str) -> int:
    """Of `whole` things the part of `rank`; None: the largest. Refused where a rank has none."""
    part = -(-whole // ranks)
    if (ranks - 1) * part >= whole:
        fitting = max(n for n in range(1, ranks) if (n - 1) * -(-whole // n) < whole)
        raise InputError(
            f"tp {ranks}: the target has {whole} {what}, which leaves a rank without any; "
            f"use {fitting}"
        )
    return whole - (ranks - 1) * part if rank == 0 else part
