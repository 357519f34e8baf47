"""CachedAttention and BlockAttention: the two attentions of a cycle.

Both rotate q and k at absolute positions `lengths[b] + j`, place the new keys and values behind the
`lengths[b]` cached ones, and attend with grouped query heads. They differ in what a row may see and
in what is kept:

* `CachedAttention` (the target) is causal and returns the updated caches.
* `BlockAttention` (the drafter) sees the injected context and, in both directions, its own block;
  the block's keys and values are not kept. `causal=1` makes it causal inside the block
  (sliding-window layers of some published drafters).

Common inputs: q [B, S, N*D], k and v [B, S, K*D] before rotation; k_cache, v_cache [B, K, L, D];
lengths [B] int32; cos, sin [P, D/2]; sinks [N], one extra logit per query head in the softmax
(-inf: none). A row attends to key position p at its own position t when

    p <= newest  and  (window == 0 or t - window < p < t + window)

with newest = t where causal, else the last position of the block. Rows of the caches at and behind
`lengths[b] + S` are unspecified. `lengths[b] + S` must not exceed L.
"""

from onnxscript import script

from dflash_trt.ops.domain import DFLASH, OPSET

op = OPSET


@script(DFLASH, default_opset=OPSET)
def RotateHeads(x, lengths, cos, sin, heads: int):
    """[B, S, heads*D] -> [B, heads, S, D], rotated by halves at positions lengths[b] + j."""
    zero = op.Constant(value_ints=[0])
    steps = op.Range(
        op.Constant(value_int=0), op.Squeeze(op.Shape(x, start=1, end=2)), op.Constant(value_int=1)
    )
    positions = op.Unsqueeze(op.Cast(lengths, to=7), op.Constant(value_ints=[1])) + steps
    rotated = op.RotaryEmbedding(x, cos, sin, positions, num_heads=heads)
    split = op.Concat(
        zero,
        zero,
        op.Reshape(op.Constant(value_int=heads), [1]),
        op.Constant(value_ints=[-1]),
        axis=0,
    )
    return op.Transpose(op.Reshape(rotated, split), perm=[0, 2, 1, 3])


@script(DFLASH, default_opset=OPSET)
def SplitHeads(x, heads: int):
    """[B, S, heads*D] -> [B, heads, S, D]."""
    zero = op.Constant(value_ints=[0])
    split = op.Concat(
        zero,
        zero,
        op.Reshape(op.Constant(value_int=heads), [1]),
        op.Constant(value_ints=[-1]),
        axis=0,
    )
    return op.Transpose(op.Reshape(x, split), perm=[0, 2, 1, 3])


@script(DFLASH, default_opset=OPSET)
def Attend(q, keys, cached, lengths, sinks, scale: float, causal: int, window: int):
    """softmax(scale * q @ keys^T, sink) @ cached: [B, N, S, D], [B, K, L, D] x2 -> [B, S, N*D]."""
    one = op.Constant(value_ints=[1])
    zero_scalar = op.Constant(value_int=0)
    one_scalar = op.Constant(value_int=1)
    size = op.Shape(q, start=2, end=3)
    capacity = op.Shape(keys, start=2, end=3)

    grouped = op.Reshape(
        q, op.Concat(op.Shape(keys, start=0, end=2), [-1], op.Shape(q, start=3), axis=0)
    )
    logits = op.MatMul(grouped, op.Transpose(keys, perm=[0, 1, 3, 2])) * op.Constant(
        value_float=scale
    )
    logits = op.Reshape(logits, op.Concat(op.Shape(q, start=0, end=3), capacity, axis=0))

    start = op.Unsqueeze(op.Cast(lengths, to=7), op.Constant(value_ints=[1, 2]))  # [B, 1, 1]
    row = start + op.Unsqueeze(
        op.Range(zero_scalar, op.Squeeze(size), one_scalar), one
    )  # [B, S, 1]
    key = op.Range(zero_scalar, op.Squeeze(capacity), one_scalar)  # [L]
    newest = op.Where(op.Constant(value_int=causal) == zero_scalar, start + size - one, row)
    reach = op.Where(
        op.Constant(value_int=window) == zero_scalar, capacity, op.Constant(value_int=window)
    )
    visible = op.And(key <= newest, op.And(key > row - reach, key < row + reach))  # [B, S, L]
    lowest = op.CastLike(op.Constant(value_float=float("-inf")), logits)
    logits = op.Where(op.Unsqueeze(visible, one), logits, lowest)

    sink = op.Expand(
        op.Reshape(op.CastLike(sinks, logits), [1, -1, 1, 1]),
        op.Concat(op.Shape(q, start=0, end=3), one, axis=0),
    )
    weights = op.Softmax(op.Concat(logits, sink, axis=-1), axis=-1)
    weights = op.Slice(weights, [0], capacity, [3])
    # Rows of the cache that no one may see can hold anything, NaN included: 0 * NaN must stay out.
    seen = op.ReduceMax(op.Cast(visible, to=6), one, keepdims=0)  # [B, L]
    seen = op.Unsqueeze(op.Cast(seen, to=9), op.Constant(value_ints=[1, 3]))
    values = op.Where(seen, cached, op.CastLike(op.Constant(value_float=0.0), cached))

    weights = op.Reshape(weights, op.Concat(op.Shape(keys, start=0, end=2), [-1], capacity, axis=0))
    heads = op.Reshape(op.MatMul(weights, values), op.Shape(q))
    return op.Reshape(op.Transpose(heads, perm=[0, 2, 1, 3]), [0, 0, -1])


@script(DFLASH, default_opset=OPSET)
def CachedAttention(
    q, k, v, k_cache, v_cache, lengths, cos, sin, sinks,
    heads: int, kv_heads: int, scale: float, window: int,
):  # fmt: skip
    """Returns (out [B, S, N*D], k_cache, v_cache)."""
    start = op.Cast(lengths, to=7)
    keys = op.TensorScatter(
        k_cache, DFLASH.RotateHeads(k, lengths, cos, sin, heads=kv_heads), start, axis=2
    )
    cached = op.TensorScatter(v_cache, DFLASH.SplitHeads(v, heads=kv_heads), start, axis=2)
    rotated = DFLASH.RotateHeads(q, lengths, cos, sin, heads=heads)
    out = DFLASH.Attend(rotated, keys, cached, lengths, sinks, scale=scale, causal=1, window=window)
    return out, keys, cached


@script(DFLASH, default_opset=OPSET)
def BlockAttention(
    q, k, v, k_cache, v_cache, lengths, cos, sin, sinks,
    heads: int, kv_heads: int, scale: float, window: int, causal: int,
):  # fmt: skip
    """Returns out [B, S, N*D]."""
    start = op.Cast(lengths, to=7)
    keys = op.TensorScatter(
        k_cache, DFLASH.RotateHeads(k, lengths, cos, sin, heads=kv_heads), start, axis=2
    )
    cached = op.TensorScatter(v_cache, DFLASH.SplitHeads(v, heads=kv_heads), start, axis=2)
    rotated = DFLASH.RotateHeads(q, lengths, cos, sin, heads=heads)
    return DFLASH.Attend(
        rotated, keys, cached, lengths, sinks, scale=scale, causal=causal, window=window
    )
