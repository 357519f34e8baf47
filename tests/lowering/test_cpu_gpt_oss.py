"""The CPU lowering of gpt-oss: windows and sinks inside the attention kernel, experts as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.checkpoints import open_drafter, open_target
from dflash_trt.engines.build import source_graphs
from dflash_trt.lowering.cpu import lower
from tests import tiny, tiny_gpt_oss
from tests.lowering.test_cpu import OPTIONS, assert_same, loaded, run, target_feeds


@pytest.mark.parametrize(("rows", "length"), [(1, 0), (8, 0), (1, 7), (8, 5), (3, 40)])
def test_target(tmp_path: Path, rows: int, length: int) -> None:
    """Inside the window of 8, across it and behind it."""
    pair = (
        open_target(tiny_gpt_oss.tiny_gpt_oss(tmp_path / "t")),
        open_drafter(tiny.tiny_drafter(tmp_path / "d")),
    )
    sources = source_graphs(*pair, OPTIONS)
    lowered, fired = lower(sources.target, {})
    assert fired["CachedAttention"] == 4
    weights = loaded(sources)
    feeds = target_feeds(sources.target, rows, length)
    source = run(sources.target.model, feeds, weights)
    assert_same(run(lowered, feeds, weights), source, length + rows)
