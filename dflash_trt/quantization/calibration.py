"""Largest magnitudes of the activations in front of every quantised weight, from runs on the CPU.

The source graph is run as it is by ONNX Runtime, with the activations of interest as outputs: the
graph that is compiled is the graph that is measured. It is run in pieces, each over all prompts
before the next: the weights of one piece are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from dflash_trt.errors import InputError
from dflash_trt.models.graph import SourceGraph

Feeds = Mapping[str, np.ndarray]
Load = Callable[[str], np.ndarray]
# Is given a weight, its values and the peak of its activations once that is known.
Done = Callable[[str, np.ndarray, float], None]
PIECE_BYTES = 64_000_000  # of weights in fp32; a larger one is a piece of its own
_HANDED_ON = ("features", "accepted", "context", "anchor")  # from the target to the drafter


def watched(nodes: Sequence[onnx.NodeProto], weights: Collection[str]) -> dict[str, list[str]]:
    """For each of `weights` the values that are multiplied with it."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        if node.op_type == "MatMul" and node.input[1] in weights:
            found.setdefault(node.input[1], []).append(node.input[0])
    return found


def calibrate(
    source: SourceGraph,
    weights: Collection[str],
    load: Load,
    feeds: Sequence[Feeds],
    done: Done,
    outputs: Sequence[str] = (),
) -> list[dict[str, np.ndarray]]:
    """Run a graph over all of `feeds`; its `outputs` for each of them.

    `load` gives any weight of the graph by name; `done` is told the peak of each of `weights` that
    the graph multiplies with.
    """
    graph = source.model.graph
    measured = watched(graph.node, weights)
    products = [n.output[0] for n in graph.node if n.op_type == "MatMul" and n.input[1] in weights]
    nodes = _needed(graph, {*outputs, *products})
    last = {name: index for index, node in enumerate(nodes) for name in node.input}
    last |= dict.fromkeys(outputs, len(nodes))
    states = [dict(feed) for feed in feeds]
    peaks = dict.fromkeys(measured, 0.0)
    end = 0
    for piece in _pieces(nodes, source):
        end += len(piece)
        read = {name for node in piece for name in node.input}
        values = {name: load(name) for name in sorted(read & source.weight_names)}
        _run(source, piece, values, states, {n for n, at in last.items() if at >= end}, measured)
        for weight, names in watched(piece, measured).items():
            found = [float(np.abs(state[name]).max()) for state in states for name in names]
            peaks[weight] = max(peaks[weight], *found)
            if last[weight] < end:
                done(weight, values[weight], peaks[weight])
        for state in states:
            for name in [name for name in state if last.get(name, 0) < end]:
                del state[name]
        del values
    return [{name: state[name] for name in outputs} for state in states]


def _needed(graph: onnx.GraphProto, values: Collection[str]) -> list[onnx.NodeProto]:
    """The nodes that `values` depend on, in order."""
    wanted, kept = set(values), []
    for node in reversed(graph.node):
        if wanted.intersection(node.output):
            wanted.update(node.input)
            kept.append(node)
    return kept[::-1]


def _pieces(nodes: Sequence[onnx.NodeProto], source: SourceGraph) -> Iterator[list[onnx.NodeProto]]:
    """Runs of `nodes`, each with as many weights as fit."""
    sizes = {w.name: 4 * prod(w.shape) for w in source.weights}
    piece: list[onnx.NodeProto] = []
    held: set[str] = set()
    for node in nodes:
        own = held.union(node.input) & sizes.keys()
        if held and own != held and sum(sizes[name] for name in own) > PIECE_BYTES:
            yield piece
            piece, own = [], sizes.keys() & set(node.input)
        piece.append(node)
        held = own
    yield piece


def _run(
    source: SourceGraph,
    nodes: Sequence[onnx.NodeProto],
    weights: Feeds,
    states: Sequence[dict[str, np.ndarray]],
    later: Collection[str],
    measured: Mapping[str, Sequence[str]],
) -> None:
    """Run `nodes` on each of `states` and add what `later` nodes or a measurement read."""
    made = {name for node in nodes for name in node.output}
    seen = {name for names in measured.values() for name in names}
    given = sorted({name for node in nodes for name in node.input if name} - made)
    constants = [t for t in source.model.graph.initializer if t.name in given]
    given = [name for name in given if name not in {t.name for t in constants}]
    results = sorted(made & ({*later} | seen))
    types = {name: array.dtype for name, array in {**states[0], **weights}.items()}
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(types[n]), None)
        for n in given
    ]
    model = helper.make_model(
        helper.make_graph(
            nodes, "piece", inputs, [helper.make_empty_tensor_value_info(n) for n in results],
            constants,
        ),
        opset_imports=source.model.opset_import, functions=source.model.functions,
        ir_version=source.model.ir_version,
    )  # fmt: skip
    session = ort.InferenceSession(
        model.SerializeToString(), _options(), providers=["CPUExecutionProvider"]
    )
    for state in states:
        feeds = {name: weights[name] if name in weights else state[name] for name in given}
        state.update(zip(results, session.run(results, feeds), strict=True))


def _options() -> ort.SessionOptions:
    """Memory goes back when it is free, and threads that wait sleep: the compiler runs beside this."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def empty_caches(model: onnx.ModelProto, capacity: int) -> dict[str, np.ndarray]:
    """Zeros for every cache input of a source graph, one sequence."""
    caches = {}
    for value in model.graph.input:
        dims = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        if len(dims) == 4 and dims[2] == "L":
            caches[value.name] = np.zeros((1, dims[1], capacity, dims[3]), np.float32)
    return caches


def calibrate_pair(
    target: SourceGraph,
    drafter: SourceGraph,
    weights: Collection[str],
    load: Load,
    prompts: Sequence[np.ndarray],
    block: int,
    mask_id: int,
    done: Done,
) -> None:
    """Prefill each prompt [S] int64 on the target, inject its features and draft one block.

    Raises `InputError` before anything is run where a weight would get no peak.
    """
    nodes = [*target.model.graph.node, *drafter.model.graph.node]
    for name in sorted(set(weights) - watched(nodes, weights).keys()):
        raise InputError(
            f"weight '{name}': nothing is multiplied with it, so it cannot be quantised"
        )
    prefills = [
        {
            "tokens": prompt[None],
            "lengths": np.zeros(1, np.int32),
            "rows": np.array([[len(prompt) - 1]], np.int64),
            **empty_caches(target.model, len(prompt) + block),
        }
        for prompt in prompts
    ]
    handed = calibrate(target, weights, load, prefills, done, _HANDED_ON)
    masks = np.full((1, block - 1), mask_id, np.int64)
    drafts = [
        {**values, "masks": masks, **empty_caches(drafter.model, len(prompt) + block)}
        for prompt, values in zip(prompts, handed, strict=True)
    ]
    calibrate(drafter, weights, load, drafts, done)
