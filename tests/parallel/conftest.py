"""A small engine for one and for two ranks, built once per run."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.checkpoints import open_drafter, open_target
from dflash_trt.engines.build import BuildOptions, build_cpu
from tests import tiny, tiny_gpt_oss


@pytest.fixture(scope="session")
def tiny_engines(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """gpt-oss for one and for two ranks; its three MXFP4 blocks of columns do not divide by two."""
    folder = tmp_path_factory.mktemp("ranks")
    target = open_target(tiny_gpt_oss.tiny_gpt_oss(folder / "target"))
    drafter = open_drafter(tiny.tiny_drafter(folder / "drafter"))
    paths = {ranks: folder / f"engine{ranks}" for ranks in (1, 2)}
    for ranks, path in paths.items():
        options = BuildOptions("t", block=8, max_seq_len=256, max_batch=2, ranks=ranks)
        build_cpu(target, drafter, options, path)
    return paths
