"""The pictures and the page of a concurrency sweep."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes

from dflash_trt.bench import plots
from dflash_trt.bench.interactivity import Level
from tests.bench.drawn import draw_instead, line, words


def level(mode: str, users: int, tpot: float, tokens: int) -> Level:
    times = {"p50": tpot, "p90": 2 * tpot}
    return Level(mode, users, 4, 0, 1.0, 0, tokens, None, {"p50": 7.0, "p90": 9.0}, times, times)


LEVELS = [
    level("autoregressive", 4, 20.0, 200),
    level("autoregressive", 1, 10.0, 100),
    level("dflash", 1, 5.0, 190),
    level("dflash", 4, 16.0, 300),
]


def test_curves_are_drawn_by_mode_and_concurrency(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = draw_instead(monkeypatch, plots)
    assert list(plots.figures(LEVELS, "what this is")) == ["pareto", "latency"]
    (pareto,), (ttft, tpot) = (figure.axes for figure in drawn)
    assert line(pareto, 0) == [(100, 100), (50, 200)]
    assert line(pareto, 1) == [(200, 190), (62.5, 300)]
    assert [text.get_text() for text in pareto.texts] == ["1", "4", "1", "4"]
    assert [y for _, y in line_values(tpot)] == [[10, 20], [20, 40], [5, 16], [10, 32]]
    assert [y for _, y in line_values(ttft)] == [[7, 7], [9, 9]] * 2
    for figure in drawn:
        assert "what this is" in words(figure)
        assert "autoregressive" in words(figure)
    for axes, x, y in (
        (pareto, "tokens/s per user", "tokens/s per device"),
        (ttft, "concurrent users", "milliseconds"),
    ):
        assert x in axes.get_xlabel()
        assert y in axes.get_ylabel()
    for axes in (pareto, ttft, tpot):
        for x, y in (point for i in range(len(axes.lines)) for point in line(axes, i)):
            assert axes is not pareto or 0 < x < 0.95 * axes.get_xlim()[1]
            assert 0 < y < 0.95 * axes.get_ylim()[1]


def test_lines_of_latency_say_which_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = draw_instead(monkeypatch, plots)
    plots.figures(LEVELS, "")
    for axes in drawn[1].axes:
        assert [drawn.get_label() for drawn in axes.lines] == [
            "autoregressive, median", "autoregressive, p90", "DFlash, median", "DFlash, p90",
        ]  # fmt: skip


def line_values(axes: Axes) -> list[tuple[list, list]]:
    return [tuple(map(list, drawn.get_data())) for drawn in axes.lines]


def test_a_single_point_lies_within_the_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = draw_instead(monkeypatch, plots)
    plots.figures(LEVELS[1:3], "one user")
    (axes,) = drawn[0].axes
    for x, y in (*line(axes, 0), *line(axes, 1)):
        assert 0 < x < 0.95 * axes.get_xlim()[1]
        assert 0 < y < 0.95 * axes.get_ylim()[1]


def test_the_page_needs_no_network_and_shows_what_there_is() -> None:
    rows = [
        {"mode": "<plain>", "input": None, "rate": 1.5},
        {"mode": "b", "input": None, "rate": None},
    ]
    page = plots.report_html("a & b", {"pareto": b"png"}, {"levels": rows}, ["what it means"])
    for part in (
        "<h1>a &amp; b</h1>", "data:image/png;base64,cG5n", "<h2>levels</h2>",
        "<tr><th>mode</th><th>rate</th></tr>", "<td>&lt;plain&gt;</td><td>1.5</td>",
        "<td>b</td><td>-</td>", "<p>what it means</p>",
    ):  # fmt: skip
        assert part in page
    for outside in ("http", 'src="/', "<script", "<link"):
        assert outside not in page
