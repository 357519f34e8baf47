"""Drawing a PNG picture with matplotlib, which is in the extra `plots`."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING

from dflash_trt.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart with any colour vision.
ORANGE, BLUE, GREY = "#D55E00", "#0072B2", "#999999"


def need_matplotlib() -> None:
    """Say so early where pictures cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError("plots need matplotlib: pip install 'dflash-trt[plots]'") from None


def png(draw: Callable[[Figure], None], width: float = 7.2, height: float = 4.6) -> bytes:
    """What `draw` puts on a figure of so many inches, as PNG data."""
    need_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    draw(figure)
    data = BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()
