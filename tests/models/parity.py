"""Compares a target's source graph with its model in transformers, rows at different lengths."""

from __future__ import annotations

import numpy as np
import torch

from dflash_trt.checkpoints import TargetCheckpoint
from dflash_trt.checkpoints.weights import WeightLoader
from dflash_trt.models.registry import target_graph
from tests.models.test_llama import empty_caches, run_source


def states_of(model: torch.nn.Module, ids: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits and the output of every layer, the last one before the final norm."""
    seen: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, _inputs: object, out: object) -> None:
        seen.append(out[0] if isinstance(out, tuple) else out)

    hooks = [layer.register_forward_hook(keep) for layer in model.model.layers]
    with torch.inference_mode():
        logits = model(torch.tensor(ids), use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits.numpy(), [state.numpy() for state in seen]


def check_ragged(
    model: torch.nn.Module, target: TargetCheckpoint, ids: np.ndarray, starts: list[int]
) -> None:
    """Row b is prefilled, cut back to `starts[b]` tokens, and continued by a call of 8 tokens.

    Logits and the features of all layers agree within 1e-4 of transformers' run of whole rows.
    """
    rows, width, capacity = len(ids), 8, 64
    taps = tuple(range(target.config.num_layers))
    logits, states = states_of(model, ids)
    graph = target_graph(target.config, taps, capacity)
    loader = WeightLoader({"target": target.tensors}, {"target": target.config})
    loader.check(graph.weights)
    first = max(starts)
    feeds = {
        "tokens": ids[:, :first],
        "lengths": np.zeros(rows, np.int32),
        "rows": np.full((rows, 1), first - 1),
        **empty_caches(graph, rows, capacity),
    }
    one = run_source(graph, loader, feeds)
    own = [slice(start, start + width) for start in starts]
    feeds = {
        "tokens": np.stack([ids[b, own[b]] for b in range(rows)]),
        "lengths": np.array(starts, np.int32),
        "rows": np.tile(np.arange(width), (rows, 1)),
        **{name.removesuffix(".out"): one[name] for name in one if name.endswith(".out")},
    }
    two = run_source(graph, loader, feeds)
    existing = target.config.token_count
    for b in range(rows):
        np.testing.assert_allclose(two["logits"][b], logits[b, own[b], :existing], atol=1e-4)
        features = np.concatenate([state[b, own[b]] for state in states], -1)
        np.testing.assert_allclose(two["features"][b], features, atol=1e-4, rtol=1e-5)
