"""The int8 drafter says what the same drafter in fp32 says, in the slots that decide how much is
accepted; behind them two tokens are often nearly as likely."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_trt.checkpoints import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.engines import build
from dflash_trt.engines.build import BuildOptions, CpuPrecision, build_cpu
from dflash_trt.engines.onnxruntime import OnnxRuntimePair
from dflash_trt.runtime.generate import Runtime

TEXT = "Question: a farmer has 12 cows and buys 7 more. Answer: The farmer has 12 + 7 = 19 cows. "


def drafts(engines: OnnxRuntimePair, ids: list[int], ends: range) -> np.ndarray:
    """Drafted tokens [ends, 7] behind prefixes of `ids`."""
    found = []
    for end in ends:
        engines.release(0)
        engines.prefill(0, np.asarray(ids[:end]), inject=True)
        engines.draft([0], 7)
        engines.verify([0], 8)
        found.append(engines.tokens[0, 1:].copy())
    return np.array(found)


def test_int8_drafts_agree_with_fp32(
    smollm2: tuple[TargetCheckpoint, DrafterCheckpoint],
    smollm2_engine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(build.CPU_PRECISIONS, "fp32", CpuPrecision({}, {}))
    build_cpu(*smollm2, BuildOptions("exact", block=8, max_seq_len=512), tmp_path / "exact")
    ids = Runtime.load(smollm2_engine).codec.ids(TEXT * 2)
    ends = range(20, min(len(ids), 100), 2)
    rounded = drafts(OnnxRuntimePair(smollm2_engine), ids, ends)
    exact = drafts(OnnxRuntimePair(tmp_path / "exact"), ids, ends)
    assert (rounded == exact)[:, :3].mean() > 0.9
