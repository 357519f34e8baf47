"""What a quantised product sees of its activations: fp32 in, the nearest values of the format out.

Only simulations use these functions; no source graph holds them. They are held against
`quantization.fp8.to_e4m3` and `quantization.nvfp4.encode_rows`, bit for bit.
"""

from onnxscript import script

from dflash_trt.ops.domain import DFLASH, OPSET

op = OPSET


@script(DFLASH, default_opset=OPSET)
def RoundE4M3(x):
    """To the nearest value of E4M3 (17), even where two are as near, and saturating."""
    return op.Cast(op.Cast(x, to=17), to=1)


@script(DFLASH, default_opset=OPSET)
def RoundNVFP4(x):
    """x [.., K] to E2M1 in blocks of 16 along K, times an E4M3 scale that brings the largest to 6.

    E2M1 has steps of 1/2 below 2, of 1 below 4, of 2 up to 6; a block whose scale rounds to zero is
    zero.
    """
    shape = op.Concat(op.Shape(x, start=0, end=-1), op.Constant(value_ints=[-1, 16]), axis=0)
    blocks = op.Reshape(x, shape)
    peak = op.ReduceMax(op.Abs(blocks), op.Constant(value_ints=[-1]), keepdims=1)
    scale = DFLASH.RoundE4M3(peak / op.Constant(value_float=6.0))
    zero = op.Constant(value_float=0.0)
    divisor = op.Where(scale > zero, scale, op.Constant(value_float=float("inf")))
    ratio = blocks / divisor
    size = op.Min(op.Abs(ratio), op.Constant(value_float=6.0))
    two = op.Constant(value_float=2.0)
    above = op.Where(size < op.Constant(value_float=4.0), op.Constant(value_float=1.0), two)
    step = op.Where(size < two, op.Constant(value_float=0.5), above)
    rounded = op.Sign(ratio) * op.Round(size / step) * step
    return op.Reshape(rounded * scale, op.Shape(x))
