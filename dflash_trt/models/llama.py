"""Llama-style targets: Llama, SmolLM2, and Qwen3, which norms q and k (`TargetConfig.qk_norm`)."""

from __future__ import annotations

from dflash_trt.config import TargetConfig
from dflash_trt.models import layers
from dflash_trt.models.decoder import MODEL, decoder_graph
from dflash_trt.models.graph import GraphWriter, SourceGraph
from dflash_trt.models.shards import Share


def target_graph(
    config: TargetConfig,
    taps: tuple[int, ...],
    positions: int,
    ranks: int = 1,
    rank: int | None = None,
) -> SourceGraph:
    """The target's graph, inputs and outputs as in `decoder_graph`."""
    return decoder_graph(config, taps, positions, _mlp, ranks, rank)


def _mlp(g: GraphWriter, c: TargetConfig, share: Share, h: str, layer: int) -> str:
    prefix, name = f"model.layers.{layer}.mlp", f"l{layer}.mlp"
    sizes = c.hidden_size, c.intermediate_size
    return layers.swiglu_mlp(g, h, *sizes, prefix, name, MODEL, share)
