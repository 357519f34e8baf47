"""The plugin `ConfidenceCommit`: two launches, logits to the tokens of the next pass."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_plugins.aot import KernelBuild
from dflash_plugins.base import Output, PluginKind, Tensor
from dflash_plugins.launch import Launch
from dflash_plugins.vocabulary import partials


class ConfidenceCommit(PluginKind):
    """Inputs logits [B, M, V], drafts [B, M], committed [B, M], share [1].

    Settings: `dtype` of the logits, `vocabulary`, `slots` (largest M), `final`.
    """

    name = "ConfidenceCommit"
    num_outputs = 2

    def input_types(self) -> tuple[str, ...]:
        return (self.settings["dtype"], "INT64", "BOOL", "INT64")

    def outputs(self) -> tuple[Output, ...]:
        return (Output("INT64", 1), Output("BOOL", 2))

    def workspace_bytes(self, shapes: Sequence[tuple[int, ...]]) -> int:
        batch, slots = shapes[1]
        return partials.workspace_bytes(batch * slots, self.settings["vocabulary"])

    def kernels(self) -> tuple[KernelBuild, ...]:
        from dflash_plugins.confidence_commit.kernel import constants, settle

        signature = {
            "best": "*fp32", "index": "*i32", "total": "*fp32", "drafts": "*i64",
            "committed": "*i8", "share": "*i64", "new_drafts": "*i64", "new_committed": "*i8",
            "slots": "i32",
        }  # fmt: skip
        tile_count = partials.tiles(self.settings["vocabulary"])
        fixed = constants(tile_count, self.settings["slots"], bool(self.settings["final"]))
        return (
            partials.kernel(self.settings),
            KernelBuild("settle", settle, signature, fixed, num_warps=1),
        )

    def launches(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], workspace: int
    ) -> list[Launch]:
        logits, drafts, committed, share = inputs
        batch, slots = drafts.shape
        vocabulary = self.settings["vocabulary"]
        parts = partials.fields(workspace, batch * slots, vocabulary)
        given = (drafts.address, committed.address, share.address)
        results = tuple(output.address for output in outputs)
        return [
            partials.launch(logits.address, batch * slots, vocabulary, parts),
            Launch("settle", (batch, 1, 1), (*parts, *given, *results, slots)),
        ]
