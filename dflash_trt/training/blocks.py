"""From stored sequences to training blocks: anchors, labels, and which labels count.

A block with anchor a holds positions a .. a+K-1. Slot 0 is the anchor itself; slot j is asked for
the target's greedy token at position a+j, which is ``greedy[a+j-1]``. In a greedy answer that is
the token that stands there. In a sampled answer the text may leave the greedy path: from then on a
draft of this block is lost whatever it says, so later slots carry no label.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_trt.training.store import FeatureStore, Sequence

NO_LABEL = -1


@dataclass(frozen=True)
class Batch:
    """One step's work. S sequences, A anchors each (short ones padded: all labels NO_LABEL)."""

    taps: Tensor  # bfloat16 [S, T, W]
    tokens: Tensor  # int64 [S, A, K], before drafting: the anchor, then mask or revealed tokens
    anchors: Tensor  # int64 [S, A]
    labels: Tensor  # int64 [S, A, K], NO_LABEL where nothing is to be learnt

    def to(self, device: torch.device) -> Batch:
        moved = (t.to(device) for t in (self.taps, self.tokens, self.anchors, self.labels))
        return Batch(*moved)


def anchor_range(sequence: Sequence) -> range:
    """Rows that may be an anchor: answer tokens that have a successor in the answer."""
    return range(sequence.prompt_length, sequence.length - 1)


def block_labels(
    tokens: NDArray[np.int32], greedy: NDArray[np.int32], anchors: NDArray[np.int64], block: int
) -> NDArray[np.int64]:
    """Labels [A, K] of blocks at ``anchors``; tokens and greedy [rows] of one sequence.

    Slot 0 never has one. Slot j has ``greedy[a+j-1]`` while position a+j exists and the tokens
    a+1 .. a+j-1 are the greedy ones.
    """
    slots = anchors[:, None] + np.arange(1, block)  # the position each slot is asked for
    inside = slots < len(tokens)
    slots = np.minimum(slots, len(tokens) - 1)
    wanted = greedy[slots - 1].astype(np.int64)
    kept = (tokens[slots] == wanted) & inside
    on_path = np.concatenate([np.ones((len(anchors), 1), bool), kept[:, :-1]], 1)
    on_path = np.logical_and.accumulate(on_path, axis=1)
    labels = np.full((len(anchors), block), NO_LABEL, np.int64)
    labels[:, 1:] = np.where(inside & on_path, wanted, NO_LABEL)
    return labels


def block_tokens(
    anchor_tokens: NDArray[np.int32],
    labels: NDArray[np.int64],
    mask_token: int,
    reveal: float = 0.0,
    rng: np.random.Generator | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What the slots hold [A, K], and the labels that are left to predict.

    With ``reveal`` > 0 that share of the blocks shows the true token in a random number of random
    slots, as a second refinement pass would see it; a shown slot is no longer asked for.
    """
    tokens = np.full(labels.shape, mask_token, np.int64)
    tokens[:, 0] = anchor_tokens
    if reveal <= 0.0 or rng is None:
        return tokens, labels
    chosen = rng.random((len(labels), 1)) < reveal
    share = rng.random((len(labels), 1))
    shown = chosen & (rng.random(labels.shape) < share) & (labels != NO_LABEL)
    return np.where(shown, labels, tokens), np.where(shown, NO_LABEL, labels)


def draw_anchors(sequence: Sequence, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """``count`` different anchors in order, or all there are."""
    legal = np.asarray(anchor_range(sequence), np.int64)
    if len(legal) <= count:
        return legal
    return np.sort(rng.choice(legal, count, replace=False))


def make_batch(
    store: FeatureStore,
    sequences: Seq[Sequence],
    anchors: Seq[NDArray[np.int64]],
    block: int,
    reveal: float = 0.0,
    rng: np.random.Generator | None = None,
) -> Batch:
    """Pad sequences and anchors to the longest and stack them."""
    count = max(len(a) for a in anchors)
    # Drafts see rows before their anchor; the teacher reads on to the row before the last slot.
    rows = max(int(a.max()) for a in anchors) + block - 1
    taps = np.zeros((len(sequences), rows, store.meta.width), np.uint16)
    tokens = np.full((len(sequences), count, block), store.meta.mask_token, np.int64)
    labels = np.full((len(sequences), count, block), NO_LABEL, np.int64)
    places = np.zeros((len(sequences), count), np.int64)
    for i, (sequence, at) in enumerate(zip(sequences, anchors, strict=True)):
        span = slice(sequence.start, sequence.stop)
        text = store.tokens[span]
        taken = min(rows, sequence.length)
        taps[i, :taken] = store.taps[sequence.start : sequence.start + taken]
        wanted = block_labels(text, store.greedy[span], at, block)
        shown, wanted = block_tokens(text[at], wanted, store.meta.mask_token, reveal, rng)
        tokens[i, : len(at)], labels[i, : len(at)], places[i, : len(at)] = shown, wanted, at
    return Batch(
        torch.from_numpy(taps.view(np.int16)).view(torch.bfloat16),
        torch.from_numpy(tokens),
        torch.from_numpy(places),
        torch.from_numpy(labels),
    )
