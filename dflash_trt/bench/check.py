"""The acceptance check that ends every build: wrong drafts never show in the output, only here."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.runtime.generate import GenerationOptions, Runtime
from dflash_trt.runtime.metrics import GenerationMetrics, total

PROMPTS = (
    "What is 12 plus 30? Explain step by step.",
    "Write a short paragraph about the sea.",
    "Write a Python function that adds two numbers.",
)
TOKENS = 48


def acceptance_check(engine: Path) -> GenerationMetrics:
    """Draft a few answers with a new engine; the sum of their metrics."""
    runtime = Runtime.load(engine)
    options = GenerationOptions(TOKENS)
    prompts = [runtime.prompt_ids(text) for text in PROMPTS]
    return total(runtime.generate(prompt, options).metrics for prompt in prompts)


def verdict(metrics: GenerationMetrics) -> str:
    """One line: the acceptance length, or an alarm where nothing at all was accepted."""
    if metrics.drafted and metrics.committed == metrics.cycles:
        return (
            f"WARNING: none of {metrics.drafted} drafted tokens was accepted; "
            "the drafter does not fit this target"
        )
    slots = " ".join(f"{x:.2f}" for x in metrics.acceptance_per_slot)
    return f"acceptance length {metrics.acceptance_length:.2f} (per slot {slots})"
