"""Engine directories of a tiny pair for TensorRT, one for each precision, built once per run."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.engines.build import BuildOptions
from dflash_trt.engines.tensorrt_directory import TensorRTOptions, build_tensorrt

BLOCK, CHUNK, SLOTS = 4, 8, 2


@pytest.fixture(scope="session")
def tiny_plans(tiny_checkpoints, tmp_path_factory) -> dict[str, Path]:
    """Folders by precision."""
    pytest.importorskip("tensorrt_rtx", reason="pip install 'dflash-trt[tensorrt-rtx]'")
    folders = {}
    for precision in ("bf16", "fp8", "nvfp4"):
        options = BuildOptions("tiny", BLOCK, precision, max_seq_len=64, max_batch=SLOTS)
        own = TensorRTOptions("tensorrt-rtx", (120,), chunk=CHUNK, step=precision == "bf16")
        folders[precision] = tmp_path_factory.mktemp("plans") / precision
        manifest, _ = build_tensorrt(*tiny_checkpoints, options, own, folders[precision])
        assert (manifest.backend, manifest.precision) == ("tensorrt-rtx", precision)
    return folders
