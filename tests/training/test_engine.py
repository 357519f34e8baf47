"""The target's engine in training: many slots, and taps that equal Hugging Face's hidden states."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dflash_trt.config import Rope, TargetConfig
from dflash_trt.errors import InputError
from dflash_trt.training.engine import SlotEngine, prepare_engine

TAPS, CAPACITY, VOCAB = (0, 1, 2), 192, 64
CONFIG = TargetConfig(
    architecture="llama", vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_layers=4,
    num_heads=4, num_kv_heads=2, head_dim=16, rms_norm_eps=1e-5, rope=Rope(1e4),
    max_positions=256, tied_embeddings=True, stop_ids=(1,),
)  # fmt: skip


@pytest.fixture(scope="module")
def reference():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5,
        max_position_embeddings=256, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


class Tensors:
    origin = "tiny"

    def __init__(self, model) -> None:
        self._state = {k: v.numpy() for k, v in model.state_dict().items()}

    def names(self):
        return frozenset(self._state)

    def shape(self, name):
        return self._state[name].shape

    def dtype(self, name):
        return self._state[name].dtype

    def read(self, name):
        return self._state[name]

    def rows(self, name):
        yield self._state[name]

    def digest(self):
        return "sha256:tiny"


@pytest.fixture(scope="module")
def folder(reference, tmp_path_factory):
    path = tmp_path_factory.mktemp("train") / "engine"
    target = SimpleNamespace(config=CONFIG, tensors=Tensors(reference))
    prepare_engine(path, target, TAPS, CAPACITY)
    prepare_engine(path, target, TAPS, CAPACITY)  # the second time it is there already
    with pytest.raises(InputError, match="was made for another target, taps or length"):
        prepare_engine(path, target, (1,), CAPACITY)
    with pytest.raises(InputError, match="the target ends at 256"):
        prepare_engine(path, target, TAPS, 999)
    assert json.loads((path / "target.json").read_text())["taps"] == list(TAPS)
    return path


def text(size: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, VOCAB, size).tolist()


@pytest.mark.parametrize("size", [1, 7, 128, 150])
def test_taps_and_choices_of_a_whole_text(folder, reference, size):
    """Over one prefill chunk and over two; row i is the layer's output at token i."""
    ids = text(size, size)
    features, choices = SlotEngine(folder, 1, CAPACITY, 1).read(ids, first=size // 2)
    with torch.no_grad():
        out = reference(torch.tensor([ids]), output_hidden_states=True)
    expected = torch.cat([out.hidden_states[t + 1][0] for t in TAPS], -1).numpy()
    np.testing.assert_allclose(features, expected, atol=2e-4, rtol=2e-4)
    greedy = out.logits[0].argmax(-1).numpy()
    assert choices[size // 2 :].tolist() == greedy[size // 2 :].tolist()
    assert (choices[: size // 2] == -1).all()


def test_slots_of_different_lengths_decode_as_if_alone(folder, reference):
    engine = SlotEngine(folder, 3, CAPACITY, 1)
    texts = [text(n, n) for n in (5, 140, 23)]
    logits = np.stack([engine.prefill(i, t) for i, t in enumerate(texts)])
    for _ in range(6):
        tokens = logits.argmax(-1)
        for t, token in zip(texts, tokens, strict=True):
            t.append(int(token))
        logits = engine.decode(tokens).copy()
    for i, t in enumerate(texts):
        with torch.no_grad():
            expected = reference(torch.tensor([t])).logits[0, -1].numpy()
        np.testing.assert_allclose(logits[i], expected, atol=1e-3, rtol=1e-3)


def test_a_slot_is_reused_without_a_trace(folder):
    engine = SlotEngine(folder, 2, CAPACITY, 1)
    first = engine.prefill(0, text(9, 1)).copy()
    engine.prefill(0, text(50, 2))
    engine.decode(np.array([3, 4]))
    np.testing.assert_array_equal(engine.prefill(0, text(9, 1)), first)


def test_a_text_that_does_not_fit_is_refused(folder):
    with pytest.raises(InputError, match="a text of 193 tokens does not fit into 192"):
        SlotEngine(folder, 1, CAPACITY, 1).read(text(193, 0), 0)
