"""Drafters in the z-lab layout: `DFlashDraftModel` folders with config.json and safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.huggingface import read_json
from dflash_trt.checkpoints.safetensors import SafetensorsFolder
from dflash_trt.config import ConfigReader, DrafterConfig, TargetConfig
from dflash_trt.errors import InputError

ARCHITECTURE = "DFlashDraftModel"


class DrafterCheckpoint:
    """A drafter folder; tensor names may carry a `model.` prefix, which is left away."""

    def __init__(self, folder: Path) -> None:
        path = folder / "config.json"
        self.config = drafter_config(read_json(path), str(path))
        self.tensors = SafetensorsFolder(folder, strip="model.")


def drafter_config(values: dict[str, Any], origin: str) -> DrafterConfig:
    """Read a drafter's `config.json`; `origin` names the file in errors."""
    names = values.get("architectures") or ["(none)"]
    if names[0] != ARCHITECTURE:
        raise InputError(f"{origin}: '{names[0]}' is not a DFlash drafter ({ARCHITECTURE})")
    read = ConfigReader(values, origin)
    own = ConfigReader(read.get("dflash_config", {}), f"{origin}, dflash_config")
    heads, hidden = read.integer("num_attention_heads"), read.integer("hidden_size")
    layers = read.integer("num_hidden_layers")
    config = DrafterConfig(
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
        block=_block(read, own),
        mask_id=own.integer("mask_token_id", minimum=0),
        taps=_taps(own),
        num_target_layers=read.integer("num_target_layers"),
        attention_bias=bool(read.get("attention_bias", False)),
        windows=read.windows(layers),
        window_causal=bool(own.get("causal", True)),
    )
    if config.mask_id >= config.vocab_size:
        raise InputError(
            f"{origin}: mask_token_id {config.mask_id} is outside the vocabulary of {config.vocab_size}"
        )
    return config


def _block(read: ConfigReader, own: ConfigReader) -> int:
    """`block_size` may stand at the top or in `dflash_config`; both and different is an error."""
    sizes = {r.integer("block_size", minimum=2) for r in (read, own) if "block_size" in r}
    if not sizes:
        raise InputError(f"{read.origin}: the key 'block_size' is missing")
    if len(sizes) > 1:
        raise InputError(f"{read.origin}: 'block_size' is given twice, as {sorted(sizes)}")
    return sizes.pop()


def _taps(own: ConfigReader) -> tuple[int, ...]:
    taps = own.get("target_layer_ids", None)
    if not taps or not all(isinstance(tap, int) for tap in taps):
        raise InputError(
            f"{own.origin}: 'target_layer_ids' is missing or not a list of layer numbers"
        )
    return tuple(taps)


def check_pair(target: TargetConfig, drafter: DrafterConfig, origin: str) -> None:
    """Refuse a drafter that was made for another target."""
    pairs = (
        ("num_target_layers", drafter.num_target_layers, target.num_layers),
        ("hidden_size", drafter.hidden_size, target.hidden_size),
        ("vocab_size", drafter.vocab_size, target.vocab_size),
    )
    for key, mine, theirs in pairs:
        if mine != theirs:
            raise InputError(
                f"{origin}: the drafter is for another target, its {key} is {mine} and the target's {theirs}"
            )
    outside = [tap for tap in drafter.taps if not 0 <= tap < target.num_layers]
    if outside:
        raise InputError(
            f"{origin}: target_layer_ids {outside} lie outside the target's {target.num_layers} layers"
        )
