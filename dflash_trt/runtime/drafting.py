"""How long a batch's blocks should be, from what the runtime's own cycles committed and took."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from statistics import fmean, median

from dflash_trt.runtime.cycle import StepResult

_TRIALS = 3  # cycles of each width before widths are compared, and of one that is looked at again
_RUN = 64  # cycles of a batch size from one look to the next
_CYCLES = 9  # latest cycles whose time counts
_BLOCKS = 64  # latest blocks whose tokens count


class DraftControl:
    """Chooses the width of a batch's blocks: the one with most tokens per second, as measured.

    Candidates are the longest block, its halves, and 1, which is no drafting. Seconds of a cycle are
    known by width and number of lanes (in powers of two), since what another row costs depends on
    how busy the device is; tokens committed are known by width alone. One width serves all lanes of
    a call, so drafting a hopeless request in good company costs nothing. Only speed depends on it.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        """widths: those that the engines can do."""
        self._widths = widths
        self._committed: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=_BLOCKS))
        self._seconds: defaultdict[tuple[int, int], deque[float]] = defaultdict(
            lambda: deque(maxlen=_CYCLES)
        )
        self._cycles: Counter[int] = Counter()

    def width(self, lanes: int, drafted: int, longest: int) -> int:
        """For the next cycle of `lanes` lanes, of which so many are `drafted`, if any, with blocks of
        `longest` tokens at most."""
        size = _size(lanes)
        halves = (longest >> n for n in range(longest.bit_length()))
        widths = [width for width in halves if width in self._widths]
        least = min(widths, key=lambda width: len(self._seconds[size, width]))
        if len(self._seconds[size, least]) < _TRIALS:
            return least
        turn, cycle = divmod(self._cycles[size], _RUN)
        if cycle < _TRIALS:
            return widths[turn % len(widths)]
        return max(widths, key=lambda width: self._rate(width, size, drafted / lanes))

    def observe(self, results: Sequence[StepResult], seconds: float) -> None:
        """Count a cycle: what its lanes committed, and the time of its draft and verify calls."""
        width, size = 1 + max(result.drafted for result in results), _size(len(results))
        blocks = [result for result in results if result.drafted == width - 1]
        self._committed[width].extend(len(result.committed) for result in blocks)
        self._seconds[size, width].append(seconds)
        self._cycles[size] += 1

    def _rate(self, width: int, size: int, share: float) -> float:
        """Tokens per second and lane where a `share` of the lanes is drafted."""
        gain = 1 + share * (fmean(self._committed[width]) - 1)
        return gain / median(self._seconds[size, width])


def _size(lanes: int) -> int:
    """The next power of two: engines round batches up, and neighbours cost about the same."""
    return 1 << (lanes - 1).bit_length()
