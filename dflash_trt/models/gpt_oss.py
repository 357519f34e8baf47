"""gpt-oss: attention sinks, alternating sliding windows, biases, and experts in MXFP4.

Format: the checkpoints that OpenAI published, `experts.gate_up_proj_blocks` [E, 2*I, H/32, 16] and
`_scales` [E, 2*I, H/32] (gate and up rows alternate), `down_proj` likewise, as transformers reads
them. The bytes enter the graph as they are, [E, rows, K/2].
"""

from __future__ import annotations

from dflash_trt.config import TargetConfig
from dflash_trt.models import layers
from dflash_trt.models.decoder import MODEL, decoder_graph
from dflash_trt.models.graph import GraphWriter, SourceGraph, Weight
from dflash_trt.models.shards import Shard, Share
from dflash_trt.ops import DOMAIN
from dflash_trt.ops.mixture_of_experts import MXFP4_BLOCK


def target_graph(
    config: TargetConfig,
    taps: tuple[int, ...],
    positions: int,
    ranks: int = 1,
    rank: int | None = None,
) -> SourceGraph:
    """The target's graph, inputs and outputs as in `decoder_graph`."""
    return decoder_graph(config, taps, positions, _experts, ranks, rank)


def _experts(g: GraphWriter, c: TargetConfig, share: Share, h: str, layer: int) -> str:
    assert c.experts is not None
    prefix, name = f"model.layers.{layer}.mlp", f"l{layer}.mlp"
    logits = layers.linear(
        g, h, (c.hidden_size, c.experts.count), (f"{prefix}.router",), f"{name}.router", MODEL,
        kind="router", bias=True,
    )  # fmt: skip
    hidden, inner = c.hidden_size, share.inner
    source = f"{prefix}.experts"
    rows = share.cut(1, (2 * c.intermediate_size, 2 * inner))
    shape = (c.experts.count, 2 * inner, hidden)
    gate_up = _packed(g, shape, f"{source}.gate_up_proj", name, rows, rows)
    blocks = share.cut(2, (c.intermediate_size // MXFP4_BLOCK, inner // MXFP4_BLOCK))
    once = share.last_rank_only(1, hidden)
    shape = (c.experts.count, hidden, inner)
    down = _packed(g, shape, f"{source}.down_proj", name, blocks, once)
    y = g.op(
        "MixtureOfExperts", h, logits, *gate_up, *down,
        name=name if share.ranks == 1 else f"{name}.experts", domain=DOMAIN,
        top_k=c.experts.per_token, alpha=c.experts.alpha, limit=c.experts.limit,
    )  # fmt: skip
    return layers.all_reduce(g, y, share.ranks, hidden, name)


def _packed(
    g: GraphWriter, shape: tuple[int, int, int], source: str, name: str,
    shard: Shard | None, bias_shard: Shard | None,
) -> list[str]:  # fmt: skip
    """Blocks, scales and bias of one projection of all experts, [E, rows, K] when unpacked."""
    experts, rows, inner = shape
    label = f"{MODEL}.{name}.{source.split('.')[-1].removesuffix('_proj')}"
    parts = (
        ("blocks", (experts, rows, inner // 2), "mxfp4_blocks", shard),
        ("scales", (experts, rows, inner // MXFP4_BLOCK), "mxfp4_scales", shard),
        ("bias", (experts, rows), "bias", bias_shard),
    )
    return [
        g.weight(Weight(f"{label}.{p}", size, kind, (f"{source}_{p}",), shard=cut))
        for p, size, kind, cut in parts
    ]
