"""The picture of `bench --report`."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from dflash_trt.bench import acceptance
from dflash_trt.runtime.metrics import GenerationMetrics
from tests.bench.drawn import bars, draw_instead, line, words


def test_the_report_draws_what_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 cycles with three drafts each: 80 accepted the first, 40 the second, 10 the third."""
    figures = draw_instead(monkeypatch, acceptance)
    metrics = GenerationMetrics(
        tokens=231, cycles=100, committed=230, drafted=300, accepted_by_slot=[80, 40, 10],
        drafted_by_slot=[100, 100, 100], decode_seconds=4.0, engine_seconds=3.5, draft_seconds=1.0,
    )  # fmt: skip
    acceptance.acceptance_png(metrics, "an engine")
    (figure,) = figures
    slots, lengths, times = figure.axes
    assert bars(slots) == [80, 40, 10]
    assert line(slots) == [(1, 80), (2, 50), (3, 25)]
    assert bars(lengths) == [20, 40, 30, 10]
    assert line(lengths)[0][0] == pytest.approx(2.3)
    assert bars(times) == [10, 25, 5]  # draft, verify, host
    for shown in (
        "an engine", "draft 10.00 ms, 25.0%", "verify 25.00 ms, 62.5%", "host 5.00 ms, 12.5%",
        "acceptance length 2.30", "accepted (% of cycles)", "milliseconds",
    ):  # fmt: skip
        assert shown in words(figure)


def test_a_share_of_few_cycles_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = draw_instead(monkeypatch, acceptance)
    metrics = GenerationMetrics(
        cycles=30, committed=60, drafted=60, accepted_by_slot=[19, 11], drafted_by_slot=[30, 30]
    )
    acceptance.acceptance_png(metrics, "")
    assert line(figures[0].axes[0]) == [(1, pytest.approx(100 * 19 / 30))]
