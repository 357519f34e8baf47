"""The acceptance check that ends a build."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.bench.check import TOKENS, acceptance_check, verdict
from dflash_trt.runtime.cycle import StepResult
from dflash_trt.runtime.metrics import GenerationMetrics


def test_a_useless_drafter_raises_an_alarm() -> None:
    metrics = GenerationMetrics()
    for _ in range(5):
        metrics.count(StepResult((3,), drafted=7))
    assert "WARNING: none of 35 drafted tokens was accepted" in verdict(metrics)


def test_a_build_says_what_is_accepted(smollm2_engine: Path) -> None:
    metrics = acceptance_check(smollm2_engine)
    assert 0 < metrics.tokens <= 3 * TOKENS
    assert metrics.acceptance_length > 1.1
    assert f"acceptance length {metrics.acceptance_length:.2f}" in verdict(metrics)
