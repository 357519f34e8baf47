"""Reads a written network back and compares it with the source graph, before it is compiled.

TensorRT accepts some settings and then does something else without a word; these are looked for in
what the network itself says, not in what was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx

from dflash_trt.domain import COLLECTIVES, DOMAIN
from dflash_trt.errors import InputError
from dflash_trt.lowering.tensorrt import plugins
from dflash_trt.lowering.tensorrt.plan import PlanRequest
from dflash_trt.lowering.tensorrt.standard import attributes


def check_network(
    trt: Any, definition: Any, nodes: Sequence[onnx.NodeProto], request: PlanRequest
) -> None:
    """Every op of ours is there once, as a plugin or as an attention layer that does what it says."""
    layers = [definition.get_layer(i) for i in range(definition.num_layers)]
    attentions = _attentions(trt, layers)
    wanted = {node.name: node for node in nodes if node.op_type.endswith("Attention")}
    _same("attention layers", set(attentions), set(wanted))
    for name, attention in attentions.items():
        _check_attention(trt, name, attention, wanted[name])
    found = {layer.name for layer in layers if layer.type == trt.LayerType.PLUGIN_V3}
    _same("plugins", found, {name for name, _, _ in plugins.wanted(nodes, request)})
    _check_collectives(trt, layers, nodes)
    built = {*wanted, *found, *(layer.name.partition("/")[0] for layer in layers)}
    for node in nodes:
        if node.domain == DOMAIN and node.name not in built:
            raise InputError(f"node '{node.name}' ({node.op_type}) is not in the network")


def _check_collectives(trt: Any, layers: Sequence[Any], nodes: Sequence[onnx.NodeProto]) -> None:
    """One layer for each, over as many ranks as its node says."""
    wanted = {node.name: node for node in nodes if node.op_type in COLLECTIVES}
    found = {}
    for layer in layers:
        if layer.type == trt.LayerType.DIST_COLLECTIVE:
            layer.__class__ = trt.IDistCollectiveLayer
            found[layer.name.partition("/")[0]] = layer
    _same("collectives", set(found), set(wanted))
    for name, layer in found.items():
        ranks = attributes(wanted[name])["ranks"]
        if layer.num_ranks != ranks:
            raise InputError(f"node '{name}': is over {layer.num_ranks} ranks, not {ranks}")


def _attentions(trt: Any, layers: Sequence[Any]) -> dict[str, Any]:
    found = {}
    for layer in layers:
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            found[layer.attention.name] = layer.attention
    return found


def _same(what: str, found: set[str], wanted: set[str]) -> None:
    for name in sorted(found ^ wanted):
        where = "the network" if name in found else "the source graph"
        raise InputError(f"{what} of network and source graph differ: '{name}' is only in {where}")


def _check_attention(trt: Any, name: str, attention: Any, node: onnx.NodeProto) -> None:
    settings = attributes(node)
    causal = settings.get("causal", 1) if node.op_type == "BlockAttention" else 1
    windowed = settings["window"] > 0
    kinds = trt.CausalMaskKind
    wanted = kinds.LOWER_RIGHT if causal and not windowed else kinds.NONE
    if attention.key_value_lengths is None:
        raise InputError(f"node '{name}': TensorRT dropped the lengths of the attention")
    if attention.causal_kind != wanted:
        raise InputError(
            f"node '{name}': the attention's causal kind is {attention.causal_kind.name}, "
            f"{wanted.name} was asked for"
        )
    if (attention.mask is not None) != windowed:
        state = "lost" if windowed else "has"
        raise InputError(f"node '{name}': the attention {state} a mask")
