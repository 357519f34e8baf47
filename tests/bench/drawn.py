"""What a picture shows, read from the drawing instead of its PNG."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text


def draw_instead(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[Figure]:
    """The figures that `module` draws from now on, in order."""
    figures: list[Figure] = []

    def png(draw: Callable[[Figure], None], **_: float) -> bytes:
        figures.append(Figure(layout="constrained"))
        draw(figures[-1])
        return b"drawn"

    monkeypatch.setattr(module, "png", png)
    return figures


def bars(axes: Axes) -> list[float]:
    """Heights, left to right or upwards."""
    return [round(float(bar.get_height()), 3) for bar in axes.patches]


def line(axes: Axes, index: int = 0) -> list[tuple[float, float]]:
    x, y = axes.lines[index].get_data()
    return list(zip(map(float, x), map(float, y), strict=True))


def words(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))
