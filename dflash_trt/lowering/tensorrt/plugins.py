"""Our ops that are plugins: how they get into the network, and their settings.

Only TensorRT's ONNX parser can add a plugin to a network in every package. So, before anything else,
a small ONNX file that holds nothing but the plugin nodes is parsed; constants stand for their inputs.
When the writer reaches a node, the plugin's inputs are replaced and its settings filled in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from dflash_trt.domain import DOMAIN
from dflash_trt.errors import InputError
from dflash_trt.lowering.tensorrt.network import CacheView, Network
from dflash_trt.lowering.tensorrt.plan import PlanRequest

EXPERTS = "MixtureOfExperts"
PLUGIN_OPS = ("KVInjection", "ConfidenceCommit", "SpeculativeVerify", EXPERTS)
OUTPUTS = {
    "KVInjection": 1,
    "BlockWrite": 1,
    "ConfidenceCommit": 2,
    "SpeculativeVerify": 3,
    EXPERTS: 1,
}
BLOCK_WRITE = ".block_write"


def wanted(nodes: Sequence[onnx.NodeProto], request: PlanRequest) -> list[tuple[str, str, int]]:
    """(node, plugin, number of inputs) for all plugins that writing `nodes` will take."""
    found = []
    updated: set[str] = set()
    ops = {op for op in PLUGIN_OPS if op != EXPERTS or request.experts == "plugin"}
    for node in nodes:
        if node.domain == DOMAIN and node.op_type in ops:
            found.append((node.name, node.op_type, len(node.input)))
        if node.op_type == "BlockAttention":
            if node.input[3] in updated:
                found.append((node.name + BLOCK_WRITE, "BlockWrite", 7))
            updated.add(node.input[3])
    return found


def skeleton(plugins: Sequence[tuple[str, str, int]]) -> onnx.ModelProto:
    """A model of plugin nodes only, with a constant for every input."""
    nodes, outputs = [], []
    blank = numpy_helper.from_array(np.zeros((1,), np.int32), "blank")
    for name, plugin, inputs in plugins:
        results = [f"{name}.out{i}" for i in range(OUTPUTS[plugin])]
        outputs += [helper.make_tensor_value_info(r, TensorProto.INT32, [1]) for r in results]
        nodes.append(
            helper.make_node(
                plugin, ["blank"] * inputs, results, name=name, domain=DOMAIN,
                settings=name, plugin_namespace="dflash", plugin_version="1",
            )
        )  # fmt: skip
    graph = helper.make_graph(nodes, "plugins", [], outputs, [blank])
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11)


def splice(
    trt: Any, definition: Any, logger: Any, nodes: Sequence[onnx.NodeProto], request: PlanRequest,
    settings: dict[str, dict[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """Parse the skeleton into an empty network; plugin layers by node name.

    The parser asks for the types of outputs, so each plugin's `settings` begin with its type.
    """
    plugins = wanted(nodes, request)
    if not plugins:
        return {}
    settings.update((name, {"dtype": request.activations}) for name, _, _ in plugins)
    parser = trt.OnnxParser(definition, logger)
    if not parser.parse(skeleton(plugins).SerializeToString()):
        reasons = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
        raise InputError(f"TensorRT did not accept the plugins: {reasons}")
    for output in [definition.get_output(i) for i in range(definition.num_outputs)]:
        definition.unmark_output(output)
    layers = [definition.get_layer(i) for i in range(definition.num_layers)]
    found = {layer.name: layer for layer in layers if layer.type == trt.LayerType.PLUGIN_V3}
    if set(found) != {name for name, _, _ in plugins}:
        raise InputError(f"TensorRT made the plugins {sorted(found)} of {plugins}")
    return found


def place(
    net: Network, name: str, kind: str, inputs: Sequence[Any], settings: dict[str, Any]
) -> list[Any]:
    """Connect the plugin of a node and fill in its settings; returns its outputs."""
    layer, held = net.plugins[name]
    held.update(settings)
    for index, tensor in enumerate(inputs):
        layer.set_input(index, tensor)
    net.report.plugins[name] = kind
    return [layer.get_output(i) for i in range(OUTPUTS[kind])]


def kv_injection(
    net: Network, node: onnx.NodeProto, inputs: list[Any], a: dict[str, Any]
) -> list[Any]:
    kv, k_norm, lengths, cos, sin, *caches = inputs
    tensors = [kv, k_norm, lengths, cos, sin, *(cache.tensor for cache in caches)]
    settings = {
        **_cache_settings(caches[0], a["kv_heads"], k_norm.shape[1]),
        "layers": len(caches) // 2,
        "epsilon": a["epsilon"],
    }
    (done,) = place(net, net.node, "KVInjection", tensors, settings)
    return [CacheView(cache.tensor, cache.name, done) for cache in caches]


def block_write(net: Network, node: onnx.NodeProto, inputs: list[Any], kv_heads: int) -> Any:
    """Write one layer's block behind the context, in place; returns `done`."""
    k, v, lengths, cos, sin, k_cache, v_cache = inputs
    settings = _cache_settings(k_cache, kv_heads, k.shape[-1] // kv_heads)
    tensors = [k, v, lengths, cos, sin, k_cache.tensor, v_cache.tensor]
    return place(net, net.node + BLOCK_WRITE, "BlockWrite", tensors, settings)[0]


def _cache_settings(cache: CacheView, kv_heads: int, head_dim: int) -> dict[str, Any]:
    _, _, capacity, cache_dim = cache.tensor.shape
    return {
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "capacity": capacity,
        "cache_dim": cache_dim,
    }


def confidence_commit(
    net: Network, node: onnx.NodeProto, inputs: list[Any], a: dict[str, Any]
) -> list[Any]:
    logits, drafts, _, _ = inputs
    settings = {
        "vocabulary": logits.shape[2],
        "slots": _largest(net, "M", drafts.shape[1]),
        "final": a["final"],
    }
    return place(net, net.node, "ConfidenceCommit", inputs, settings)


def speculative_verify(
    net: Network, node: onnx.NodeProto, inputs: list[Any], a: dict[str, Any]
) -> list[Any]:
    logits, _, rows, _ = inputs
    settings = {"vocabulary": logits.shape[2], "width": _largest(net, "W", rows.shape[1])}
    return place(net, net.node, "SpeculativeVerify", inputs, settings)


def mixture_of_experts(
    net: Network, node: onnx.NodeProto, inputs: list[Any], a: dict[str, Any]
) -> list[Any]:
    from dflash_plugins.mixture_of_experts.layout import tile_rows

    x, down = inputs[0], inputs[5]
    experts, hidden, packed = down.shape
    tokens = net.request.letters["B"][2] * _largest(net, "S", x.shape[1])
    settings = {
        "hidden": hidden,
        "inner": 2 * packed,
        "experts": experts,
        "top_k": a["top_k"],
        "alpha": a["alpha"],
        "limit": a["limit"],
        "rows": tile_rows(tokens, a["top_k"], experts),
    }
    return place(net, net.node, EXPERTS, inputs, settings)


def _largest(net: Network, letter: str, size: int) -> int:
    return size if size >= 0 else net.request.letters[letter][2]
