"""A CPU engine that computes what a TensorRT engine's quantisation leaves of the model.

It is made of what the GPU would get: the source graphs, the plans' bindings and the weights file. All
products with quantised weights round their activations as the plans do; weights are the file's codes
and scales. Everything between the products is fp32, where the GPU has bf16.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx.helper import tensor_dtype_to_np_dtype

from dflash_trt.engines import onnxruntime as cpu
from dflash_trt.engines.directory import (
    Manifest,
    build_versions,
    new_directory,
    read_manifest,
    write_manifest,
)
from dflash_trt.engines.onnxruntime_build import WEIGHTS_FILE, WeightsFile, compile_models
from dflash_trt.engines.tensorrt_directory import read_plans
from dflash_trt.engines.tensorrt_weights import FILE, read_weights, weight_table
from dflash_trt.errors import InputError
from dflash_trt.lowering.cpu import lower
from dflash_trt.models.graph import SourceGraph, Weight
from dflash_trt.quantization import nvfp4
from dflash_trt.quantization.simulated import ROUNDING, simulated

Parts = Mapping[str, str]


def build_simulation(
    engine: Path, out: Path, progress: Callable[[str], None] = lambda _: None
) -> Manifest:
    """Build a CPU engine directory at `out` from the TensorRT engine directory `engine`."""
    manifest = read_manifest(engine)
    if manifest.backend == "cpu":
        raise InputError(f"{engine}: is an engine for the CPU; what is simulated is a TensorRT one")
    if manifest.tensor_parallel > 1:
        raise InputError(f"{engine}: is cut over ranks; what is simulated is built without --tp")
    if FILE not in manifest.files:
        raise InputError(
            f"{engine}: holds plans only; write its weights first: dflash-trt weights {engine}"
        )
    parts = _parts(engine)
    precisions = {name: kind for name, own in parts.items() for kind in own if kind in ROUNDING}
    weights = {w.name: w for w in map(_weight, manifest.weights)}
    models = {}
    for name in ("target", "drafter"):
        source = _source(engine / "source" / f"{name}.onnx", weights)
        models[name] = lower(simulated(source, precisions), {})[0]
    tensors = read_weights(engine / FILE)
    arrays = {n: partial(_arrays, w, parts.get(n, {"": n}), tensors) for n, w in weights.items()}
    with new_directory(out) as folder:
        with WeightsFile(folder / WEIGHTS_FILE) as file:
            compile_models(models, arrays, folder, lambda _: file, progress)
        for name in ("tokenizer.json", "chat_template.jinja"):
            shutil.copy(engine / name, folder / name)
        made = _described(manifest)
        write_manifest(folder, made)
    return made


def _described(manifest: Manifest) -> Manifest:
    """The CPU engine's manifest: it verifies no more than is drafted, one sequence at a time."""
    return dataclasses.replace(
        manifest, backend="cpu", block=min(manifest.block, manifest.drafted + 1), max_batch=1,
        target_requirements=cpu.requirements(), versions=build_versions("onnx", "onnxruntime"),
    )  # fmt: skip


def _parts(engine: Path) -> Mapping[str, Parts]:
    """For each source weight, the tensors of the weights file by the part they are of it."""
    bindings = [report.bindings for report in read_plans(engine)["plans"].values()]
    found: dict[str, dict[str, str]] = {}
    for binding in weight_table(bindings).values():
        source, part = binding.made_of
        found.setdefault(source, {})[part] = binding.name
    return found


def _weight(entry: Mapping) -> Weight:
    return Weight(**{**entry, "shape": tuple(entry["shape"]), "sources": tuple(entry["sources"])})


def _source(path: Path, weights: Mapping[str, Weight]) -> SourceGraph:
    model = onnx.load(path)
    return SourceGraph(
        model, tuple(weights[i.name] for i in model.graph.input if i.name in weights)
    )


def _arrays(
    weight: Weight, parts: Parts, tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """What the simulated graph reads of a weight: decoded codes [K, N], and both scales."""
    if "bytes" in parts:
        return {weight.name: tensors[parts["bytes"]].reshape(weight.shape)}
    made = {
        parts[part]: tensors[parts[part]].astype(tensor_dtype_to_np_dtype(weight.dtype))
        for part in ("", "fp8", "scale", "inverse_input_scale")
        if part in parts
    }
    if "nvfp4" in parts:
        codes, blocks = tensors[parts["nvfp4"]], tensors[parts["block_scale"]]
        made[weight.name] = nvfp4.decode(codes, blocks, np.ones((1, 1), np.float32))
    return made
