"""Sweeping concurrency: what each user gets, and what the device gives, with and without drafting.

Definitions, per request: TTFT, seconds from submission to the first token; TPOT, (end-to-end - TTFT)
/ (output tokens - 1); interactivity, 1 / TPOT, tokens per second and user; inter-chunk latency, the
seconds between two deliveries, of one or more tokens each. Per level: output throughput, output
tokens of all requests over the wall time of the level. Tokens are counted, never deliveries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_trt.errors import InputError
from dflash_trt.planner.interactivity import throughput_at
from dflash_trt.runtime.generate import Generation, GenerationOptions, Prompt

if TYPE_CHECKING:
    from dflash_trt.bench.endpoints import Endpoint

PERCENTILES = (50, 90, 99)


@dataclass
class Timeline:
    """One request: when it was submitted and when how many tokens arrived. counted: tokens of the
    whole answer, from a server that does not count them by chunk; failure: why it failed."""

    generation: Generation = field(default_factory=Generation)
    submitted: float = field(default_factory=perf_counter)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    counted: int | None = None
    failure: str | None = None

    @property
    def tokens(self) -> int:
        if self.counted is not None:
            return self.counted
        return sum(count for _, count in self.arrivals)

    @property
    def ttft(self) -> float:
        return self.arrivals[0][0] - self.submitted

    @property
    def tpot(self) -> float | None:
        """None where there is only one token."""
        if self.tokens < 2:
            return None
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        times = [time for time, _ in self.arrivals]
        return [b - a for a, b in pairwise(times)]


@dataclass(frozen=True)
class Level:
    """One concurrency in one mode. Times in milliseconds, rates in tokens per second."""

    mode: str
    concurrency: int
    requests: int
    failed: int
    seconds: float
    input_tokens: int
    output_tokens: int
    acceptance_length: float | None
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    inter_chunk_ms: dict[str, float]

    @property
    def throughput(self) -> float:
        """Output tokens per second of the device."""
        return self.output_tokens / self.seconds

    @property
    def total_throughput(self) -> float:
        """Input and output tokens per second of the device."""
        return (self.input_tokens + self.output_tokens) / self.seconds

    @property
    def interactivity(self) -> float:
        """Tokens per second and user, from the median TPOT."""
        return 1e3 / self.tpot_ms["p50"]

    def row(self) -> dict[str, Any]:
        """All figures; None where there is none, as for requests and input of what is modelled."""
        times = {
            f"{what} {p}": getattr(self, name).get(p)
            for what, name in (
                ("TTFT", "ttft_ms"),
                ("TPOT", "tpot_ms"),
                ("chunk", "inter_chunk_ms"),
            )
            for p in ("p50", "p90", "p99")
        }
        measured = self.requests > 0
        served = self.requests - self.failed
        return {
            "mode": self.mode,
            "users": self.concurrency,
            "input": round(self.input_tokens / served) if served else None,
            "requests": self.requests if measured else None,
            "failed": self.failed if measured else None,
            "tok/s/user": round(self.interactivity, 1),
            "out tok/s": round(self.throughput, 1),
            "all tok/s": round(self.total_throughput, 1) if measured else None,
            "accept": self.acceptance_length,
            **times,
        }


def sweep(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    concurrencies: Sequence[int],
    options: GenerationOptions,
    per_user: int = 2,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Level]:
    """Every concurrency, plain and drafted right behind each other so that both see the same machine.

    Each level runs `per_user` requests per concurrent user, at least 4, after a warm-up.
    """
    _check_slots(concurrencies, endpoint.slots)
    levels = []
    for concurrency in concurrencies:
        count = max(4, per_user * concurrency)
        chosen = [prompts[i % len(prompts)] for i in range(count)]
        for mode, wanted in both_modes(options).items():
            progress(f"concurrency {concurrency}, {mode}")
            run_level(endpoint, chosen[:concurrency], concurrency, short(wanted))
            seconds, lines = run_level(endpoint, chosen, concurrency, wanted)
            if all(line.failure is not None for line in lines):
                raise InputError(f"concurrency {concurrency}, {mode}: {lines[0].failure}")
            levels.append(summarise(mode, concurrency, seconds, lines))
    return levels


def both_modes(options: GenerationOptions) -> dict[str, GenerationOptions]:
    """What is measured against each other."""
    plain = GenerationOptions(options.max_tokens, draft=False, ignore_eos=options.ignore_eos)
    return {"autoregressive": plain, "dflash": options}


def short(options: GenerationOptions) -> GenerationOptions:
    """The same for a warm-up."""
    return replace(options, max_tokens=8, ignore_eos=True)


def _check_slots(concurrencies: Sequence[int], slots: int | None) -> None:
    for users in concurrencies:
        if users < 1:
            raise InputError(f"concurrency {users}: must be 1 or more")
        if slots is not None and users > slots:
            raise InputError(f"concurrency {users}: this engine has {slots} slots (--max-batch)")


def run_level(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    concurrency: int,
    options: GenerationOptions,
) -> tuple[float, list[Timeline]]:
    """Keep `concurrency` requests in flight until all prompts are answered; (seconds, timelines)."""
    finished: SimpleQueue[None] = SimpleQueue()
    begin = perf_counter()
    lines = []
    for index, prompt in enumerate(prompts):
        if index >= concurrency:
            finished.get()
        lines.append(endpoint.submit(prompt, options, lambda: finished.put(None)))
    for _ in range(min(concurrency, len(prompts))):
        finished.get()
    return perf_counter() - begin, lines


def summarise(mode: str, concurrency: int, seconds: float, lines: Sequence[Timeline]) -> Level:
    good = [line for line in lines if line.failure is None and line.arrivals]
    cycles = sum(line.generation.metrics.cycles for line in good)
    committed = sum(line.generation.metrics.committed for line in good)
    return Level(
        mode=mode,
        concurrency=concurrency,
        requests=len(lines),
        failed=len(lines) - len(good),
        seconds=seconds,
        input_tokens=sum(line.generation.metrics.prompt_tokens for line in good),
        output_tokens=sum(line.tokens for line in good),
        acceptance_length=round(committed / cycles, 3) if mode == "dflash" and cycles else None,
        ttft_ms=_percentiles([line.ttft for line in good]),
        tpot_ms=_percentiles([line.tpot for line in good if line.tpot is not None]),
        inter_chunk_ms=_percentiles([gap for line in good for gap in line.gaps]),
    )


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds; empty where there is nothing to count."""
    if not seconds:
        return {}
    values = np.percentile(np.asarray(seconds) * 1e3, PERCENTILES)
    return {f"p{p}": round(float(v), 2) for p, v in zip(PERCENTILES, values, strict=True)}


def comparison(levels: Sequence[Level]) -> list[dict[str, float | None]]:
    """For each concurrency the ratio of throughputs at equal concurrency, and at the interactivity
    that drafting gives there; None where plain decoding serves nobody at it."""
    plain, drafted = ([x for x in levels if x.mode == m] for m in ("autoregressive", "dflash"))
    end = max(level.interactivity for level in plain)
    rows: list[dict[str, float | None]] = []
    for a, b in zip(plain, drafted, strict=True):
        there = throughput_at(plain, b.interactivity)
        rows.append(
            {
                "users": b.concurrency,
                "equal concurrency": round(b.throughput / a.throughput, 3),
                "at tok/s/user": round(b.interactivity, 1),
                "equal interactivity": round(b.throughput / there, 3) if there else None,
                "plain ends at": round(end, 1),
            }
        )
    return rows
