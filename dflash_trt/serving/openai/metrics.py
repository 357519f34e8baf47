"""The runtime's counters in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dflash_trt.runtime.metrics import RuntimeMetrics

_GAUGES = (
    ("queued", "Requests that wait for a slot"),
    ("slots", "Sequences that are decoded together at most"),
    ("slots_used", "Slots in use"),
    ("tokens_cached", "Tokens in the caches of all slots"),
    ("cache_bytes", "Memory of the caches of all slots"),
)
_COUNTERS = (
    ("prompt_tokens", "Tokens of prompts"),
    ("tokens", "Tokens returned"),
    ("cycles", "Draft and verify cycles, counted per sequence"),
    ("committed", "Tokens committed by cycles; divided by cycles: the acceptance length"),
    ("drafted", "Tokens drafted"),
    ("queue_seconds", "Time between submission and slot"),
    ("ttft", "Seconds to the first token"),
    ("decode_seconds", "Seconds from the first token to the last"),
)


class RuntimeCollector(Collector):
    """Counts of finished requests; gauges are as of the last cycle."""

    def __init__(self, metrics: RuntimeMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        m = self._metrics
        for name, text in _GAUGES:
            yield GaugeMetricFamily(f"dflash_{name}", text, getattr(m, name))
        for name, text in _COUNTERS:
            yield CounterMetricFamily(f"dflash_{name}", text, getattr(m.requests, name))
        yield CounterMetricFamily("dflash_refused", "Requests refused, queue full", m.refused)
        yield _labelled("finished", "Requests ended", "reason", m.finished.copy())
        for name in ("drafted_by_slot", "accepted_by_slot"):
            values = dict(enumerate(list(getattr(m.requests, name)), 1))
            yield _labelled(name, "Tokens by their place in the block", "slot", values)


def _labelled(name: str, text: str, label: str, values: dict) -> CounterMetricFamily:
    family = CounterMetricFamily(f"dflash_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([str(key)], value)
    return family


def exposition(metrics: RuntimeMetrics) -> bytes:
    """The page that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RuntimeCollector(metrics))
    return generate_latest(registry)
