"""A TensorRT engine's weights file against the checkpoints, read by the safetensors library alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import safe_open

from dflash_trt.engines.directory import read_manifest
from dflash_trt.engines.tensorrt_directory import read_plans
from dflash_trt.engines.tensorrt_weights import read_weights
from dflash_trt.models.rope import Rope, rope_tables

TYPES = {"BF16": "BF16", "FLOAT": "F32", "INT8": "U8", "INT64": "I64"}


def check_weights_file(engine: Path, target: Path, drafter: Path) -> None:
    """Of a bf16 engine: every tensor that plans ask for is there and no other, each with the plans' type
    and shape and the checkpoint's values; packed experts byte for byte, one expert at a time."""
    manifest = read_manifest(engine, verify=False)
    asked = [
        b for report in read_plans(engine)["plans"].values() for b in report.bindings
        if b.direction == "input"
    ]  # fmt: skip
    bindings = {b.name: b for b in asked if b.role == "weight"}
    sinks = {b.made_of[0] for b in asked if b.made_of[1] == "sinks"}
    path = engine / "weights.safetensors"
    with safe_open(path, "np") as held:
        assert set(held.keys()) == set(bindings) | sinks
        for name, binding in bindings.items():
            entry = held.get_slice(name)
            assert tuple(entry.get_shape()) == binding.shape, name
            assert entry.get_dtype() == TYPES[binding.dtype], name
    weights, found = {w["name"]: w for w in manifest.weights}, read_weights(path)
    ropes = {"target": manifest.target.config, "drafter": manifest.drafter.config}
    files = {"target": target, "drafter": drafter}
    for name, array in found.items():
        weight = weights[bindings[name].made_of[0] if name in bindings else name]
        if weight["kind"].startswith("rope_"):
            config = ropes[weight["model"]]
            tables = rope_tables(Rope(**config["rope"]), config["head_dim"], weight["shape"][0])
            wanted = iter([tables[weight["kind"] == "rope_sin"].astype(array.dtype)])
        else:
            wanted = stored(files[weight["model"]], weight, array)
        at = 0
        for part in wanted:
            assert np.array_equal(array[at : at + len(part)], part), (name, at)
            at += len(part)
        assert at == len(array), name


def stored(folder: Path, weight: dict, array: np.ndarray) -> Iterator[np.ndarray]:
    """What a weight is made of, in the layout of `array`, in pieces along its first axis."""
    with safe_open(folder / "model.safetensors", "np") as held:
        if weight["kind"].startswith("mxfp4_"):
            (source,) = weight["sources"]
            experts = held.get_slice(source)
            for expert in range(len(array)):
                yield experts[expert : expert + 1].reshape(1, *array.shape[1:])
            return
        whole = np.concatenate([held.get_tensor(source) for source in weight["sources"]])
    whole = whole.T if weight["transpose"] else whole
    yield whole.reshape(weight["shape"]).astype(array.dtype).reshape(array.shape)
