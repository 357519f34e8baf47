"""A source graph for a batch becomes one whose attention runs lane by lane.

ONNX Runtime's attention kernel takes several rows on a cache only one sequence at a time, and a
sequence's caches must be buffers of their own to be written in place wherever its slot is. So every
op that touches a cache is written once per lane of a fixed batch, on caches `<name>.lane<i>` of one
sequence each; everything else stays [B, S, ..] and multiplies all lanes' rows together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper, numpy_helper

from dflash_trt.models.graph import SourceGraph
from dflash_trt.ops import DOMAIN

_BY_LANE = {  # inputs with a batch axis; names of caches are found by themselves
    "CachedAttention": ("q", "k", "v", "lengths"),
    "BlockAttention": ("q", "k", "v", "lengths"),
    "KVInjection": ("kv", "lengths"),
}
_INPUTS = {
    "CachedAttention": ("q", "k", "v", "k_cache", "v_cache", "lengths"),
    "BlockAttention": ("q", "k", "v", "k_cache", "v_cache", "lengths"),
    "KVInjection": ("kv", "k_norm", "lengths"),
}


def unroll_lanes(source: SourceGraph, lanes: int) -> tuple[SourceGraph, Counter[str]]:
    """The graph for exactly `lanes` sequences, and how many ops of each kind were unrolled."""
    if lanes == 1:
        return source, Counter()
    state = _Unrolling(source.model.graph, lanes)
    for node in source.model.graph.node:
        if node.domain == DOMAIN and node.op_type in _BY_LANE:
            state.unroll(node)
        else:
            state.nodes.append(node)
    return SourceGraph(_assemble(source.model, state), source.weights), state.fired


@dataclass
class _Unrolling:
    graph: onnx.GraphProto
    lanes: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    fired: Counter[str] = field(default_factory=Counter)
    split: dict[str, list[str]] = field(default_factory=dict)
    producers: dict[str, onnx.NodeProto] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.producers = {out: node for node in self.graph.node for out in node.output}

    def unroll(self, node: onnx.NodeProto) -> None:
        """One copy of `node` per lane, and their first outputs joined where that is not a cache."""
        by_lane = {
            name: self.pieces(name)
            for kind, name in zip(_INPUTS[node.op_type], node.input, strict=False)
            if kind in _BY_LANE[node.op_type]
        }
        for lane in range(self.lanes):
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.name = lane_name(node.name, lane)
            copy.input[:] = [
                by_lane[n][lane] if n in by_lane else _cache_of(n, lane) for n in node.input
            ]
            copy.output[:] = [lane_name(n, lane) for n in node.output]
            self.nodes.append(copy)
        out = node.output[0]
        if not is_cache(out):
            parts = [lane_name(out, lane) for lane in range(self.lanes)]
            self.nodes.append(helper.make_node("Concat", parts, [out], name=f"{out}.join", axis=0))
        self.fired[node.op_type] += 1

    def pieces(self, value: str) -> list[str]:
        """`value` cut along the batch, once for all who ask.

        What a Split along the last axis makes is cut before it: the attention kernel reads queries,
        keys and values of a lane packed as they were.
        """
        if value not in self.split:
            producer = self.producers.get(value)
            if producer is not None and producer.op_type == "Split":
                self._split_again(producer)
            else:
                self.split[value] = self._cut(value)
        return self.split[value]

    def _cut(self, value: str) -> list[str]:
        parts = [lane_name(value, lane) for lane in range(self.lanes)]
        name = f"{value}.lanes"
        self.nodes.append(
            helper.make_node("Split", [value, "lanes.ones"], parts, name=name, axis=0)
        )
        return parts

    def _split_again(self, producer: onnx.NodeProto) -> None:
        whole = self.pieces(producer.input[0])
        for out in producer.output:
            self.split[out] = [lane_name(out, lane) for lane in range(self.lanes)]
        for lane in range(self.lanes):
            copy = onnx.NodeProto()
            copy.CopyFrom(producer)
            copy.name = lane_name(producer.name, lane)
            copy.input[0] = whole[lane]
            copy.output[:] = [lane_name(out, lane) for out in producer.output]
            self.nodes.append(copy)


def is_cache(name: str) -> bool:
    return name.startswith(("k_cache.", "v_cache."))


def lane_name(name: str, lane: int) -> str:
    """A value's name in one lane; the suffix of an updated cache stays at the end."""
    base = name.removesuffix(".out")
    return f"{base}.lane{lane}" + (".out" if is_cache(name) and base != name else "")


def _cache_of(name: str, lane: int) -> str:
    return lane_name(name, lane) if is_cache(name) else name


def _assemble(source: onnx.ModelProto, state: _Unrolling) -> onnx.ModelProto:
    model = onnx.ModelProto()
    model.CopyFrom(source)
    graph = model.graph
    for values in (graph.input, graph.output):
        kept = [expanded for value in values for expanded in _expanded(value, state.lanes)]
        del values[:]
        values.extend(kept)
    del graph.node[:]
    graph.node.extend(state.nodes)
    ones = numpy_helper.from_array(np.ones(state.lanes, np.int64), "lanes.ones")
    graph.initializer.append(ones)
    return model


def _expanded(value: onnx.ValueInfoProto, lanes: int) -> Sequence[onnx.ValueInfoProto]:
    if not is_cache(value.name):
        return [value]
    out = []
    for lane in range(lanes):
        copy = onnx.ValueInfoProto()
        copy.CopyFrom(value)
        copy.name = lane_name(value.name, lane)
        copy.type.tensor_type.shape.dim[0].dim_value = 1
        out.append(copy)
    return out
