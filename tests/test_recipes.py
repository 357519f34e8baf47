"""Recipes: all of them give graphs without a checkpoint, and say what the published models are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dflash_trt.checkpoints import hub
from dflash_trt.checkpoints.described import AbsentTensors
from dflash_trt.checkpoints.drafter import check_pair
from dflash_trt.engines.build import BuildOptions, build_cpu, describe, source_graphs
from dflash_trt.errors import InputError
from dflash_trt.models.dflash import drafter_graph
from dflash_trt.models.registry import target_graph
from dflash_trt.recipes import Recipe, find_recipe, recipe_names

DESCRIBED = [name for name in recipe_names() if find_recipe(name).target_config]
# name: block, mask id, stop ids, layers
PUBLISHED = {
    "gpt-oss-120b": (10, 200000, {200002, 199999, 200012}, 36),
    "gpt-oss-20b": (8, 200000, {200002, 199999, 200012}, 24),
    "llama-3.1-8b": (10, 128002, {128001, 128008, 128009}, 32),
    "qwen3-4b": (16, 151669, {151645, 151643}, 36),
    "qwen3-8b": (16, 151669, {151645, 151643}, 36),
}


def test_every_published_pair_has_a_recipe() -> None:
    assert set(DESCRIBED) == set(PUBLISHED)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_recipe(name: str) -> None:
    recipe = find_recipe(name)
    target, drafter = recipe.described_target(), recipe.described_drafter()
    check_pair(target.config, drafter.config, name)
    block, mask, stops, layers = PUBLISHED[name]
    assert (drafter.config.block, drafter.config.mask_id) == (block, mask)
    assert (set(target.config.stop_ids), target.config.num_layers) == (stops, layers)
    taken = drafter.config.taps
    graphs = (
        target_graph(target.config, taken, 1024),
        drafter_graph(drafter.config, target.config, 1024, passes=1),
    )
    assert all(len(graph.model.graph.node) > 100 for graph in graphs)


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


def _offline(repo: str, local_only: bool) -> Path:
    raise ConnectionError("no network\nand a long trace")
