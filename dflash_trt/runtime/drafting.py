"""Whether a request is worth drafting, from what its own cycles committed and took."""

from __future__ import annotations

_PROBE = {True: 16, False: 4}  # cycles that a mode is tried for, with and without drafting
_RUN = 128  # cycles of the faster mode until the other one is looked at again


class DraftControl:
    """Tries both modes, keeps the faster one, and looks at the other again from time to time.

    The output does not depend on the mode, only its speed does.
    """

    def __init__(self) -> None:
        self.drafting = True
        self._rates: dict[bool, float] = {}
        self._tokens, self._seconds = 0, 0.0
        self._left, self._running = _PROBE[True], False

    def observe(self, committed: int, seconds: float) -> None:
        """Count a cycle of the present mode: tokens that it committed, seconds that it took."""
        self._tokens += committed
        self._seconds += seconds
        self._left -= 1
        if self._left == 0:
            self._rates[self.drafting] = self._tokens / max(self._seconds, 1e-9)
            self._tokens, self._seconds = 0, 0.0
            self._next_phase()

    def _next_phase(self) -> None:
        if self._running or len(self._rates) < 2:
            self.drafting, self._running = not self.drafting, False
            self._left = _PROBE[self.drafting]
        else:
            self.drafting, self._running = self._rates[True] >= self._rates[False], True
            self._left = _RUN
