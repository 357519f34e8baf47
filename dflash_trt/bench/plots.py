"""Pictures of a concurrency sweep: PNG files, and one HTML file that needs no network."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflash_trt.bench.figure import BLUE, ORANGE, png
from dflash_trt.bench.interactivity import Level

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Markers differ as well as colours.
STYLES: dict[str, dict[str, Any]] = {
    "autoregressive": {"color": ORANGE, "marker": "s", "label": "autoregressive"},
    "dflash": {"color": BLUE, "marker": "o", "label": "DFlash"},
}


def figures(levels: Sequence[Level], title: str) -> dict[str, bytes]:
    """PNG data by name: `pareto`, and `latency` where latencies were measured."""
    drawn = {"pareto": png(lambda figure: _pareto(figure, levels, title))}
    if all(level.ttft_ms for level in levels):
        drawn["latency"] = png(lambda figure: _latency(figure, levels, title))
    return drawn


def _curve(levels: Sequence[Level], mode: str) -> list[Level]:
    return sorted((x for x in levels if x.mode == mode), key=lambda x: x.concurrency)


def _finish(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _pareto(figure: Figure, levels: Sequence[Level], title: str) -> None:
    axes = figure.subplots()
    for mode, style in STYLES.items():
        curve = _curve(levels, mode)
        axes.plot([x.interactivity for x in curve], [x.throughput for x in curve], **style)
        for level in curve:
            axes.annotate(
                str(level.concurrency), (level.interactivity, level.throughput),
                textcoords="offset points", xytext=(6, 6), fontsize=8, color=style["color"],
            )  # fmt: skip
    axes.margins(0.1)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    _finish(
        axes,
        f"{title}\nnumbers are concurrent users",
        "interactivity (output tokens/s per user, median)",
        "throughput (output tokens/s per device)",
    )


def _latency(figure: Figure, levels: Sequence[Level], title: str) -> None:
    left, right = figure.subplots(1, 2)
    figure.suptitle(title, fontsize=10)
    for axes, name, what in (
        (left, "ttft_ms", "time to first token"),
        (right, "tpot_ms", "time per output token"),
    ):
        for mode, style in STYLES.items():
            curve = _curve(levels, mode)
            users = [str(x.concurrency) for x in curve]
            axes.plot(users, [getattr(x, name)["p50"] for x in curve], **style)
            axes.plot(
                users, [getattr(x, name)["p90"] for x in curve],
                color=style["color"], linestyle=":", label=f"{style['label']}, p90",
            )  # fmt: skip
        axes.set_ylim(bottom=0)
        _finish(axes, what, "concurrent users", "milliseconds (line: median)")


def report_html(
    title: str, images: Mapping[str, bytes], rows: Sequence[Mapping[str, Any]], notes: Sequence[str]
) -> str:
    """One page with the pictures inside, the table, and the definitions."""
    pictures = "".join(
        f'<img alt="{html.escape(name)}" '
        f'src="data:image/png;base64,{base64.b64encode(data).decode()}">'
        for name, data in images.items()
    )
    head = "".join(f"<th>{html.escape(str(key))}</th>" for key in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(v))}</td>" for v in row.values()) + "</tr>"
        for row in rows
    )
    notes_html = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>"
        "<style>body{font:15px/1.5 sans-serif;max-width:1000px;margin:2em auto;padding:0 1em}"
        "img{max-width:100%}table{border-collapse:collapse}"
        "td,th{padding:.2em .6em;text-align:right;border-bottom:1px solid #ccc}</style>"
        f"<h1>{html.escape(title)}</h1>{pictures}<table><tr>{head}</tr>{body}</table>{notes_html}</html>"
    )
