"""What a matrix multiplication with a weight becomes in each precision.

FP8 and NVFP4 keep TensorRT's own quantised GEMM only where the scale inside the network is a
constant, and weights are bound at run time. So the scale in the network is 1, activations are
multiplied by an `inverse_input_scale` (a power of two, exact in bf16) before they are quantised, and
the product is multiplied by `scale`, which holds both scales, behind the GEMM.
"""

from __future__ import annotations

from typing import Any

import onnx

from dflash_trt.errors import InputError
from dflash_trt.lowering.tensorrt.network import Network

FP4_BLOCK = 16
QUANTISED_KINDS = frozenset({"projection"})


def precision_of(net: Network, weight: str) -> str:
    """The precision a weight is stored in: only projections are quantised, unless they are kept."""
    kind = net.request.weights.get(weight)
    quantised = kind in QUANTISED_KINDS and weight not in net.request.kept
    return net.request.precision if quantised else "bf16"


def matmul(net: Network, node: onnx.NodeProto, inputs: list[Any], a: dict[str, Any]) -> list[Any]:
    x, weight = inputs[0], node.input[1]
    if weight not in net.request.weights:
        raise InputError(f"node '{net.node}': MatMul with something that is no weight")
    rows = net.flatten_rows(x)
    write = {"bf16": _plain, "fp8": _fp8, "nvfp4": _nvfp4}[precision_of(net, weight)]
    return [net.unflatten_rows(write(net, rows, weight), x)]


def _plain(net: Network, rows: Any, weight: str) -> Any:
    """A product of one row is made of two: the compiler would copy the whole weight, transposed."""
    if rows.shape[0] != 1:
        return net.matmul(rows, net.values[weight])
    product = net.matmul(net.concat([rows, rows], 0), net.values[weight])
    return net.slice_axis(product, 0, 0, 1)


def _fp8(net: Network, rows: Any, weight: str) -> Any:
    """E4M3 activations and weights [K, N], one scale per column of the product."""
    size, columns = net.values[weight]
    stored = _weight_input(net, weight, weight, "FP8", (size, columns), "fp8")
    one = net.scalar(1.0, 0, net.request.activations)
    quantise = net.definition.add_quantize(_scaled(net, rows, weight), one, net.trt.DataType.FP8)
    activations = _dequantise(net, net.out(quantise, "quantise"), one)
    product = net.matmul(activations, _dequantise(net, stored, one))
    scale = _weight_input(net, weight, f"{weight}.scale", "FLOAT", (1, columns), "scale")
    return _times(net, product, scale)


def _nvfp4(net: Network, rows: Any, weight: str) -> Any:
    """E2M1 activations and weights [N, K] in blocks of 16 along K with E4M3 scales."""
    size, columns = net.values[weight]
    if size % FP4_BLOCK:
        raise InputError(f"weight '{weight}': {size} rows cannot be cut into blocks of {FP4_BLOCK}")
    types = net.trt.DataType
    one = net.scalar(1.0, 0, "FLOAT")
    stored = _weight_input(net, weight, weight, "FP4", (columns, size), "nvfp4")
    blocks = (columns, size // FP4_BLOCK)
    block_scale = _weight_input(net, weight, f"{weight}.block_scale", "FP8", blocks, "block_scale")
    dynamic = net.definition.add_dynamic_quantize(
        _scaled(net, rows, weight), 1, FP4_BLOCK, types.FP4, types.FP8
    )
    dynamic.set_input(1, one)
    data, scales = net.out(dynamic, "quantise"), dynamic.get_output(1)
    activations = _dequantise(net, data, _dequantise(net, scales, one), axis=1)
    weights = _dequantise(net, stored, _dequantise(net, block_scale, one), axis=1)
    product = net.matmul(activations, weights, transpose_b=True)
    scale = _weight_input(net, weight, f"{weight}.scale", "FLOAT", (1, columns), "scale")
    return _times(net, product, scale)


def _weight_input(
    net: Network, source: str, name: str, dtype: str, shape: tuple[int, int], part: str
) -> Any:
    key = ("weight", name)
    return net.once(key, lambda: net.add_input(name, dtype, shape, "weight", (source, part)))


def _scaled(net: Network, rows: Any, weight: str) -> Any:
    name, kind = f"{weight}.inverse_input_scale", net.request.activations
    inverse = _weight_input(net, weight, name, kind, (1, 1), "inverse_input_scale")
    return net.elementwise(rows, inverse, "PROD")


def _dequantise(net: Network, data: Any, scale: Any, axis: int | None = None) -> Any:
    layer = net.definition.add_dequantize(data, scale, net.real)
    if axis is not None:
        layer.axis = axis
    return net.out(layer, "dequantise")


def _times(net: Network, product: Any, scale: Any) -> Any:
    """The product times its scale, in fp32, rounded once."""
    return net.cast(net.elementwise(net.cast(product, "FLOAT"), scale, "PROD"), net.real)
