"""The same prompts, so many at a time: throughput, and whether company changes any answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dflash_trt.bench.endpoints import LocalRuntime
from dflash_trt.bench.interactivity import Timeline, both_modes, run_level, short
from dflash_trt.errors import InputError
from dflash_trt.runtime.generate import GenerationOptions, Runtime
from dflash_trt.runtime.metrics import total


def check_batches(runtime: Runtime, batches: Sequence[int], prompts: int) -> None:
    """Refuse what cannot be measured."""
    slots = runtime.manifest.max_batch
    for batch in batches:
        if not 1 <= batch <= slots:
            raise InputError(f"batch {batch}: this engine has {slots} slots (--max-batch)")
        if prompts < batch:
            raise InputError(f"batch {batch}: needs as many prompts, there are {prompts}")


def batch_table(
    runtime: Runtime,
    prompts: Sequence[Sequence[int]],
    batches: Sequence[int],
    options: GenerationOptions,
    progress: Callable[[int], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """A row for each batch, with so many of the prompts in flight until all are answered, plain and
    drafted right behind each other.

    Rates are output tokens of all requests over the wall time, prefills included. `changed` counts
    answers whose tokens, or drafts accepted by slot, are not those of the first row.
    """
    rows: list[dict[str, Any]] = []
    endpoint = LocalRuntime(runtime)
    first: list[Timeline] = []
    for done, batch in enumerate(batches, 1):
        rates = {}
        for mode, wanted in both_modes(options).items():
            run_level(endpoint, prompts[:batch], batch, short(wanted))
            seconds, lines = run_level(endpoint, prompts, batch, wanted)
            rates[mode] = round(sum(line.tokens for line in lines) / seconds, 2)
        first = first or lines
        figures = total(line.generation.metrics for line in lines).summary()
        rows.append(
            {
                "batch": batch,
                "tokens_per_second": rates,
                "acceptance_length": figures["acceptance_length"],
                "host_share": figures["host_share"],
                "changed": sum(map(_differ, first, lines)),
            }
        )
        progress(done)
    return rows


def _differ(a: Timeline, b: Timeline) -> bool:
    x, y = a.generation, b.generation
    accepted = x.metrics.accepted_by_slot, y.metrics.accepted_by_slot
    return x.tokens != y.tokens or accepted[0] != accepted[1]
