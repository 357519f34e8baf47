"""Writing a source graph: nodes with readable names, weights as inputs, a table of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from dflash_trt import ops
from dflash_trt.models.shards import Shard


@dataclass(frozen=True)
class Weight:
    """One weight input of a graph and how it is made from checkpoint tensors.

    `sources` are concatenated along axis 0 and transposed where `transpose` is set. `kind` says
    what the weight is for and with that which precision recipes apply to it: `projection`, `fc`,
    `lm_head`, `draft_head` (one that the drafter alone uses), `embedding`, `norm`, `bias`,
    `router`, `sinks`, `mxfp4_blocks` and `mxfp4_scales` (uint8, see `MixtureOfExperts`),
    `token_map` (int64, see `models.dflash`), `shard_start` (int64, where the vocabulary shard
    begins, no sources), `rope_cos` and `rope_sin` (computed from the rotary settings of `model`, no
    sources). `model` says whose tensors the sources are: `target`, `drafter`, or `draft_head` (see
    `checkpoints.draft_head`). `shard`: the part of the sources that a rank has, where they are cut;
    `shape` is the part's.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    sources: tuple[str, ...]
    transpose: bool = False
    model: str = "target"
    shard: Shard | None = None

    @property
    def dtype(self) -> int:
        """The ONNX element type of the graph input."""
        return _STORED_TYPES.get(self.kind, TensorProto.FLOAT)


_STORED_TYPES = {
    "mxfp4_blocks": TensorProto.UINT8,
    "mxfp4_scales": TensorProto.UINT8,
    "token_map": TensorProto.INT64,
    "shard_start": TensorProto.INT64,
}


@dataclass
class SourceGraph:
    """An ONNX model with our ops as local functions, and the table of its weight inputs."""

    model: onnx.ModelProto
    weights: tuple[Weight, ...]

    @property
    def weight_names(self) -> frozenset[str]:
        return frozenset(w.name for w in self.weights)


@dataclass
class GraphWriter:
    """Appends nodes; every output is named after the node that makes it.

    `scope` is put before the names of nodes, not of weights: what is written twice in different
    scopes shares its weights.
    """

    name: str
    scope: str = ""
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    constants: dict[str, onnx.TensorProto] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    described: list[onnx.ValueInfoProto] = field(default_factory=list)

    def input(self, name: str, dtype: int, shape: Sequence[int | str]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, value: str, name: str, dtype: int, shape: Sequence[int | str]) -> str:
        self.nodes.append(helper.make_node("Identity", [value], [name], name=name))
        return self.declare_output(name, dtype, shape)

    def declare_output(self, name: str, dtype: int, shape: Sequence[int | str]) -> str:
        self.outputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def describe(self, value: str, shape: Sequence[int | str]) -> str:
        """Note the shape of a value, fp32, at which the graph may be cut (see `lowering.segments`)."""
        self.described.append(helper.make_tensor_value_info(value, TensorProto.FLOAT, shape))
        return value

    def weight(self, weight: Weight) -> str:
        known = self.weights.setdefault(weight.name, weight)
        assert known == weight, f"two different weights are called {weight.name}"
        return weight.name

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        """A small constant; equal constants are stored once."""
        array = np.asarray(value, dtype)
        label = "_".join(str(x) for x in array.ravel()).replace("-", "m")
        name = f"const.{array.dtype.name}.{'x'.join(map(str, array.shape)) or 's'}.{label}"
        self.constants.setdefault(name, numpy_helper.from_array(array, name))
        return name

    def op(self, kind: str, *args: str, name: str, domain: str = "", **attributes: Any) -> str:
        """Append a node with one output, which carries the node's name."""
        return self.ops(
            kind, *args, outputs=[self.scope + name], name=name, domain=domain, **attributes
        )[0]

    def ops(
        self,
        kind: str,
        *args: str,
        outputs: Sequence[str],
        name: str,
        domain: str = "",
        **attributes: Any,
    ) -> Sequence[str]:
        node = helper.make_node(
            kind, args, outputs, name=self.scope + name, domain=domain, **attributes
        )
        self.nodes.append(node)
        return outputs

    def finish(self, draft_layers: int = 0) -> SourceGraph:
        weight_inputs = [
            helper.make_tensor_value_info(w.name, w.dtype, w.shape) for w in self.weights.values()
        ]
        graph = helper.make_graph(
            self.nodes,
            self.name,
            self.inputs + weight_inputs,
            self.outputs,
            list(self.constants.values()),
            value_info=self.described,
        )
        model = helper.make_model(
            graph,
            opset_imports=ops.OPSET_IMPORTS,
            functions=ops.library(draft_layers),
            producer_name="dflash-trt",
            ir_version=11,
        )
        onnx.checker.check_model(model)
        return SourceGraph(model, tuple(self.weights.values()))
