"""Exports of ModelOpt in FP8 and NVFP4: scales are applied, and missing ones are named."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_trt.checkpoints import open_drafter, open_target
from dflash_trt.checkpoints.weights import WeightLoader
from dflash_trt.errors import InputError
from dflash_trt.models.registry import target_graph
from tests import tiny

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def fp8(weight: np.ndarray, rows: bool) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The parts of a weight in E4M3, and the values they stand for."""
    peak = np.abs(weight).max(axis=1) if rows else np.abs(weight).max()
    scale = np.asarray(peak / 448, np.float32)
    factor = scale[:, None] if rows else scale
    stored = (weight / factor).astype(ml_dtypes.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale}, stored.astype(np.float32) * factor


def nvfp4(weight: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Likewise in blocks of 16, scaled to their peak of 6."""
    blocks = weight.reshape(len(weight), -1, 16)
    peaks = np.abs(blocks).max(-1) / 6
    whole = np.float32(peaks.max() / 448)
    scale = (peaks / whole).astype(ml_dtypes.float8_e4m3fn)
    factors = scale.astype(np.float32)[..., None] * whole
    codes = np.abs(blocks[..., None] / factors[..., None] - E2M1).argmin(-1).astype(np.uint8)
    values = (E2M1[codes] * factors).reshape(weight.shape)
    flat = codes.reshape(weight.shape)
    packed = flat[:, 0::2] | (flat[:, 1::2] << 4)
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": whole}, values


def export(
    folder: Path, algo: str, rows: bool = False, dropped: str = "(none)", input_scale: float = 1
) -> dict[str, np.ndarray]:
    """Quantise the projections of a checkpoint in place; returns all values by name.

    Tensors whose name ends in `dropped` are left away.
    """
    path = folder / "model.safetensors"
    stored, values = {}, load_file(path)
    for name, tensor in list(values.items()):
        if "_proj.weight" not in name:
            stored[name] = tensor
            continue
        parts, values[name] = fp8(tensor, rows) if algo == "FP8" else nvfp4(tensor)
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{part}": np.asarray(array) for part, array in parts.items()}
        stored[f"{module}.input_scale"] = np.full((), input_scale, np.float32)
    save_file({n: t for n, t in stored.items() if not n.endswith(dropped)}, path)
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algo}}
    (folder / "hf_quant_config.json").write_text(json.dumps(settings))
    return values


@pytest.mark.parametrize(("algo", "rows"), [("FP8", False), ("FP8", True), ("NVFP4", False)])
def test_scales_are_applied(tmp_path: Path, algo: str, rows: bool) -> None:
    folder = tiny.tiny_target(tmp_path / "t")
    values = export(folder, algo, rows)
    target = open_target(folder)
    assert target.tensors.names() == set(values)
    for name, value in values.items():
        assert target.tensors.shape(name) == value.shape
        np.testing.assert_array_equal(target.tensors.read(name), value)
    graph = target_graph(target.config, (0,), 32)
    WeightLoader({"target": target.tensors}, {"target": target.config}).check(graph.weights)


def test_a_drafter(tmp_path: Path) -> None:
    folder = tiny.tiny_drafter(tmp_path / "d")
    values = export(folder, "NVFP4")
    tensors = open_drafter(folder).tensors
    for name, value in values.items():
        np.testing.assert_array_equal(tensors.read(name), value)


@pytest.mark.parametrize(
    ("suffix", "sentence"),
    [
        ("weight_scale", "NVFP4 was announced, but no tensor has a scale"),
        ("weight_scale_2", "'model.layers.0.mlp.down_proj.weight_scale_2' is missing"),
    ],
)
def test_missing_scales(tmp_path: Path, suffix: str, sentence: str) -> None:
    folder = tiny.tiny_target(tmp_path / "t")
    export(folder, "NVFP4", dropped=suffix)
    with pytest.raises(InputError, match=sentence):
        open_target(folder)


def test_one_missing_scale(tmp_path: Path) -> None:
    folder = tiny.tiny_target(tmp_path / "t")
    name = "model.layers.1.mlp.up_proj.weight"
    export(folder, "NVFP4", dropped=f"{name}_scale")
    with pytest.raises(InputError, match=f"'{name}' is packed and has no scale"):
        open_target(folder)


def test_other_algorithms(tmp_path: Path) -> None:
    folder = tiny.tiny_target(tmp_path / "t")
    export(folder, "FP8")
    path = folder / "hf_quant_config.json"
    path.write_text(path.read_text().replace("FP8", "W4A8_AWQ"))
    with pytest.raises(InputError, match="'quant_algo' is 'W4A8_AWQ', only FP8, NVFP4"):
        open_target(folder)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [(None, "'{}' is missing"), (0.0, "'{}' is 0.0, not a scale"), (np.nan, "is nan, not a scale")],
)
def test_an_input_scale_that_is_none(tmp_path: Path, value: float | None, sentence: str) -> None:
    folder = tiny.tiny_target(tmp_path / "t")
    name = "model.layers.0.mlp.down_proj.input_scale"
    export(folder, "FP8", dropped="(none)" if value is not None else name, input_scale=value or 0)
    with pytest.raises(InputError, match=sentence.format(name)):
        open_target(folder).tensors.stored(name.replace("input_scale", "weight"))  # type: ignore[attr-defined]
