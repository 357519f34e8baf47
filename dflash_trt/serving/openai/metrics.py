"""The runtime's counters in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dflash_trt.runtime.metrics import Histogram, RuntimeMetrics

_GAUGES = (
    ("requests_waiting", "queued", "Requests that wait for a slot"),
    ("slots", "slots", "Sequences that are decoded together at most"),
    ("slots_used", "slots_used", "Slots in use"),
    ("kv_cache_tokens", "tokens_cached", "Tokens in the caches of all slots"),
    ("kv_cache_bytes", "cache_bytes", "Memory of the caches of all slots"),
)
_COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Tokens of prompts"),
    ("generation_tokens", "tokens", "Tokens returned"),
    ("cycles", "cycles", "Draft and verify cycles, counted per sequence"),
    ("draft_tokens", "drafted", "Tokens drafted"),
    ("wasted_draft_tokens", "drafts_wasted", "Tokens drafted and not accepted"),
    ("decode_seconds", "decode_seconds", "Seconds from the first token to the last"),
)
_TIMES = (
    ("queue_time_seconds", "queue", "From submission to a slot"),
    ("time_to_first_token_seconds", "ttft", "From submission to the first token"),
    ("time_per_output_token_seconds", "tpot", "Per token behind the first, of each request"),
)


class RuntimeCollector(Collector):
    """Counts of finished requests, and of cycles; gauges are as of the last cycle."""

    def __init__(self, metrics: RuntimeMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        m = self._metrics
        for name, field, text in _GAUGES:
            yield GaugeMetricFamily(f"dflash_{name}", text, getattr(m, field))
        for name, field, text in _COUNTERS:
            yield CounterMetricFamily(f"dflash_{name}", text, getattr(m.requests, field))
        yield CounterMetricFamily("dflash_requests_refused", "Requests refused: full", m.refused)
        yield _counted("requests_finished", "Requests ended", "reason", m.finished.copy())
        for name, counts in (
            ("draft_tokens_per_position", m.requests.drafted_by_slot),
            ("accepted_tokens_per_position", m.requests.accepted_by_slot),
        ):
            places = dict(enumerate(list(counts), 1))
            yield _counted(name, "Drafted tokens by their place in the block", "position", places)
        text = "Tokens that a drafted block committed, the target's own included"
        yield _histograms("acceptance_length", text, {(): _by_length(m.acceptance.copy(), m.block)})
        for name, field, text in _TIMES:
            yield _histograms(name, text, {(): getattr(m, field)})
        cycles: dict[Sequence[str], Histogram] = {
            (str(width),): h for width, h in sorted(m.cycles.copy().items())
        }
        text = "Engine time of a cycle, by the tokens of its blocks; 1 is no drafting"
        yield _histograms("cycle_seconds", text, cycles, ("width",))


def _counted(name: str, text: str, label: str, values: Mapping) -> CounterMetricFamily:
    family = CounterMetricFamily(f"dflash_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([str(key)], value)
    return family


def _by_length(acceptance: Counter[int], block: int) -> Histogram:
    """A bucket for every length that a block may have."""
    histogram = Histogram(tuple(range(1, block + 1)))
    for length, count in acceptance.items():
        histogram.counts[length - 1] += count
        histogram.sum += length * count
    return histogram


def _histograms(
    name: str,
    text: str,
    histograms: Mapping[Sequence[str], Histogram],
    labels: Sequence[str] = (),
) -> HistogramMetricFamily:
    """A histogram for each value of the labels; buckets are cumulative, as the format wants."""
    family = HistogramMetricFamily(f"dflash_{name}", text, labels=labels)
    for values, h in histograms.items():
        bounds = [floatToGoString(bound) for bound in (*h.bounds, float("inf"))]
        family.add_metric(values, list(zip(bounds, accumulate(h.counts), strict=True)), h.sum)
    return family


def exposition(metrics: RuntimeMetrics) -> bytes:
    """The page that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RuntimeCollector(metrics))
    return generate_latest(registry)
