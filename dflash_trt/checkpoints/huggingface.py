"""Targets in a Hugging Face folder: config.json, safetensors, tokenizer.json, chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.base import TextFormat
from dflash_trt.checkpoints.safetensors import SafetensorsFolder
from dflash_trt.config import ConfigReader, TargetConfig
from dflash_trt.errors import InputError

ARCHITECTURES = {"LlamaForCausalLM": "llama"}


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; an error names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: holds no JSON object")
    return value


class HuggingFaceTarget:
    """A target folder as `save_pretrained` writes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = target_config(read_json(folder / "config.json"), str(folder / "config.json"))
        self.tensors = SafetensorsFolder(folder)

    def text_format(self) -> TextFormat:
        tokenizer = self.folder / "tokenizer.json"
        if not tokenizer.exists():
            raise InputError(f"{tokenizer}: there is no such file, the target has no tokenizer")
        settings_path = self.folder / "tokenizer_config.json"
        settings = read_json(settings_path) if settings_path.exists() else {}
        template = self.folder / "chat_template.jinja"
        chat = template.read_text() if template.exists() else settings.get("chat_template", "")
        return TextFormat(
            tokenizer.read_text(),
            chat,
            _token(settings, "bos_token"),
            _token(settings, "eos_token"),
        )


def _token(settings: dict[str, Any], key: str) -> str:
    value = settings.get(key) or ""
    return value["content"] if isinstance(value, dict) else value


def target_config(values: dict[str, Any], origin: str) -> TargetConfig:
    """Read a target's `config.json`; `origin` names the file in errors."""
    names = values.get("architectures") or ["(none)"]
    if names[0] not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise InputError(f"{origin}: the architecture '{names[0]}' is not one of {known}")
    read = ConfigReader(values, origin)
    heads, hidden = read.integer("num_attention_heads"), read.integer("hidden_size")
    layers = read.integer("num_hidden_layers")
    eos = read.get("eos_token_id", [])
    return TargetConfig(
        architecture=ARCHITECTURES[names[0]],
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=read.integer("num_key_value_heads", heads),
        head_dim=read.integer("head_dim", hidden // heads),
        rms_norm_eps=read.number("rms_norm_eps"),
        rope=read.rope(),
        max_positions=read.integer("max_position_embeddings"),
        tied_embeddings=bool(read.get("tie_word_embeddings", False)),
        attention_bias=bool(read.get("attention_bias", False)),
        windows=read.windows(layers),
        stop_ids=tuple(eos) if isinstance(eos, list) else (eos,),
    )
