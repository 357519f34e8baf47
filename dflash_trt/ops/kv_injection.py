"""KVInjection: target features of newly committed tokens become keys and values of every draft layer.

The projections of all draft layers are one matmul in front of this op, so that quantisation applies
to them; the op itself normalises, rotates and writes. Its arity depends on the number of draft
layers, so the function is written for a given one:

    kv [B, R, layers*2*K*D]   for each layer its keys, then its values
    k_norm [layers, D]        weight of the RMS norm over each key head
    lengths [B] int32         tokens already injected; row r goes to position lengths[b] + r
    cos, sin [P, D/2]
    k_cache.i, v_cache.i [B, K, L, D] for each layer, and the same as outputs

Every row is written; the caller counts only those that belong to committed tokens, and the next call
overwrites the rest. `lengths[b] + R` must not exceed L.
"""

import onnx
from onnx import helper
from onnxscript import script

from dflash_trt.ops.domain import DFLASH, DOMAIN, OPSET, OPSET_IMPORTS

op = OPSET


@script(DFLASH, default_opset=OPSET)
def InjectLayer(
    kv, layer, k_norm, lengths, cos, sin, k_cache, v_cache, kv_heads: int, epsilon: float
):
    """One layer's share: kv [B, R, layers*2*K*D], layer [1] int64."""
    zero = op.Constant(value_ints=[0])
    heads = op.Reshape(op.Constant(value_int=kv_heads), [1])
    head_dim = op.Shape(k_cache, start=3, end=4)
    split = op.Concat(zero, zero, [-1], [2], heads * head_dim, axis=0)
    own = op.Squeeze(op.Gather(op.Reshape(kv, split), layer, axis=2), [2])  # [B, R, 2, K*D]
    keys = op.Squeeze(op.Slice(own, [0], [1], [2]), [2])
    values = op.Squeeze(op.Slice(own, [1], [2], [2]), [2])

    by_head = op.Reshape(keys, op.Concat(zero, zero, heads, [-1], axis=0))
    scale = op.Reshape(op.Gather(k_norm, layer), [-1])
    normed = op.Reshape(op.RMSNormalization(by_head, scale, epsilon=epsilon), op.Shape(keys))

    start = op.Cast(lengths, to=7)
    rotated = DFLASH.RotateHeads(normed, lengths, cos, sin, heads=kv_heads)
    return (
        op.TensorScatter(k_cache, rotated, start, axis=2),
        op.TensorScatter(v_cache, DFLASH.SplitHeads(values, heads=kv_heads), start, axis=2),
    )


def kv_injection(layers: int) -> onnx.FunctionProto:
    """The function `KVInjection` for a drafter of `layers` layers."""
    shared = ["kv", "k_norm", "lengths", "cos", "sin"]
    caches = [f"{kind}_cache.{i}" for i in range(layers) for kind in "kv"]
    nodes = []
    for i in range(layers):
        own = [f"k_cache.{i}", f"v_cache.{i}"]
        nodes.append(helper.make_node("Constant", [], [f"layer.{i}"], value_ints=[i]))
        call = helper.make_node(
            "InjectLayer",
            ["kv", f"layer.{i}", "k_norm", "lengths", "cos", "sin", *own],
            [f"{name}.out" for name in own],
            domain=DOMAIN,
        )
        for name, kind in (
            ("kv_heads", onnx.AttributeProto.INT),
            ("epsilon", onnx.AttributeProto.FLOAT),
        ):
            call.attribute.append(onnx.AttributeProto(name=name, ref_attr_name=name, type=kind))
        nodes.append(call)
    return helper.make_function(
        DOMAIN,
        "KVInjection",
        shared + caches,
        [f"{name}.out" for name in caches],
        nodes,
        OPSET_IMPORTS,
        attributes=["kv_heads", "epsilon"],
    )
