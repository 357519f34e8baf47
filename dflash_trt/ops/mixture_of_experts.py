"""MixtureOfExperts: the feed-forward part of gpt-oss, a few experts of many for each token.

    x [B, S, H]                       what the experts read
    router_logits [B, S, E]
    gate_up_blocks [E, 2*I, H/2]      uint8, two FP4 values to a byte, the first in the low half
    gate_up_scales [E, 2*I, H/32]     uint8, E8M0: 32 values along H share the factor 2^(byte - 127)
    gate_up_bias [E, 2*I]
    down_blocks [E, H, I/2], down_scales [E, H, I/32], down_bias [E, H]

(E experts, I their inner size.) Rows 2*i of gate_up are the gate, rows 2*i + 1 the up projection,
as gpt-oss stores them; a tensor of the checkpoint, [E, rows, K/32, 16], is the same bytes.

Each token goes to the `top_k` experts with the largest router logits (the lower index among
equals); their outputs are added with softmax weights over the selected logits only. An expert
computes

    gate = min(gate, limit), up = clip(up, -limit, limit)
    y = down(gate * sigmoid(alpha * gate) * (up + 1)) + down_bias

Formats: OCP Microscaling v1.0 (E2M1 elements, E8M0 scales). The body unpacks one expert at a time,
only those that some token selected, and gives it its own tokens.
"""

import numpy as np
from onnx import numpy_helper
from onnxscript import script

from dflash_trt.ops.domain import DFLASH, OPSET

op = OPSET

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4_VALUES = np.concatenate([E2M1, -E2M1])
# 2^(e - 127), exact in fp32 down to the subnormal 2^-127; 255 is NaN.
E8M0_VALUES = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.nan).astype(np.float32)
MXFP4_BLOCK = 32

# The two values of every byte [256, 2], the low half first.
_BYTES = np.arange(256)
_PAIRS = numpy_helper.from_array(FP4_VALUES[np.stack([_BYTES & 15, _BYTES >> 4], 1)], "pairs")
_E8M0 = numpy_helper.from_array(E8M0_VALUES, "e8m0")


@script(DFLASH, default_opset=OPSET)
def DecodeMXFP4(blocks, scales):
    """Packed values [N, K/2] and scales [N, K/32], both uint8 -> fp32 [N, K]."""
    pairs = op.Gather(op.Constant(value=_PAIRS), op.Cast(blocks, to=6))  # [N, K/2, 2]
    values = op.Reshape(pairs, [0, -1, 32])  # [N, K/32, 32]
    factors = op.Gather(op.Constant(value=_E8M0), op.Cast(scales, to=6))
    factors = op.Unsqueeze(factors, [-1])
    return op.Reshape(values * factors, [0, -1])


@script(DFLASH, default_opset=OPSET)
def ExpertMLP(
    x, gate_up_blocks, gate_up_scales, gate_up_bias, down_blocks, down_scales, down_bias,
    alpha: float, limit: float,
):  # fmt: skip
    """One expert: x [T, H], packed [2*I, H/2] and [H, I/2], scales and biases -> [T, H]."""
    gate_up = op.CastLike(DFLASH.DecodeMXFP4(gate_up_blocks, gate_up_scales), x)
    both = op.MatMul(x, op.Transpose(gate_up, perm=[1, 0])) + gate_up_bias
    pairs = op.Reshape(both, [0, -1, 2])
    highest = op.CastLike(op.Constant(value_float=limit), x)
    gate = op.Min(op.Squeeze(op.Slice(pairs, [0], [1], [2]), [2]), highest)
    up = op.Squeeze(op.Slice(pairs, [1], [2], [2]), [2])
    up = op.Min(op.Max(up, op.Neg(highest)), highest)
    steep = gate * op.CastLike(op.Constant(value_float=alpha), x)
    inner = gate * op.Sigmoid(steep) * (up + op.CastLike(op.Constant(value_float=1.0), x))
    down = op.CastLike(DFLASH.DecodeMXFP4(down_blocks, down_scales), x)
    return op.MatMul(inner, op.Transpose(down, perm=[1, 0])) + down_bias


@script(DFLASH, default_opset=OPSET)
def MixtureOfExperts(
    x, router_logits, gate_up_blocks, gate_up_scales, gate_up_bias,
    down_blocks, down_scales, down_bias, top_k: int, alpha: float, limit: float,
):  # fmt: skip
    """Returns y [B, S, H]."""
    count = op.Reshape(op.Constant(value_int=top_k), [1])
    size = op.Shape(x, start=2, end=3)
    tokens = op.Reshape(x, op.Concat([-1], size, axis=0))  # [T, H]
    logits = op.Reshape(
        router_logits, op.Concat([-1], op.Shape(router_logits, start=2, end=3), axis=0)
    )
    best, chosen = op.TopK(logits, count, axis=-1, largest=1, sorted=1)
    shares = op.Softmax(best, axis=-1)  # [T, top_k]

    experts, _, _, _ = op.Unique(op.Reshape(chosen, [-1]), sorted=1)
    y = op.Expand(op.CastLike(op.Constant(value_float=0.0), tokens), op.Shape(tokens))
    for i in range(op.Squeeze(op.Shape(experts))):
        expert = op.Gather(experts, i)
        mine = op.Cast(op.Equal(chosen, expert), to=6)
        rows = op.Transpose(op.NonZero(op.ReduceMax(mine, [-1], keepdims=0)), perm=[1, 0])  # [n, 1]
        out = DFLASH.ExpertMLP(
            op.GatherND(tokens, rows),
            op.Gather(gate_up_blocks, expert),
            op.Gather(gate_up_scales, expert),
            op.Gather(gate_up_bias, expert),
            op.Gather(down_blocks, expert),
            op.Gather(down_scales, expert),
            op.Gather(down_bias, expert),
            alpha=alpha,
            limit=limit,
        )
        share = op.ReduceSum(shares * op.CastLike(mine, shares), [-1], keepdims=1)  # [T, 1]
        y = op.ScatterND(y, rows, out * op.GatherND(share, rows), reduction="add")
    return op.Reshape(y, op.Shape(x))
