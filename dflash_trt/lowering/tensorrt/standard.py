"""What the standard ONNX ops of a source graph become."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import helper

from dflash_trt.errors import InputError
from dflash_trt.lowering.tensorrt.network import TENSOR_TYPES, Network

Attributes = dict[str, Any]
Writer = Callable[[Network, onnx.NodeProto, list[Any], Attributes], list[Any]]


def attributes(node: onnx.NodeProto) -> Attributes:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def whole(net: Network, name: str) -> np.ndarray:
    """The value of an input that must be known when the plan is built."""
    if name not in net.folded:
        raise InputError(f"node '{net.node}': the input '{name}' must be a constant")
    return net.folded[name]


def gather(net: Network, node: onnx.NodeProto, inputs: list[Any], a: Attributes) -> list[Any]:
    return [net.gather(inputs[0], inputs[1], a.get("axis", 0))]


def gather_nd(net: Network, node: onnx.NodeProto, inputs: list[Any], a: Attributes) -> list[Any]:
    layer = net.definition.add_gather_v2(inputs[0], inputs[1], net.trt.GatherMode.ND)
    layer.num_elementwise_dims = a.get("batch_dims", 0)
    return [net.out(layer, "gather_nd")]


def rms_norm(net: Network, node: onnx.NodeProto, inputs: list[Any], a: Attributes) -> list[Any]:
    """x * rsqrt(mean(x^2) + eps) in fp32, rounded, times the weight."""
    x, weight = inputs
    rank = len(x.shape)
    wide = net.cast(x, "FLOAT")
    mean = net.reduce(net.elementwise(wide, wide, "PROD"), "AVG", rank - 1, keep=True)
    mean = net.elementwise(mean, net.scalar(a["epsilon"], rank, "FLOAT"), "SUM")
    factor = net.unary(net.unary(mean, "SQRT"), "RECIP")
    normed = net.cast(net.elementwise(wide, factor, "PROD"), net.real)
    return [net.elementwise(normed, net.per_feature(weight, rank), "PROD")]


def swish(net: Network, node: onnx.NodeProto, inputs: list[Any], a: Attributes) -> list[Any]:
    wide = net.cast(inputs[0], "FLOAT")
    kind = net.trt.ActivationType.SIGMOID
    gate = net.out(net.definition.add_activation(wide, kind), "sigmoid")
    return [net.cast(net.elementwise(wide, gate, "PROD"), net.real)]


def _broadcast(net: Network, *operands: Any) -> list[Any]:
    """Give all operands the rank of the largest one, ones in front."""
    rank = max(len(x.shape) for x in operands)
    return [_widen(net, x, rank) for x in operands]


def _widen(net: Network, tensor: Any, rank: int) -> Any:
    missing = rank - len(tensor.shape)
    if missing == 0:
        return tensor
    if len(tensor.shape) == 1:
        return net.per_feature(tensor, rank)
    return net.reshape(tensor, (1,) * missing + tuple(tensor.shape))


def _binary(operation: str) -> Writer:
    def write(net: Network, node: onnx.NodeProto, inputs: list[Any], a: Attributes) -> list[Any]:
        left, right = _broadcast(net, *inputs)
        return [net.elementwise(left, right, operation)]

    return write


def where(net: Network, node: onnx.NodeProto, inputs: list[Any], a: Attributes) -> list[Any]:
    return [net.out(net.definition.add_select(*_broadcast(net, *inputs)), "select")]


def not_(net: Network, node: onnx.NodeProto, inputs: list[Any], a: Attributes) -> list[Any]:
    return [net.unary(inputs[0], "NOT")]


def split(net: Network, node: onnx.NodeProto, inputs: list[Any], a: Attributes) -> list[Any]:
    x = inputs[0]
    if a.get("axis", 0) not in (-1, len(x.shape) - 1):
        raise InputError(f"node '{net.node}': Split is supported along the last axis only")
    start, parts = 0, []
    for size in whole(net, node.input[1]).tolist():
        parts.append(net.slice_last(x, start, size))
        start += size
    return parts


def reshape(net: Network, node: onnx.NodeProto, inputs: list[Any], a: Attributes) -> list[Any]:
    return [net.reshape(inputs[0], whole(net, node.input[1]).tolist())]


def concat(net: Network, node: onnx.NodeProto, inputs: list[Any], a: Attributes) -> list[Any]:
    rank = len(inputs[0].shape)
    return [net.concat(inputs, a["axis"] % rank)]


def unsqueeze(net: Network, node: onnx.NodeProto, inputs: list[Any], a: Attributes) -> list[Any]:
    rank = len(inputs[0].shape) + 1
    axes = [axis % rank for axis in whole(net, node.input[1]).tolist()]
    if len(axes) != 1:
        raise InputError(f"node '{net.node}': Unsqueeze is supported for one axis only")
    dims = [0] * len(inputs[0].shape)
    dims.insert(axes[0], 1)
    if axes[0] <= len(dims) - 2:  # behind the new axis, 0 would copy the wrong dimension
        dims = list(inputs[0].shape)
        dims.insert(axes[0], 1)
    if dims.count(-1) > 1:
        raise InputError(f"node '{net.node}': Unsqueeze in front of two varying dimensions")
    return [net.reshape(inputs[0], dims)]


def slice_(net: Network, node: onnx.NodeProto, inputs: list[Any], a: Attributes) -> list[Any]:
    """Slice along one axis of a fixed size, with steps of one."""
    starts, ends, axes = (whole(net, node.input[i]).tolist() for i in (1, 2, 3))
    axis = axes[0] % len(inputs[0].shape)
    size = inputs[0].shape[axis]
    if len(axes) != 1 or size < 0:
        raise InputError(f"node '{net.node}': Slice needs one axis of a fixed size")
    start, end, _ = slice(starts[0], ends[0]).indices(size)
    return [net.slice_axis(inputs[0], axis, start, end - start)]


def shape(net: Network, node: onnx.NodeProto, inputs: list[Any], a: Attributes) -> list[Any]:
    """Only fixed dimensions: the value is then known when the plan is built."""
    dims = tuple(inputs[0].shape)[a.get("start", 0) : a.get("end")]
    if min(dims) < 0:
        raise InputError(f"node '{net.node}': Shape of a dimension that varies within the plan")
    net.folded[node.output[0]] = np.array(dims, np.int64)
    return [net.constant(list(dims), "INT64")]


def divide(net: Network, node: onnx.NodeProto, inputs: list[Any], a: Attributes) -> list[Any]:
    if all(name in net.folded for name in node.input):
        quotient = net.folded[node.input[0]] // net.folded[node.input[1]]
        net.folded[node.output[0]] = quotient
        return [net.constant(quotient, "INT64")]
    return _binary("DIV")(net, node, inputs, a)


def cast(net: Network, node: onnx.NodeProto, inputs: list[Any], a: Attributes) -> list[Any]:
    target = TENSOR_TYPES.get(a["to"])
    return [net.cast(inputs[0], target if target else net.real)]


def identity(net: Network, node: onnx.NodeProto, inputs: list[Any], a: Attributes) -> list[Any]:
    return [net.out(net.definition.add_identity(inputs[0]), "identity")]


WRITERS: dict[str, Writer] = {
    "Add": _binary("SUM"),
    "And": _binary("AND"),
    "Cast": cast,
    "Concat": concat,
    "Div": divide,
    "Gather": gather,
    "GatherND": gather_nd,
    "Identity": identity,
    "Mul": _binary("PROD"),
    "Not": not_,
    "RMSNormalization": rms_norm,
    "Reshape": reshape,
    "Shape": shape,
    "Slice": slice_,
    "Split": split,
    "Sub": _binary("SUB"),
    "Swish": swish,
    "Unsqueeze": unsqueeze,
    "Where": where,
}
