"""What the host adds to a cycle, with text made beside the engines and after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from statistics import median
from time import perf_counter
from typing import TypeVar

from dflash_trt.runtime.cycle import EnginePair
from dflash_trt.runtime.generate import GenerationOptions, Runtime
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.scheduler import Scheduler

_Result = TypeVar("_Result")


def host_times(
    runtime: Runtime, prompts: Sequence[Sequence[int]], options: GenerationOptions
) -> dict[str, dict[str, float]]:
    """Median milliseconds of a cycle, and of what of it lies outside the engines' calls, where text
    is made `after` and `beside` them; all `prompts` decode together.

    Cycles of one run take one or the other by lot, so that both see the same machine and tokens.
    """
    scheduler = TwoWays(runtime.engines)
    for prompt in prompts:
        scheduler.submit(
            Request(prompt, options, runtime.engines, runtime.codec, lambda delta: None)
        )
    while scheduler.busy:
        scheduler.step()
    return {
        name: {
            "cycle_ms": round(1e3 * median(cycle for cycle, _ in steps), 3),
            "host_ms": round(1e3 * median(host for _, host in steps), 3),
        }
        for name, steps in (("after", scheduler.after), ("beside", scheduler.beside))
        if steps
    }


class TwoWays(Scheduler):
    """A scheduler that tells after the engines' calls in about half of its steps. after, beside:
    (seconds, of them outside the engines) of the steps that only decoded."""

    def __init__(self, engines: EnginePair) -> None:
        super().__init__(engines, queue_limit=engines.manifest.max_batch)
        self.after: list[tuple[float, float]] = []
        self.beside: list[tuple[float, float]] = []
        self._lot, self._waits = Random(0), False

    def step(self) -> None:
        self._waits = self._lot.random() < 0.5
        decodes = bool(self._decoding) and not (self.queued or self._prefilling)
        begin, before = perf_counter(), self._cycle.engine_seconds
        super().step()
        seconds = perf_counter() - begin
        if decodes:
            steps = self.after if self._waits else self.beside
            steps.append((seconds, seconds - (self._cycle.engine_seconds - before)))

    def _run(self, call: Callable[[], _Result]) -> _Result:
        if not self._waits:
            return super()._run(call)
        result = call()
        self._tell()
        return result
