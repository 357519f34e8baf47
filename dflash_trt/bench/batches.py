"""The same prompts, so many at a time: throughput, and whether company changes any answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dflash_trt.bench.endpoints import LocalRuntime
from dflash_trt.bench.interactivity import Timeline, both_modes, run_level
from dflash_trt.bench.overlap import host_times
from dflash_trt.errors import InputError
from dflash_trt.runtime.generate import GenerationOptions, Runtime
from dflash_trt.runtime.metrics import total

_WARM_UP: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}  # enough to try every width


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
    """A row for each batch, with so many of the prompts in flight until all are answered: plain,
    drafted, and drafted as far as it pays, right behind each other.

    Rates are output tokens of all requests over the wall time, prefills included. Acceptance and
    host times are of the mode `dflash`, drafts per cycle of `adaptive`. `changed` counts, by mode,
    answers whose tokens are not those of the first row; of `dflash` also those whose drafts
    accepted by slot are not. Host times: see `host_times`.
    """
    rows: list[dict[str, Any]] = []
    endpoint = LocalRuntime(runtime)
    modes = both_modes(options) | {"adaptive": replace(options, adaptive=True)}
    first: Mapping[str, Sequence[Timeline]] = {}
    for done, batch in enumerate(batches, 1):
        rates, answers = {}, {}
        for mode, wanted in modes.items():
            run_level(endpoint, prompts[:batch], batch, replace(wanted, **_WARM_UP))
            seconds, lines = run_level(endpoint, prompts, batch, wanted)
            rates[mode] = round(sum(line.tokens for line in lines) / seconds, 2)
            answers[mode] = lines
        first = first or answers
        sums = {mode: total(a.generation.metrics for a in answers[mode]) for mode in modes}
        rows.append(
            {
                "batch": batch,
                "tokens_per_second": rates,
                "acceptance_length": round(sums["dflash"].acceptance_length, 3),
                "drafts_per_cycle": round(sums["adaptive"].drafted / sums["adaptive"].cycles, 2),
                "changed": {m: sum(map(_DIFFER[m], first[m], answers[m])) for m in modes},
                "host": host_times(runtime, prompts[:batch], options),
            }
        )
        progress(done)
    return rows


def _other_tokens(a: Timeline, b: Timeline) -> bool:
    return a.generation.tokens != b.generation.tokens


def _other_drafts(a: Timeline, b: Timeline) -> bool:
    x, y = a.generation.metrics, b.generation.metrics
    return _other_tokens(a, b) or x.accepted_by_slot != y.accepted_by_slot


_DIFFER = {"autoregressive": _other_tokens, "dflash": _other_drafts, "adaptive": _other_tokens}
