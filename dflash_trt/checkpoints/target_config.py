"""A target's `config.json`, as Hugging Face checkpoints carry it; no weights are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dflash_trt.config import ConfigReader, Experts, TargetConfig
from dflash_trt.errors import InputError
from dflash_trt.models.rope import check_scaling
from dflash_trt.ops.mixture_of_experts import MXFP4_BLOCK


def target_config(values: Mapping[str, Any], origin: str, tokens: int = 0) -> TargetConfig:
    """Read a `config.json`; `origin` names the file in errors, `tokens` counts the tokenizer's
    entries (0: as many as the embedding has rows)."""
    names = values.get("architectures") or ["(none)"]
    if names[0] not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise InputError(f"{origin}: the architecture '{names[0]}' is not one of {known}")
    architecture, special = ARCHITECTURES[names[0]]
    read = ConfigReader(values, origin)
    decoder = read.decoder()
    check_scaling(decoder["rope"], origin)
    _check_supported(read, architecture)
    return TargetConfig(
        architecture=architecture,
        **decoder,
        tied_embeddings=bool(read.get("tie_word_embeddings", False)),
        stop_ids=_stop_ids(read),
        tokens=tokens if tokens < decoder["vocab_size"] else 0,
        **special(read),
    )


def _stop_ids(read: ConfigReader) -> tuple[int, ...]:
    """All ids that end an answer: those of `config.json`, then those of `generation_config.json`."""
    found: dict[int, None] = {}
    for key in ("eos_token_id", "generation_eos_token_id"):
        ids = read.get(key, [])
        found |= dict.fromkeys(ids if isinstance(ids, list) else [ids])
    return tuple(found)


def _check_supported(read: ConfigReader, architecture: str) -> None:
    """Refuse what the graph does not know, by the key that asks for it."""
    if read.get("hidden_act", "silu") != "silu":
        raise InputError(f"{read.origin}: 'hidden_act' is '{read.get('hidden_act', '')}', not silu")
    for key in ("mlp_bias", "use_sliding_window"):
        if read.get(key, False) and not ("layer_types" in read and key == "use_sliding_window"):
            raise InputError(f"{read.origin}: '{key}' is set, which is not supported")
    partial = read.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise InputError(
            f"{read.origin}: 'partial_rotary_factor' is {partial}, only 1 is supported"
        )
    method = read.get("quantization_config", {}).get("quant_method", "none")
    readable = ("none", "mxfp4") if architecture == "gpt_oss" else ("none", "modelopt")
    if method not in readable:
        raise InputError(f"{read.origin}: a {architecture} in '{method}' cannot be read")


def _llama(read: ConfigReader) -> dict[str, Any]:
    return {"attention_bias": bool(read.get("attention_bias", False))}


def _qwen3(read: ConfigReader) -> dict[str, Any]:
    layers = read.integer("num_hidden_layers")
    return {**_llama(read), "qk_norm": True, "windows": read.windows(layers)}


def _gpt_oss(read: ConfigReader) -> dict[str, Any]:
    """Layers alternate between a window and full attention where `layer_types` does not say."""
    layers = read.integer("num_hidden_layers")
    window = read.integer("sliding_window", 128)
    alternating = tuple(0 if layer % 2 else window for layer in range(layers))
    for key in ("hidden_size", "intermediate_size"):
        if read.integer(key) % MXFP4_BLOCK:
            raise InputError(f"{read.origin}: '{key}' is no multiple of {MXFP4_BLOCK}")
    experts = Experts(
        count=read.integer("num_local_experts"),
        per_token=read.integer("num_experts_per_tok", read.get("experts_per_token", None)),
        alpha=read.number("swiglu_alpha", 1.702),
        limit=read.number("swiglu_limit", 7.0),
    )
    return {
        "attention_bias": bool(read.get("attention_bias", True)),
        "attention_sinks": True,
        "windows": read.windows(layers) if "layer_types" in read else alternating,
        "experts": experts,
    }


Special = Callable[[ConfigReader], dict[str, Any]]

# Class name in `architectures` -> our name (see `models.registry`) and what only it has.
ARCHITECTURES: Mapping[str, tuple[str, Special]] = {
    "LlamaForCausalLM": ("llama", _llama),
    "Qwen3ForCausalLM": ("qwen3", _qwen3),
    "GptOssForCausalLM": ("gpt_oss", _gpt_oss),
}
