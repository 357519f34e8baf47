"""Targets in a Hugging Face folder: safetensors, tokenizer.json, chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dflash_trt.checkpoints.base import TextFormat
from dflash_trt.checkpoints.json_file import read_json
from dflash_trt.checkpoints.modelopt import quantised_tensors
from dflash_trt.checkpoints.safetensors import SafetensorsFolder
from dflash_trt.checkpoints.target_config import target_config
from dflash_trt.errors import InputError


class HuggingFaceTarget:
    """A target folder as `save_pretrained` writes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / "config.json"
        values = {**_generation_stops(folder), **read_json(path)}
        self.config = target_config(values, str(path), _token_count(folder / "tokenizer.json"))
        self.tensors = quantised_tensors(folder, values, SafetensorsFolder(folder))

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


def _generation_stops(folder: Path) -> dict[str, Any]:
    """Stop ids of `generation_config.json`: chat models list there what ends a turn."""
    path = folder / "generation_config.json"
    if not path.exists():
        return {}
    return {"generation_eos_token_id": read_json(path).get("eos_token_id")}


def _token_count(tokenizer: Path) -> int:
    """Entries of a tokenizer, added tokens too; 0 where there is none."""
    if not tokenizer.exists():
        return 0
    try:
        codec = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"{tokenizer}: cannot be read as a tokenizer ({error})") from error
    return max(codec.get_vocab(with_added_tokens=True).values()) + 1
