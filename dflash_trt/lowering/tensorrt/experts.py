"""MixtureOfExperts: a plugin, or TensorRT's layers; expert weights in MXFP4 as they are stored.

A plan takes the plugin for any number of tokens. It reads a selected expert once for all tokens that
want it, where the layers read it once for each: were experts drawn evenly, 51 instead of 64 for a
block of 16 in gpt-oss-120b, 126 instead of 512 for eight such blocks. For a single token both read
the same, the plugin 16 bytes at a time and the layers one code at a time. The layers (`--experts
layers`) are what is left should a TensorRT refuse the plugin, and a second thing to compare with.

They are dequantise, gather the selected experts, multiply, reduce: the compiler makes one kernel of
that, which reads FP4 and its scales and writes nothing but the result. Written as gather and matrix
multiply it would write the selected experts out in bf16 for every token. Gathering comes after
dequantising: FP4 cannot be gathered. The identity matrix multiply between the two projections keeps
the compiler from computing the activation again for every row of the second one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from dflash_trt.lowering.tensorrt import plugins
from dflash_trt.lowering.tensorrt.network import Network

# Size of the identity; the inner size of an expert is a multiple of it.
BREAK = 32


def mixture_of_experts(
    net: Network, node: onnx.NodeProto, inputs: list[Any], a: dict[str, Any]
) -> list[Any]:
    if net.request.experts == "plugin":
        return plugins.mixture_of_experts(net, node, inputs, a)
    x, logits, gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias = inputs
    rows, top_k = net.flatten_rows(x), a["top_k"]
    chosen, shares = _route(net, net.flatten_rows(logits), top_k)
    first = net.reshape(net.cast(rows, "FLOAT"), (-1, 1, 1, x.shape[-1]))
    both = _project(net, first, (gate_up, gate_up_scales, gate_up_bias), chosen)
    inner = _swiglu(net, both, top_k, a["alpha"], a["limit"])
    second = net.reshape(net.cast(inner, "FLOAT"), (-1, top_k, 1, inner.shape[-1]))
    outputs = _project(net, second, (down, down_scales, down_bias), chosen)
    weighted = net.elementwise(outputs, net.reshape(shares, (-1, top_k, 1)), "PROD")
    total = net.cast(net.reduce(weighted, "SUM", 1, keep=False), net.real)
    return [net.unflatten_rows(total, x)]


def _route(net: Network, logits: Any, top_k: int) -> tuple[Any, Any]:
    """Indices [T, k] of the largest logits and their softmax [T, k] in fp32."""
    layer = net.definition.add_topk(
        net.cast(logits, "FLOAT"), net.trt.TopKOperation.MAX, top_k, 1 << 1
    )
    best, chosen = net.out(layer, "route"), layer.get_output(1)
    softmax = net.definition.add_softmax(best)
    softmax.axes = 1 << 1
    return chosen, net.out(softmax, "shares")


def _project(net: Network, rows: Any, weight: tuple[Any, Any, Any], chosen: Any) -> Any:
    """rows [T, 1 or k, 1, K] times the selected experts' [N, K], plus bias: fp32 [T, k, N]."""
    blocks, scales, bias = weight
    layer = net.definition.add_dequantize(blocks, scales, net.trt.DataType.FLOAT)
    layer.axis = 2
    selected = net.gather(net.out(layer, "dequantise"), chosen)
    product = net.reduce(net.elementwise(rows, selected, "PROD"), "SUM", 3, keep=False)
    return net.elementwise(product, net.cast(net.gather(bias, chosen), "FLOAT"), "SUM")


def _swiglu(net: Network, both: Any, top_k: int, alpha: float, limit: float) -> Any:
    """Gate and up rows alternate: [T, k, 2*I] -> clamped SwiGLU [T, k, I], rounded once."""

    def value(number: float) -> Any:
        return net.scalar(number, 3, "FLOAT")

    size = both.shape[-1] // 2
    pairs = net.reshape(both, (-1, top_k, size, 2))
    gate, up = (net.reshape(net.slice_last(pairs, i, 1), (-1, top_k, size)) for i in range(2))
    gate = net.elementwise(gate, value(limit), "MIN")
    up = net.elementwise(net.elementwise(up, value(limit), "MIN"), value(-limit), "MAX")
    steep = net.elementwise(gate, value(alpha), "PROD")
    sigmoid = net.definition.add_activation(steep, net.trt.ActivationType.SIGMOID)
    swish = net.elementwise(gate, net.out(sigmoid, "sigmoid"), "PROD")
    inner = net.elementwise(swish, net.elementwise(up, value(1.0), "SUM"), "PROD")
    kind = net.request.activations
    identity = net.once(("identity",), lambda: net.constant(np.eye(BREAK), kind))
    flat = net.reshape(net.cast(inner, kind), (-1, BREAK))
    return net.reshape(net.matmul(flat, identity), (-1, top_k, size))
