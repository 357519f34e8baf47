"""Divisors so small that logits overflow are kept from the engines, which all clients share."""

from __future__ import annotations

SMALLEST_TEMPERATURE = 1e-4
SMALLEST_PENALTY = 0.01


def usable_temperature(value: float) -> float:
    """Below the smallest the most likely token is all that is left, which is what 0 means."""
    return 0.0 if 0 <= value < SMALLEST_TEMPERATURE else value
