"""Engines that several tests share, built once per run."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from dflash_trt.checkpoints import DrafterCheckpoint, TargetCheckpoint, open_drafter, open_target
from dflash_trt.engines.build import BuildOptions, build_cpu
from dflash_trt.recipes import find_recipe, packaged_file
from tests import tiny

# The same examples in every run; `pytest --hypothesis-profile=explore` looks for new ones.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore", print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def tiny_checkpoints(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[TargetCheckpoint, DrafterCheckpoint]:
    folder = tmp_path_factory.mktemp("tiny")
    return (
        open_target(tiny.tiny_target(folder / "target")),
        open_drafter(tiny.tiny_drafter(folder / "drafter")),
    )


@pytest.fixture(scope="session")
def tiny_engine(
    tiny_checkpoints: tuple[TargetCheckpoint, DrafterCheckpoint],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    out = tmp_path_factory.mktemp("engines") / "tiny"
    build_cpu(*tiny_checkpoints, BuildOptions("tiny", block=8, max_seq_len=512), out)
    return out


@pytest.fixture(scope="session")
def smollm2() -> tuple[TargetCheckpoint, DrafterCheckpoint]:
    recipe = find_recipe("smollm2-135m")
    target = open_target(packaged_file(recipe.package, recipe.file))
    return target, open_drafter((recipe.folder / recipe.drafter).resolve())


@pytest.fixture(scope="session")
def smollm2_engine(
    smollm2: tuple[TargetCheckpoint, DrafterCheckpoint], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("engines") / "smollm2"
    build_cpu(*smollm2, BuildOptions("smollm2", block=8, max_seq_len=1024), out)
    return out
