"""How a target is cut over the ranks of a tensor parallel mesh.

Every rank runs the same graph on weights of the same shapes, so that one plan serves all of them.
A rank has some key/value heads with all their query heads, some columns of the MLP (the same columns
of every expert), and some tokens of the vocabulary. Where a size cannot be divided, the last ranks'
weights end in zeros: a head of zeros has values of zero, a column of zeros an activation of zero, and
both add exactly nothing to the sum over the ranks. The vocabulary has no such zeros, because a logit
of zero could be the largest: the last shards begin earlier instead, and a token in two of them does no
harm to a maximum.

Experts are cut by columns and not dealt out whole: each rank then reads the same number of bytes
whichever experts the tokens choose, which is what counts when few tokens are verified at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.config import TargetConfig
from dflash_trt.errors import InputError
from dflash_trt.ops.mixture_of_experts import MXFP4_BLOCK


@dataclass(frozen=True)
class Shard:
    """A rank's part of a weight: of source i, with `whole[i]` entries along `axis`, the `parts[i]`
    entries from `rank * parts[i]` on. What lies behind the end of the source is zero; with `overlap`
    the part begins earlier instead and ends with the source."""

    ranks: int
    axis: int
    whole: tuple[int, ...]
    parts: tuple[int, ...]
    overlap: bool = False

    def span(self, source: int, rank: int) -> tuple[int, int]:
        """First entry and the one behind the last that exist in the source; may be none."""
        whole, part = self.whole[source], self.parts[source]
        begin = min(rank * part, whole - part if self.overlap else whole)
        return begin, min(begin + part, whole)


@dataclass(frozen=True)
class Share:
    """What each of `ranks` ranks has of a target, padding included: query heads, key/value heads,
    MLP columns, tokens. With one rank it is the target itself, and nothing is cut."""

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

    def first_rank_only(self, axis: int, size: int) -> Shard | None:
        """The whole source on rank 0, zeros elsewhere: what must be added up once."""
        return self.cut(axis, (size, size))


def share_of(c: TargetConfig, ranks: int) -> Share:
    """The share of every rank; refused where a rank would be left without a head or a column."""
    if ranks == 1:
        return Share(1, c.num_heads, c.num_kv_heads, c.intermediate_size, c.token_count)
    block = MXFP4_BLOCK if c.experts else 1
    kv_heads = _part(ranks, c.num_kv_heads, "key/value heads")
    inner = _part(ranks, c.intermediate_size // block, "columns in the MLP") * block
    heads = kv_heads * (c.num_heads // c.num_kv_heads)
    return Share(ranks, heads, kv_heads, inner, -(-c.token_count // ranks))


def _part(ranks: int, whole: int, what: str) -> int:
    part = -(-whole // ranks)
    if (ranks - 1) * part >= whole:
        fitting = max(n for n in range(1, ranks) if (n - 1) * -(-whole // n) < whole)
        raise InputError(
            f"tp {ranks}: the target has {whole} {what}, which leaves a rank without any; "
            f"use {fitting}"
        )
    return part
