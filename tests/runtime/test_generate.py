"""Ends of a generation, refusals, and what the metrics count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dflash_trt.errors import InputError
from dflash_trt.runtime.cycle import StepResult
from dflash_trt.runtime.generate import GenerationOptions, Runtime
from dflash_trt.runtime.metrics import GenerationMetrics, total


@pytest.fixture(scope="module")
def runtime(tiny_engine: Path) -> Runtime:
    return Runtime.load(tiny_engine)


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 30])
def test_exactly_max_tokens(runtime: Runtime, count: int) -> None:
    result = runtime.generate([1, 2, 3], GenerationOptions(count, ignore_eos=True))
    assert len(result.tokens) == count
    assert result.finish_reason == "length"


@pytest.mark.parametrize("draft", [True, False])
def test_every_stop_id_ends_at_every_position(runtime: Runtime, draft: bool) -> None:
    """A stop id inside an accepted block ends the answer, whichever of several ids it is."""
    whole = runtime.generate([1, 2, 3], GenerationOptions(40, ignore_eos=True)).tokens
    manifest, engines = runtime.manifest, runtime.engines
    for token in dict.fromkeys(whole):
        engines.manifest = replace(manifest, stop_ids=(99999, token))
        result = runtime.generate([1, 2, 3], GenerationOptions(40, draft=draft))
        assert result.tokens == whole[: whole.index(token)]
        assert result.finish_reason == "stop"
    engines.manifest = manifest


def test_the_cache_is_used_to_its_end(runtime: Runtime) -> None:
    """The last block may start at the last position; nothing is written behind the cache."""
    room = runtime.manifest.max_seq_len
    for draft in (True, False):
        result = runtime.generate(
            [7] * (room - 20), GenerationOptions(1000, draft, ignore_eos=True)
        )
        assert result.finish_reason == "length"
        assert 20 <= len(result.tokens) <= 20 + runtime.manifest.block


def test_refusals(runtime: Runtime) -> None:
    with pytest.raises(InputError, match="the prompt is empty"):
        runtime.generate([], GenerationOptions(5))
    with pytest.raises(InputError, match="the prompt has 512 tokens, the engine holds 512"):
        runtime.generate([1] * 512, GenerationOptions(5))
    with pytest.raises(InputError, match="max-tokens 0"):
        runtime.generate([1], GenerationOptions(0))
    for width in (1, 9):
        with pytest.raises(InputError, match=f"width {width}: this engine verifies 2 to 8"):
            runtime.generate([1], GenerationOptions(5, width=width))


def test_metrics_count_slots_and_waste() -> None:
    m = GenerationMetrics()
    m.count(StepResult((5, 6, 7), drafted=4, draft_seconds=0.25))
    m.count(StepResult((8,), drafted=4, draft_seconds=0.25))
    m.engine_seconds, m.decode_seconds = 2.0, 2.1
    assert m.acceptance_length == 2.0
    assert m.acceptance_per_slot == [0.5, 0.5, 0.0, 0.0]
    assert m.drafts_wasted == 6
    assert m.cycles_by_committed == [1, 0, 1, 0, 0]
    assert m.time_split == {"draft": 0.5, "verify": 1.5, "host": pytest.approx(0.1)}
    both = total([m, m])
    assert (both.cycles, both.drafts_wasted, both.acceptance_per_slot) == (4, 12, [0.5, 0.5, 0, 0])
