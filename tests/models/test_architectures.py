"""Qwen3 and Llama 3.1 against transformers: norms of q and k, rotary scalings, padded lm_head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_trt.checkpoints import open_target
from tests import tiny

torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
transformers = pytest.importorskip("transformers")
parity = pytest.importorskip("tests.models.parity")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 2.0}


def tiny_qwen3(folder: Path, **changes: object) -> Path:
    changes = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **changes}
    tiny.tiny_target(folder, **changes)
    tensors = load_file(folder / "model.safetensors")
    random = np.random.default_rng(3)
    for layer in range(tiny.LAYERS):
        for name in "qk":
            norm = (1 + 0.3 * random.standard_normal(tiny.HEAD_DIM)).astype(np.float32)
            tensors[f"model.layers.{layer}.self_attn.{name}_norm.weight"] = norm
    save_file(tensors, folder / "model.safetensors")
    return folder


def prompts(rows: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, tiny.VOCAB, (rows, 45))


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True, "rope_scaling": YARN}, {"vocab_size": 320}]
)
def test_qwen3(tmp_path: Path, changes: dict) -> None:
    """In the last case the lm_head has 32 rows more than the tokenizer has entries."""
    folder = tiny_qwen3(tmp_path / "t", **changes)
    target = open_target(folder)
    assert target.config.token_count == tiny.VOCAB
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    parity.check_ragged(model, target, prompts(), [1, 20, 37])


@pytest.mark.parametrize("scaling", [LLAMA3, YARN, LINEAR])
def test_llama_with_rotary_scaling(tmp_path: Path, scaling: dict) -> None:
    folder = tiny.tiny_target(tmp_path / "t", rope_scaling=scaling)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    parity.check_ragged(model, open_target(folder), prompts(), [1, 20, 37])
