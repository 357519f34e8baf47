"""Writes networks, breaks each in one way, and prints what the reading back says of it.

As a program, `python -m tests.lowering.broken_networks FOLDER`: one JSON object, a sentence for each
break, none for a network that is whole. TensorRT itself does some of the breaking: it drops an
attention's lengths, for one, when its causal kind is changed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from dflash_trt.config import Rope, TargetConfig
from dflash_trt.domain import DOMAIN
from dflash_trt.engines.tensorrt_compile import Compiler
from dflash_trt.errors import InputError
from dflash_trt.lowering.tensorrt import api, attention, readback, writer
from dflash_trt.lowering.tensorrt.plan import PlanRequest
from dflash_trt.models.llama import target_graph

CAPACITY, OUTPUTS = 24, ("accepted", "anchor", "context", "features")
# l0 is causal, l1 has a window: a mask without a causal kind.
TARGET = TargetConfig("llama", 97, 64, 96, 2, 4, 2, 16, 1e-5, Rope(1e4), 64, False, windows=(0, 5))


class Written:
    """A network, the nodes it was written from, and its attention layers by their nodes' names."""

    def __init__(self, compiler: Compiler, folder: Path, ranks: int) -> None:
        self.trt = compiler.trt
        source, path = target_graph(TARGET, (0, 1), CAPACITY, ranks), folder / f"{ranks}.onnx"
        onnx.save(source.model, path)
        sizes = {"B": (1, 1, 3), "S": (4, 4, 4), "W": (4, 4, 4), "L": (CAPACITY,) * 3}
        kinds = {w.name: w.kind for w in source.weights}
        self.request = PlanRequest("tiny", str(path), OUTPUTS, sizes, kinds)
        self.nodes = writer.needed_nodes(source.model.graph, OUTPUTS)
        self.definition = compiler.write(self.request).definition
        self.attention = {}
        for layer in map(self.definition.get_layer, range(self.definition.num_layers)):
            if layer.type == self.trt.LayerType.ATTENTION_INPUT:
                layer.__class__ = self.trt.IAttentionInputLayer
                self.attention[layer.attention.name] = layer.attention

    def causal_kind(self, name: str, kind: str) -> None:
        self.attention[name].causal_kind = getattr(self.trt.CausalMaskKind, kind)

    def change(self, name: str, key: str, value: int) -> None:
        """An attribute of a node of the source graph."""
        (node,) = (node for node in self.nodes if node.name == name)
        (attribute,) = (a for a in node.attribute if a.name == key)
        attribute.i = value

    def forget(self, name: str) -> None:
        """The source graph has no such node."""
        self.nodes = [node for node in self.nodes if node.name != name]

    def expect(self, op: str, **attributes: Any) -> None:
        """The source graph has one node more."""
        node = helper.make_node(op, ["x"], ["y"], name="more", domain=DOMAIN, **attributes)
        self.nodes.append(node)

    def sentence(self) -> str:
        try:
            readback.check_network(self.trt, self.definition, self.nodes, self.request)
        except InputError as error:
            return str(error)
        return ""


def _no_lengths(net: Written) -> None:
    net.attention["l0.attn"].key_value_lengths = None


def _mask_unasked(net: Written) -> None:
    net.change("l1.attn", "window", 0)
    (node,) = (node for node in net.nodes if node.name == "l1.attn")
    node.op_type = "BlockAttention"
    node.attribute.append(helper.make_attribute("causal", 0))


# How many ranks the network is for, and what is done to it.
BREAKS: dict[str, tuple[int, Callable[[Written], None]]] = {
    "nothing": (1, lambda net: None),
    "nothing, two ranks": (2, lambda net: None),
    "lengths": (1, _no_lengths),
    "upper left": (1, lambda net: net.causal_kind("l0.attn", "UPPER_LEFT")),
    "not causal": (1, lambda net: net.causal_kind("l0.attn", "NONE")),
    "mask": (1, _mask_unasked),
    "attention more": (1, lambda net: net.forget("l1.attn")),
    "attention less": (1, lambda net: net.expect("CachedAttention", window=0)),
    "plugin more": (1, lambda net: net.forget("verify")),
    "plugin less": (1, lambda net: net.expect("SpeculativeVerify")),
    "op less": (2, lambda net: net.expect("VerifyShards")),
    "collective more": (2, lambda net: net.forget("best.all")),
    "collective less": (2, lambda net: net.expect("AllReduce", ranks=2)),
    "other ranks": (2, lambda net: net.change("l1.mlp.down", "ranks", 3)),
}


@contextmanager
def without_windows(causal: bool) -> Iterator[None]:
    """Attention with a window is written as if it had none, as a causal one or as one that is not."""
    attend = attention._attend

    def unmasked(*arguments: Any, window: int, **more: Any) -> Any:
        return attend(*arguments, **{**more, "causal": causal or not window}, window=0)

    attention._attend = unmasked
    try:
        yield
    finally:
        attention._attend = attend


def main(folder: str) -> None:
    compiler = Compiler(api.load("tensorrt-rtx"), (120,))
    found = {}
    for name, (ranks, break_it) in BREAKS.items():
        net = Written(compiler, Path(folder), ranks)
        break_it(net)
        found[name] = net.sentence()
    for name, causal in (("window lost", False), ("window causal", True)):
        with without_windows(causal):
            try:
                Written(compiler, Path(folder), 1)
            except InputError as error:
                found[name] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
