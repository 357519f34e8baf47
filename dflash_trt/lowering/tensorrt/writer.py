"""Writes the network of a plan from its source graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
from onnx import numpy_helper

from dflash_trt.domain import DOMAIN
from dflash_trt.errors import InputError
from dflash_trt.lowering.tensorrt import (
    attention,
    collectives,
    experts,
    linear,
    plugins,
    standard,
)
from dflash_trt.lowering.tensorrt.network import TENSOR_TYPES, CacheView, Network
from dflash_trt.lowering.tensorrt.plan import PlanRequest

OURS: dict[str, standard.Writer] = {
    "AllGather": collectives.all_gather,
    "AllReduce": collectives.all_reduce,
    "BestOfShard": collectives.best_of_shard,
    "BlockAttention": attention.block_attention,
    "CachedAttention": attention.cached_attention,
    "ConfidenceCommit": plugins.confidence_commit,
    "KVInjection": plugins.kv_injection,
    "MixtureOfExperts": experts.mixture_of_experts,
    "SpeculativeVerify": plugins.speculative_verify,
    "VerifyShards": collectives.verify_shards,
}
CACHE_INPUTS = {
    "BlockAttention": slice(3, 5),
    "CachedAttention": slice(3, 5),
    "KVInjection": slice(5, None),
}
PACKED = ("mxfp4_blocks", "mxfp4_scales")
# Ops whose constant inputs are read when the network is written.
LITERAL_READERS = frozenset({"Reshape", "Slice", "Split", "Unsqueeze"})
Settings = Mapping[str, dict[str, Any]]


def needed_nodes(graph: onnx.GraphProto, outputs: Sequence[str]) -> list[onnx.NodeProto]:
    """The nodes that `outputs` depend on, in order."""
    wanted = set(outputs)
    unknown = wanted - {value.name for value in graph.output}
    if unknown:
        raise InputError(f"the graph '{graph.name}' has no output '{min(unknown)}'")
    kept = []
    for node in reversed(graph.node):
        if wanted.intersection(node.output):
            wanted.update(node.input)
            kept.append(node)
    return kept[::-1]


def write_network(
    trt: Any,
    definition: Any,
    request: PlanRequest,
    graph: onnx.GraphProto,
    spliced: Mapping[str, Any],
    settings: Settings,
    progress: Callable[[str], None] = lambda node: None,
) -> Network:
    """Fill `definition` (empty but for the spliced plugins) with what `request` asks for.

    `settings` are the plugins' settings by node, filled in here before TensorRT reads them.
    `progress` is told each node before it is written.
    """
    nodes = needed_nodes(graph, request.outputs)
    net = Network(trt, definition, request)
    net.sinks = attention.sinks_of_caches(nodes, {t.name for t in graph.initializer})
    net.plugins = {name: (layer, settings[name]) for name, layer in spliced.items()}
    _add_inputs(net, graph, nodes)
    for tensor in graph.initializer:
        net.folded[tensor.name] = numpy_helper.to_array(tensor)
    for node in nodes:
        progress(node.name)
        _write_node(net, node)
    _mark_outputs(net, graph)
    for index in range(definition.num_layers):
        kind = definition.get_layer(index).type.name
        net.report.layers[kind] = net.report.layers.get(kind, 0) + 1
    return net


def _add_inputs(net: Network, graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> None:
    used = {name for node in nodes for name in node.input}
    caches = {
        name
        for node in nodes
        if node.op_type in CACHE_INPUTS
        for name in node.input[CACHE_INPUTS[node.op_type]]
    }
    bound_otherwise = set(net.sinks.values())  # sinks live in the first row of their caches
    for value in graph.input:
        if value.name in used - bound_otherwise:
            _add_input(net, value, value.name in caches)


def _add_input(net: Network, value: onnx.ValueInfoProto, is_cache: bool) -> None:
    name, kind = value.name, value.type.tensor_type
    shape = [_dimension(net, d) for d in kind.shape.dim]
    letters = [d.dim_param for d in kind.shape.dim]
    dtype = TENSOR_TYPES.get(kind.elem_type, net.request.activations)
    if name in net.request.weights:
        if net.request.weights[name] in PACKED:
            plugin = net.request.experts == "plugin"
            dtype, shape = _packed(net.request.weights[name], shape, plugin)
            net.values[name] = net.add_input(name, dtype, shape, "weight", (name, "bytes"))
        elif linear.precision_of(net, name) != "bf16":
            net.values[name] = tuple(shape)  # the matmul that uses it declares what it needs
        else:
            net.values[name] = net.add_input(name, dtype, shape, "weight", (name, ""))
    elif is_cache:
        sinks = net.sinks.get(name)
        if sinks:
            shape = attention.shape_with_sinks(shape)
        tensor = net.add_input(name, dtype, shape, "cache", (sinks, "sinks") if sinks else ("", ""))
        net.values[name] = CacheView(tensor, name)
    else:
        net.values[name] = net.add_input(name, dtype, shape, "state")
    if -1 in shape:
        given = zip(letters, shape, strict=True)
        net.dimensions[name] = tuple(letter if size < 0 else size for letter, size in given)


def _packed(kind: str, shape: list[int], plugin: bool) -> tuple[str, list[int]]:
    """Type and shape of a weight that the graph holds as bytes; a plugin takes it as such."""
    if plugin:
        return "INT8", shape
    if kind == "mxfp4_blocks":
        return "FP4", [*shape[:-1], 2 * shape[-1]]
    return "E8M0", shape


def _dimension(net: Network, dim: Any) -> int:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    if dim.dim_param not in net.request.letters:
        raise InputError(f"plan '{net.request.name}': no size given for dimension {dim.dim_param}")
    fixed = net.request.fixed(dim.dim_param)
    return -1 if fixed is None else fixed


def _write_node(net: Network, node: onnx.NodeProto) -> None:
    ours = node.domain == DOMAIN
    table = OURS if ours else {**standard.WRITERS, "MatMul": linear.matmul}
    if node.op_type not in table:
        raise InputError(f"node '{node.name}': no TensorRT lowering for the op {node.op_type}")
    net.node = node.name
    inputs = [_value(net, node, name) for name in node.input]
    results = table[node.op_type](net, node, inputs, standard.attributes(node))
    net.values.update(zip(node.output, results, strict=True))
    if ours:
        net.report.ours.setdefault(node.op_type, []).append(node.name)


def _value(net: Network, node: onnx.NodeProto, name: str) -> Any:
    """The tensor of a name. A constant becomes a layer where an op takes it as a tensor."""
    if name in net.sinks.values():
        return None
    if name not in net.values and name in net.folded:
        if node.op_type in LITERAL_READERS:
            return None
        array = net.folded[name]
        kind = "INT64" if array.dtype.kind == "i" else net.request.activations
        net.values[name] = net.constant(array, kind)
    return net.values[name]


def _mark_outputs(net: Network, graph: onnx.GraphProto) -> None:
    """Outputs of the request. A cache that the network's own layers write is marked already; where
    only a plugin wrote to it, what it returned becomes the output `written`."""
    marked = {binding.name for binding in net.report.bindings}
    for name in net.request.outputs:
        value = net.values[name]
        if not isinstance(value, CacheView):
            net.mark_output(value, name, "state")
        elif name not in marked and "written" not in marked:
            net.mark_output(value.done, "written", "state")
            marked.add("written")
