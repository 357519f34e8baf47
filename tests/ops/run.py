"""Runs one op of the domain through its local function in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import helper

from dflash_trt import ops


def run_op(
    name: str,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[str],
    draft_layers: int = 0,
    **attributes: Any,
) -> list[np.ndarray]:
    """Outputs of op `name` on `inputs`; the function body defines the result."""
    names = [f"in{i}" for i in range(len(inputs))]
    values = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), None)
        for n, a in zip(names, inputs, strict=True)
    ]
    results = [helper.make_empty_tensor_value_info(name) for name in outputs]
    node = helper.make_node(name, names, outputs, domain=ops.DOMAIN, **attributes)
    model = helper.make_model(
        helper.make_graph([node], name, values, results),
        opset_imports=ops.OPSET_IMPORTS,
        functions=ops.library(draft_layers),
        ir_version=11,
    )
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, dict(zip(names, inputs, strict=True)))
