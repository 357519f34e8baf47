"""Llama-style targets (SmolLM2, Llama): pre-norm decoder, grouped query attention, SwiGLU."""

from __future__ import annotations

from onnx import TensorProto

from dflash_trt.config import TargetConfig
from dflash_trt.models import layers
from dflash_trt.models.graph import GraphWriter, SourceGraph
from dflash_trt.ops import DOMAIN

MODEL = "target"


def target_graph(config: TargetConfig, taps: tuple[int, ...], positions: int) -> SourceGraph:
    """The target's graph: one call verifies a block, decodes one token, or prefills a chunk.

    Inputs: tokens [B, S] int64, lengths [B] int32, rows [B, W] int64, and for each layer l
    k_cache.l, v_cache.l [B, K, L, D]. Outputs: accepted [B] int32, anchor [B] int64,
    context [B] int32 (see `SpeculativeVerify`), features [B, S, taps*H], logits [B, W, V] and the
    caches with suffix `.out`. Tap id l is the output of 0-based layer l, before the final norm.
    """
    c = config
    g = GraphWriter("target")
    tokens = g.input("tokens", TensorProto.INT64, ["B", "S"])
    lengths = g.input("lengths", TensorProto.INT32, ["B"])
    rows = g.input("rows", TensorProto.INT64, ["B", "W"])
    tables = layers.rope_tables(g, positions, c.head_dim, MODEL)

    x = layers.embed(g, tokens, c.hidden_size, c.vocab_size, "embed")
    outputs = []
    for layer in range(c.num_layers):
        x = _layer(g, c, x, lengths, tables, layer)
        outputs.append(x)
    g.op("Concat", *(outputs[tap] for tap in taps), name="features", axis=-1)
    g.declare_output("features", TensorProto.FLOAT, ["B", "S", len(taps) * c.hidden_size])

    index = g.op("Unsqueeze", rows, g.constant([-1]), name="rows.index")
    read = g.op("GatherND", x, index, name="rows.hidden", batch_dims=1)
    normed = layers.rms_norm(
        g, read, c.hidden_size, "model.norm.weight", c.rms_norm_eps, "norm", MODEL
    )
    logits = layers.lm_head(g, normed, c.hidden_size, c.vocab_size, c.tied_embeddings, "logits")
    g.declare_output(logits, TensorProto.FLOAT, ["B", "W", c.vocab_size])
    g.ops(
        "SpeculativeVerify", logits, tokens, rows, lengths,
        outputs=["accepted", "anchor", "context"], name="verify", domain=DOMAIN,
    )  # fmt: skip
    g.declare_output("accepted", TensorProto.INT32, ["B"])
    g.declare_output("anchor", TensorProto.INT64, ["B"])
    g.declare_output("context", TensorProto.INT32, ["B"])
    return g.finish()


def _layer(
    g: GraphWriter, c: TargetConfig, x: str, lengths: str, tables: tuple[str, str], layer: int
) -> str:
    source, name = f"model.layers.{layer}", f"l{layer}"
    h = layers.rms_norm(
        g,
        x,
        c.hidden_size,
        f"{source}.input_layernorm.weight",
        c.rms_norm_eps,
        f"{name}.attn_norm",
        MODEL,
    )
    h = _attention(g, c, h, lengths, tables, layer)
    x = g.op("Add", x, h, name=f"{name}.attn_residual")
    h = layers.rms_norm(
        g, x, c.hidden_size, f"{source}.post_attention_layernorm.weight", c.rms_norm_eps,
        f"{name}.mlp_norm", MODEL,
    )  # fmt: skip
    h = layers.swiglu_mlp(
        g, h, c.hidden_size, c.intermediate_size, f"{source}.mlp", f"{name}.mlp", MODEL
    )
    return g.op("Add", x, h, name=f"{name}.out")


def _attention(
    g: GraphWriter, c: TargetConfig, h: str, lengths: str, tables: tuple[str, str], layer: int
) -> str:
    source, name = f"model.layers.{layer}.self_attn", f"l{layer}.attn"
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    modules = tuple(f"{source}.{p}_proj" for p in "qkv")
    qkv = layers.linear(
        g,
        h,
        (c.hidden_size, q_size + 2 * kv_size),
        modules,
        f"{name}.qkv",
        MODEL,
        bias=c.attention_bias,
    )
    q, k, v = layers.split(g, qkv, [q_size, kv_size, kv_size], "q k v", name)
    if c.qk_norm:
        eps = c.rms_norm_eps
        q = layers.head_norm(
            g, q, c.num_heads, c.head_dim, f"{source}.q_norm.weight", eps, f"{name}.q_norm", MODEL
        )
        k = layers.head_norm(
            g,
            k,
            c.num_kv_heads,
            c.head_dim,
            f"{source}.k_norm.weight",
            eps,
            f"{name}.k_norm",
            MODEL,
        )
    caches = [
        g.input(f"{kind}_cache.{layer}", TensorProto.FLOAT, ["B", c.num_kv_heads, "L", c.head_dim])
        for kind in "kv"
    ]
    outs = [f"{cache}.out" for cache in caches]
    out, *_ = g.ops(
        "CachedAttention", q, k, v, *caches, lengths, *tables, layers.no_sinks(g, c.num_heads),
        outputs=[f"{name}.heads", *outs], name=name, domain=DOMAIN, heads=c.num_heads,
        kv_heads=c.num_kv_heads, scale=c.head_dim**-0.5, window=c.window(layer),
    )  # fmt: skip
    for cache in outs:
        g.declare_output(cache, TensorProto.FLOAT, ["B", c.num_kv_heads, "L", c.head_dim])
    return layers.linear(
        g,
        out,
        (q_size, c.hidden_size),
        (f"{source}.o_proj",),
        f"{name}.o",
        MODEL,
        bias=c.attention_bias,
    )
