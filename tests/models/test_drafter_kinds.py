"""Drafters as they are published, against the authors' package: windows, yarn, biases."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_trt.checkpoints import open_drafter, open_target
from dflash_trt.checkpoints.weights import WeightLoader
from dflash_trt.engines.build import BuildOptions, source_graphs
from dflash_trt.models.dflash import drafter_graph
from dflash_trt.models.graph import SourceGraph
from tests import tiny
from tests.models.test_dflash import CAPACITY, ours, reference_states
from tests.models.test_llama import empty_caches, run_source

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
ALL_SLIDING = ["sliding_attention", "sliding_attention"]
WINDOW = {"sliding_window": 6, "use_sliding_window": True}
BLOCK = {"block": 8, "mask": tiny.MASK_ID}


def biased_drafter(folder: Path, **changes: object) -> Path:
    """As `tiny_drafter`, with biases on all four projections of the attention."""
    tiny.tiny_drafter(folder, attention_bias=True, **changes)
    tensors = load_file(folder / "model.safetensors")
    random = np.random.default_rng(5)
    for name in [n for n in tensors if n.endswith("_proj.weight") and "self_attn" in n]:
        bias = 0.3 * random.standard_normal(len(tensors[name]))
        tensors[name.replace(".weight", ".bias")] = bias.astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": YARN, "rope_theta": 150000.0},
        {"layer_types": ["sliding_attention", "full_attention"], **WINDOW},
        {"layer_types": ALL_SLIDING, **WINDOW, "is_causal": False},
    ],
    ids=["yarn", "window", "window both ways"],
)
@pytest.mark.parametrize("context", [3, 41])
def test_published_kinds(tmp_path: Path, changes: dict, context: int) -> None:
    """Contexts shorter and longer than the window; the block of 8 is longer than it too."""
    target = open_target(tiny.tiny_target(tmp_path / "target"))
    folder = biased_drafter(tmp_path / "drafter", **changes)
    shape = (1, context, len(tiny.TAPS) * tiny.HIDDEN)
    features = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    states, drafts = reference_states(folder, target, features, 42, BLOCK)
    my_states, my_drafts = ours(target, open_drafter(folder), features, 42)
    np.testing.assert_allclose(my_states, states, atol=1e-4)
    np.testing.assert_array_equal(my_drafts, drafts)


def test_one_window_for_all_layers(tmp_path: Path) -> None:
    """`use_swa` in `dflash_config` means what sliding layers with that window mean."""
    own = {"target_layer_ids": list(tiny.TAPS), "mask_token_id": tiny.MASK_ID}
    swa = {**own, "use_swa": True, "swa_window_size": 6, "causal": False}
    config = open_drafter(
        tiny.tiny_drafter(tmp_path / "d", layer_types=None, dflash_config=swa)
    ).config
    assert config.windows == (6, 6)
    assert not config.causal(0)


DRAFT_VOCAB = 40


def speculators_drafter(folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A drafter in the speculators layout: 40 of the target's 288 tokens, an own embedding."""
    tiny.tiny_drafter(folder)
    path = folder / "config.json"
    inner = json.loads(path.read_text())
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [tap + 1 for tap in tiny.TAPS],
        "block_size": 8,
        "mask_token_id": tiny.MASK_ID,
        "draft_vocab_size": DRAFT_VOCAB,
        "transformer_layer_config": {
            k: v for k, v in inner.items() if k not in ("dflash_config", "block_size")
        },
    }
    path.write_text(json.dumps(config))
    random = np.random.default_rng(7)
    ids = np.sort(random.choice(tiny.VOCAB, DRAFT_VOCAB, replace=False))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = random.standard_normal((DRAFT_VOCAB, tiny.HIDDEN)).astype(
        np.float32
    )
    tensors["embed_tokens.weight"] = random.standard_normal((tiny.VOCAB, tiny.HIDDEN)).astype(
        np.float32
    )
    tensors["d2t"] = ids - np.arange(DRAFT_VOCAB)
    tensors["t2d"] = np.isin(np.arange(tiny.VOCAB), ids)
    save_file(tensors, folder / "model.safetensors")
    return folder, tensors


def zlab_drafter_of_a_part(folder: Path) -> np.ndarray:
    """A drafter in the z-lab layout that drafts 40 of the target's 288 tokens; their ids."""
    tiny.tiny_drafter(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"draft_vocab_size": DRAFT_VOCAB}))
    ids = np.sort(np.random.default_rng(7).choice(tiny.VOCAB, DRAFT_VOCAB, replace=False))
    save_file({"d2t": ids - np.arange(DRAFT_VOCAB)}, folder / "d2t.safetensors")
    return ids


def first_block(graph: SourceGraph, loader: WeightLoader) -> dict[str, np.ndarray]:
    """What a drafter gives for a block behind nine rows of random features."""
    features = np.random.default_rng(0).standard_normal((1, 9, 3 * tiny.HIDDEN))
    feeds = {
        "features": features.astype(np.float32),
        "accepted": np.array([9], np.int32),
        "context": np.array([9], np.int32),
        "anchor": np.array([42]),
        "masks": np.full((1, 7), tiny.MASK_ID),
        **empty_caches(graph, 1, CAPACITY),
    }
    return run_source(graph, loader, feeds)


def test_a_part_of_the_targets_lm_head(tmp_path: Path) -> None:
    """Without an lm_head of its own it chooses the best of its tokens by the target's."""
    target = open_target(tiny.tiny_target(tmp_path / "target"))
    ids = zlab_drafter_of_a_part(tmp_path / "drafter")
    options = BuildOptions("t", block=8, max_seq_len=CAPACITY - 8)
    sources = source_graphs(target, open_drafter(tmp_path / "drafter"), options)
    assert "lm_head.weight" not in sources.drafter.weight_names
    got = first_block(sources.drafter, sources.loader)
    logits = got["hidden"][0] @ target.tensors.read(target.config.lm_head).T
    assert not np.isin(logits.argmax(-1), ids).all()
    np.testing.assert_array_equal(got["tokens"][0, 1:], ids[logits[:, ids].argmax(-1)])


@pytest.mark.parametrize("passes", [1, 2])
def test_speculators_drafter_proposes_target_ids(tmp_path: Path, passes: int) -> None:
    """Through its own lm_head and embedding; what a first pass settles is fed back as target ids."""
    target = open_target(tiny.tiny_target(tmp_path / "target"))
    folder, tensors = speculators_drafter(tmp_path / "drafter")
    drafter = open_drafter(folder)
    assert drafter.config.taps == tiny.TAPS
    assert drafter.config.own_embedding
    assert drafter.config.token_map
    graph = drafter_graph(drafter.config, target.config, CAPACITY, passes)
    loader = WeightLoader(
        {"target": target.tensors, "drafter": drafter.tensors},
        {"target": target.config, "drafter": drafter.config},
    )
    loader.check(graph.weights)
    assert not {"lm_head.weight", "embed_tokens.weight"} & graph.weight_names
    got = first_block(graph, loader)
    best = (got["hidden"][0] @ tensors["lm_head.weight"].T).argmax(-1)
    expected = best + tensors["d2t"][best]
    drafts = got["tokens"][0, 1:]
    assert tensors["t2d"][drafts].all()
    assert (drafts == expected).sum() >= (7 if passes == 1 else 4)  # others: from the first pass
