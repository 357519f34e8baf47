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

# Markers differ as well as colours; labels of points go to different sides.
STYLES: dict[str, dict[str, Any]] = {
    "autoregressive": {"color": ORANGE, "marker": "s", "label": "autoregressive"},
    "dflash": {"color": BLUE, "marker": "o", "label": "DFlash"},
}
_LABEL_OFFSETS = {"autoregressive": (-9, -12), "dflash": (6, 6)}  # points


def figures(levels: Sequence[Level], title: str) -> dict[str, bytes]:
    """PNG data by name: `pareto`, and `latency` where latencies were measured."""
    drawn = {"pareto": png(lambda figure: _pareto(figure, levels, title))}
    if all(level.ttft_ms for level in levels):
        drawn["latency"] = png(lambda figure: _latency(figure, levels, title))
    return drawn


def _curve(levels: Sequence[Level], mode: str) -> list[Level]:
    return sorted((x for x in levels if x.mode == mode), key=lambda x: x.concurrency)


def _finish(figure: Figure, axes: Sequence[Axes], titles: Sequence[str], x: str, y: str) -> None:
    """Titles, units, and one legend under all axes, where it hides no point."""
    for each, title in zip(axes, titles, strict=True):
        each.set_title(title, fontsize=10)
        each.set_xlabel(x)
        each.set_ylabel(y)
        each.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=2)


def _pareto(figure: Figure, levels: Sequence[Level], title: str) -> None:
    axes = figure.subplots()
    for mode, style in STYLES.items():
        curve = _curve(levels, mode)
        axes.plot([x.interactivity for x in curve], [x.throughput for x in curve], **style)
        for level in curve:
            axes.annotate(
                str(level.concurrency), (level.interactivity, level.throughput), fontsize=8,
                textcoords="offset points", xytext=_LABEL_OFFSETS[mode], color=style["color"],
            )  # fmt: skip
    axes.set_xlim(0, 1.1 * max(x.interactivity for x in levels))
    axes.set_ylim(0, 1.1 * max(x.throughput for x in levels))
    _finish(
        figure, [axes], [f"{title}\nnumbers are concurrent users"],
        "interactivity (output tokens/s per user, median)",
        "throughput (output tokens/s per device)",
    )  # fmt: skip


def _latency(figure: Figure, levels: Sequence[Level], title: str) -> None:
    axes = figure.subplots(1, 2)
    figure.suptitle(title, fontsize=10)
    for each, name in zip(axes, ("ttft_ms", "tpot_ms"), strict=True):
        for mode, style in STYLES.items():
            curve = _curve(levels, mode)
            users = [str(x.concurrency) for x in curve]
            median, late = ([getattr(x, name)[p] for x in curve] for p in ("p50", "p90"))
            each.plot(users, median, **style | {"label": f"{style['label']}, median"})
            dotted = {"linestyle": ":", "fillstyle": "none", "label": f"{style['label']}, p90"}
            each.plot(users, late, **style | dotted)
        each.set_ylim(0, 1.1 * max(getattr(x, name)["p90"] for x in levels))
    titles = ("time to first token", "time per output token")
    _finish(figure, axes, titles, "concurrent users", "milliseconds")


Rows = Sequence[Mapping[str, Any]]


def report_html(
    title: str, images: Mapping[str, bytes], tables: Mapping[str, Rows], notes: Sequence[str]
) -> str:
    """One page with the pictures inside, the tables by their titles, and the definitions."""
    pictures = "".join(
        f'<img alt="{html.escape(name)}" '
        f'src="data:image/png;base64,{base64.b64encode(data).decode()}">'
        for name, data in images.items()
    )
    shown = "".join(f"<h2>{html.escape(name)}</h2>{_table(rows)}" for name, rows in tables.items())
    notes_html = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>"
        "<style>body{font:15px/1.5 sans-serif;max-width:1200px;margin:2em auto;padding:0 1em}"
        "img{max-width:100%}div{overflow-x:auto}table{border-collapse:collapse;font-size:80%}"
        "td,th{padding:.2em .3em;text-align:right;border-bottom:1px solid #ccc}</style>"
        f"<h1>{html.escape(title)}</h1>{pictures}{shown}{notes_html}</html>"
    )


def _table(rows: Rows) -> str:
    """Columns in which nothing was measured are left out."""
    keys = [key for key in rows[0] if any(row[key] is not None for row in rows)]
    body = "".join(
        _line("td", ["-" if row[key] is None else row[key] for key in keys]) for row in rows
    )
    return f"<div><table>{_line('th', keys)}{body}</table></div>"


def _line(tag: str, cells: Sequence[Any]) -> str:
    inner = "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells)
    return f"<tr>{inner}</tr>"
