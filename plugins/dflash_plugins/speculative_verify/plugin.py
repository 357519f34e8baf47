"""The plugin `SpeculativeVerify`: two launches, logits to accepted counts, nothing to the host."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_plugins.aot import KernelBuild
from dflash_plugins.base import Output, PluginKind, Tensor
from dflash_plugins.launch import Launch
from dflash_plugins.vocabulary import partials


class SpeculativeVerify(PluginKind):
    """Inputs logits [B, W, V], tokens [B, S], rows [B, W], lengths [B].

    Settings: `dtype` of the logits, `vocabulary`, `width` (largest W).
    """

    name = "SpeculativeVerify"
    num_outputs = 3

    def input_types(self) -> tuple[str, ...]:
        return (self.settings["dtype"], "INT64", "INT64", "INT32")

    def outputs(self) -> tuple[Output, ...]:
        return (Output("INT32", 3), Output("INT64", 3), Output("INT32", 3))

    def workspace_bytes(self, shapes: Sequence[tuple[int, ...]]) -> int:
        batch, width = shapes[2]
        return partials.workspace_bytes(batch * width, self.settings["vocabulary"])

    def kernels(self) -> tuple[KernelBuild, ...]:
        from dflash_plugins.speculative_verify.kernel import accept, constants

        signature = {
            "best": "*fp32", "index": "*i32", "tokens": "*i64", "rows": "*i64", "lengths": "*i32",
            "accepted": "*i32", "anchor": "*i64", "context": "*i32", "width": "i32", "size": "i32",
        }  # fmt: skip
        tile_count = partials.tiles(self.settings["vocabulary"])
        fixed = constants(tile_count, self.settings["width"])
        return (
            partials.kernel(self.settings),
            KernelBuild("accept", accept, signature, fixed, num_warps=1),
        )

    def launches(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], workspace: int
    ) -> list[Launch]:
        logits, tokens, rows, lengths = inputs
        batch, width = rows.shape
        vocabulary = self.settings["vocabulary"]
        parts = partials.fields(workspace, batch * width, vocabulary)
        results = tuple(output.address for output in outputs)
        given = (tokens.address, rows.address, lengths.address)
        return [
            partials.launch(logits.address, batch * width, vocabulary, parts),
            Launch(
                "accept",
                (batch, 1, 1),
                (*parts[:2], *given, *results, width, tokens.shape[1]),
            ),
        ]
