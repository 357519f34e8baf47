"""One picture of what drafting did: acceptance per slot, accepted lengths, where the time went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash_trt.bench.figure import BLUE, GREY, ORANGE, png
from dflash_trt.runtime.metrics import GenerationMetrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ENOUGH = 20  # cycles; a share of fewer is not drawn


def acceptance_png(metrics: GenerationMetrics, title: str) -> bytes:
    """PNG data; `metrics` are the sum over all drafted requests."""

    def draw(figure: Figure) -> None:
        slots, lengths, times = figure.subplots(1, 3, width_ratios=(4, 4, 3))
        figure.suptitle(title, fontsize=11)
        _slots(slots, metrics)
        _lengths(lengths, metrics)
        _times(times, metrics)

    return png(draw, width=11, height=3.8)


def _slots(axes: Axes, metrics: GenerationMetrics) -> None:
    """Two readings of suffix decay: of all cycles, and of those that accepted everything before."""
    rates = metrics.acceptance_per_slot
    slots = range(1, len(rates) + 1)
    _bars(axes, slots, [100 * rate for rate in rates], BLUE)
    reached = list(zip(metrics.drafted_by_slot[:1] + metrics.accepted_by_slot, slots, strict=False))
    often = [slot for cycles, slot in reached if cycles >= _ENOUGH]
    given = [100 * metrics.accepted_by_slot[s - 1] / reached[s - 1][0] for s in often]
    axes.plot(often, given, color=ORANGE, marker="s", label="of cycles that accepted all before")
    axes.set_ylim(0, 115)
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    _label(axes, "suffix decay", "drafted slot", "accepted (% of cycles)")


def _lengths(axes: Axes, metrics: GenerationMetrics) -> None:
    counts = metrics.cycles_by_committed
    shares = [100 * count / max(sum(counts), 1) for count in counts]
    _bars(axes, range(1, len(counts) + 1), shares, BLUE)
    mean = metrics.acceptance_length
    axes.axvline(  # behind the bars and their numbers
        mean, color=ORANGE, linestyle="--", zorder=0.5, label=f"acceptance length {mean:.2f}"
    )
    axes.margins(y=0.15)
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    _label(axes, "tokens committed by a cycle", "tokens, the target's own included", "% of cycles")


def _times(axes: Axes, metrics: GenerationMetrics) -> None:
    """Milliseconds of a mean cycle, stacked."""
    split = {name: 1e3 * s / max(metrics.cycles, 1) for name, s in metrics.time_split.items()}
    whole, base = sum(split.values()), 0.0
    for (name, value), colour in zip(split.items(), (ORANGE, BLUE, GREY), strict=True):
        share = value / whole if whole else 0.0
        label = f"{name} {value:.2f} ms, {share:.1%}"
        axes.bar(0, value, bottom=base, color=colour, width=0.5, label=label)
        base += value
    axes.set_xticks([])
    axes.set_xlim(-0.6, 0.6)
    axes.set_ylim(0, base * 1.4 if base else 1)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, fontsize=8, loc="upper center")
    _label(axes, "a mean cycle", "", "milliseconds")


def _bars(axes: Axes, xs: Sequence[int], heights: Sequence[float], colour: str) -> None:
    """Bars with their heights written in them, or above where they are too low."""
    bars, tall = axes.bar(xs, heights, color=colour), 0.15 * max(heights, default=0)
    inside = [f"{h:.0f}" if h > tall else "" for h in heights]
    above = [f"{h:.0f}" if h <= tall else "" for h in heights]
    axes.bar_label(bars, inside, fontsize=8, label_type="center", color="white")
    axes.bar_label(bars, above, fontsize=8)
    axes.set_xticks(xs)


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
