"""Which module writes the graph of which architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dflash_trt.config import TargetConfig
from dflash_trt.errors import InputError
from dflash_trt.models import gpt_oss, llama
from dflash_trt.models.graph import SourceGraph

TargetWriter = Callable[[TargetConfig, tuple[int, ...], int, int, int | None], SourceGraph]

TARGETS: Mapping[str, TargetWriter] = {
    "llama": llama.target_graph,
    "qwen3": llama.target_graph,
    "gpt_oss": gpt_oss.target_graph,
}


def target_graph(
    config: TargetConfig,
    taps: tuple[int, ...],
    positions: int,
    ranks: int = 1,
    rank: int | None = None,
) -> SourceGraph:
    """The graph of `config.architecture`, with features after the layers `taps`, for `positions`
    tokens at most; inputs and outputs, `ranks` and `rank` as in `models.decoder.decoder_graph`."""
    if config.architecture not in TARGETS:
        known = ", ".join(TARGETS)
        raise InputError(f"the architecture '{config.architecture}' is not one of {known}")
    return TARGETS[config.architecture](config, taps, positions, ranks, rank)
