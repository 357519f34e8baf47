"""Runs one op of our domain through ONNX Runtime: the reference that kernels are held against."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from dflash_trt import ops


def run_op(
    op: str, inputs: dict[str, np.ndarray], outputs: dict[str, type], **attributes: Any
) -> list[np.ndarray]:
    """`inputs` in the op's order; `outputs` name and numpy type of each."""

    def info(name: str, dtype: Any) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), None
        )

    node = helper.make_node(op, list(inputs), list(outputs), domain=ops.DOMAIN, **attributes)
    layers = (len(inputs) - 5) // 2 if op == "KVInjection" else 0
    given = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
        )
        for name, array in inputs.items()
    ]
    graph = helper.make_graph([node], op, given, [info(n, t) for n, t in outputs.items()])
    model = helper.make_model(
        graph, opset_imports=ops.OPSET_IMPORTS, functions=ops.library(layers), ir_version=11
    )
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)
