"""Tiny random gpt-oss checkpoints, as OpenAI published the large ones: bf16 and MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests import tiny

HIDDEN, INNER, EXPERTS, TOP_K, WINDOW = 64, 96, 8, 3, 8
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}


def tiny_gpt_oss(folder: Path, seed: int = 0, **changes: object) -> Path:
    """Four layers, windows of 8 alternating with full attention; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "eos_token_id": tiny.EOS_ID,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "max_position_embeddings": 512,
        "num_attention_heads": 8,
        "num_experts_per_tok": TOP_K,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "num_local_experts": EXPERTS,
        "quantization_config": {"quant_method": "mxfp4"},
        "rms_norm_eps": 1e-5,
        "rope_scaling": YARN,
        "rope_theta": 150000,
        "sliding_window": WINDOW,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": tiny.VOCAB,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    stops = {"eos_token_id": [tiny.EOS_ID, 258, 259]}
    (folder / "generation_config.json").write_text(json.dumps(stops))
    save_file(_tensors(config, np.random.default_rng(seed)), folder / "model.safetensors")
    (folder / "tokenizer.json").write_text(tiny.byte_tokenizer().to_str())
    settings = {"chat_template": tiny.CHAT_TEMPLATE, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _tensors(c: dict, random: np.random.Generator) -> dict[str, np.ndarray]:
    size, vocab = c["hidden_size"], c["vocab_size"]
    tensors = {
        "model.embed_tokens.weight": _values(random, vocab, size, scale=1.0),
        "model.norm.weight": 1 + _values(random, size, scale=0.1),
        "lm_head.weight": _values(random, vocab, size, scale=_scale(size)),
    }
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors |= _attention(f"{prefix}.self_attn", c, random)
        tensors |= _mlp(f"{prefix}.mlp", c, random)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = 1 + _values(random, size, scale=0.1)
    return {
        name: t if t.dtype == np.uint8 else t.astype(ml_dtypes.bfloat16)
        for name, t in tensors.items()
    }


def _attention(prefix: str, c: dict, random: np.random.Generator) -> dict[str, np.ndarray]:
    size, dim, heads = c["hidden_size"], c["head_dim"], c["num_attention_heads"]
    scale = _scale(size)
    q, kv = heads * dim, c["num_key_value_heads"] * dim
    tensors = {f"{prefix}.sinks": _values(random, heads, scale=1.0)}
    for name, rows, columns in (("q", q, size), ("k", kv, size), ("v", kv, size), ("o", size, q)):
        tensors[f"{prefix}.{name}_proj.weight"] = _values(random, rows, columns, scale=scale)
        tensors[f"{prefix}.{name}_proj.bias"] = _values(random, rows, scale=0.2)
    return tensors


def _mlp(prefix: str, c: dict, random: np.random.Generator) -> dict[str, np.ndarray]:
    size, inner, count = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    tensors = {
        f"{prefix}.router.weight": _values(random, count, size, scale=_scale(size)),
        f"{prefix}.router.bias": _values(random, count, scale=0.2),
    }
    for name, rows, columns in (("gate_up_proj", 2 * inner, size), ("down_proj", size, inner)):
        source, shape = f"{prefix}.experts.{name}", (count, rows, columns // 32)
        tensors[f"{source}_blocks"] = random.integers(0, 256, (*shape, 16), dtype=np.uint8)
        tensors[f"{source}_scales"] = random.integers(118, 122, shape, dtype=np.uint8)
        tensors[f"{source}_bias"] = _values(random, count, rows, scale=0.2)
    return tensors


def _scale(size: int) -> float:
    """Of weights that are multiplied with `size` values: sums are as large at every width."""
    return 0.2 * (HIDDEN / size) ** 0.5


def _values(random: np.random.Generator, *shape: int, scale: float) -> np.ndarray:
    return (scale * random.standard_normal(shape)).astype(np.float32)
