"""Llama targets against transformers: logits, tapped features, generated tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from dflash_trt.checkpoints import DrafterCheckpoint, TargetCheckpoint, open_target
from dflash_trt.checkpoints.weights import WeightLoader
from dflash_trt.models.graph import SourceGraph
from dflash_trt.models.registry import target_graph
from tests import tiny

torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
transformers = pytest.importorskip("transformers")


def run_source(
    graph: SourceGraph, loader: WeightLoader, feeds: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(
        graph.model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [o.name for o in session.get_outputs()]
    weights = {w.name: loader.load(w) for w in graph.weights}
    return dict(zip(names, session.run(names, {**weights, **feeds}), strict=True))


def empty_caches(graph: SourceGraph, batch: int, capacity: int) -> dict[str, np.ndarray]:
    return {
        i.name: np.full(
            (
                batch,
                i.type.tensor_type.shape.dim[1].dim_value,
                capacity,
                i.type.tensor_type.shape.dim[3].dim_value,
            ),
            np.nan,
            np.float32,
        )
        for i in graph.model.graph.input
        if "_cache." in i.name
    }


def check_against(
    model: torch.nn.Module,
    target: TargetCheckpoint,
    ids: np.ndarray,
    taps: tuple[int, ...],
    tolerance: float,
) -> None:
    """Two calls (chunk, then the rest behind its cache) give transformers' logits and features."""
    with torch.inference_mode():
        truth = model(torch.tensor(ids), output_hidden_states=True)
    loader = WeightLoader({"target": target.tensors}, {"target": target.config})
    graph = target_graph(target.config, taps, 64)
    first, batch = ids.shape[1] // 2, len(ids)
    feeds = {
        "tokens": ids[:, :first],
        "lengths": np.zeros(batch, np.int32),
        "rows": np.tile(np.arange(first), (batch, 1)),
        **empty_caches(graph, batch, 64),
    }
    one = run_source(graph, loader, feeds)
    rest = ids[:, first:]
    feeds = {
        "tokens": rest,
        "lengths": np.full(batch, first, np.int32),
        "rows": np.tile(np.arange(rest.shape[1]), (batch, 1)),
        **{name.removesuffix(".out"): one[name] for name in one if name.endswith(".out")},
    }
    two = run_source(graph, loader, feeds)
    logits = np.concatenate([one["logits"], two["logits"]], 1)
    np.testing.assert_allclose(
        logits, truth.logits.numpy()[..., : target.config.token_count], atol=tolerance
    )
    features = np.concatenate([one["features"], two["features"]], 1)
    states = [
        truth.hidden_states[tap + 1].numpy()
        for tap in taps
        if tap + 1 < len(truth.hidden_states) - 1
    ]
    assert states, "at least one tap is compared"
    size = target.config.hidden_size
    for i, state in enumerate(states):
        mine = features[..., i * size : (i + 1) * size]
        np.testing.assert_allclose(mine, state, atol=tolerance, rtol=1e-5)  # values reach 2e3


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 4, "vocab_size": 300}]
)
def test_tiny(tmp_path: Path, changes: dict) -> None:
    folder = tiny.tiny_target(tmp_path / "t", **changes)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = np.random.default_rng(0).integers(0, tiny.VOCAB, (3, 20))
    check_against(model, open_target(folder), ids, (0, 1, 2), 1e-4)


def test_last_layer_is_tapped_before_the_final_norm(tmp_path: Path) -> None:
    """`hidden_states[-1]` of transformers is normed; the tap of the last layer is not."""
    folder = tiny.tiny_target(tmp_path / "t")
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    seen = []
    model.model.layers[-1].register_forward_hook(lambda _m, _i, out: seen.append(out))
    ids = np.random.default_rng(0).integers(0, tiny.VOCAB, (1, 9))
    with torch.inference_mode():
        model(torch.tensor(ids))
    target = open_target(folder)
    graph = target_graph(target.config, (tiny.LAYERS - 1,), 64)
    loader = WeightLoader({"target": target.tensors}, {"target": target.config})
    feeds = {
        "tokens": ids,
        "lengths": np.zeros(1, np.int32),
        "rows": np.array([[8]]),
        **empty_caches(graph, 1, 64),
    }
    got = run_source(graph, loader, feeds)["features"]
    out = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    np.testing.assert_allclose(got, out.numpy().reshape(got.shape), atol=1e-4)


def test_smollm2(smollm2: tuple[TargetCheckpoint, DrafterCheckpoint]) -> None:
    """The real model from its GGUF file, on a real prompt, against transformers in fp32."""
    target = smollm2[0]
    c = target.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads, rms_norm_eps=c.rms_norm_eps, tie_word_embeddings=True,
        max_position_embeddings=c.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    state = {n: torch.from_numpy(target.tensors.read(n).copy()) for n in target.tensors.names()}
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(target.text_format().tokenizer_json)
    text = "<|im_start|>user\nWhat do 17 apples cost at 3 cents each?<|im_end|>\n<|im_start|>assistant\n"
    ids = np.array([tokenizer.encode(text).ids])
    check_against(model, target, ids, (0, 1, 14, 28), 1e-3)
