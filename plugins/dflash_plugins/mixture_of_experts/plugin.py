"""The plugin `MixtureOfExperts`: five launches, packed weights as plan inputs.

TensorRT takes neither E8M0 nor unsigned bytes as inputs of a plugin, so blocks and scales are
declared INT8; the bytes are those of the checkpoint all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_plugins.aot import KernelBuild
from dflash_plugins.base import Output, PluginKind, Tensor
from dflash_plugins.launch import Launch
from dflash_plugins.mixture_of_experts import layout
from dflash_plugins.vocabulary.partials import POINTERS

INPUTS = (
    "x", "router_logits", "gate_up_blocks", "gate_up_scales", "gate_up_bias",
    "down_blocks", "down_scales", "down_bias",
)  # fmt: skip


class MixtureOfExperts(PluginKind):
    """Inputs as those of the op: x [B, S, H], router_logits [B, S, E], then blocks, scales and bias
    of gate_up and of down.

    Settings: `dtype` (BF16 or HALF), `hidden`, `inner`, `experts`, `top_k`, `alpha`, `limit`, and
    `rows` (see `layout.tile_rows`).
    """

    name = "MixtureOfExperts"

    def input_types(self) -> tuple[str, ...]:
        kind = self.settings["dtype"]
        return (kind, kind, "INT8", "INT8", kind, "INT8", "INT8", kind)

    def outputs(self) -> tuple[Output, ...]:
        return (Output(self.settings["dtype"], 0),)

    def workspace_bytes(self, shapes: Sequence[tuple[int, ...]]) -> int:
        batch, size, _ = shapes[0]
        return layout.offsets(self.settings, batch * size)[1]

    def kernels(self) -> tuple[KernelBuild, ...]:
        from dflash_plugins.mixture_of_experts.kernel import builds

        pointer = POINTERS[self.settings["dtype"]]
        packed = {"blocks": "*u8", "scales": "*u8", "bias": pointer}
        order = dict.fromkeys(("order", *layout.TILES, "tile_count"), "*i32")
        signatures: dict[str, dict[str, Any]] = {
            "route": {"logits": pointer, "chosen": "*i32", "shares": "*fp32"},
            "group": {"chosen": "*i32", **order, "pairs": "i32"},
            "gate_up": {"x": pointer, **packed, **order, "inner": pointer},
            "down": {"inner": pointer, **packed, "shares": "*fp32", **order, "parts": "*fp32"},
            "combine": {"parts": "*fp32", "y": pointer},
        }
        return builds(self.settings, signatures)

    def launches(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], workspace: int
    ) -> list[Launch]:
        batch, size, _ = inputs[0].shape
        tokens = batch * size
        given = {name: tensor.address for name, tensor in zip(INPUTS, inputs, strict=True)}
        begins, _ = layout.offsets(self.settings, tokens)
        field = {name: workspace + begin for name, begin in begins.items()}
        pairs = tokens * self.settings["top_k"]
        taken = layout.arguments({**given, "y": outputs[0].address}, field, pairs)
        grids = layout.grids(self.settings, tokens)
        return [Launch(name, grids[name], values) for name, values in taken.items()]
