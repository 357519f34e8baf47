"""Recipes: all of them give graphs without a checkpoint, and say what the published models are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dflash_trt.checkpoints import hub
from dflash_trt.checkpoints.described import AbsentTensors
from dflash_trt.checkpoints.drafter import check_pair
from dflash_trt.cli import main
from dflash_trt.cli.build import recipe_of
from dflash_trt.config import Experts
from dflash_trt.engines.build import BuildOptions, build_cpu, describe, source_graphs
from dflash_trt.errors import InputError
from dflash_trt.models.dflash import drafter_graph
from dflash_trt.models.registry import target_graph
from dflash_trt.planner.build_size import build_size
from dflash_trt.planner.fit import fits
from dflash_trt.planner.hardware import GPUS
from dflash_trt.recipes import Recipe, find_recipe, recipe_names

DESCRIBED = [name for name in recipe_names() if find_recipe(name).target_config]
# name: block, mask id, stop ids, layers, taps
PUBLISHED = {
    "gpt-oss-120b": (10, 200000, {200002, 199999, 200012}, 36, (1, 9, 17, 25, 33)),
    "gpt-oss-20b": (8, 200000, {200002, 199999, 200012}, 24, (1, 6, 11, 16, 21)),
    "llama-3.1-8b": (10, 128002, {128001, 128008, 128009}, 32, (1, 8, 15, 22, 29)),
    "qwen3-4b": (16, 151669, {151645, 151643}, 36, (1, 9, 17, 25, 33)),
    "qwen3-8b": (16, 151669, {151645, 151643}, 36, (1, 9, 17, 25, 33)),
}
IDS = {
    "gpt-oss-120b": ("openai/gpt-oss-120b", "z-lab/gpt-oss-120b-DFlash"),
    "gpt-oss-20b": ("openai/gpt-oss-20b", "z-lab/gpt-oss-20b-DFlash"),
    "llama-3.1-8b": (
        "meta-llama/Llama-3.1-8B-Instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
    ),
    "qwen3-4b": ("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"),
    "qwen3-8b": ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"),
}  # fmt: skip


def test_every_published_pair_has_a_recipe() -> None:
    assert set(DESCRIBED) == set(PUBLISHED)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_recipe(name: str) -> None:
    recipe = find_recipe(name)
    target, drafter = recipe.described_target(), recipe.described_drafter()
    check_pair(target.config, drafter.config, name)
    block, mask, stops, layers, taps = PUBLISHED[name]
    assert (recipe.target, recipe.drafter) == IDS[name]
    assert (recipe.block, recipe.precision, recipe.backend) == (block, "bf16", "tensorrt-rtx")
    assert (drafter.config.block, drafter.config.mask_id) == (block, mask)
    assert drafter.config.taps == taps
    assert (set(target.config.stop_ids), target.config.num_layers) == (stops, layers)
    taken = drafter.config.taps
    graphs = (
        target_graph(target.config, taken, 1024),
        drafter_graph(drafter.config, target.config, 1024, passes=1),
    )
    assert all(len(graph.model.graph.node) > 100 for graph in graphs)


@pytest.mark.parametrize("name", recipe_names())
def test_memory_is_what_a_dry_run_says(name: str) -> None:
    """Of the recipe's own backend, precision and length, for one sequence."""
    recipe = find_recipe(name)
    target, drafter = recipe.open_target(), recipe.open_drafter()
    options = BuildOptions(name, recipe.block, recipe.precision, max_seq_len=recipe.max_seq_len)
    sources = source_graphs(target, drafter, options)
    size = build_size(target.config, drafter.config, options, sources, recipe.backend)
    assert recipe.memory_gb == round(size.device / 1e9, 1)
    roomy = [n for n, gpu in GPUS.items() if recipe.backend != "cpu" and fits(size.device, gpu)]
    assert list(recipe.gpus) == roomy


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--compute-capability", "12.1"],
            "qwen3-4b: 11.4 GB where it runs, for one sequence; room",
        ),
        (["--compute-capability", "12.1"], "room for that is on: gb10\n"),
        (["--compute-capability", "8.9"], "for one sequence\n"),
        (["--max-batch", "2"], ""),
        (["--precision", "nvfp4"], ""),
    ],
)
def test_a_build_as_the_recipe_has_it_says_its_memory(tmp_path, capsys, arguments, said):
    """It is refused then: its place is taken."""
    pytest.importorskip("tensorrt_rtx", reason="pip install 'dflash-trt[tensorrt-rtx]'")
    (tmp_path / "mine").touch()
    command = ["build", "--target", "qwen3-4b", "-o", str(tmp_path), *arguments]
    assert main(command) == 2
    err = capsys.readouterr().err
    assert "is not an engine directory" in err
    assert said in err if said else "GB where it runs" not in err


def test_recipes_say_how_to_talk_to_the_target() -> None:
    """Arguments of the chat template: low effort for gpt-oss, Qwen3 without thinking."""
    said = {name: dict(find_recipe(name).chat_arguments) for name in recipe_names()}
    low, silent = {"reasoning_effort": "low"}, {"enable_thinking": False}
    assert said == {
        "gpt-oss-120b": low, "gpt-oss-20b": low, "qwen3-4b": silent, "qwen3-8b": silent,
        "llama-3.1-8b": {}, "smollm2-135m": {},
    }  # fmt: skip


def test_a_recipe_is_found_by_its_targets_hub_id() -> None:
    known = recipe_of("openai/gpt-oss-20b", None)
    assert known == find_recipe("gpt-oss-20b")
    with pytest.raises(InputError, match="a target given as a path or hub id needs --drafter"):
        recipe_of("openai/gpt-oss-2b", None)


@pytest.mark.parametrize(("name", "experts"), [("gpt-oss-120b", 128), ("gpt-oss-20b", 32)])
def test_gpt_oss_is_what_its_config_says(name: str, experts: int) -> None:
    """Sinks, every other layer a window of 128, four experts of many, their clamp, yarn from 4096."""
    config = find_recipe(name).described_target().config
    assert config.attention_sinks
    assert config.attention_bias
    assert [config.window(layer) for layer in range(4)] == [128, 0, 128, 0]
    assert config.experts == Experts(experts, per_token=4, alpha=1.702, limit=7.0)
    assert config.rope == find_recipe(name).described_drafter().config.rope
    assert (config.rope.theta, config.rope.kind) == (150000.0, "yarn")
    assert config.rope.scaling == {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 4096,
    }  # fmt: skip


def test_a_wide_verify_drafts_what_was_trained(tmp_path: Path) -> None:
    """`--block 16` with a drafter of 10; the cpu backend refuses, for want of use and of weights."""
    recipe = find_recipe("gpt-oss-120b")
    pair = recipe.described_target(), recipe.described_drafter()
    options = BuildOptions("wide", block=16)
    manifest = describe(*pair, options, source_graphs(*pair, options), "tensorrt-rtx", {}, {})
    assert (manifest.block, manifest.drafted, manifest.trained_block) == (16, 9, 10)
    with pytest.raises(InputError, match="the checkpoint is not here, and the cpu backend needs"):
        build_cpu(*pair, options, tmp_path / "e")


def test_a_wide_verify_has_no_use_on_the_cpu(tiny_checkpoints: tuple, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="block 9: the drafter was trained with blocks of 8"):
        build_cpu(*tiny_checkpoints, BuildOptions("wide", block=9, max_seq_len=512), tmp_path / "e")


def test_weights_of_gpt_oss_120b_are_as_many_bytes_as_published() -> None:
    """The checkpoint has 116.8 billion parameters; experts are four bits and a scale per 32."""
    target = find_recipe("gpt-oss-120b").described_target()
    graph = target_graph(target.config, (1,), 16)
    count = 0
    for weight in graph.weights:
        size = 1
        for n in weight.shape:
            size *= n
        if not weight.kind.startswith("rope") and weight.kind != "mxfp4_scales":
            count += size * (2 if weight.kind == "mxfp4_blocks" else 1)
    assert count == pytest.approx(116.83e9, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "size"),
    [("gpt-oss-120b", 1.46), ("gpt-oss-20b", 1.46), ("llama-3.1-8b", 1.953), ("qwen3-4b", 1.0),
     ("qwen3-8b", 1.95)],
)  # fmt: skip
def test_drafters_are_as_large_as_their_published_files(name: str, size: float) -> None:
    """GiB in bf16. The graph has keys and values twice, the injection's are not counted here."""
    recipe = find_recipe(name)
    target, drafter = recipe.described_target().config, recipe.described_drafter().config
    count = sum(
        math.prod(weight.shape)
        for weight in drafter_graph(drafter, target, 16, passes=1).weights
        if weight.model == "drafter" and weight.sources and ".inject.kv." not in weight.name
    )
    assert 2 * count / 2**30 == pytest.approx(size, rel=5e-3)


def test_reading_an_absent_checkpoint_says_so() -> None:
    with pytest.raises(InputError, match="a/b: the checkpoint is not here"):
        AbsentTensors("a/b").read("x")


def test_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.is_hub_id("openai/gpt-oss-20b")
    assert not hub.is_hub_id("gpt-oss-20b")
    assert not hub.is_hub_id(str(tmp_path))
    monkeypatch.setattr(hub, "_snapshot", _offline)
    assert hub.cached_folder("a/b") is None
    with pytest.raises(InputError, match=r"a/b: cannot be downloaded .*\(no network\); fetch it"):
        hub.download("a/b")
    unknown = Recipe(name="x", folder=tmp_path, target="a/b", drafter="a/c", block=8)
    with pytest.raises(InputError, match="a/b: cannot be downloaded"):
        unknown.open_target()


def _offline(*_: object, **__: object) -> Path:
    raise ConnectionError("no network\nand a long trace")
