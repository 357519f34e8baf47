"""The DFlash drafter: one call injects new target features and drafts a whole block.

Format and semantics: the authors' `dflash` package (`DFlashDraftModel`); checkpoint layout as
published by z-lab. Embedding and lm_head are the target's, unless the drafter has its own.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from dflash_trt.config import DrafterConfig, TargetConfig
from dflash_trt.models import layers
from dflash_trt.models.graph import GraphWriter, SourceGraph, Weight
from dflash_trt.ops import DOMAIN

MODEL = "drafter"


def drafter_graph(
    config: DrafterConfig, target: TargetConfig, positions: int, passes: int
) -> SourceGraph:
    """The drafter's graph, with `passes` refinement passes.

    Inputs: features [B, R, taps*H] and accepted [B] int32 (how many feature rows count), as the
    verify call left them; context [B] int32, cached tokens once those rows are injected; anchor [B]
    int64; masks [B, M] int64, filled with the mask id (M drafted slots, 0 to inject only); for each
    layer i k_cache.i, v_cache.i [B, K, L, D]. Outputs: tokens [B, 1+M] int64, the anchor and the
    drafts; lengths [B] int32, the context passed on to the verify call; hidden [B, M, H], the last
    pass's final states; the caches with suffix `.out`.
    """
    c = config
    g = GraphWriter("drafter")
    features = g.input("features", TensorProto.FLOAT, ["B", "R", len(c.taps) * target.hidden_size])
    accepted = g.input("accepted", TensorProto.INT32, ["B"])
    context = g.input("context", TensorProto.INT32, ["B"])
    anchor = g.input("anchor", TensorProto.INT64, ["B"])
    masks = g.input("masks", TensorProto.INT64, ["B", "M"])
    tables = layers.rope_tables(g, positions, c.head_dim, MODEL)

    caches = _inject(
        g, c, target, features, g.op("Sub", context, accepted, name="injected"), tables
    )
    drafts, hidden = _refine(g, c, target, anchor, masks, context, caches, tables, passes)
    first = g.op("Unsqueeze", anchor, g.constant([1]), name="anchor.column")
    g.op("Concat", first, drafts, name="tokens", axis=1)
    g.declare_output("tokens", TensorProto.INT64, ["B", "S"])
    g.output(context, "lengths", TensorProto.INT32, ["B"])
    g.output(hidden, "hidden", TensorProto.FLOAT, ["B", "M", c.hidden_size])
    return g.finish(c.num_layers)


def _inject(
    g: GraphWriter,
    c: DrafterConfig,
    target: TargetConfig,
    features: str,
    injected: str,
    tables: tuple[str, str],
) -> list[str]:
    """fc and hidden_norm once, then every layer's K and V projection as one matmul."""
    shape = (len(c.taps) * target.hidden_size, c.hidden_size)
    context = layers.linear(g, features, shape, ("fc",), "fc", MODEL, kind="fc")
    context = layers.rms_norm(
        g, context, c.hidden_size, "hidden_norm.weight", c.rms_norm_eps, "hidden_norm", MODEL
    )
    kv_size = c.num_kv_heads * c.head_dim
    modules = tuple(f"layers.{i}.self_attn.{p}_proj" for i in range(c.num_layers) for p in "kv")
    kv = layers.linear(
        g, context, (c.hidden_size, len(modules) * kv_size), modules, "inject.kv", MODEL,
        bias=c.attention_bias,
    )  # fmt: skip
    norms = tuple(f"layers.{i}.self_attn.k_norm.weight" for i in range(c.num_layers))
    k_norm = g.weight(
        Weight("drafter.inject.k_norm", (c.num_layers, c.head_dim), "norm", norms, model=MODEL)
    )
    caches = [f"{kind}_cache.{i}" for i in range(c.num_layers) for kind in "kv"]
    shape_of_cache: list[int | str] = ["B", c.num_kv_heads, "L", c.head_dim]
    for cache in caches:
        g.input(cache, TensorProto.FLOAT, shape_of_cache)
        g.declare_output(f"{cache}.out", TensorProto.FLOAT, shape_of_cache)
    g.ops(
        "KVInjection", kv, k_norm, injected, *tables, *caches,
        outputs=[f"{cache}.out" for cache in caches], name="inject", domain=DOMAIN,
        kv_heads=c.num_kv_heads, epsilon=c.rms_norm_eps,
    )  # fmt: skip
    return [f"{cache}.out" for cache in caches]


def _refine(
    g: GraphWriter,
    c: DrafterConfig,
    target: TargetConfig,
    anchor: str,
    masks: str,
    context: str,
    caches: list[str],
    tables: tuple[str, str],
    passes: int,
) -> tuple[str, str]:
    """`passes` runs of the block; each settles an equal share of the slots, the last the rest."""
    slots = g.op("Shape", masks, name="slots", start=1, end=2)
    share = g.op("Div", slots, g.constant([passes]), name="share")
    committed = g.op(
        "Cast", g.op("Sub", masks, masks, name="open.zero"), name="open", to=TensorProto.BOOL
    )
    first = g.op("Unsqueeze", anchor, g.constant([1]), name="anchor.slot")
    drafts = masks
    for index in range(passes):
        last = index == passes - 1
        g.scope = f"p{index}."
        block = g.op("Concat", first, drafts, name="block", axis=1)
        hidden = _block(g, c, target, block, context, caches, tables)
        logits = _logits(g, c, target, hidden)
        drafts, settled = g.ops(
            "ConfidenceCommit", logits, drafts, committed, slots if last else share,
            outputs=[f"p{index}.drafts", f"p{index}.committed"], name="commit",
            domain=DOMAIN, final=int(last),
        )  # fmt: skip
        if c.token_map:
            drafts = _target_ids(g, c, drafts, committed, "" if last else settled)
        committed = settled
    g.scope = ""
    return drafts, hidden


def _logits(g: GraphWriter, c: DrafterConfig, target: TargetConfig, hidden: str) -> str:
    """Through the target's lm_head, some of its rows, or the drafter's own."""
    if not c.draft_vocab_size:
        return layers.lm_head(g, hidden, target, "lm_head")
    shape, source = (c.hidden_size, c.draft_vocab_size), ("lm_head.weight",)
    name, model = "drafter.lm_head.weight", MODEL if c.own_lm_head else "draft_head"
    weight = g.weight(Weight(name, shape, "draft_head", source, transpose=True, model=model))
    logits = g.op("MatMul", hidden, weight, name="lm_head")
    if c.draft_vocab_size <= target.token_count:
        return logits
    ends = g.constant([0]), g.constant([target.token_count]), g.constant([-1])
    return g.op("Slice", logits, *ends, name="lm_head.existing")


def _target_ids(g: GraphWriter, c: DrafterConfig, drafts: str, before: str, after: str) -> str:
    """Replace what this pass settled, ids of the draft vocabulary, by the target's ids.

    `before` and `after`: slots that are settled in front of and behind this pass (all: empty).
    """
    shape = (c.draft_vocab_size,)
    d2t = g.weight(Weight("drafter.d2t", shape, "token_map", ("d2t",), model=MODEL))
    fresh = g.op("Not", before, name="fresh")
    if after:
        fresh = g.op("And", after, fresh, name="fresh.now")
    ids = g.op("Where", fresh, drafts, g.constant(0), name="draft.ids")
    mapped = g.op("Add", ids, g.op("Gather", d2t, ids, name="d2t"), name="target.ids")
    return g.op("Where", fresh, mapped, drafts, name="drafts.mapped")


def _embed(g: GraphWriter, c: DrafterConfig, target: TargetConfig, block: str) -> str:
    if not c.own_embedding:
        return layers.embed(g, block, target.hidden_size, target.vocab_size, "embed")
    shape, source = (c.vocab_size, c.hidden_size), ("embed_tokens.weight",)
    weight = Weight("drafter.embed_tokens.weight", shape, "embedding", source, model=MODEL)
    return g.op("Gather", g.weight(weight), block, name="embed", axis=0)


def _block(
    g: GraphWriter,
    c: DrafterConfig,
    target: TargetConfig,
    block: str,
    context: str,
    caches: list[str],
    tables: tuple[str, str],
) -> str:
    """All layers over the block; final states of the drafted slots [B, M, H]."""
    x = _embed(g, c, target, block)
    for layer in range(c.num_layers):
        x = _layer(g, c, x, context, caches[2 * layer : 2 * layer + 2], tables, layer)
    drafted = g.op(
        "Slice", x, g.constant([1]), g.constant([np.iinfo(np.int64).max]), g.constant([1]),
        name="drafted",
    )  # fmt: skip
    return layers.rms_norm(g, drafted, c.hidden_size, "norm.weight", c.rms_norm_eps, "norm", MODEL)


def _layer(
    g: GraphWriter,
    c: DrafterConfig,
    x: str,
    context: str,
    caches: list[str],
    tables: tuple[str, str],
    layer: int,
) -> str:
    source, name = f"layers.{layer}", f"d{layer}"
    eps, size = c.rms_norm_eps, c.hidden_size
    h = layers.rms_norm(
        g, x, size, f"{source}.input_layernorm.weight", eps, f"{name}.attn_norm", MODEL
    )
    h = _attention(g, c, h, context, caches, tables, layer)
    x = g.op("Add", x, h, name=f"{name}.attn_residual")
    h = layers.rms_norm(
        g, x, size, f"{source}.post_attention_layernorm.weight", eps, f"{name}.mlp_norm", MODEL
    )
    h = layers.swiglu_mlp(g, h, size, c.intermediate_size, f"{source}.mlp", f"{name}.mlp", MODEL)
    return g.op("Add", x, h, name=f"{name}.out")


def _attention(
    g: GraphWriter,
    c: DrafterConfig,
    h: str,
    context: str,
    caches: list[str],
    tables: tuple[str, str],
    layer: int,
) -> str:
    source, name = f"layers.{layer}.self_attn", f"d{layer}.attn"
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
    eps, dim = c.rms_norm_eps, c.head_dim
    q = layers.head_norm(
        g, q, c.num_heads, dim, f"{source}.q_norm.weight", eps, f"{name}.q_norm", MODEL
    )
    k = layers.head_norm(
        g, k, c.num_kv_heads, dim, f"{source}.k_norm.weight", eps, f"{name}.k_norm", MODEL
    )
    out = g.op(
        "BlockAttention", q, k, v, *caches, context, *tables, layers.no_sinks(g, c.num_heads),
        name=name, domain=DOMAIN, heads=c.num_heads, kv_heads=c.num_kv_heads, scale=dim**-0.5,
        window=c.window(layer), causal=int(c.causal(layer)),
    )  # fmt: skip
    return layers.linear(
        g,
        out,
        (q_size, c.hidden_size),
        (f"{source}.o_proj",),
        f"{name}.o",
        MODEL,
        bias=c.attention_bias,
    )
