"""CachedAttention and BlockAttention with TensorRT's cache update, rotation and attention layers.

The traps of the attention layer that are avoided here, and looked for again by `readback`: lengths
must be set, or every row of the cache is attended to; "causal" must be aligned to the lower right
corner; a mask next to a causal kind is ignored, so a window is a mask without a causal kind.
Attention sinks have no input of their own. The heads of a cache with sinks are 16 wider: a query ends
in a one for its place in the group, and the first row of the key cache holds, in these columns, the
sinks of the group (its values are zero). That row's logit is the sink exactly. It is written once, when
caches are allocated; tokens follow behind it.
The final q is an output of the network: otherwise the compiler copies keys and values, expanded over
the query heads, for the whole capacity of the cache.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import onnx

from dflash_trt.errors import InputError
from dflash_trt.lowering.tensorrt import plugins
from dflash_trt.lowering.tensorrt.network import CacheView, Network
from dflash_trt.lowering.tensorrt.standard import whole

SINK_COLUMNS = 16


def cached_attention(
    net: Network, node: onnx.NodeProto, inputs: list[Any], a: dict[str, Any]
) -> list[Any]:
    q, k, v, k_cache, v_cache, lengths, cos, sin, _ = inputs
    heads, kv_heads = a["heads"], a["kv_heads"]
    sinks = k_cache.name in net.sinks
    places = _positions(net, lengths, q)
    start = _behind_sinks(net, lengths) if sinks else lengths
    rotated, split = _rotate(net, k, kv_heads, cos, sin, places), _split_heads(net, v, kv_heads)
    keys = _update(net, k_cache, _widened(net, rotated) if sinks else rotated, start)
    values = _update(net, v_cache, _widened(net, split) if sinks else split, start)
    query = _query(net, q, heads, cos, sin, places, a["scale"], heads // kv_heads if sinks else 0)
    out = _attend(net, query, keys, values, start, causal=True, window=a["window"], sinks=sinks)
    return [out, CacheView(keys, k_cache.name), CacheView(values, v_cache.name)]


def block_attention(
    net: Network, node: onnx.NodeProto, inputs: list[Any], a: dict[str, Any]
) -> list[Any]:
    """The first pass writes the block by TensorRT's cache update, which takes a cache once only;
    later passes write over it by the plugin `BlockWrite`."""
    q, k, v, k_cache, v_cache, lengths, cos, sin, _ = inputs
    _refuse_sinks(net, node)
    kv_heads = a["kv_heads"]
    if k_cache.done is not None:
        lengths = _after(net, lengths, k_cache.done)
    places = _positions(net, lengths, q)
    if ("updated", k_cache.name) in net.memo:
        done = plugins.block_write(net, node, [k, v, lengths, cos, sin, k_cache, v_cache], kv_heads)
        lengths = _after(net, lengths, done)
        keys, values = (net.memo["updated", cache.name] for cache in (k_cache, v_cache))
    else:
        keys = _update(net, k_cache, _rotate(net, k, kv_heads, cos, sin, places), lengths)
        values = _update(net, v_cache, _split_heads(net, v, kv_heads), lengths)
        net.memo["updated", k_cache.name], net.memo["updated", v_cache.name] = keys, values
    query = _query(net, q, a["heads"], cos, sin, places, a["scale"])
    causal, window = bool(a["causal"]), a["window"]
    return [_attend(net, query, keys, values, lengths, causal=causal, window=window)]


def sinks_of_caches(nodes: Sequence[onnx.NodeProto], constants: Collection[str]) -> dict[str, str]:
    """The weight that holds the sinks of each cache; sinks that are a constant stand for none."""
    return {
        cache: node.input[8]
        for node in nodes
        if node.op_type == "CachedAttention" and node.input[8] not in constants
        for cache in node.input[3:5]
    }


def shape_with_sinks(shape: Sequence[int]) -> list[int]:
    """[B, K, L, D] -> [B, K, L + 1, D + 16]."""
    batch, heads, capacity, dim = shape
    return [batch, heads, capacity + 1, dim + SINK_COLUMNS]


def _behind_sinks(net: Network, lengths: Any) -> Any:
    key = ("behind sinks", lengths.name)
    one = net.once(("one",), lambda: net.constant([1], "INT32"))
    return net.once(key, lambda: net.elementwise(lengths, one, "SUM"))


def _widened(net: Network, x: Any, columns: np.ndarray | None = None) -> Any:
    """x [B, N, S, D] with 16 more columns: zeros, or `columns` [N, 16] for every token."""
    heads, steps, kind = x.shape[1], x.shape[2], net.request.activations
    values = np.zeros((heads, SINK_COLUMNS)) if columns is None else columns
    key = ("columns", steps, values.tobytes(), values.shape)
    block = np.broadcast_to(values[None, :, None], (1, heads, max(steps, 1), SINK_COLUMNS))
    constant = net.once(key, lambda: net.constant(block, kind))
    # Times the first 16 columns times zero plus the constant: as many sequences as x has.
    first = net.slice_last(x, 0, SINK_COLUMNS)
    blank = net.elementwise(first, net.scalar(0.0, 4, kind), "PROD")
    return net.concat([x, net.elementwise(blank, constant, "SUM")], 3)


def _refuse_sinks(net: Network, node: onnx.NodeProto) -> None:
    sinks = whole(net, node.input[8])
    if not np.isneginf(sinks).all():
        raise InputError(f"node '{net.node}': attention sinks are not supported by this backend")


def _after(net: Network, lengths: Any, done: Any) -> Any:
    """`lengths`, available only after the plugin that returned `done` (zeros) has run."""
    key = ("after", lengths.name, done.name)
    return net.once(key, lambda: net.elementwise(lengths, done, "SUM"))


def _steps(net: Network, like: Any) -> Any:
    """0, 1, .. S-1 as int32 [S], S being the second dimension of `like`."""
    steps = like.shape[1]
    if steps >= 0:
        return net.once(("steps", steps), lambda: net.constant(np.arange(steps), "INT32"))
    longest = max(sizes[2] for sizes in net.request.letters.values())
    layer = net.definition.add_slice(net.constant(np.arange(longest), "INT32"), (0,), (1,), (1,))
    layer.set_input(2, net.size(like, 1))
    return net.out(layer, "steps")


def _positions(net: Network, lengths: Any, like: Any) -> Any:
    """lengths[b] + j as int64 [B, S]."""

    def make() -> Any:
        steps = net.reshape(_steps(net, like), (1, -1))
        places = net.elementwise(net.reshape(lengths, (-1, 1)), steps, "SUM")
        return net.cast(places, "INT64")

    return net.once(("positions", lengths.name, like.shape[1]), make)


def _key_lengths(net: Network, lengths: Any, like: Any) -> Any:
    """Keys that exist after the update, lengths + S, int32 [B]."""

    def make() -> Any:
        return net.elementwise(lengths, net.cast(net.size(like, 2), "INT32"), "SUM")

    return net.once(("key lengths", lengths.name, like.shape[2]), make)


def _split_heads(net: Network, x: Any, heads: int) -> Any:
    """[B, S, heads*D] -> [B, heads, S, D]."""
    return net.reshape(x, (0, 0, heads, x.shape[-1] // heads), (0, 2, 1, 3))


def _rotate(net: Network, x: Any, heads: int, cos: Any, sin: Any, places: Any) -> Any:
    layer = net.definition.add_rotary_embedding(_split_heads(net, x, heads), cos, sin, False, 0)
    layer.set_input(3, places)
    return net.out(layer, "rotary")


def _query(
    net: Network, q: Any, heads: int, cos: Any, sin: Any, places: Any, scale: float, group: int = 0
) -> Any:
    """The rotated and scaled query, marked as an output of the network. group: heads that share a
    key head, where there are sinks."""
    wide = net.cast(_rotate(net, q, heads, cos, sin, places), "FLOAT")
    query = net.cast(net.elementwise(wide, net.scalar(scale, 4, "FLOAT"), "PROD"), net.real)
    if group:
        query = _widened(net, query, np.eye(SINK_COLUMNS)[np.arange(heads) % group])
    net.mark_output(query, f"{net.node}.q", "scratch")
    return query


def _update(net: Network, cache: CacheView, rows: Any, lengths: Any) -> Any:
    mode = net.trt.KVCacheMode.LINEAR
    layer = net.definition.add_kv_cache_update(cache.tensor, rows, lengths, mode)
    updated = net.out(layer, "cache")
    net.mark_output(updated, f"{cache.name}.out", "cache", alias=cache.name)
    return updated


def _attend(
    net: Network, q: Any, keys: Any, values: Any, lengths: Any, causal: bool, window: int,
    sinks: bool = False,
) -> Any:  # fmt: skip
    """[B, N, S, D] over the cache [B, K, L, D] -> [B, S, N*D]."""
    trt = net.trt
    kinds = trt.CausalMaskKind
    kind = kinds.LOWER_RIGHT if causal and not window else kinds.NONE
    softmax = trt.AttentionNormalizationOp.SOFTMAX
    attention = net.definition.add_attention_v2(q, keys, values, softmax, kind)
    if attention is None:
        raise InputError(f"node '{net.node}': TensorRT did not accept the attention layer")
    attention.name = net.node
    attention.key_value_lengths = _key_lengths(net, lengths, q)
    if window:
        attention.mask = _window_mask(net, lengths, q, keys.shape[2], causal, window, sinks)
    heads = net.permute(attention.get_output(0), (0, 2, 1, 3))
    dim = q.shape[3] - SINK_COLUMNS if sinks else q.shape[3]
    heads = net.slice_last(heads, 0, dim) if sinks else heads
    return net.reshape(heads, (0, 0, q.shape[1] * dim))


def _window_mask(
    net: Network, lengths: Any, like: Any, capacity: int, causal: bool, window: int, sinks: bool
) -> Any:
    """bool [B, 1, S, L]: which key positions a row may see. Layers with one window share it."""
    key = ("window", lengths.name, like.shape[2], capacity, causal, window, sinks)

    def make() -> Any:
        mask = _make_mask(net, lengths, like, capacity, causal, window)
        if not sinks:
            return mask
        first = net.constant(np.arange(capacity)[None, None, None] == 0, "BOOL")
        return net.elementwise(mask, first, "OR")

    return net.once(key, make)


def _make_mask(
    net: Network, lengths: Any, like: Any, capacity: int, causal: bool, window: int
) -> Any:
    key = net.reshape(net.constant(np.arange(capacity), "INT32"), (1, 1, 1, -1))
    by_row = net.permute(like, (0, 2, 1, 3))
    steps = net.reshape(_steps(net, by_row), (1, 1, -1, 1))
    row = net.elementwise(net.reshape(lengths, (-1, 1, 1, 1)), steps, "SUM")
    reach = net.constant(np.full((1, 1, 1, 1), window), "INT32")
    one = net.constant(np.full((1, 1, 1, 1), 1), "INT32")
    if causal:
        end = net.elementwise(row, one, "SUM")
    else:
        end = net.reshape(_key_lengths(net, lengths, like), (-1, 1, 1, 1))
    visible = net.elementwise(
        net.elementwise(key, end, "LESS"),
        net.elementwise(key, net.elementwise(row, reach, "SUB"), "GREATER"),
        "AND",
    )
    if causal:
        return visible
    ahead = net.elementwise(key, net.elementwise(row, reach, "SUM"), "LESS")
    return net.elementwise(visible, ahead, "AND")
