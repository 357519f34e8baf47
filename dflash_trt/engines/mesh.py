"""What the ranks of a mesh say to each other, whatever carries it.

Rank 0 owns all state and all decisions. In front of each target call it broadcasts one `Step`, which
holds everything that the others need to make the same call: they keep nothing but their caches, so
there is nothing in which they could diverge. Within a call the ranks meet in collectives, as
`lowering.segments` left them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NoReturn, Protocol

import numpy as np

_HEADER = 5


class Mesh(Protocol):
    """The ranks that share a target; every rank calls the same methods in the same order. `calls` and
    `bytes` count what this rank has brought to meetings, by the kind of meeting."""

    rank: int
    size: int
    calls: Counter[str]
    bytes: Counter[str]

    def broadcast(self, message: np.ndarray) -> None:
        """Rank 0's `message` to all others, in place."""
        ...

    def all_reduce(self, part: np.ndarray) -> None:
        """Replace `part`, fp32, by the sum of all ranks' parts."""
        ...

    def all_gather(self, part: np.ndarray, whole: np.ndarray) -> None:
        """All ranks' `part`, one behind the other, into `whole` [size, ..part.shape]."""
        ...

    def fail(self, error: BaseException) -> NoReturn:
        """End every rank because of an error in this one: the others may be waiting for it."""
        ...


@dataclass(frozen=True)
class Step:
    """One target call: the lanes' slots, their cached `lengths` [B] and `tokens` [B, W] behind them;
    `prefill`: a piece of a prompt, of which one row of logits is read; `logits`: they are wanted."""

    lanes: tuple[int, ...]
    lengths: np.ndarray
    tokens: np.ndarray
    prefill: bool
    logits: bool


def message_size(max_batch: int, widest: int) -> int:
    """Numbers, int32, in the message of any step of up to `max_batch` lanes and `widest` tokens."""
    return _HEADER + 2 * max_batch + widest


def encode(step: Step | None, message: np.ndarray) -> None:
    """Write a step into `message` int32; none ends the mesh."""
    message[:_HEADER] = 0
    if step is None:
        return
    lanes, width = step.tokens.shape
    message[:_HEADER] = 1, lanes, width, step.prefill, step.logits
    parts = (np.array(step.lanes), step.lengths, step.tokens.ravel())
    content = np.concatenate(parts).astype(np.int32)
    message[_HEADER : _HEADER + len(content)] = content


def decode(message: np.ndarray) -> Step | None:
    """The inverse of `encode`."""
    goes_on, lanes, width, prefill, logits = message[:_HEADER].tolist()
    if not goes_on:
        return None
    slots, lengths, tokens = np.split(message[_HEADER:], [lanes, 2 * lanes])
    tokens = tokens[: lanes * width].reshape(lanes, width)
    return Step(tuple(slots.tolist()), lengths, tokens, bool(prefill), bool(logits))
