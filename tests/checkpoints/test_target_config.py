"""Targets' configurations: every mistake is a sentence, before anything big is read."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_trt.checkpoints import open_target
from dflash_trt.checkpoints.target_config import target_config
from dflash_trt.checkpoints.weights import WeightLoader
from dflash_trt.errors import InputError
from dflash_trt.models.registry import target_graph
from tests import tiny, tiny_gpt_oss


def values_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not one of Llama"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "type 'dynamic' is not supported, only"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "needs the number 'low_freq"),
        ({"mlp_bias": True}, "'mlp_bias' is set, which is not supported"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu', not silu"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "a llama in 'gptq' cannot be read"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "a llama in 'mxfp4' cannot be read"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, changes: dict, sentence: str) -> None:
    values = values_of(tiny.tiny_target(tmp_path / "t"))
    with pytest.raises(InputError, match=sentence):
        target_config({**values, **changes}, "config.json")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_local_experts": None}, "the key 'num_local_experts' is missing"),
        ({"intermediate_size": 100}, "'intermediate_size' is no multiple of 32"),
        ({"layer_types": ["sliding_attention"]}, "'layer_types' names 1 layers instead of 4"),
    ],
)
def test_gpt_oss_mistakes(tmp_path: Path, changes: dict, sentence: str) -> None:
    values = values_of(tiny_gpt_oss.tiny_gpt_oss(tmp_path / "t"))
    with pytest.raises(InputError, match=sentence):
        target_config({**values, **changes}, "config.json")


def test_gpt_oss_windows_alternate_where_the_file_is_silent(tmp_path: Path) -> None:
    values = values_of(tiny_gpt_oss.tiny_gpt_oss(tmp_path / "t"))
    config = target_config({**values, "layer_types": None}, "config.json")
    assert config.windows == (8, 0, 8, 0)


def edited(folder: Path, change: str) -> WeightLoader:
    path, name = folder / "model.safetensors", "model.layers.2.mlp.experts.down_proj"
    tensors = load_file(path)
    if change == "no scales":
        del tensors[f"{name}_scales"]
    elif change == "short scales":
        tensors[f"{name}_scales"] = tensors[f"{name}_scales"][:, :, :1].copy()
    elif change == "bf16 experts":
        blocks = tensors.pop(f"{name}_blocks")
        tensors[f"{name}_blocks"] = blocks.astype(ml_dtypes.bfloat16)
    save_file(tensors, path)
    target = open_target(folder)
    return WeightLoader({"target": target.tensors}, {"target": target.config})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("no scales", "down_proj_scales' is missing"),
        ("short scales", r"down_proj_scales' \[8, 64, 1\] cannot make target.l2.mlp.down.scales"),
    ],
)
def test_packed_experts_are_checked(tmp_path: Path, change: str, sentence: str) -> None:
    folder = tiny_gpt_oss.tiny_gpt_oss(tmp_path / "t")
    graph = target_graph(open_target(folder).config, (0,), 32)
    with pytest.raises(InputError, match=sentence):
        edited(folder, change).check(graph.weights)


def test_packed_experts_of_another_type(tmp_path: Path) -> None:
    folder = tiny_gpt_oss.tiny_gpt_oss(tmp_path / "t")
    graph = target_graph(open_target(folder).config, (0,), 32)
    with pytest.raises(InputError, match="down_proj_blocks' holds float32, not uint8"):
        edited(folder, "bf16 experts").check(graph.weights)


def test_sharded_files_are_read_one_tensor_at_a_time(tmp_path: Path) -> None:
    """Two shards with an index give what one file gives; a shard that is gone is named."""
    folder = tiny_gpt_oss.tiny_gpt_oss(tmp_path / "t")
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    names = sorted(whole)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    for shard, half in zip(shards, halves, strict=True):
        save_file({name: whole[name] for name in half}, folder / shard)
    placed = {name: s for s, half in zip(shards, halves, strict=True) for name in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    tensors = open_target(folder).tensors
    assert tensors.names() == set(whole)
    for name, array in whole.items():
        np.testing.assert_array_equal(tensors.read(name), array.astype(tensors.read(name).dtype))
    (folder / shards[1]).unlink()
    with pytest.raises(InputError, match="a shard is missing"):
        open_target(folder)
