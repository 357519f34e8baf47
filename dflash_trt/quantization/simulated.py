"""Source graphs that compute, in fp32, what a quantised plan computes.

Weights come as the codes of the weights file, decoded; activations are rounded in the graph, between
the same two scales that a plan applies (see `lowering.tensorrt.linear`):

    y = (round(x * inverse_input_scale) @ weight) * scale
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import helper

from dflash_trt.models.graph import SourceGraph
from dflash_trt.ops.domain import DOMAIN, with_domain_import
from dflash_trt.ops.rounding import RoundE4M3, RoundNVFP4

ROUNDING = {"fp8": RoundE4M3, "nvfp4": RoundNVFP4}


def simulated(source: SourceGraph, precisions: Mapping[str, str]) -> SourceGraph:
    """The graph with every product with a weight of `precisions` (`fp8` or `nvfp4`) as above.

    It reads `<weight>.inverse_input_scale` and `<weight>.scale` by name; whoever compiles it adds
    them, and the weight itself as [K, N] without its scale.
    """
    model = onnx.ModelProto()
    model.CopyFrom(source.model)
    del model.graph.node[:]
    for node in source.model.graph.node:
        precision = precisions.get(node.input[1]) if node.op_type == "MatMul" else None
        model.graph.node.extend(_rounded(node, precision) if precision else [node])
    functions = [RoundE4M3.to_function_proto(), RoundNVFP4.to_function_proto()]
    model.functions.extend(with_domain_import(function) for function in functions)
    return SourceGraph(model, source.weights)


def _rounded(node: onnx.NodeProto, precision: str) -> list[onnx.NodeProto]:
    (x, weight), (y,) = node.input, node.output
    rounding = ROUNDING[precision].name
    scaled, rounded, product = (f"{node.name}.{part}" for part in ("scaled", "rounded", "product"))
    return [
        helper.make_node("Mul", [x, f"{weight}.inverse_input_scale"], [scaled], name=scaled),
        helper.make_node(rounding, [scaled], [rounded], name=rounded, domain=DOMAIN),
        helper.make_node("MatMul", [rounded, weight], [product], name=product),
        helper.make_node("Mul", [product, f"{weight}.scale"], [y], name=node.name),
    ]
