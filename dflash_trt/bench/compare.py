"""Measuring an engine: drafting against plain decoding of the same engine, prompt by prompt."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_trt.engines.onnxruntime_ranks import RankPair
from dflash_trt.runtime.generate import Generation, GenerationOptions, Runtime
from dflash_trt.runtime.loops import loops
from dflash_trt.runtime.metrics import GenerationMetrics, total


@dataclass
class Comparison:
    """Results of a run over prompts; `plain` is empty unless plain decoding was measured too.
    traffic: of the drafted answers, where ranks share the target (see `RankPair`)."""

    drafted: list[Generation] = field(default_factory=list)
    plain: list[Generation] = field(default_factory=list)
    traffic: Counter[str] = field(default_factory=Counter)

    def report(self) -> dict[str, Any]:
        """The figures; rates in tokens per second, times in milliseconds."""
        d = total(g.metrics for g in self.drafted)
        summary = d.summary()
        report: dict[str, Any] = {
            "prompts": len(self.drafted),
            "tokens": d.tokens,
            "acceptance_length": summary["acceptance_length"],
            "acceptance_per_slot": summary["acceptance_per_slot"],
            "drafts_wasted": d.drafts_wasted,
            "host_share": summary["host_share"],
            "cycles_by_committed": d.cycles_by_committed,
            "ms_per_cycle": _ms_per_cycle(d),
            "tokens_per_second": {"dflash": round(_rate(self.drafted), 2)},
            "ttft_ms": round(d.ttft / len(self.drafted) * 1e3, 2),
            "tpot_ms": round(1e3 / _rate(self.drafted), 3),
        }
        straight = [g for g in self.drafted if not loops(g.tokens)]
        without = total(g.metrics for g in straight)
        report |= {
            "answers_that_loop": len(self.drafted) - len(straight),
            "acceptance_length_without_loops": without.summary()["acceptance_length"],
        }
        if self.traffic:
            report["communication_per_cycle"] = {
                kind: round(count / self.traffic["cycles"], 2)
                for kind, count in self.traffic.items()
                if kind != "cycles"
            }
        if self.plain:
            report |= self._against_plain(d)
        return report | {"peak_memory_mb": round(peak_memory() / 1e6)}

    def _against_plain(self, drafted: GenerationMetrics) -> dict[str, Any]:
        plain = total(g.metrics for g in self.plain)
        rates = {"autoregressive": _rate(self.plain), "dflash": _rate(self.drafted)}
        return {
            "tokens_per_second": {key: round(rate, 2) for key, rate in rates.items()},
            "ms_per_plain_step": _ms_per_cycle(plain),
            "cycle_cost": round(drafted.seconds_per_cycle / plain.seconds_per_cycle, 3),
            "speedup": round(rates["dflash"] / rates["autoregressive"], 3),
            "lossless": {"prompts": len(self.plain), "different": len(self.differences())},
        }

    def differences(self) -> list[tuple[int, int]]:
        """(prompt, position) of the first token that differs, for each prompt that differs."""
        found = []
        for index, (a, b) in enumerate(zip(self.drafted, self.plain, strict=True)):
            if a.tokens != b.tokens:
                same = [x == y for x, y in zip(a.tokens, b.tokens, strict=False)]
                found.append((index, same.index(False) if False in same else len(same)))
        return found


def top_gap(runtime: Runtime, ids: Sequence[int]) -> float:
    """How far the two largest logits behind `ids` are apart; 0 would be a tie."""
    options = GenerationOptions(1, draft=False, logprobs=2, ignore_eos=True)
    (position,) = runtime.generate(ids, options).logprobs
    (_, first), (_, second) = position.top
    return first - second


def peak_memory() -> int:
    """Most bytes that this process has held resident, mapped weights included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux


def _ms_per_cycle(metrics: GenerationMetrics) -> dict[str, float]:
    """Where the time of a mean cycle goes; a plain step is a verify call of one row."""
    count = max(metrics.cycles, 1)
    return {name: round(s / count * 1e3, 3) for name, s in metrics.time_split.items()}


def _rate(generations: Sequence[Generation]) -> float:
    """Decoded tokens per second over all requests; first tokens belong to the prefills."""
    tokens = sum(max(g.metrics.tokens - 1, 0) for g in generations)
    return tokens / sum(g.metrics.decode_seconds for g in generations)


def compare(
    runtime: Runtime,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    plain: bool,
    progress: Callable[[int], None] = lambda _: None,
) -> Comparison:
    """Run every prompt drafted, and plain right behind it so that both see the same machine."""
    result = Comparison()
    baseline = GenerationOptions(options.max_tokens, draft=False, ignore_eos=options.ignore_eos)
    _warm_up(runtime, prompts[0], options, baseline)
    for index, prompt in enumerate(prompts):
        before = _traffic(runtime)
        result.drafted.append(runtime.generate(prompt, options))
        result.traffic += _traffic(runtime) - before
        if plain:
            result.plain.append(runtime.generate(prompt, baseline))
        progress(index + 1)
    return result


def _traffic(runtime: Runtime) -> Counter[str]:
    engines = runtime.engines
    return +engines.traffic if isinstance(engines, RankPair) else Counter()


def _warm_up(
    runtime: Runtime, prompt: Sequence[int], *options: GenerationOptions, tokens: int = 16
) -> None:
    for o in options:
        runtime.generate(prompt, GenerationOptions(tokens, o.draft, o.width))
