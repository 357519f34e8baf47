"""Collectives, and the arg max over a vocabulary in shards, with TensorRT's own layers.

The largest logit is compared with all logits and the lowest token among the equal ones is taken: exact
where TensorRT's TopK promises nothing about ties. Tokens are int32 on the way, and fp32 (which holds
them exactly) through the gathering.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from dflash_trt.domain import MOST_TOKENS
from dflash_trt.errors import InputError
from dflash_trt.lowering.tensorrt.network import Network


def all_reduce(
    net: Network, node: onnx.NodeProto, inputs: list[Any], a: dict[str, Any]
) -> list[Any]:
    return [_collective(net, inputs[0], "ALL_REDUCE", "SUM", a["ranks"])]


def all_gather(
    net: Network, node: onnx.NodeProto, inputs: list[Any], a: dict[str, Any]
) -> list[Any]:
    """TensorRT joins along the first axis, the op along a new one."""
    whole = _collective(net, inputs[0], "ALL_GATHER", "NONE", a["ranks"])
    return [net.reshape(whole, (a["ranks"], -1, *whole.shape[1:]))]


def _collective(net: Network, x: Any, kind: str, reduction: str, ranks: int) -> Any:
    """All ranks take part (no groups); there is no root."""
    trt = net.trt
    operation, by = getattr(trt.CollectiveOperation, kind), getattr(trt.ReduceOperation, reduction)
    layer = net.definition.add_dist_collective(x, operation, by, -1, None)
    if layer is None:
        raise InputError(f"node '{net.node}': TensorRT did not accept the collective {kind}")
    layer.num_ranks = ranks
    return net.out(layer, kind.lower())


def best_of_shard(
    net: Network, node: onnx.NodeProto, inputs: list[Any], a: dict[str, Any]
) -> list[Any]:
    logits, start = inputs  # [B, W, V], [1]
    columns = net.constant(np.arange(logits.shape[2])[None, None], "INT32")
    top = net.reduce(logits, "MAX", 2, keep=True)
    token = _lowest_where(net, net.elementwise(logits, top, "EQUAL"), columns, 2)
    first = net.reshape(net.cast(start, "INT32"), (1, 1, 1))
    pair = [top, net.elementwise(token, first, "SUM")]
    return [net.concat([net.cast(x, "FLOAT") for x in pair], 2)]


def verify_shards(
    net: Network, node: onnx.NodeProto, inputs: list[Any], a: dict[str, Any]
) -> list[Any]:
    best, tokens, rows, lengths = inputs  # [ranks, B, W, 2], [B, S], [B, W], [B]
    value = net.slice_last(best, 0, 1)
    top = net.reduce(value, "MAX", 0, keep=True)
    token = net.cast(net.slice_last(best, 1, 1), "INT32")
    greedy = _lowest_where(net, net.elementwise(value, top, "EQUAL"), token, 0)
    width = rows.shape[1]
    greedy = net.reshape(greedy, (-1, width))
    agreed = _agreed(net, greedy, tokens, rows)  # [B, 1]
    slots = net.constant(np.arange(width)[None], "INT32")
    here = net.elementwise(slots, agreed, "EQUAL")
    anchor = net.reduce(_select(net, here, greedy, 0), "MAX", 1, keep=False)
    first = net.cast(net.slice_axis(rows, 1, 0, 1), "INT32")
    one = net.constant([[1]], "INT32")
    accepted = net.elementwise(net.elementwise(first, one, "SUM"), agreed, "SUM")
    accepted = net.reshape(accepted, (-1,))
    return [accepted, net.cast(anchor, "INT64"), net.elementwise(lengths, accepted, "SUM")]


def _agreed(net: Network, greedy: Any, tokens: Any, rows: Any) -> Any:
    """Drafts in a row that are the target's own: the place of the first that is not, int32 [B, 1]."""
    width = rows.shape[1]
    if width == 1:
        return net.elementwise(greedy, net.constant([[0]], "INT32"), "PROD")
    layer = net.definition.add_gather_v2(tokens, rows, net.trt.GatherMode.ELEMENT)
    layer.axis = 1
    run = net.cast(net.out(layer, "gather_elements"), "INT32")
    drafted = net.slice_axis(run, 1, 1, width - 1)
    same = net.elementwise(drafted, net.slice_axis(greedy, 1, 0, width - 1), "EQUAL")
    places = net.constant(np.arange(width - 1)[None], "INT32")
    return net.reduce(_select(net, same, width - 1, places), "MIN", 1, keep=True)


def _lowest_where(net: Network, condition: Any, values: Any, axis: int) -> Any:
    """The smallest of `values` where `condition` holds, along `axis`."""
    return net.reduce(_select(net, condition, values, MOST_TOKENS), "MIN", axis, keep=True)


def _select(net: Network, condition: Any, yes: Any, no: Any) -> Any:
    """Elementwise `condition ? yes : no` of int32; a number stands for a tensor of it."""
    rank = len(condition.shape)
    chosen = [net.scalar(x, rank, "INT32") if isinstance(x, int) else x for x in (yes, no)]
    return net.out(net.definition.add_select(condition, *chosen), "select")
