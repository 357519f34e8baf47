"""The page for Prometheus, read with its own parser."""

from __future__ import annotations

from itertools import pairwise

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from dflash_trt.runtime.metrics import Histogram
from dflash_trt.runtime.options import GenerationOptions
from dflash_trt.runtime.scheduler import Scheduler
from dflash_trt.serving.openai.metrics import exposition
from tests.runtime.drive import Driven
from tests.runtime.toy import ToyPair, as_engines


@pytest.fixture(scope="module")
def scheduler() -> Scheduler:
    """Behind three drafted requests, a plain one, and one that was cancelled while it waited."""
    toy = ToyPair(slots=2)
    scheduler = Scheduler(as_engines(toy))
    wishes = [GenerationOptions(30, ignore_eos=True, draft=draft) for draft in (1, 1, 1, 0, 1)]
    driven = [Driven(toy, [i + 1], wish) for i, wish in enumerate(wishes)]
    for one in driven:
        scheduler.submit(one.request)
    driven[-1].request.cancelled = True
    while scheduler.busy:
        scheduler.step()
    return scheduler


@pytest.fixture(scope="module")
def page(scheduler: Scheduler) -> dict[str, Metric]:
    text = exposition(scheduler.metrics).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(family: Metric, end: str, **labels: str) -> float:
    name = family.name + end
    (found,) = (s.value for s in family.samples if s.name == name and s.labels == labels)
    return found


def test_names_follow_the_conventions(page: dict[str, Metric]) -> None:
    for name, family in page.items():
        assert name.startswith("dflash_")
        assert family.documentation
        assert ("second" in name or "time" in name) == name.endswith("_seconds")


def test_histograms_are_cumulative_and_add_up(page: dict[str, Metric]) -> None:
    histograms = [family for family in page.values() if family.type == "histogram"]
    assert len(histograms) == 5
    for family in histograms:
        for width in ({"width": "6"}, {"width": "1"}, {}):
            buckets = [
                (float(s.labels["le"]), s.value)
                for s in family.samples
                if s.name.endswith("_bucket") and s.labels == {**width, "le": s.labels["le"]}
            ]
            if not buckets:
                continue
            assert all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(buckets))
            assert buckets[-1] == (float("inf"), value(family, "_count", **width))
            assert value(family, "_sum", **width) > 0


def test_a_value_belongs_to_the_first_bound_that_it_does_not_exceed() -> None:
    histogram = Histogram((1.0, 2.0))
    for number in (0.5, 1.0, 1.5, 2.0, 2.5, 9.0):
        histogram.observe(number)
    assert (histogram.counts, histogram.sum) == ([2, 2, 2], 16.5)


def test_figures_are_those_of_the_runtime(scheduler: Scheduler, page: dict[str, Metric]) -> None:
    m = scheduler.metrics
    length = page["dflash_acceptance_length"]
    mean = value(length, "_sum") / value(length, "_count")
    assert mean == pytest.approx(m.requests.acceptance_length) != 1
    assert value(length, "_count") == m.requests.drafted_by_slot[0]
    for name, requests in (
        ("queue_time", 4), ("time_to_first_token", 4), ("time_per_output_token", 4),
    ):  # fmt: skip
        assert value(page[f"dflash_{name}_seconds"], "_count") == requests
    ttft = page["dflash_time_to_first_token_seconds"]
    assert value(ttft, "_sum") == pytest.approx(m.requests.ttft)
    for length in range(1, 7):
        bucket = sum(count for committed, count in m.acceptance.items() if committed <= length)
        assert value(page["dflash_acceptance_length"], "_bucket", le=f"{length}.0") == bucket
    queued = page["dflash_queue_time_seconds"]
    assert value(queued, "_sum") == pytest.approx(m.requests.queue_seconds)
    tpot = [r.decode_seconds / (r.tokens - 1) for r in m.recent if r.tokens]
    assert value(page["dflash_time_per_output_token_seconds"], "_sum") == pytest.approx(sum(tpot))
    assert {s.labels["width"] for s in page["dflash_cycle_seconds"].samples} == {"1", "6"}
    tokens = page["dflash_generation_tokens"]
    assert value(tokens, "_total") == 4 * 30
    finished = page["dflash_requests_finished"]
    assert value(finished, "_total", reason="length") == 4
    assert value(finished, "_total", reason="cancelled") == 1
    drafts = page["dflash_draft_tokens"]
    places = page["dflash_draft_tokens_per_position"]
    accepted = page["dflash_accepted_tokens_per_position"]
    assert sum(s.value for s in places.samples) == value(drafts, "_total")
    wasted = value(drafts, "_total") - sum(s.value for s in accepted.samples)
    assert value(page["dflash_wasted_draft_tokens"], "_total") == wasted
    assert value(page["dflash_slots"], "") == 2
