"""New keys and values into the caches: norm, rotation and write of all layers in one launch.

Program (row, layer) handles every head of one token in one layer: it reads 2*K*D new values, and
writes as many to `lengths[b] + r` of that layer's caches. The caches are changed in place; the only
output is `done`, zeros that later layers add to their lengths so that they run after this one.

Bytes: new rows once in and once out, `4 * B * R * layers * K * D * size`, plus `2 * D/2 * size` of
rotary table per row and layer and `D * size` of norm weight. The minimum is the first term; the
excess at K = 8, D = 64 is 6%, and comes from the L2 cache after the first layer.

Tolerance: the reference rounds to the activations' type after the norm, after its weight and after
the rotation; so does the kernel, but sums run in another order: 1e-5 in fp32, 2 ulp in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl


@triton.jit
def write_rows(
    new_keys, new_values, k_norm, lengths, cos, sin, key_caches, value_caches, done, rows,
    LAYERS: tl.constexpr, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, HALF: tl.constexpr,
    HALF_PAD: tl.constexpr, CAPACITY: tl.constexpr, CACHE_DIM: tl.constexpr,
    ROW_STRIDE: tl.constexpr, LAYER_STRIDE: tl.constexpr, VALUE_OFFSET: tl.constexpr,
    NORM: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    """Program (b * rows + r, layer); `key_caches` and `value_caches` hold a pointer per layer."""
    row = tl.program_id(0)
    layer = tl.program_id(1)
    b = row // rows
    r = row - b * rows
    position = tl.load(lengths + b) + r
    head = tl.arange(0, HEADS_PAD)[:, None]
    d = tl.arange(0, HALF_PAD)[None, :]
    mask = (head < HEADS) & (d < HALF)
    kind = new_keys.dtype.element_ty

    source = row.to(tl.int64) * ROW_STRIDE + layer * LAYER_STRIDE + head * (2 * HALF) + d
    low = tl.load(new_keys + source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(new_keys + source + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(low * low + high * high, axis=1)[:, None] / (2 * HALF)
        factor = 1.0 / tl.sqrt(square + EPSILON)
        weight = k_norm + layer * (2 * HALF) + d
        low = (low * factor).to(kind).to(tl.float32)
        high = (high * factor).to(kind).to(tl.float32)
        low *= tl.load(weight, mask=d < HALF, other=0.0).to(tl.float32)
        high *= tl.load(weight + HALF, mask=d < HALF, other=0.0).to(tl.float32)
        low = low.to(kind).to(tl.float32)
        high = high.to(kind).to(tl.float32)
    angle = position.to(tl.int64) * HALF + d
    in_table = (d < HALF) & (angle < CAPACITY * HALF)
    c = tl.load(cos + angle, mask=in_table, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=in_table, other=0.0).to(tl.float32)
    key_low = (low * c - high * s).to(kind)
    key_high = (high * c + low * s).to(kind)
    value_low = tl.load(new_values + VALUE_OFFSET + source, mask=mask, other=0.0)
    value_high = tl.load(new_values + VALUE_OFFSET + source + HALF, mask=mask, other=0.0)

    target = ((b * HEADS + head).to(tl.int64) * CAPACITY + position) * CACHE_DIM + d
    inside = mask & in_table
    for i in tl.static_range(LAYERS):
        if layer == i:
            tl.store(key_caches[i] + target, key_low, mask=inside)
            tl.store(key_caches[i] + target + HALF, key_high, mask=inside)
            tl.store(value_caches[i] + target, value_low, mask=inside)
            tl.store(value_caches[i] + target + HALF, value_high, mask=inside)
    if (layer == 0) & (r == 0):
        tl.store(done + b, 0)


def launch_injection(
    kv: Any, k_norm: Any, lengths: Any, cos: Any, sin: Any,
    key_caches: Sequence[Any], value_caches: Sequence[Any], done: Any, epsilon: float,
) -> None:  # fmt: skip
    """Checks and launches on torch tensors; shapes as in the op `KVInjection`, caches in place."""
    batch, rows, width = kv.shape
    layers = len(key_caches)
    cache_batch, heads, capacity, dim = key_caches[0].shape
    if width != layers * 2 * heads * dim:
        raise ValueError(f"kv has {width} columns, {layers * 2 * heads * dim} are needed")
    if cache_batch != batch or tuple(lengths.shape) != (batch,):
        raise ValueError(f"caches for {cache_batch} sequences, new rows for {batch}")
    if cos.shape[0] < capacity:
        raise ValueError(f"rotary tables of {cos.shape[0]} rows for a cache of {capacity} tokens")
    fixed = constants(layers, heads, dim, capacity, dim, epsilon)
    write_rows[(batch * rows, layers)](
        kv, kv, k_norm, lengths, cos, sin, tuple(key_caches), tuple(value_caches), done, rows,
        **fixed,
    )  # fmt: skip


def constants(
    layers: int, heads: int, dim: int, capacity: int, cache_dim: int, epsilon: float
) -> dict[str, Any]:
    """Compile-time sizes for the injection of all layers' keys and values from one tensor."""
    return {
        **_sizes(layers, heads, dim, capacity, cache_dim),
        "ROW_STRIDE": layers * 2 * heads * dim,
        "LAYER_STRIDE": 2 * heads * dim,
        "VALUE_OFFSET": heads * dim,
        "NORM": True,
        "EPSILON": epsilon,
    }


def block_constants(heads: int, dim: int, capacity: int, cache_dim: int) -> dict[str, Any]:
    """Compile-time sizes for one layer's block: keys are normed already, values are apart."""
    return {
        **_sizes(1, heads, dim, capacity, cache_dim),
        "ROW_STRIDE": heads * dim,
        "LAYER_STRIDE": 0,
        "VALUE_OFFSET": 0,
        "NORM": False,
        "EPSILON": 0.0,
    }


def _sizes(layers: int, heads: int, dim: int, capacity: int, cache_dim: int) -> dict[str, int]:
    return {
        "LAYERS": layers,
        "HEADS": heads,
        "HEADS_PAD": triton.next_power_of_2(heads),
        "HALF": dim // 2,
        "HALF_PAD": triton.next_power_of_2(dim // 2),
        "CAPACITY": capacity,
        "CACHE_DIM": cache_dim,
    }
