"""The plugins that write into the draft caches in place: `KVInjection` and `BlockWrite`.

TensorRT's own cache update takes a cache once per network and only as a network input. Both plugins
write behind its back into a cache that is such an input, and return `done`, zeros [B]: who reads the
cache afterwards adds `done` to the lengths it reads with, which puts the plugin before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_plugins.aot import KernelBuild
from dflash_plugins.base import Output, PluginKind, Tensor
from dflash_plugins.launch import Launch
from dflash_plugins.vocabulary.partials import POINTERS


class KVInjection(PluginKind):
    """Inputs kv [B, R, layers*2*K*D], k_norm, lengths [B], cos, sin, k_cache.0, v_cache.0, ...

    Settings: `dtype`, `layers`, `kv_heads`, `head_dim`, `capacity`, `cache_dim`, `epsilon`.
    """

    name = "KVInjection"

    def input_types(self) -> tuple[str, ...]:
        kind = self.settings["dtype"]
        return (kind, kind, "INT32", kind, kind, *(kind,) * (2 * self.settings["layers"]))

    def outputs(self) -> tuple[Output, ...]:
        return (Output("INT32", 2),)

    def kernels(self) -> tuple[KernelBuild, ...]:
        from dflash_plugins.kv_injection.kernel import constants, write_rows

        s = self.settings
        fixed = constants(
            s["layers"], s["kv_heads"], s["head_dim"], s["capacity"], s["cache_dim"], s["epsilon"]
        )
        signature = _signature(s["dtype"], s["layers"])
        return (KernelBuild("write_rows", write_rows, signature, fixed, num_warps=1),)

    def launches(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], workspace: int
    ) -> list[Launch]:
        kv, k_norm, lengths, cos, sin, *caches = (tensor.address for tensor in inputs)
        batch, rows, _ = inputs[0].shape
        arguments = (kv, kv, k_norm, lengths, cos, sin, *caches[0::2], *caches[1::2])
        grid = (batch * rows, self.settings["layers"], 1)
        return [Launch("write_rows", grid, (*arguments, outputs[0].address, rows))]


class BlockWrite(PluginKind):
    """Inputs k, v [B, S, K*D] before rotation, lengths [B], cos, sin, k_cache, v_cache.

    Settings as for `KVInjection` without `layers` and `epsilon`.
    """

    name = "BlockWrite"

    def input_types(self) -> tuple[str, ...]:
        kind = self.settings["dtype"]
        return (kind, kind, "INT32", kind, kind, kind, kind)

    def outputs(self) -> tuple[Output, ...]:
        return (Output("INT32", 2),)

    def kernels(self) -> tuple[KernelBuild, ...]:
        from dflash_plugins.kv_injection.kernel import block_constants, write_rows

        s = self.settings
        fixed = block_constants(s["kv_heads"], s["head_dim"], s["capacity"], s["cache_dim"])
        return (
            KernelBuild("write_rows", write_rows, _signature(s["dtype"], 1), fixed, num_warps=1),
        )

    def launches(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], workspace: int
    ) -> list[Launch]:
        k, v, lengths, cos, sin, k_cache, v_cache = (tensor.address for tensor in inputs)
        batch, rows, _ = inputs[0].shape
        arguments = (k, v, k, lengths, cos, sin, k_cache, v_cache, outputs[0].address, rows)
        return [Launch("write_rows", (batch * rows, 1, 1), arguments)]


def _signature(dtype: str, layers: int) -> dict[str, Any]:
    pointer = POINTERS[dtype]
    return {
        "new_keys": pointer, "new_values": pointer, "k_norm": pointer, "lengths": "*i32",
        "cos": pointer, "sin": pointer, "key_caches": (pointer,) * layers,
        "value_caches": (pointer,) * layers, "done": "*i32", "rows": "i32",
    }  # fmt: skip
