"""From a source graph to what ONNX Runtime's CPU provider runs fastest.

The ops that touch caches are lowered for one sequence; `lanes.unroll_lanes` makes them so in a batch.
Each rule below replaces one kind of node and says what it relies on. Ops without a rule stay: their
local function is run as it is. Weights are inputs no longer: the compiler adds them as initializers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from dflash_trt.models.graph import SourceGraph, Weight
from dflash_trt.ops import DOMAIN
from dflash_trt.quantization.integers import BLOCK, COLUMNS8, IntegerForm

CONTRIB = "com.microsoft"


@dataclass
class Lowering:
    """The state of one lowering; rules append to `nodes` and count themselves in `fired`. `made`:
    what several nodes share and is there already."""

    source: SourceGraph
    forms: Mapping[str, IntegerForm]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, onnx.TensorProto] = field(default_factory=dict)
    fired: Counter[str] = field(default_factory=Counter)
    producers: dict[str, onnx.NodeProto] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)
    weights: dict[str, Weight] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = {w.name: w for w in self.source.weights}
        graph = self.source.model.graph
        self.producers = {out: node for node in graph.node for out in node.output}

    def emit(
        self, kind: str, inputs: list[str], outputs: list[str], domain: str = "", **attrs: Any
    ) -> str:
        name = f"{outputs[0]}.{kind}"
        self.nodes.append(
            helper.make_node(kind, inputs, outputs, name=name, domain=domain, **attrs)
        )
        return outputs[0]

    def ints(self, *values: int) -> str:
        name = "int." + "_".join(str(v).replace("-", "m") for v in values)
        self.constants.setdefault(name, numpy_helper.from_array(np.asarray(values, np.int64), name))
        return name

    def scalar(self, value: np.generic) -> str:
        name = f"{value.dtype}.{value}"
        self.constants.setdefault(name, numpy_helper.from_array(np.asarray(value), name))
        return name

    def packed_source(self, *values: str) -> str | None:
        """The input of the Split that makes exactly `values`, if there is one."""
        producer = self.producers.get(values[0])
        if producer is None or producer.op_type != "Split" or tuple(producer.output) != values:
            return None
        return str(producer.input[0])


Rule = Callable[[Lowering, onnx.NodeProto], bool]


def lower(
    source: SourceGraph, forms: Mapping[str, IntegerForm]
) -> tuple[onnx.ModelProto, Counter[str]]:
    """The lowered model and how often each rule fired.

    `forms` maps a kind of weight to the integer form that it is stored in; kinds that are not named
    stay fp32. Nodes read weights by name; whoever compiles the model adds them.
    """
    state = Lowering(source, forms)
    for node in source.model.graph.node:
        rule = RULES.get((node.domain, node.op_type))
        if rule is not None and rule(state, node):
            state.fired[node.op_type] += 1
        else:
            state.nodes.append(node)
    return _assemble(state), state.fired


def _assemble(state: Lowering) -> onnx.ModelProto:
    model = onnx.ModelProto()
    model.CopyFrom(state.source.model)
    del model.graph.node[:]
    model.graph.node.extend(_live(state.nodes, {o.name for o in model.graph.output}))
    model.graph.initializer.extend(state.constants.values())
    model.opset_import.append(helper.make_opsetid(CONTRIB, 1))
    kept = [i for i in model.graph.input if i.name not in state.weights]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    return model


def _live(nodes: list[onnx.NodeProto], needed: set[str]) -> list[onnx.NodeProto]:
    """Nodes that an output depends on, in their order."""
    live = []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            needed.update(node.input)
            live.append(node)
    return live[::-1]


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _matmul(state: Lowering, node: onnx.NodeProto) -> bool:
    """Weights stored as integers are multiplied as integers."""
    weight = state.weights.get(node.input[1])
    form = state.forms.get(weight.kind) if weight else None
    if weight is None or form is None:
        return False
    if form is COLUMNS8:
        _matmul_by_rows(state, node.input[0], form.labels(weight.name), node.output[0])
        return True
    inner, outer = weight.shape
    state.emit(
        "MatMulNBits", [node.input[0], *form.labels(weight.name)], list(node.output), CONTRIB,
        K=inner, N=outer, bits=form.bits, block_size=BLOCK, accuracy_level=4,
    )  # fmt: skip
    return True


def _matmul_by_rows(state: Lowering, x: str, stored: list[str], out: str) -> None:
    """Each row of x over its largest magnitude becomes uint8 around 128; no row depends on its
    neighbours. One node per input: layers that read the same x share the rounded one."""
    q, scale = stored
    rounded, largest = f"{x}.rounded", f"{x}.largest"
    step, zero = state.scalar(np.float32(1 / 127)), state.scalar(np.uint8(128))
    if rounded not in state.made:
        state.made.add(rounded)
        size = state.emit("Abs", [x], [f"{x}.size"])
        size = state.emit("ReduceMax", [size, state.ints(-1)], [f"{x}.row_size"], keepdims=1)
        state.emit("Max", [size, state.scalar(np.float32(1e-30))], [largest])
        share = state.emit("Div", [x, largest], [f"{x}.share"])
        state.emit("QuantizeLinear", [share, step, zero], [rounded])
    product = state.emit(
        "MatMulIntegerToFloat", [rounded, q, step, scale, zero], [f"{out}.of_share"], CONTRIB
    )
    state.emit("Mul", [product, largest], [out])


def _rms_norm(state: Lowering, node: onnx.NodeProto) -> bool:
    """Adds its residual in the same kernel where the input is a sum that is not yet emitted."""
    attrs = _attributes(node)
    x, weight = node.input
    last = state.nodes[-1] if state.nodes else None
    if last is not None and last.op_type == "Add" and last.output[0] == x and not last.domain:
        state.nodes.pop()
        outputs = [node.output[0], "", "", x]
        inputs = [*last.input, weight]
        state.emit(
            "SkipSimplifiedLayerNormalization", inputs, outputs, CONTRIB, epsilon=attrs["epsilon"]
        )
    else:
        state.emit(
            "SimplifiedLayerNormalization", [x, weight], list(node.output),
            axis=-1, epsilon=attrs["epsilon"], stash_type=1,
        )  # fmt: skip
    return True


def _swish(state: Lowering, node: onnx.NodeProto) -> bool:
    state.emit("QuickGelu", list(node.input), list(node.output), CONTRIB, alpha=1.0)
    return True


def _cached_attention(state: Lowering, node: onnx.NodeProto) -> bool:
    """GroupQueryAttention: rotates, writes the caches in place when bound so, attends causally."""
    q, k, v, k_cache, v_cache, lengths, cos, sin, sinks = node.input
    a = _attributes(node)
    packed = state.packed_source(q, k, v)
    qkv = [packed, "", ""] if packed else [q, k, v]
    last, total = _sequence_lengths(state, lengths, qkv[0])
    inputs = [*qkv, k_cache, v_cache, last, total, cos, sin]
    if not _no_sinks(state, sinks):
        inputs += ["", "", sinks]
    state.emit(
        "GroupQueryAttention", inputs, list(node.output), CONTRIB, num_heads=a["heads"],
        kv_num_heads=a["kv_heads"], scale=a["scale"], do_rotary=1, rotary_interleaved=0,
        local_window_size=a["window"] or -1,
    )  # fmt: skip
    return True


def _sequence_lengths(state: Lowering, lengths: str, rows: str) -> tuple[str, str]:
    """GroupQueryAttention's last valid index per sequence, and the longest length, as int32."""
    last, longest = f"{lengths}.last", f"{lengths}.total"
    if longest not in state.made:
        state.made.add(longest)
        size = state.emit("Shape", [rows], [f"{lengths}.rows"], start=1, end=2)
        size = state.emit("Cast", [size], [f"{lengths}.size"], to=TensorProto.INT32)
        total = state.emit("Add", [lengths, size], [f"{lengths}.after"])
        one = numpy_helper.from_array(np.ones(1, np.int32), "int32.1")
        state.constants["int32.1"] = one
        state.emit("Sub", [total, "int32.1"], [last])
        state.emit("ReduceMax", [total], [longest], keepdims=1)
    return last, longest


def _no_sinks(state: Lowering, sinks: str) -> bool:
    for constant in state.source.model.graph.initializer:
        if constant.name == sinks:
            return bool(np.isneginf(numpy_helper.to_array(constant)).all())
    return False


def _kv_injection(state: Lowering, node: onnx.NodeProto) -> bool:
    """Per layer: norm, rotation, and one TensorScatter each for keys and values (in place)."""
    kv, k_norm, lengths, cos, sin, *caches = node.input
    a = _attributes(node)
    start = state.emit("Cast", [lengths], [f"{node.name}.start"], to=TensorProto.INT64)
    size = int(state.weights[k_norm].shape[1]) * a["kv_heads"]
    layers = len(caches) // 2
    parts = [f"{node.name}.{p}{i}" for i in range(layers) for p in "kv"]
    state.emit("Split", [kv, state.ints(*[size] * len(parts))], parts, axis=-1)
    norms = [f"{node.name}.norm{i}" for i in range(layers)]
    state.emit("Split", [k_norm, state.ints(*[1] * layers)], norms, axis=0)
    for i in range(layers):
        keys, values = parts[2 * i : 2 * i + 2]
        keys = _normed_heads(state, keys, norms[i], a["kv_heads"], a["epsilon"])
        keys = _rotated_heads(state, keys, start, cos, sin, a["kv_heads"])
        values = _split_heads(state, values, a["kv_heads"])
        for update, cache, out in zip(
            (keys, values), caches[2 * i : 2 * i + 2], node.output[2 * i : 2 * i + 2], strict=True
        ):
            state.emit("TensorScatter", [cache, update, start], [out], axis=2)
    return True


def _normed_heads(state: Lowering, x: str, norm: str, heads: int, epsilon: float) -> str:
    by_head = state.emit("Reshape", [x, state.ints(0, 0, heads, -1)], [f"{x}.by_head"])
    weight = state.emit("Reshape", [norm, state.ints(-1)], [f"{norm}.flat"])
    normed = state.emit(
        "SimplifiedLayerNormalization", [by_head, weight], [f"{x}.normed"],
        axis=-1, epsilon=epsilon, stash_type=1,
    )  # fmt: skip
    return state.emit("Reshape", [normed, state.ints(0, 0, -1)], [f"{x}.flat"])


def _rotated_heads(state: Lowering, x: str, start: str, cos: str, sin: str, heads: int) -> str:
    """[1, S, heads*D] -> [1, heads, S, D]; a single position means: rows follow each other."""
    rotated = state.emit(
        "RotaryEmbedding", [x, start, cos, sin], [f"{x}.rotated"], CONTRIB, num_heads=heads
    )
    return _split_heads(state, rotated, heads)


def _split_heads(state: Lowering, x: str, heads: int) -> str:
    by_head = state.emit("Reshape", [x, state.ints(0, 0, heads, -1)], [f"{x}.split"])
    return state.emit("Transpose", [by_head], [f"{x}.heads"], perm=[0, 2, 1, 3])


def _block_attention(state: Lowering, node: onnx.NodeProto) -> bool:
    """Attention over a copy of the used part of the cache with the block behind it.

    The copy costs two memory passes over what is used; leaving the block out of the cache keeps the
    injection's in-place write the only one. Windowed layers run their local function.
    """
    q, k, v, k_cache, v_cache, lengths, cos, sin, sinks = node.input
    a = _attributes(node)
    if a["window"] or a["causal"] or not _no_sinks(state, sinks):
        return False
    start = f"{node.name}.start"
    state.emit("Cast", [lengths], [start], to=TensorProto.INT64)
    rotated = _rotated_heads(state, q, start, cos, sin, a["heads"])
    keys = _rotated_heads(state, k, start, cos, sin, a["kv_heads"])
    values = _split_heads(state, v, a["kv_heads"])
    seen = [
        _behind_context(state, cache, own, start)
        for cache, own in ((k_cache, keys), (v_cache, values))
    ]
    out = state.emit("Attention", [rotated, *seen], [f"{node.name}.heads"], scale=a["scale"])
    merged = state.emit("Transpose", [out], [f"{node.name}.merged"], perm=[0, 2, 1, 3])
    state.emit("Reshape", [merged, state.ints(0, 0, -1)], list(node.output))
    return True


def _behind_context(state: Lowering, cache: str, own: str, length: str) -> str:
    context = state.emit("Slice", [cache, state.ints(0), length, state.ints(2)], [f"{own}.context"])
    return state.emit("Concat", [context, own], [f"{own}.all"], axis=2)


def _confidence_commit(state: Lowering, node: onnx.NodeProto) -> bool:
    """In the last pass confidence plays no part: arg max where a slot is open."""
    if not _attributes(node)["final"]:
        return False
    logits, drafts, committed, _ = node.input
    best = state.emit("ArgMax", [logits], [f"{node.name}.best"], axis=-1, keepdims=0)
    state.emit("Where", [committed, drafts, best], [node.output[0]])
    return True


RULES: dict[tuple[str, str], Rule] = {
    ("", "MatMul"): _matmul,
    ("", "RMSNormalization"): _rms_norm,
    ("", "Swish"): _swish,
    (DOMAIN, "CachedAttention"): _cached_attention,
    (DOMAIN, "KVInjection"): _kv_injection,
    (DOMAIN, "BlockAttention"): _block_attention,
    (DOMAIN, "ConfidenceCommit"): _confidence_commit,
}
