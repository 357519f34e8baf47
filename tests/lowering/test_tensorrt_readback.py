"""What the reading back of a network finds: each silent trap of TensorRT, and what is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_trt.engines.tensorrt_build import library_folder

pytest.importorskip("tensorrt_rtx", reason="pip install 'dflash-trt[tensorrt-rtx]'")

_DIFFER = "of network and source graph differ"
SENTENCES = {
    "nothing": "",
    "nothing, two ranks": "",
    "lengths": "node 'l0.attn': TensorRT dropped the lengths of the attention",
    "upper left": "node 'l0.attn': the attention's causal kind is UPPER_LEFT, LOWER_RIGHT was asked for",
    "not causal": "node 'l0.attn': the attention's causal kind is NONE, LOWER_RIGHT was asked for",
    "window causal": "node 'l1.attn': the attention's causal kind is LOWER_RIGHT, NONE was asked for",
    "window lost": "node 'l1.attn': the attention lost a mask",
    "mask": "node 'l1.attn': the attention has a mask",
    "attention more": f"attention layers {_DIFFER}: 'l1.attn' is only in the network",
    "attention less": f"attention layers {_DIFFER}: 'more' is only in the source graph",
    "plugin more": f"plugins {_DIFFER}: 'verify' is only in the network",
    "plugin less": f"plugins {_DIFFER}: 'more' is only in the source graph",
    "op less": "node 'more' (VerifyShards) is not in the network",
    "collective more": f"collectives {_DIFFER}: 'best.all' is only in the network",
    "collective less": f"collectives {_DIFFER}: 'more' is only in the source graph",
    "other ranks": "node 'l1.mlp.down': is over 2 ranks, not 3",
}


def test_a_network_that_is_not_its_source_graph_is_refused(tmp_path: Path) -> None:
    with library_folder("tensorrt-rtx") as libraries:
        done = subprocess.run(
            [sys.executable, "-m", "tests.lowering.broken_networks", tmp_path],
            env={**os.environ, "LD_LIBRARY_PATH": libraries}, cwd=Path(__file__).parents[2],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == SENTENCES
