"""Exports of ModelOpt built for TensorRT: the weights file holds their own codes and scales."""

from __future__ import annotations

import json
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from dflash_trt.checkpoints import open_target
from dflash_trt.cli import main
from dflash_trt.engines import tensorrt_build
from dflash_trt.engines.build import BuildOptions, source_graphs
from dflash_trt.engines.plan import Plan
from dflash_trt.engines.tensorrt_directory import quantised_weights, read_plans, write_weights_of
from dflash_trt.engines.tensorrt_weights import read_weights
from dflash_trt.errors import InputError
from tests import tiny
from tests.checkpoints.test_modelopt import export

pytest.importorskip("tensorrt_rtx", reason="pip install 'dflash-trt[tensorrt-rtx]'")

LEFT_OUT = "model.layers.1.mlp.down_proj"
QKV = [f"model.layers.2.self_attn.{p}_proj" for p in "qkv"]


def exported(folder, algo):
    """A tiny export with input scales of their own, one module left out; its stored tensors."""
    tiny.tiny_target(folder)
    path = folder / "model.safetensors"
    plain = load_file(path)[f"{LEFT_OUT}.weight"]
    export(folder, algo)
    with safe_open(path, "numpy") as file:
        names = list(file.keys())
    stored = {name: raw(path, name) for name in names if not name.startswith(LEFT_OUT)}
    for number, name in enumerate(sorted(n for n in stored if n.endswith("input_scale"))):
        stored[name] = np.full((), 0.011 * (1 + number % 5), np.float32)
    stored[f"{LEFT_OUT}.weight"] = plain
    save_file(stored, path)
    return stored


def raw(path, name):
    """A tensor in its own type, E4M3 included."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + size])[name]
    types = {"F32": np.float32, "U8": np.uint8, "F8_E4M3": ml_dtypes.float8_e4m3fn}
    begin, end = entry["data_offsets"]
    part = data[8 + size + begin : 8 + size + end]
    return np.frombuffer(part, types[entry["dtype"]]).reshape(entry["shape"])


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


def test_a_missing_input_scale_is_named_before_anything_is_compiled(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tensorrt_build, "COMMAND", ("compiled, which it should not be",))
    target = tmp_path / "target"
    exported(target, "NVFP4")
    path, name = target / "model.safetensors", f"{QKV[0]}.input_scale"
    with safe_open(path, "numpy") as file:
        names = [other for other in file.keys() if other != name]  # noqa: SIM118 (not a mapping)
    save_file({other: raw(path, other) for other in names}, path)
    drafter = tiny.tiny_drafter(tmp_path / "drafter")
    arguments = ["build", "--target", target, "--drafter", drafter, "--backend", "tensorrt-rtx"]
    arguments += ["-o", tmp_path / "e", "--max-seq-len", 64, "--block", 4]
    assert main([str(a) for a in arguments]) == 2
    assert f"the tensor '{name}' is missing" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize("algo", ["FP8", "NVFP4"])
def test_the_weights_file_holds_the_exports_codes_and_scales(tmp_path, algo, capsys):
    """Built by the command, without --precision: that is the export's."""
    stored = exported(tmp_path / "t", algo)
    tiny.tiny_drafter(tmp_path / "d")
    out = tmp_path / "out"
    arguments = [
        "build", "--target", tmp_path / "t", "--drafter", tmp_path / "d", "-o", out, "--block", 4,
        "--backend", "tensorrt-rtx", "--compute-capability", "12.0", "--max-seq-len", 64,
    ]  # fmt: skip
    assert main([str(a) for a in arguments]) == 0
    assert f"own {algo.lower()} scales" in capsys.readouterr().err
    found, name = read_weights(out / "weights.safetensors"), "target.l2.attn.qkv.weight"
    codes = np.concatenate([stored[f"{m}.weight"] for m in QKV])
    largest = max(float(stored[f"{m}.input_scale"]) for m in QKV)
    input_scale = 2.0 ** np.ceil(np.log2(largest))
    assert found[f"{name}.inverse_input_scale"].astype(np.float64)[0, 0] == 1 / input_scale
    if algo == "FP8":
        np.testing.assert_array_equal(bits(found[name]), bits(codes.T))
        scales, kind = [stored[f"{m}.weight_scale"] for m in QKV], "fp8"
    else:
        blocks = np.concatenate([stored[f"{m}.weight_scale"] for m in QKV])
        np.testing.assert_array_equal(found[name], codes)
        np.testing.assert_array_equal(bits(found[f"{name}.block_scale"]), bits(blocks))
        scales, kind = [stored[f"{m}.weight_scale_2"] for m in QKV], "nvfp4"
    columns = np.repeat(np.float32(scales), [64, 32, 32]) * np.float32(input_scale)
    np.testing.assert_array_equal(found[f"{name}.scale"], columns[None])
    assert len(set(columns.tolist())) == 3
    left_out = found["target.l1.mlp.down.weight"]
    assert left_out.dtype == ml_dtypes.bfloat16
    wanted = stored[f"{LEFT_OUT}.weight"].T.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(bits(left_out), bits(wanted))
    verify = read_plans(out)["plans"]["target.verify"]
    kinds = [b.made_of[1] for b in verify.bindings if b.role == "weight"]
    assert kinds.count(kind) == 15
    assert Plan.read(out / verify.file).holds(f"{name}.scale")


def test_an_export_built_in_another_precision_is_quantised_anew(tmp_path, tiny_checkpoints):
    exported(tmp_path / "t", "FP8")
    pair = open_target(tmp_path / "t"), tiny_checkpoints[1]
    for precision, kept in (
        ("fp8", {"target.l1.mlp.down.weight"}),
        ("nvfp4", set()),
        ("bf16", set()),
    ):
        options = BuildOptions("t", 4, precision, max_seq_len=64)
        assert quantised_weights(source_graphs(*pair, options), precision)[1] == kept


def test_plans_that_quantise_what_the_export_left_out_are_refused(tmp_path, tiny_checkpoints):
    """Plans of the configuration alone, in which every module is quantised."""
    exported(tmp_path / "t", "FP8")
    pair = open_target(tmp_path / "t"), tiny_checkpoints[1]
    options = BuildOptions("t", 4, "fp8", max_seq_len=64)
    planned, _ = quantised_weights(source_graphs(*tiny_checkpoints, options), "fp8")
    report = SimpleNamespace(bindings=[SimpleNamespace(made_of=(n, "fp8")) for n in planned])
    sources = source_graphs(*pair, options)
    with pytest.raises(InputError, match="t: the plans quantise other weights than this export"):
        write_weights_of(tmp_path, *pair, sources, options, [report], lambda _: None)
