"""The loss of a step, the vocabulary it is taken over, and the one that is drafted from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dflash_trt.errors import InputError
from dflash_trt.training.blocks import NO_LABEL, Batch
from dflash_trt.training.drafter import Drafter
from dflash_trt.training.recipe import Recipe


@dataclass(frozen=True)
class Vocabulary:
    """Tokens that occur as labels. Unseen ones come in as ``negatives`` drawn each step, so that
    their logits stay down too: at run time the argmax is over others as well."""

    seen: NDArray[np.int64]
    rest: NDArray[np.int64]
    negatives: int

    @classmethod
    def of(cls, greedy: NDArray[np.int32], size: int, recipe: Recipe) -> Vocabulary:
        if recipe.full_vocabulary:
            return cls(np.arange(size), np.empty(0, np.int64), 0)
        present = np.zeros(size, bool)
        present[greedy[greedy >= 0]] = True
        return cls(np.flatnonzero(present), np.flatnonzero(~present), recipe.negatives)

    def draw(self, rng: np.random.Generator) -> Tensor:
        """Token ids of one step's softmax; the seen ones come first, always in the same order."""
        count = min(self.negatives, len(self.rest))
        drawn = rng.choice(self.rest, count, replace=False) if count else self.rest[:0]
        return torch.from_numpy(np.concatenate([self.seen, drawn]))


def drafted_tokens(greedy: NDArray[np.int32], size: int, count: int) -> NDArray[np.int64]:
    """The ``count`` most frequent of the labels ``greedy`` (negative: none), rising; among equals,
    and among tokens that are no label, those with the lowest ids, which a tokenizer merged first.
    0: all ``size`` of the vocabulary."""
    if count > size:
        raise InputError(f"recipe: draft_vocabulary {count} exceeds the vocabulary of {size}")
    times = np.bincount(greedy[greedy >= 0], minlength=size)
    return np.sort(np.argsort(-times, kind="stable")[: count or size])


def slot_weights(block: int, gamma: float) -> Tensor:
    """exp(-(k-1)/gamma) for slots k = 0 .. K-1; slot 0 is the anchor and weighs nothing. [K]"""
    weights = torch.exp(-(torch.arange(block, dtype=torch.float32) - 1) / gamma)
    weights[0] = 0.0
    return weights


@dataclass(frozen=True)
class Asked:
    """The slots of a batch that carry a label, flattened. N of them."""

    index: Tensor  # int64 [N]: place in the flattened [S * A * K]
    labels: Tensor  # int64 [N]: place of the label among the step's token ids
    weights: Tensor  # float32 [N], summing to 1


def asked_slots(batch: Batch, chosen: Tensor, vocab: int, gamma: float) -> Asked:
    """Find the labelled slots; ``chosen`` int64 [C] are the token ids of the step's softmax."""
    flat = batch.labels.flatten()
    index = (flat != NO_LABEL).nonzero()[:, 0]
    place = torch.zeros(vocab, dtype=torch.int64, device=chosen.device)
    place[chosen] = torch.arange(len(chosen), device=chosen.device)
    block = batch.labels.shape[-1]
    weights = slot_weights(block, gamma).to(index.device)[index % block]
    return Asked(index, place[flat[index]], weights / weights.sum())


def weighted_loss(
    drafter: Drafter,
    taps: Tensor,
    blocks: Tensor,
    anchors: Tensor,
    asked: Asked,
    head: Tensor,
    taught: Tensor | None = None,
    distill: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Weighted cross entropy over head [C, H], and which slots were right, bool [N].

    ``taught`` [N, H]: the target's last hidden state behind each asked slot; a share ``distill``
    of the loss is then cross entropy to the distribution that it gives.
    """
    hidden = drafter(taps, blocks, anchors).flatten(0, 2)[asked.index]
    logits = F.linear(hidden.to(head.dtype), head).float()
    mine = logits.gather(-1, asked.labels[:, None])[:, 0]
    wanted = mine
    if taught is not None:
        soft = F.linear(taught, head).float().softmax(-1)
        wanted = (1 - distill) * mine + distill * (soft * logits).sum(-1)
    loss = ((logits.logsumexp(-1) - wanted) * asked.weights).sum()
    return loss, mine.detach() >= logits.detach().amax(-1)


@torch.no_grad()
def batch_tau(right: Tensor, asked: Asked, labels: Tensor) -> float:
    """Mean accepted prefix + 1 over the blocks that were asked anything; labels [S, A, K]."""
    hits = torch.zeros(labels.numel(), device=labels.device)
    hits[asked.index] = right.float()
    accepted = hits.view(labels.shape)[..., 1:].cumprod(-1).sum(-1)
    return float(accepted[(labels != NO_LABEL).any(-1)].mean()) + 1.0
