"""The rows of a target's lm_head that a drafter with a part of its vocabulary drafts from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dflash_trt.checkpoints.base import TensorSource
from dflash_trt.checkpoints.described import AbsentTensors
from dflash_trt.errors import InputError

NAME = "lm_head.weight"


@dataclass(frozen=True)
class DraftHead:
    """One tensor, `lm_head.weight` [draft vocabulary, H]: row i is row i + d2t[i] of the target's.

    d2t int64 [draft vocabulary] is the drafter's, the ids it makes must rise.
    """

    target: TensorSource
    head: str
    drafter: TensorSource

    @property
    def origin(self) -> str:
        return self.drafter.origin

    @cached_property
    def ids(self) -> np.ndarray:
        """Target ids [draft vocabulary] int64. Raises `InputError` where they are none."""
        d2t = self.drafter.read("d2t")
        count = self.target.shape(self.head)[0]
        if d2t.ndim != 1 or d2t.dtype.kind not in "iu":
            raise InputError(f"{self.origin}: 'd2t' is no list of integers")
        ids = np.arange(len(d2t)) + d2t.astype(np.int64)
        if not len(ids) or ids[0] < 0 or ids[-1] >= count or (np.diff(ids) <= 0).any():
            raise InputError(
                f"{self.origin}: the token ids of 'd2t' do not rise from 0 to {count - 1} at most"
            )
        return ids

    def names(self) -> frozenset[str]:
        return frozenset({NAME})

    def shape(self, name: str) -> tuple[int, ...]:
        return (len(self.ids), *self.target.shape(self.head)[1:])

    def dtype(self, name: str) -> np.dtype:
        return self.target.dtype(self.head)

    def read(self, name: str) -> np.ndarray:
        return np.concatenate(list(self.rows(name)))

    def read_part(self, name: str, axis: int, begin: int, end: int) -> np.ndarray:
        return self.read(name).take(range(begin, end), axis)

    def rows(self, name: str) -> Iterator[np.ndarray]:
        """The target's lm_head is read piece by piece, and of each the drafted rows are kept."""
        begin = 0
        for piece in self.target.rows(self.head):
            end = begin + len(piece)
            first, last = np.searchsorted(self.ids, (begin, end))
            yield piece[self.ids[first:last] - begin]
            begin = end

    def digest(self) -> str:
        return self.drafter.digest()


def draft_head(target: TensorSource, head: str, drafter: TensorSource) -> TensorSource:
    """The drafted rows of `head`, a tensor of `target`; absent where one of the checkpoints is."""
    for tensors in (target, drafter):
        if isinstance(tensors, AbsentTensors):
            return tensors
    return DraftHead(target, head, drafter)
