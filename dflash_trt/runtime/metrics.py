"""Counting what a generation did. Times are seconds, rates tokens per second."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dflash_trt.runtime.cycle import StepResult

if TYPE_CHECKING:
    from dflash_trt.runtime.request import Generation


@dataclass
class GenerationMetrics:
    """One request. `tokens` counts what was returned; acceptance counts what cycles committed."""

    prompt_tokens: int = 0
    tokens: int = 0
    cycles: int = 0
    committed: int = 0
    drafted: int = 0
    accepted_by_slot: list[int] = field(default_factory=list)
    drafted_by_slot: list[int] = field(default_factory=list)
    ttft: float = 0.0
    queue_seconds: float = 0.0
    decode_seconds: float = 0.0
    engine_seconds: float = 0.0
    draft_seconds: float = 0.0

    def count(self, step: StepResult) -> None:
        self.cycles += 1
        self.committed += len(step.committed)
        self.drafted += step.drafted
        self.draft_seconds += step.draft_seconds
        missing = step.drafted - len(self.drafted_by_slot)
        self.drafted_by_slot += [0] * missing
        self.accepted_by_slot += [0] * missing
        for slot in range(step.drafted):
            self.drafted_by_slot[slot] += 1
            self.accepted_by_slot[slot] += slot < step.accepted

    def add(self, other: GenerationMetrics) -> None:
        """Sum of two requests."""
        for name in ("prompt_tokens", "tokens", "cycles", "committed", "drafted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in (
            "ttft", "queue_seconds", "decode_seconds", "engine_seconds", "draft_seconds",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in (
            (self.accepted_by_slot, other.accepted_by_slot),
            (self.drafted_by_slot, other.drafted_by_slot),
        ):
            mine += [0] * (len(theirs) - len(mine))
            for slot, count in enumerate(theirs):
                mine[slot] += count

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per drafted cycle, the target's own included; 1 without drafting."""
        drafted = self.drafted_by_slot[0] if self.drafted_by_slot else 0
        return 1 + sum(self.accepted_by_slot) / drafted if drafted else float(self.cycles > 0)

    @property
    def acceptance_per_slot(self) -> list[float]:
        """For each drafted slot, the share of cycles in which it was accepted."""
        pairs = zip(self.accepted_by_slot, self.drafted_by_slot, strict=True)
        return [accepted / drafted for accepted, drafted in pairs]

    @property
    def cycles_by_committed(self) -> list[int]:
        """Drafted cycles that committed 1, 2, .. tokens, the target's own included."""
        reached = [self.drafted_by_slot[0] if self.drafted_by_slot else 0, *self.accepted_by_slot]
        return [a - b for a, b in zip(reached, [*reached[1:], 0], strict=True)]

    @property
    def time_split(self) -> dict[str, float]:
        """Seconds of the decoding in draft calls, in verify calls, and outside the engines. A
        request that shared its batch has the prefills of others under `verify`."""
        return {
            "draft": self.draft_seconds,
            "verify": self.engine_seconds - self.draft_seconds,
            "host": self.decode_seconds - self.engine_seconds,
        }

    @property
    def drafts_wasted(self) -> int:
        return self.drafted - sum(self.accepted_by_slot)

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second; the first token belongs to the prefill."""
        return (self.tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def seconds_per_cycle(self) -> float:
        return self.decode_seconds / self.cycles if self.cycles else 0.0

    @property
    def host_share(self) -> float:
        """Share of the decoding time that was spent outside the engines."""
        return 1 - self.engine_seconds / self.decode_seconds if self.decode_seconds else 0.0

    def summary(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "tokens_per_second": round(self.tokens_per_second, 2),
            "acceptance_length": round(self.acceptance_length, 3),
            "acceptance_per_slot": [round(x, 3) for x in self.acceptance_per_slot],
            "drafts_wasted": self.drafts_wasted,
            "cycles": self.cycles,
            "host_share": round(self.host_share, 4),
            "ttft_ms": round(self.ttft * 1e3, 2),
            "tpot_ms": round(1e3 / self.tokens_per_second, 3) if self.tokens_per_second else 0.0,
        }


def total(metrics: Iterable[GenerationMetrics]) -> GenerationMetrics:
    """All requests as one."""
    whole = GenerationMetrics()
    for one in metrics:
        whole.add(one)
    return whole


_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)


@dataclass
class Histogram:
    """How many values lie up to each bound and above the one before; the last count is beyond all."""

    bounds: tuple[float, ...] = _SECONDS
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass
class RuntimeMetrics:
    """All requests of one runtime. Counters only grow; queued, slots_used and tokens_cached are as
    of the last cycle; cache_bytes is what all slots take. Histograms hold seconds: queue and ttft of
    each request that got so far, tpot of each with two tokens or more, cycles of the engines' part
    of every cycle, by the tokens of its blocks (c is the mean of one width over that of 1)."""

    slots: int
    block: int
    cache_bytes: int
    queued: int = 0
    slots_used: int = 0
    tokens_cached: int = 0
    refused: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    acceptance: Counter[int] = field(default_factory=Counter)
    requests: GenerationMetrics = field(default_factory=GenerationMetrics)
    recent: deque[GenerationMetrics] = field(default_factory=lambda: deque(maxlen=1024))
    queue: Histogram = field(default_factory=Histogram)
    ttft: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    cycles: defaultdict[int, Histogram] = field(default_factory=lambda: defaultdict(Histogram))

    def count(self, step: StepResult) -> None:
        """One lane of one cycle; `acceptance` counts drafted lanes by tokens they committed."""
        if step.drafted:
            self.acceptance[len(step.committed)] += 1

    def finish(self, generation: Generation) -> None:
        self.finished[str(generation.finish_reason)] += 1
        m = generation.metrics
        self.requests.add(m)
        self.recent.append(m)
        if m.queue_seconds:
            self.queue.observe(m.queue_seconds)
        if m.ttft:
            self.ttft.observe(m.ttft)
        if m.tokens > 1:
            self.tpot.observe(m.decode_seconds / (m.tokens - 1))

    def summary(self) -> dict[str, Any]:
        """The figures of `GenerationMetrics.summary` over all finished requests, and the state."""
        return {
            "finished": dict(self.finished),
            "refused": self.refused,
            "queued": self.queued,
            "slots": self.slots,
            "slots_used": self.slots_used,
            "tokens_cached": self.tokens_cached,
            "cache_bytes": self.cache_bytes,
            "acceptance_histogram": dict(sorted(self.acceptance.items())),
            **self.requests.summary(),
        }
