"""Drafters that draft a part of the target's vocabulary: their token map, and rows of its lm_head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dflash_trt.checkpoints.base import TargetCheckpoint, TensorSource
from dflash_trt.checkpoints.described import AbsentTensors
from dflash_trt.checkpoints.drafter import DrafterCheckpoint
from dflash_trt.errors import InputError

NAME = "lm_head.weight"


def drafted_ids(drafter: TensorSource, draft_vocab_size: int, tokens: int) -> np.ndarray:
    """The target's ids of the drafted tokens, int64 [draft_vocab_size]: id = i + d2t[i].

    Raises `InputError` where `d2t` has another shape or leaves the `tokens` of the target.
    """
    d2t = drafter.read("d2t")
    if d2t.shape != (draft_vocab_size,) or d2t.dtype.kind not in "iu":
        raise InputError(
            f"{drafter.origin}: 'd2t' is {d2t.dtype} {list(d2t.shape)}, not "
            f"{draft_vocab_size} integers"
        )
    ids = np.arange(draft_vocab_size) + d2t.astype(np.int64)
    if ids.min() < 0 or ids.max() >= tokens:
        raise InputError(
            f"{drafter.origin}: 'd2t' makes ids from {ids.min()} to {ids.max()}, the target has "
            f"{tokens} tokens"
        )
    return ids


@dataclass(frozen=True)
class DraftHead:
    """One tensor, `lm_head.weight` [draft vocabulary, H]: the rows `ids`, which rise, of the tensor
    `head` of a target."""

    target: TensorSource
    head: str
    ids: np.ndarray
    origin: str

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
        return self.target.digest()


def draft_head(target: TargetCheckpoint, drafter: DrafterCheckpoint) -> TensorSource:
    """Where a drafter's lm_head is, if it drafts a part of the target's tokens. Raises `InputError`
    for a token map that does not fit."""
    config, tensors = drafter.config, drafter.tensors
    if isinstance(tensors, AbsentTensors) or not config.token_map:
        return tensors
    ids = drafted_ids(tensors, config.draft_vocab_size, target.config.token_count)
    if config.own_lm_head:
        return tensors
    if (np.diff(ids) <= 0).any():
        raise InputError(f"{tensors.origin}: the token ids of 'd2t' do not rise")
    if isinstance(target.tensors, AbsentTensors):
        return target.tensors
    return DraftHead(target.tensors, target.config.lm_head, ids, tensors.origin)
