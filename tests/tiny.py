"""Tiny random checkpoints in the original file formats, for tests that need a whole model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4, 64, 96, 4, 2, 16, 288
MASK_ID, EOS_ID = 260, 257
TAPS = (0, 2, 3)

CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def tiny_target(folder: Path, seed: int = 0, **changes: object) -> Path:
    """A llama with random weights, a byte-level tokenizer and a chat template; returns `folder`.

    `changes` go into config.json; weights follow the changed sizes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": EOS_ID,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_target_tensors(config, np.random.default_rng(seed)), folder / "model.safetensors")
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_str())
    settings = {"chat_template": CHAT_TEMPLATE, "bos_token": "<|start|>", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _target_tensors(c: dict, random: np.random.Generator) -> dict[str, np.ndarray]:
    tensors = {
        "model.embed_tokens.weight": _matrix(random, c["vocab_size"], c["hidden_size"], scale=1.0),
        "model.norm.weight": _norm(random, c["hidden_size"]),
    }
    if not c["tie_word_embeddings"]:
        tensors["lm_head.weight"] = _matrix(random, c["vocab_size"], c["hidden_size"])
    for layer in range(c["num_hidden_layers"]):
        tensors |= _decoder_layer(f"model.layers.{layer}", c, random)
    return tensors


def tiny_drafter(folder: Path, seed: int = 1, **changes: object) -> Path:
    """A drafter for `tiny_target` with random weights, in the z-lab layout; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * 2,
        "block_size": 8,
        "num_target_layers": LAYERS,
        "dflash_config": {"target_layer_ids": list(TAPS), "mask_token_id": MASK_ID},
    }
    config |= changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file(drafter_tensors(config, seed), folder / "model.safetensors")
    return folder


def drafter_tensors(c: dict, seed: int = 1) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    size = c["hidden_size"]
    taps = len(c["dflash_config"]["target_layer_ids"])
    tensors = {
        "fc.weight": _matrix(random, size, taps * size),
        "hidden_norm.weight": _norm(random, size),
        "norm.weight": _norm(random, size),
    }
    for layer in range(c["num_hidden_layers"]):
        tensors |= _decoder_layer(f"layers.{layer}", c, random)
        for name in "qk":
            tensors[f"layers.{layer}.self_attn.{name}_norm.weight"] = _norm(random, c["head_dim"])
    return tensors


def _decoder_layer(prefix: str, c: dict, random: np.random.Generator) -> dict[str, np.ndarray]:
    size, inner, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    shapes = {
        "self_attn.q_proj": (q, size),
        "self_attn.k_proj": (kv, size),
        "self_attn.v_proj": (kv, size),
        "self_attn.o_proj": (size, q),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    tensors = {f"{prefix}.{n}.weight": _matrix(random, *shape) for n, shape in shapes.items()}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}.{norm}.weight"] = _norm(random, size)
    return tensors


def _matrix(
    random: np.random.Generator, rows: int, columns: int, scale: float | None = None
) -> np.ndarray:
    values = random.standard_normal((rows, columns)) * (scale or 1.5 * columns**-0.5)
    return values.astype(np.float32)


def _norm(random: np.random.Generator, size: int) -> np.ndarray:
    return (1 + 0.1 * random.standard_normal(size)).astype(np.float32)


def byte_tokenizer() -> Tokenizer:
    """256 byte tokens, then special tokens; every text has a token for each of its bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|start|>", "<|end|>", *(f"<|{n}|>" for n in range(VOCAB - 258))]
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in special])
    return tokenizer
