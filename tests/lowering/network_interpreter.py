"""Runs a TensorRT network in numpy, from what the network itself says.

Nothing of a plan can be run without a GPU. But the network that it is compiled from can be read back
from TensorRT, layer by layer, and what each layer does is documented. This interpreter does that in
fp32 (quantisation apart, which it rounds as it is documented), in an order of layers drawn at random
from those that their inputs allow, with caches changed in place as on the device: a dependency that
is missing in the network shows as a wrong result.

As a program: `python -m tests.lowering.network_interpreter REQUEST.json INPUTS.npz OUTPUTS.npz SEED`,
and with a number of RANKS behind that for the ranks of a mesh, each in a thread; `name@1` is then what
rank 1 has instead of `name`.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np

from dflash_trt.engines.tensorrt_compile import Compiler
from dflash_trt.lowering.tensorrt import api
from dflash_trt.lowering.tensorrt.network import Network
from dflash_trt.lowering.tensorrt.plan import PlanRequest
from dflash_trt.quantization import fp8, nvfp4
from tests.lowering.network_ops import ELEMENTWISE, UNARY, attention, plugin, rotary, shuffle

CLASSES = {
    "ACTIVATION": "IActivationLayer", "CAST": "ICastLayer", "CONCATENATION": "IConcatenationLayer",
    "CONSTANT": "IConstantLayer", "DEQUANTIZE": "IDequantizeLayer",
    "DIST_COLLECTIVE": "IDistCollectiveLayer",
    "DYNAMIC_QUANTIZE": "IDynamicQuantizeLayer", "ELEMENTWISE": "IElementWiseLayer",
    "GATHER": "IGatherLayer", "MATRIX_MULTIPLY": "IMatrixMultiplyLayer", "REDUCE": "IReduceLayer",
    "ROTARY_EMBEDDING": "IRotaryEmbeddingLayer", "SHUFFLE": "IShuffleLayer",
    "SLICE": "ISliceLayer", "SOFTMAX": "ISoftMaxLayer",
    "TOPK": "ITopKLayer", "UNARY": "IUnaryLayer", "ATTENTION_INPUT": "IAttentionInputLayer",
}  # fmt: skip


class Mesh:
    """Where the ranks, a thread each, meet."""

    def __init__(self, ranks: int) -> None:
        self.parts: list[Any] = [None] * ranks
        self.barrier = Barrier(ranks, timeout=60)

    def exchange(self, rank: int, name: str, x: np.ndarray) -> list[np.ndarray]:
        """All ranks' x; they must be at the same layer."""
        self.parts[rank] = name, x
        self.barrier.wait()
        names, parts = zip(*self.parts, strict=True)
        self.barrier.wait()
        assert len(set(names)) == 1, f"ranks meet in different layers: {names}"
        return list(parts)


class Interpreter:
    """One network and the values computed so far, by tensor name."""

    def __init__(
        self, net: Network, inputs: dict[str, np.ndarray], seed: int, mesh: Mesh, rank: int
    ) -> None:
        self.trt, self.net = net.trt, net
        self.mesh, self.rank = mesh, rank
        self.rng, self.late = np.random.default_rng(seed), bool(seed % 2)
        self.values = dict(inputs)
        layers = [net.definition.get_layer(i) for i in range(net.definition.num_layers)]
        # An activation layer hides its kind behind the kind of activation, both called `type`.
        self.layers = [(layer.type.name, layer) for layer in layers]
        self.kept = iter(net.kept)

    def run(self) -> dict[str, np.ndarray]:
        for kind, layer in self.layers:
            layer.__class__ = getattr(self.trt, CLASSES.get(kind, "ILayer"))
            if kind == "CONSTANT" and layer.name != "blank":
                self.values[layer.get_output(0).name] = self._constant()
        pending = [x for x in self.layers if x[0] not in ("CONSTANT", "ATTENTION_OUTPUT")]
        while pending:
            ready = [x for x in pending if all(n in self.values for n in self._needs(*x))]
            assert ready, f"layers wait for each other: {[x[1].name for x in pending][:5]}"
            kind, layer = self._choose(ready)
            self._evaluate(kind, layer)
            pending.remove((kind, layer))
        definition = self.net.definition
        names = [definition.get_output(i).name for i in range(definition.num_outputs)]
        return {name: self.values[name] for name in names}

    def _choose(self, ready: list[Any]) -> Any:
        """Plugins, which change caches, run as early as they may (even seed) or as late (odd)."""
        plugins = [x for x in ready if x[0] == "PLUGIN_V3"]
        others = [x for x in ready if x[0] != "PLUGIN_V3"]
        first, second = (others, plugins) if self.late else (plugins, others)
        choice = first or second
        return choice[self.rng.integers(len(choice))]

    def _constant(self) -> np.ndarray:
        array = next(self.kept)
        return array.astype(np.float32) if array.dtype.kind not in "ib" else array

    def _tensors(self, kind: str, layer: Any) -> list[Any]:
        if kind == "ATTENTION_INPUT":
            a = layer.attention
            return [*(a.get_input(i) for i in range(3)), a.mask, a.key_value_lengths]
        return [layer.get_input(i) for i in range(layer.num_inputs)]

    def _needs(self, kind: str, layer: Any) -> list[str]:
        return [t.name for t in self._tensors(kind, layer) if t is not None]

    def _evaluate(self, kind: str, layer: Any) -> None:
        inputs = [None if t is None else self.values[t.name] for t in self._tensors(kind, layer)]
        if kind == "ATTENTION_INPUT":
            a = layer.attention
            result = attention(*inputs, causal=a.causal_kind.name)
            self.values[a.get_output(0).name] = result
            return
        results = getattr(self, "_" + kind.lower())(layer, *inputs)
        results = results if isinstance(results, tuple) else (results,)
        for index, result in enumerate(results):
            self.values[layer.get_output(index).name] = result

    # -- one method for each kind of layer

    def _activation(self, layer, x):
        assert layer.type.name == "SIGMOID"
        return 1 / (1 + np.exp(-x))

    def _cast(self, layer, x):
        target = layer.get_output(0).dtype.name
        return x.astype(
            {"INT32": np.int32, "INT64": np.int64, "BOOL": bool}.get(target, np.float32)
        )

    def _concatenation(self, layer, *parts):
        return np.concatenate(parts, layer.axis)

    def _dist_collective(self, layer, x):
        parts = self.mesh.exchange(self.rank, layer.name, x)
        assert len(parts) == layer.num_ranks
        if "/all_reduce#" in layer.name:  # the layer itself does not say what it does
            return np.sum(parts, axis=0)
        assert "/all_gather#" in layer.name
        return np.concatenate(parts, axis=0)

    def _select(self, layer, condition, yes, no):
        return np.where(condition, yes, no)

    def _elementwise(self, layer, a, b):
        return ELEMENTWISE[layer.op.name](a, b)

    def _unary(self, layer, x):
        return UNARY[layer.op.name](x)

    def _identity(self, layer, x):
        return x

    def _shape(self, layer, x):
        return np.array(x.shape, np.int64)

    def _gather(self, layer, data, indices):
        if layer.mode.name == "ELEMENT":
            return np.take_along_axis(data, indices, axis=layer.axis)
        if layer.mode.name == "ND":
            assert layer.num_elementwise_dims == 1
            assert indices.shape[-1] == 1
            return np.take_along_axis(data, indices, axis=1)
        return np.take(data, indices, axis=layer.axis)

    def _matrix_multiply(self, layer, a, b):
        return a @ (np.swapaxes(b, -1, -2) if layer.op1.name == "TRANSPOSE" else b)

    def _reduce(self, layer, x):
        axes = tuple(i for i in range(x.ndim) if layer.axes >> i & 1)
        function = {"AVG": np.mean, "SUM": np.sum, "MAX": np.max, "MIN": np.min}[layer.op.name]
        return function(x, axis=axes, keepdims=layer.keep_dims)

    def _rotary_embedding(self, layer, x, cos, sin, positions):
        assert not layer.interleaved
        return rotary(x, cos, sin, positions, layer.rotary_embedding_dim)

    def _shuffle(self, layer, x, dims=None):
        return shuffle(layer, x, dims)

    def _slice(self, layer, x, start=None, size=None):
        first = tuple(layer.start)
        sizes = tuple(layer.shape) if size is None else tuple(size)
        return x[tuple(slice(a, a + n) for a, n in zip(first, sizes, strict=True))]

    def _kv_cache_update(self, layer, cache, rows, starts):
        for b, start in enumerate(starts):
            cache[b, :, start : start + rows.shape[2]] = rows[b]
        return cache

    def _plugin_v3(self, layer, *inputs):
        kind = self.net.report.plugins[layer.name]
        return plugin(kind, self.net.plugins[layer.name][1], inputs)

    def _quantize(self, layer, x, scale):
        return fp8.to_e4m3(x / scale).astype(np.float32)

    def _dequantize(self, layer, x, scale):
        x, scale = x.astype(np.float32), scale.astype(np.float32)
        if scale.ndim == 0:
            return x * scale
        assert layer.axis == x.ndim - 1
        return x * np.repeat(scale, x.shape[-1] // scale.shape[-1], axis=-1)

    def _topk(self, layer, x):
        assert layer.op.name == "MAX"
        assert layer.axes == 1 << (x.ndim - 1)
        chosen = np.argsort(-x, axis=-1, kind="stable")[..., : layer.k]
        return np.take_along_axis(x, chosen, -1), chosen.astype(np.int32)

    def _softmax(self, layer, x):
        assert layer.axes == 1 << (x.ndim - 1)
        powers = np.exp(x - x.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)

    def _dynamic_quantize(self, layer, x, scale):
        assert scale == 1.0
        codes, scales = nvfp4.encode_rows(x)
        return nvfp4.VALUES[codes], scales.astype(np.float32)


def main(request: str, inputs: str, outputs: str, seed: str, ranks: str = "1") -> None:
    values = json.loads(Path(request).read_text())
    compiler = Compiler(api.load(values["backend"]), (120,))
    net = compiler.write(PlanRequest.from_json(values["plan"]))
    with np.load(inputs) as given:
        arrays = {name: given[name] for name in given.files}
    wanted = {b.name for b in net.report.bindings if b.direction == "input"}
    known = {name.partition("@")[0] for name in arrays}
    assert wanted <= known, f"no values for {sorted(wanted - known)[:4]}"
    mesh = Mesh(int(ranks))

    def of_rank(rank: int) -> Interpreter:
        own = {n: arrays[f"{n}@{rank}"] if f"{n}@{rank}" in arrays else arrays[n] for n in wanted}
        return Interpreter(net, own, int(seed), mesh, rank)

    interpreters = [of_rank(rank) for rank in range(int(ranks))]  # all before one runs
    with ThreadPoolExecutor(int(ranks)) as pool:
        results = list(pool.map(Interpreter.run, interpreters))
    suffixes = [f"@{rank}" for rank in range(int(ranks))] if int(ranks) > 1 else [""]
    pairs = zip(suffixes, results, strict=True)
    np.savez(outputs, **{n + suffix: x for suffix, result in pairs for n, x in result.items()})
    bindings = [[b.name, b.dtype, list(b.shape), list(b.made_of)] for b in net.report.bindings]
    Path(outputs).with_suffix(".json").write_text(json.dumps(bindings))


if __name__ == "__main__":
    main(*sys.argv[1:])
