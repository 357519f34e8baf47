"""Largest magnitudes of the activations in front of every quantised weight, from runs on the CPU.

The source graph is run as it is by ONNX Runtime, with the activations of interest as outputs: the
graph that is compiled is the graph that is measured.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from dflash_trt.models.graph import SourceGraph

Feeds = Mapping[str, np.ndarray]


def watched(model: onnx.ModelProto, weights: Collection[str]) -> dict[str, list[str]]:
    """For each of `weights` the values that are multiplied with it."""
    found: dict[str, list[str]] = {}
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in weights:
            found.setdefault(node.input[1], []).append(node.input[0])
    return found


class Calibration:
    """Runs one source graph and keeps the peaks of what flows into `weights`."""

    def __init__(self, source: SourceGraph, weights: Collection[str], values: Feeds) -> None:
        """`values` holds all weight inputs of the graph, fp32."""
        self._watched = watched(source.model, weights)
        self.peaks = dict.fromkeys(self._watched, 0.0)
        self._outputs = [output.name for output in source.model.graph.output]
        model = onnx.ModelProto()
        model.CopyFrom(source.model)
        seen = sorted({name for names in self._watched.values() for name in names})
        for name in seen:
            if name not in self._outputs:
                info = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
                model.graph.output.append(info)
        self._seen, self._values = seen, dict(values)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        self._session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Run the graph, note the peaks, and return the graph's own outputs."""
        names = [*self._outputs, *(n for n in self._seen if n not in self._outputs)]
        wanted = {i.name for i in self._session.get_inputs()}
        given = {k: v for k, v in {**self._values, **feeds}.items() if k in wanted}
        results = dict(zip(names, self._session.run(names, given), strict=True))
        for weight, values in self._watched.items():
            peak = max(float(np.abs(results[name]).max()) for name in values)
            self.peaks[weight] = max(self.peaks[weight], peak)
        return {name: results[name] for name in self._outputs}


def empty_caches(model: onnx.ModelProto, capacity: int) -> dict[str, np.ndarray]:
    """Zeros for every cache input of a source graph, one sequence."""
    caches = {}
    for value in model.graph.input:
        dims = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        if len(dims) == 4 and dims[2] == "L":
            caches[value.name] = np.zeros((1, dims[1], capacity, dims[3]), np.float32)
    return caches


def calibrate_pair(
    target: Calibration, drafter: Calibration, models: tuple[onnx.ModelProto, onnx.ModelProto],
    prompts: Sequence[np.ndarray], block: int, mask_id: int,
) -> dict[str, float]:  # fmt: skip
    """Prefill each prompt [S] int64 on the target, inject its features and draft one block."""
    for prompt in prompts:
        size = len(prompt)
        first = target.run(
            {
                "tokens": prompt[None],
                "lengths": np.zeros(1, np.int32),
                "rows": np.array([[size - 1]], np.int64),
                **empty_caches(models[0], size + block),
            }
        )
        drafter.run(
            {
                "features": first["features"],
                "accepted": first["accepted"],
                "context": first["context"],
                "anchor": first["anchor"],
                "masks": np.full((1, block - 1), mask_id, np.int64),
                **empty_caches(models[1], size + block),
            }
        )
    return {**target.peaks, **drafter.peaks}
