"""What all targets have in common: a pre-norm decoder with grouped query attention over its caches.

An architecture adds its feed-forward part; biases, norms of q and k, sliding windows and attention
sinks follow from the configuration.
"""

from __future__ import annotations

from collections.abc import Callable

from onnx import TensorProto

from dflash_trt.config import TargetConfig
from dflash_trt.models import layers
from dflash_trt.models.graph import GraphWriter, SourceGraph, Weight
from dflash_trt.models.shards import Share, share_of
from dflash_trt.ops import DOMAIN

MODEL = "target"

# Writes the feed-forward part of one layer over normed states [B, S, H], named after the layer.
FeedForward = Callable[[GraphWriter, TargetConfig, Share, str, int], str]


def decoder_graph(
    config: TargetConfig,
    taps: tuple[int, ...],
    positions: int,
    feed_forward: FeedForward,
    ranks: int = 1,
    rank: int | None = None,
) -> SourceGraph:
    """A target's graph: one call verifies a block, decodes one token, or prefills a chunk.

    Inputs: tokens [B, S] int64, lengths [B] int32, rows [B, W] int64, and for each layer l
    k_cache.l, v_cache.l [B, K, L, D]. Outputs: accepted [B] int32, anchor [B] int64,
    context [B] int32 (see `SpeculativeVerify`), features [B, S, taps*H], logits [B, W, V] (V is
    `TargetConfig.token_count`) and the caches with suffix `.out`. Tap id l is the output of
    0-based layer l, before the final norm.

    With several `ranks` it is the graph of `rank`, or one for each of them (see `models.shards`):
    K heads, MLP and V are the rank's share, and the ranks' partial results meet in two `AllReduce`
    per layer and one `AllGather` in front of `VerifyShards`. All other outputs are equal on every
    rank.
    """
    c, share = config, share_of(config, ranks, rank)
    g = GraphWriter("target")
    tokens = g.input("tokens", TensorProto.INT64, ["B", "S"])
    lengths = g.input("lengths", TensorProto.INT32, ["B"])
    rows = g.input("rows", TensorProto.INT64, ["B", "W"])
    tables = layers.rope_tables(g, positions, c.head_dim, MODEL)

    states: list[int | str] = ["B", "S", c.hidden_size]
    x = g.describe(layers.embed(g, tokens, c.hidden_size, c.vocab_size, "embed"), states)
    outputs = []
    for layer in range(c.num_layers):
        x = g.describe(_layer(g, c, share, x, lengths, tables, layer, feed_forward), states)
        outputs.append(x)
    g.op("Concat", *(outputs[tap] for tap in taps), name="features", axis=-1)
    g.declare_output("features", TensorProto.FLOAT, ["B", "S", len(taps) * c.hidden_size])

    index = g.op("Unsqueeze", rows, g.constant([-1]), name="rows.index")
    read = g.op("GatherND", x, index, name="rows.hidden", batch_dims=1)
    normed = layers.rms_norm(
        g, read, c.hidden_size, "model.norm.weight", c.rms_norm_eps, "norm", MODEL
    )
    _verify(g, c, share, normed, tokens, rows, lengths)
    g.declare_output("accepted", TensorProto.INT32, ["B"])
    g.declare_output("anchor", TensorProto.INT64, ["B"])
    g.declare_output("context", TensorProto.INT32, ["B"])
    return g.finish()


def _verify(
    g: GraphWriter, c: TargetConfig, share: Share, normed: str, tokens: str, rows: str, lengths: str
) -> None:
    if share.ranks == 1:
        verdict, best = "SpeculativeVerify", layers.lm_head(g, normed, c, "logits")
    else:
        shard = layers.lm_head_shard(g, normed, c, share, "logits")
        verdict = "VerifyShards"
        best = g.op("AllGather", shard, name="best.all", domain=DOMAIN, ranks=share.ranks)
        g.describe(best, [share.ranks, "B", "W", 2])
    g.declare_output("logits", TensorProto.FLOAT, ["B", "W", share.tokens])
    g.ops(
        verdict, best, tokens, rows, lengths,
        outputs=["accepted", "anchor", "context"], name="verify", domain=DOMAIN,
    )  # fmt: skip


def _layer(
    g: GraphWriter,
    c: TargetConfig,
    share: Share,
    x: str,
    lengths: str,
    tables: tuple[str, str],
    layer: int,
    feed_forward: FeedForward,
) -> str:
    source, name, eps = f"model.layers.{layer}", f"l{layer}", c.rms_norm_eps
    norm = f"{source}.input_layernorm.weight"
    h = layers.rms_norm(g, x, c.hidden_size, norm, eps, f"{name}.attn_norm", MODEL)
    h = _attention(g, c, share, h, lengths, tables, layer)
    x = g.op("Add", x, h, name=f"{name}.attn_residual")
    g.describe(x, ["B", "S", c.hidden_size])
    norm = f"{source}.post_attention_layernorm.weight"
    h = layers.rms_norm(g, x, c.hidden_size, norm, eps, f"{name}.mlp_norm", MODEL)
    h = feed_forward(g, c, share, h, layer)
    return g.op("Add", x, h, name=f"{name}.out")


def _attention(
    g: GraphWriter,
    c: TargetConfig,
    share: Share,
    h: str,
    lengths: str,
    tables: tuple[str, str],
    layer: int,
) -> str:
    source, name = f"model.layers.{layer}.self_attn", f"l{layer}.attn"
    dim, bias = c.head_dim, c.attention_bias
    q_size, kv_size = share.heads * dim, share.kv_heads * dim
    modules = tuple(f"{source}.{p}_proj" for p in "qkv")
    shape = (c.hidden_size, q_size + 2 * kv_size)
    whole_q, whole_kv = c.num_heads * dim, c.num_kv_heads * dim
    columns = share.cut(0, (whole_q, q_size), (whole_kv, kv_size), (whole_kv, kv_size))
    qkv = layers.linear(g, h, shape, modules, f"{name}.qkv", MODEL, bias=bias, shard=columns)
    q, k, v = layers.split(g, qkv, [q_size, kv_size, kv_size], "q k v", name)
    if c.qk_norm:
        q = _head_norm(g, c, q, share.heads, "q_norm", layer)
        k = _head_norm(g, c, k, share.kv_heads, "k_norm", layer)
    cache_shape: list[int | str] = ["B", share.kv_heads, "L", dim]
    caches = [g.input(f"{p}_cache.{layer}", TensorProto.FLOAT, cache_shape) for p in "kv"]
    outs = [g.declare_output(f"{p}.out", TensorProto.FLOAT, cache_shape) for p in caches]
    out, *_ = g.ops(
        "CachedAttention", q, k, v, *caches, lengths, *tables, _sinks(g, c, share, layer),
        outputs=[f"{name}.heads", *outs], name=name, domain=DOMAIN, heads=share.heads,
        kv_heads=share.kv_heads, scale=dim**-0.5, window=c.window(layer),
    )  # fmt: skip
    shape, modules = (q_size, c.hidden_size), (f"{source}.o_proj",)
    summed = share.cut(1, (whole_q, q_size))
    return layers.linear(g, out, shape, modules, f"{name}.o", MODEL, bias=bias, shard=summed)


def _head_norm(g: GraphWriter, c: TargetConfig, x: str, heads: int, norm: str, layer: int) -> str:
    source = f"model.layers.{layer}.self_attn.{norm}.weight"
    name = f"l{layer}.attn.{norm}"
    return layers.head_norm(g, x, heads, c.head_dim, source, c.rms_norm_eps, name, MODEL)


def _sinks(g: GraphWriter, c: TargetConfig, share: Share, layer: int) -> str:
    if not c.attention_sinks:
        return layers.no_sinks(g, share.heads)
    name, source = f"target.l{layer}.attn.sinks", f"model.layers.{layer}.self_attn.sinks"
    shard = share.cut(0, (c.num_heads, share.heads))
    return g.weight(Weight(name, (share.heads,), "sinks", (source,), shard=shard))
