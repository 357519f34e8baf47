"""Pieces that decoder layers of all architectures are made of.

Activations are [B, S, H]. Linear weights are stored [in, out]: what a checkpoint holds as
[out, in], concatenated over the sources and transposed.
"""

from __future__ import annotations

import numpy as np

from dflash_trt.config import TargetConfig
from dflash_trt.models.graph import GraphWriter, Weight
from dflash_trt.models.shards import Shard, Share
from dflash_trt.ops import DOMAIN


def rms_norm(
    g: GraphWriter, x: str, size: int, source: str, eps: float, name: str, model: str
) -> str:
    weight = g.weight(Weight(f"{model}.{name}.weight", (size,), "norm", (source,), model=model))
    return g.op("RMSNormalization", x, weight, name=name, axis=-1, epsilon=eps)


def linear(
    g: GraphWriter,
    x: str,
    shape: tuple[int, int],
    sources: tuple[str, ...],
    name: str,
    model: str,
    kind: str = "projection",
    bias: bool = False,
    shard: Shard | None = None,
) -> str:
    """x [.., in] @ w [in, out] (+ b); `sources` name checkpoint modules, stacked along out.

    A shard along out (axis 0 of a source) has the bias cut alike; one along in leaves a product to
    be added up over the ranks, before the bias.
    """
    tensors = tuple(f"{s}.weight" for s in sources)
    weight = g.weight(
        Weight(f"{model}.{name}.weight", shape, kind, tensors, True, model=model, shard=shard)
    )
    summed = shard is not None and shard.axis == 1
    y = g.op("MatMul", x, weight, name=f"{name}.matmul" if bias or summed else name)
    if summed and shard:
        y = all_reduce(g, y, shard.ranks, shape[1], f"{name}.sum" if bias else name)
    if not bias:
        return y
    biases = tuple(f"{s}.bias" for s in sources)
    cut = None if summed else shard
    b = g.weight(
        Weight(f"{model}.{name}.bias", (shape[1],), "bias", biases, model=model, shard=cut)
    )
    return g.op("Add", y, b, name=name)


def all_reduce(g: GraphWriter, x: str, ranks: int, size: int, name: str) -> str:
    """The sum of all ranks' x [B, S, size]; x itself where there is one rank."""
    if ranks == 1:
        return x
    g.describe(x, ["B", "S", size])
    y = g.op("AllReduce", x, name=name, domain=DOMAIN, ranks=ranks)
    return g.describe(y, ["B", "S", size])


def split(g: GraphWriter, x: str, sizes: list[int], parts: str, name: str) -> list[str]:
    """Cut the last axis into `sizes`; the pieces are called `name.part` for each of `parts`."""
    outputs = [f"{g.scope}{name}.{part}" for part in parts.split()]
    return list(
        g.ops("Split", x, g.constant(sizes), outputs=outputs, name=f"{name}.split", axis=-1)
    )


def head_norm(
    g: GraphWriter,
    x: str,
    heads: int,
    head_dim: int,
    source: str,
    eps: float,
    name: str,
    model: str,
) -> str:
    """RMS norm over each head of x [B, S, heads*D], as Qwen3 and the drafter apply to q and k."""
    by_head = g.op("Reshape", x, g.constant([0, 0, heads, head_dim]), name=f"{name}.split")
    normed = rms_norm(g, by_head, head_dim, source, eps, name, model)
    return g.op("Reshape", normed, g.constant([0, 0, heads * head_dim]), name=f"{name}.merge")


def swiglu_mlp(
    g: GraphWriter, x: str, hidden: int, inner: int, prefix: str, name: str, model: str,
    share: Share | None = None,
) -> str:  # fmt: skip
    """down(silu(gate(x)) * up(x)), gate and up as one matmul; `share`: of a mesh's rank."""
    part = share.inner if share else inner
    columns = share.cut(0, (inner, part), (inner, part)) if share else None
    rows = share.cut(1, (inner, part)) if share else None
    modules = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
    both = linear(g, x, (hidden, 2 * part), modules, f"{name}.gate_up", model, shard=columns)
    gate, up = split(g, both, [part, part], "gate up", name)
    activated = g.op("Mul", g.op("Swish", gate, name=f"{name}.silu"), up, name=f"{name}.act")
    down = f"{prefix}.down_proj"
    return linear(g, activated, (part, hidden), (down,), f"{name}.down", model, shard=rows)


def rope_tables(g: GraphWriter, positions: int, head_dim: int, model: str) -> tuple[str, str]:
    """cos and sin [positions, head_dim / 2], made from the model's rotary settings."""
    shape = (positions, head_dim // 2)
    cos = g.weight(Weight(f"{model}.rope.cos", shape, "rope_cos", (), model=model))
    sin = g.weight(Weight(f"{model}.rope.sin", shape, "rope_sin", (), model=model))
    return cos, sin


def no_sinks(g: GraphWriter, heads: int) -> str:
    return g.constant(np.full(heads, -np.inf), np.float32)


def lm_head(g: GraphWriter, x: str, target: TargetConfig, name: str) -> str:
    """Logits of the tokens that exist; the weight is shared by target and drafter.

    Rows of a padded lm_head belong to no token, and what they give is cut off.
    """
    shape = (target.hidden_size, target.vocab_size)
    weight = g.weight(Weight("lm_head.weight", shape, "lm_head", (target.lm_head,), transpose=True))
    if target.token_count == target.vocab_size:
        return g.op("MatMul", x, weight, name=name)
    padded = g.op("MatMul", x, weight, name=f"{name}.padded")
    ends = g.constant([0]), g.constant([target.token_count]), g.constant([-1])
    return g.op("Slice", padded, *ends, name=name)


def lm_head_shard(g: GraphWriter, x: str, target: TargetConfig, share: Share, name: str) -> str:
    """The rank's largest logit and its token, [B, W, 2]; see the op `BestOfShard`."""
    size = (target.token_count, share.tokens)
    shard = share.cut(0, size, overlap=True)
    shape = (target.hidden_size, share.tokens)
    weight = g.weight(
        Weight(
            "lm_head.shard.weight", shape, "lm_head", (target.lm_head,), transpose=True, shard=shard
        )
    )
    logits = g.op("MatMul", x, weight, name=name)
    start = g.weight(Weight("lm_head.shard.start", (1,), "shard_start", (), shard=shard))
    best = g.op("BestOfShard", logits, start, name="best", domain=DOMAIN)
    return g.describe(best, ["B", "W", 2])


def embed(g: GraphWriter, tokens: str, hidden: int, vocab: int, name: str) -> str:
    weight = g.weight(
        Weight("embed_tokens.weight", (vocab, hidden), "embedding", ("model.embed_tokens.weight",))
    )
    return g.op("Gather", weight, tokens, name=name, axis=0)
