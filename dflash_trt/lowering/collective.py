"""What comes between two segments. What serves imports this, and nothing that builds graphs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """What comes between two segments: `kind` makes `result` of all ranks' `part`."""

    kind: str
    part: str
    result: str
