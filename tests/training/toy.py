"""A toy target: 20 tokens in a fixed cycle, features that tell each token and little else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from dflash_trt.training.drafter import DrafterShape
from dflash_trt.training.features import bf16_bits
from dflash_trt.training.recipe import Recipe
from dflash_trt.training.store import FeatureStore, StoreMeta, StoreWriter

VOCAB, HIDDEN, TAPS, MASK, PERIOD = 24, 32, (0, 1), 23, 20
META = StoreMeta(hidden=HIDDEN, taps=TAPS, mask_token=MASK, target="toy")


def shape(**changes: object) -> DrafterShape:
    values = {
        "hidden": HIDDEN,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "ffn": 64,
        "layers": 2,
        "block": 4,
        "taps": TAPS,
        "mask_token": MASK,
        "vocab": VOCAB,
        "target_layers": 3,
    }
    return DrafterShape(**{**values, **changes})  # type: ignore[arg-type]


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }


def recipe(**changes: object) -> Recipe:
    values = {
        "layers": 2,
        "block": 4,
        "taps": TAPS,
        "mask_token": MASK,
        "sequences": 4,
        "anchors": 12,
        "steps": 150,
        "warmup": 5,
        "learning_rate": 3e-3,
        "negatives": 2,
        "held_out": 5,
        "bf16": False,
    }
    return Recipe(**{**values, **changes})  # type: ignore[arg-type]


def store(folder: Path, sequences: int = 20, shift: int = 0) -> FeatureStore:
    """``shift`` moves the target's choices by so many rows: what a misaligned writer would do."""
    rng = np.random.default_rng(3)
    basis = rng.normal(size=(VOCAB, META.width)).astype(np.float32)
    with StoreWriter(folder, META) as writer:
        for n in range(sequences):
            start, length = int(rng.integers(PERIOD)), 36
            tokens = (start + np.arange(length)) % PERIOD
            greedy = np.roll((tokens + 1) % PERIOD, shift).astype(np.int32)
            greedy[:7] = -1
            features = basis[tokens] + rng.normal(size=(length, META.width)).astype(np.float32) / 50
            writer.append(
                bf16_bits(features.astype(np.float32)), tokens.astype(np.int32), greedy,
                prompt=n, sample=0, domain="cycle", prompt_length=8,
            )  # fmt: skip
    return FeatureStore(folder)
