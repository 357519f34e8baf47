"""A rank's graph, cut where the ranks meet.

A collective ends a segment: what runs up to it is one graph, what needs its result belongs to the next.
Each segment is a source graph of its own, with values of earlier segments as inputs; whoever runs them
one after the other does the collectives in between. (ONNX Runtime has no collective on the CPU, and
an operator in Python converts every number of a block's states.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx
from onnx import helper

from dflash_trt.domain import COLLECTIVES, DOMAIN
from dflash_trt.lowering.collective import Collective
from dflash_trt.models.graph import SourceGraph


@dataclass(frozen=True)
class Segment:
    """One segment and the collective behind it (none behind the last)."""

    graph: SourceGraph
    then: Collective | None


def segments(source: SourceGraph) -> list[Segment]:
    """The segments of a rank's graph in order; the graph itself where there is no collective."""
    graph = source.model.graph
    nodes = [(node, stage) for node, stage in _staged(graph) if not _meets(node)]
    meetings = [Collective(n.op_type, n.input[0], n.output[0]) for n in graph.node if _meets(n)]
    return [
        Segment(_segment(source, [n for n, s in nodes if s == stage], nodes, meetings), then)
        for stage, then in enumerate([*meetings, None])
    ]


def _meets(node: onnx.NodeProto) -> bool:
    return node.domain == DOMAIN and node.op_type in COLLECTIVES


def _staged(graph: onnx.GraphProto) -> list[tuple[onnx.NodeProto, int]]:
    """Every node with its segment: behind the collectives that it needs, and as late as what needs it
    allows, so that only states cross from one segment to another."""
    behind: dict[str, int] = {}
    stages, met = [], 0
    for node in graph.node:
        stage = max((behind.get(name, 0) for name in node.input), default=0)
        if _meets(node):
            assert stage == met, f"{node.name} does not wait for the collective before it"
            met += 1
        stages.append(stage)
        behind.update(dict.fromkeys(node.output, met if _meets(node) else stage))
    wanted: dict[str, int] = {}
    for index in reversed(range(len(stages))):
        node = graph.node[index]
        users = [wanted[name] for name in node.output if name in wanted]
        if users and not _meets(node):
            stages[index] = min(users)
        for name in node.input:
            wanted[name] = min(stages[index], wanted.get(name, met))
    return list(zip(graph.node, stages, strict=True))


def _segment(
    source: SourceGraph,
    own: list[onnx.NodeProto],
    nodes: list[tuple[onnx.NodeProto, int]],
    meetings: Iterable[Collective],
) -> SourceGraph:
    graph = source.model.graph
    made = {name for node in own for name in node.output}
    read = {name for node in own for name in node.input if name} - made
    others = {name for node, _ in nodes if node.output[0] not in made for name in node.input}
    others |= {meeting.part for meeting in meetings}
    known = {v.name: v for v in graph.value_info}
    results = {v.name for v in graph.output}
    constants = [t for t in graph.initializer if t.name in read]
    inputs = [v for v in graph.input if v.name in read]
    crossing = read - {v.name for v in (*inputs, *constants)}
    leaving = (made & others) - results
    model = helper.make_model(
        helper.make_graph(
            own, graph.name,
            [*(known[name] for name in sorted(crossing)), *inputs],
            [*(known[name] for name in sorted(leaving)), *(v for v in graph.output if v.name in made)],
            constants,
        ),
        opset_imports=source.model.opset_import, functions=source.model.functions,
        producer_name=source.model.producer_name, ir_version=source.model.ir_version,
    )  # fmt: skip
    onnx.checker.check_model(model)
    return SourceGraph(model, tuple(w for w in source.weights if w.name in read))
