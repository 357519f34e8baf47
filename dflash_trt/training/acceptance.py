"""Acceptance length on stored answers, as the runtime's cycle would see it.

The stored text is the target's own, so one drafter pass per possible anchor is enough to replay the
cycles exactly: draft at a, accept the longest correct prefix, append the target's token, go on
there. (Exact for greedy answers; for sampled ones, the replay stops a block where the text leaves
the greedy path.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_trt.training.blocks import anchor_range, make_batch
from dflash_trt.training.drafter import Drafter
from dflash_trt.training.store import FeatureStore, Sequence


@dataclass
class Acceptance:
    """Counts of one domain: cycles, tokens they committed, and per slot asked / right so far."""

    block: int
    cycles: int = 0
    tokens: int = 0
    asked: NDArray[np.int64] = field(init=False)
    right: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.asked = np.zeros(self.block, np.int64)
        self.right = np.zeros(self.block, np.int64)

    @property
    def tau(self) -> float:
        """Tokens per cycle, the target's own included."""
        return self.tokens / self.cycles if self.cycles else 0.0

    def slot_rates(self) -> list[float]:
        """Share of blocks accepted up to and including slot j, for j = 1 .. K-1."""
        return (self.right[1:] / np.maximum(self.asked[1:], 1)).tolist()

    def replay(self, hits: NDArray[np.bool_], first: int) -> None:
        """hits [A, K-1]: slot right, for every anchor first, first+1, ...; walk the cycles."""
        at = 0
        while at < len(hits):
            room = min(self.block - 1, len(hits) - at)
            run = np.logical_and.accumulate(hits[at, :room])
            accepted = int(run.sum())
            self.asked[1 : room + 1] += 1
            self.right[1 : room + 1] += run
            committed = min(accepted + 1, len(hits) - at)
            self.cycles, self.tokens = self.cycles + 1, self.tokens + committed
            at += committed


def _predict(
    drafter: Drafter,
    embedding: Tensor,
    head: Tensor,
    drafted: Tensor,
    store: FeatureStore,
    one: Sequence,
) -> NDArray[np.bool_]:
    """hits [A, K-1] of every anchor of one sequence."""
    block = drafter.shape.block
    anchors = np.asarray(anchor_range(one), np.int64)
    batch = make_batch(store, [one], [anchors], block).to(embedding.device)
    taps = batch.taps if torch.is_autocast_enabled(embedding.device.type) else batch.taps.float()
    hidden = drafter(taps, embedding[batch.tokens], batch.anchors)[0, :, 1:]
    drafts = drafted[(hidden.to(head.dtype) @ head.T).argmax(-1)]
    hits: NDArray[np.bool_] = (drafts == batch.labels[0, :, 1:]).cpu().numpy()
    return hits


@torch.no_grad()
def measure(
    drafter: Drafter,
    embedding: Tensor,
    head: Tensor,
    drafted: Tensor,
    store: FeatureStore,
    sequences: Iterable[Sequence],
    bf16: bool = False,
) -> dict[str, Acceptance]:
    """Acceptance by domain over ``sequences``, argmax over the tokens ``drafted``
    int64 [D], whose rows of the lm_head ``head`` [D, H] holds."""
    out: dict[str, Acceptance] = defaultdict(lambda: Acceptance(drafter.shape.block))
    with torch.autocast(embedding.device.type, torch.bfloat16, enabled=bf16):
        for one in sequences:
            if len(anchor_range(one)):
                hits = _predict(drafter, embedding, head, drafted, store, one)
                out[one.domain].replay(hits, one.prompt_length)
    return dict(out)
