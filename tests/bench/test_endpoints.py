"""Endpoints count tokens, not deliveries."""

from __future__ import annotations

from pathlib import Path
from threading import Event

from dflash_trt.bench.endpoints import LocalRuntime
from dflash_trt.runtime.generate import GenerationOptions, Runtime


def test_a_block_of_several_tokens_counts_as_several(smollm2_engine: Path) -> None:
    done = Event()
    runtime = LocalRuntime(Runtime.load(smollm2_engine))
    line = runtime.submit("What is 7 times 8?", GenerationOptions(24, ignore_eos=True), done.set)
    assert done.wait(60)
    assert line.tokens == 24
    assert len(line.arrivals) < 24
