"""Where the ranks of a tensor parallel target meet, and the arg max over a vocabulary in shards.

Two ops have no body of one rank, since their results depend on the others' inputs. x_r is rank r's:

    AllReduce(x) = x_0 + x_1 + .. + x_{ranks-1}             on every rank, the same bits on each
    AllGather(x) = [x_0, x_1, .., x_{ranks-1}]              [ranks, ..x.shape]

`join` writes the graph of a whole mesh, in which they are Sum and Concat: that is their definition.
All ranks must reach them in the same order.

`BestOfShard` and `VerifyShards` are `SpeculativeVerify` in two halves, with an AllGather of two
numbers per row in between instead of the logits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx
from onnx import helper
from onnxscript import script

from dflash_trt.domain import COLLECTIVES, DOMAIN
from dflash_trt.ops.domain import DFLASH, OPSET

op = OPSET


@script(DFLASH, default_opset=OPSET)
def BestOfShard(logits, start):
    """logits [B, W, V / ranks], start [1] int64 (token id of the first column) -> fp32 [B, W, 2]:
    the largest logit and its token id, the lowest id among equals."""
    best = op.Cast(op.ReduceMax(logits, [-1], keepdims=1), to=1)
    token = op.ArgMax(logits, axis=-1, keepdims=1) + start
    return op.Concat(best, op.Cast(token, to=1), axis=-1)


@script(DFLASH, default_opset=OPSET)
def VerifyShards(best, tokens, rows, lengths):
    """best [ranks, B, W, 2] of all ranks; otherwise inputs and outputs of `SpeculativeVerify`."""
    value = op.Squeeze(op.Slice(best, [0], [1], [3]), [3])  # [ranks, B, W]
    token = op.Cast(op.Squeeze(op.Slice(best, [1], [2], [3]), [3]), to=7)
    top = op.ReduceMax(value, [0], keepdims=1)
    behind = op.Constant(value_int=16777216)
    greedy = op.ReduceMin(op.Where(op.Equal(value, top), token, behind), [0], keepdims=0)
    accepted, anchor, context = DFLASH.AcceptGreedy(greedy, tokens, rows, lengths)
    return accepted, anchor, context


def join(rank: onnx.ModelProto, ranks: int, own: Collection[str]) -> onnx.ModelProto:
    """One graph of a whole mesh, from the graph of a rank.

    Every value of rank r is called `name@r`, outputs too, and of the inputs those in `own`; all
    ranks read the others.
    """
    model = onnx.ModelProto()
    model.CopyFrom(rank)
    graph = model.graph
    common = {v.name for v in (*graph.input, *graph.initializer)} - set(own)

    def called(names: Iterable[str], r: int) -> list[str]:
        return [name if name in common or not name else f"{name}@{r}" for name in names]

    for values in (graph.input, graph.output):
        copies = [_renamed(v, called([v.name], r)[0]) for v in values for r in range(ranks)]
        unique = {v.name: v for v in copies}
        del values[:]
        values.extend(unique.values())
    nodes = list(graph.node)
    del graph.node[:], graph.value_info[:]
    for node in nodes:
        inputs, outputs = ([called(x, r) for r in range(ranks)] for x in (node.input, node.output))
        if node.domain == DOMAIN and node.op_type in COLLECTIVES:
            parts, results = ([names[0] for names in group] for group in (inputs, outputs))
            graph.node.extend(_meeting(node, parts, results))
        else:
            graph.node.extend(map(_of_rank, [node] * ranks, inputs, outputs))
    graph.initializer.append(helper.make_tensor("join.axis", onnx.TensorProto.INT64, [1], [0]))
    return model


def _renamed(value: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(value)
    copy.name = name
    return copy


def _of_rank(node: onnx.NodeProto, inputs: list[str], outputs: list[str]) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = outputs[0]
    copy.input[:], copy.output[:] = inputs, outputs
    return copy


def _meeting(node: onnx.NodeProto, parts: list[str], results: list[str]) -> list[onnx.NodeProto]:
    """The nodes that stand for a collective of all ranks."""
    if node.op_type == "AllReduce":
        met = [helper.make_node("Sum", parts, results[:1])]
    else:
        rows = [f"{part}.row" for part in parts]
        met = [
            helper.make_node("Unsqueeze", [part, "join.axis"], [row])
            for part, row in zip(parts, rows, strict=True)
        ]
        met.append(helper.make_node("Concat", rows, results[:1], axis=0))
    return met + [helper.make_node("Identity", results[:1], [name]) for name in results[1:]]
