"""Which part of a weight a rank has. What serves imports this, and nothing that builds graphs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """A rank's part of a weight: of source i, with `whole[i]` entries along `axis`, `parts[i]`
    entries, counted from the end: the last rank has the last ones. Where rank 0 is left with fewer,
    zeros follow, unless `parts` is what it is left with. With `overlap` parts are counted from the
    beginning, and the last ones begin earlier where they would not end with the source."""

    ranks: int
    axis: int
    whole: tuple[int, ...]
    parts: tuple[int, ...]
    overlap: bool = False

    def span(self, source: int, rank: int) -> tuple[int, int]:
        """First entry and the one behind the last that exist in the source; may be none."""
        whole, part = self.whole[source], self.parts[source]
        if self.overlap:
            begin = min(rank * part, whole - part)
            return begin, begin + part
        end = max(0, whole - (self.ranks - 1 - rank) * part)
        end = min(end, part) if rank == 0 else end
        return max(0, end - part), end
