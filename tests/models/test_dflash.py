"""The drafter graph against the authors' `dflash` package on the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_trt.checkpoints import DrafterCheckpoint, TargetCheckpoint, open_drafter, open_target
from dflash_trt.checkpoints.draft_head import drafted_ids
from dflash_trt.engines.build import BuildOptions, source_graphs
from tests import tiny
from tests.models.test_llama import empty_caches, run_source

torch = pytest.importorskip("torch", reason="parity with the dflash package needs torch")
reference = pytest.importorskip(
    "dflash.model", reason="the authors' package dflash is not installed"
)

CAPACITY = 64


def reference_states(
    folder: Path, target: TargetCheckpoint, features: np.ndarray, anchor: int, config: dict
) -> tuple[np.ndarray, np.ndarray]:
    """Final states and draft tokens of one block behind `features`, by the authors' model."""
    model = reference.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    embedding = torch.from_numpy(target.tensors.read("model.embed_tokens.weight").copy())
    lm_head = torch.from_numpy(target.tensors.read(target.config.lm_head).copy())
    context, block = features.shape[1], config["block"]
    ids = torch.full((1, block), config["mask"])
    ids[0, 0] = anchor
    cache = reference._make_cache(model.config)
    with torch.inference_mode():
        states = model(
            target_hidden=torch.from_numpy(features),
            noise_embedding=embedding[ids],
            position_ids=torch.arange(context + block)[None],
            past_key_values=cache,
            use_cache=True,
        )[:, 1 - block :]
    return states.numpy(), (states @ lm_head.T).argmax(-1).numpy()


def ours(
    target: TargetCheckpoint, drafter: DrafterCheckpoint, features: np.ndarray, anchor: int
) -> tuple[np.ndarray, np.ndarray]:
    """The same block, the context injected in two calls."""
    block = drafter.config.block
    sources = source_graphs(target, drafter, BuildOptions("t", block, max_seq_len=CAPACITY - block))
    graph, loader = sources.drafter, sources.loader
    total, first = features.shape[1], features.shape[1] // 2
    got: dict[str, np.ndarray] = {}
    state = empty_caches(graph, 1, CAPACITY)
    for begin, end, slots in ((0, first, 0), (first, total, block - 1)):
        feeds = {
            "features": features[:, begin:end],
            "accepted": np.array([end - begin], np.int32),
            "context": np.array([end], np.int32),
            "anchor": np.array([anchor]),
            "masks": np.full((1, slots), drafter.config.mask_id),
            **state,
        }
        got = run_source(graph, loader, feeds)
        state = {n.removesuffix(".out"): v for n, v in got.items() if n.endswith(".out")}
    assert got["tokens"][0, 0] == anchor
    assert got["lengths"].tolist() == [total]
    return got["hidden"], got["tokens"][:, 1:]


@pytest.mark.parametrize("context", [2, 21])
def test_tiny(tmp_path: Path, context: int) -> None:
    target = open_target(tiny.tiny_target(tmp_path / "target"))
    folder = tiny.tiny_drafter(tmp_path / "drafter")
    shape = (1, context, len(tiny.TAPS) * tiny.HIDDEN)
    features = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    sizes = {"block": 8, "mask": tiny.MASK_ID}
    states, drafts = reference_states(folder, target, features, 42, sizes)
    my_states, my_drafts = ours(target, open_drafter(folder), features, 42)
    np.testing.assert_allclose(my_states, states, atol=1e-4)
    np.testing.assert_array_equal(my_drafts, drafts)


def test_shipped_drafter(smollm2: tuple[TargetCheckpoint, DrafterCheckpoint]) -> None:
    target, drafter = smollm2
    shape = (1, 19, len(drafter.config.taps) * target.config.hidden_size)
    features = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    sizes = {"block": drafter.config.block, "mask": drafter.config.mask_id}
    folder = Path(drafter.tensors.origin)
    states, _ = reference_states(folder, target, features, 28, sizes)
    my_states, my_drafts = ours(target, drafter, features, 28)
    np.testing.assert_allclose(my_states, states, atol=2e-3)
    ids = drafted_ids(drafter.tensors, drafter.config.draft_vocab_size, target.config.token_count)
    head = target.tensors.read(target.config.lm_head)[ids]
    np.testing.assert_array_equal(my_drafts, ids[(states @ head.T).argmax(-1)])
