"""Drafters: `DFlashDraftModel` folders in the z-lab layout, and the speculators layout.

z-lab: `config.json` with Qwen3-style keys and a `dflash_config`; embedding and lm_head are the
target's. speculators (`speculators_model_type: dflash`): sizes in `transformer_layer_config`,
tapped layers counted one higher. Where the draft vocabulary (`draft_vocab_size`) is a part of the
target's there is a tensor `d2t`: target id = draft id + d2t[draft id]; the lm_head [draft
vocabulary, H] is the drafter's own in the speculators layout, and those rows of the target's where
it has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.base import TensorSource
from dflash_trt.checkpoints.json_file import read_json
from dflash_trt.checkpoints.modelopt import quantised_tensors
from dflash_trt.checkpoints.safetensors import SafetensorsFolder
from dflash_trt.config import ConfigReader, DrafterConfig, TargetConfig
from dflash_trt.errors import InputError
from dflash_trt.models.rope import check_scaling

ARCHITECTURE = "DFlashDraftModel"
_SPECULATORS = "dflash"
# Drafters that look like DFlash and are not: by a word in the architecture or type, by a key of the
# configuration, by a part of a tensor's name.
_LOOKALIKES = {
    "DFlash2": (("dflash2",), ("conv_kernel_size", "selector_rank"), ("_conv.", "selector")),
    "DSpark": (("dspark",), ("markov_rank", "dspark_block_size"), ("markov", "confidence")),
    "Domino": (("domino",), (), (".gru.", "prefix_gru", "gru_")),
    "EAGLE-3": (("eagle",), (), ("midlayer", "fc_norm")),
}


@dataclass(frozen=True)
class DrafterCheckpoint:
    """A drafter: its configuration and its tensors, under the names of the z-lab layout."""

    config: DrafterConfig
    tensors: TensorSource


def read_drafter(folder: Path) -> DrafterCheckpoint:
    """A drafter folder; tensor names may carry a `model.` prefix, which is left away."""
    path = folder / "config.json"
    values = read_json(path)
    config = drafter_config(values, str(path))
    tensors = quantised_tensors(folder, values, SafetensorsFolder(folder, strip="model."))
    _refuse_foreign_tensors(tensors)
    own = tensors.names()
    if config.draft_vocab_size and "lm_head.weight" not in own:
        if config.token_map and "d2t" not in own:
            raise InputError(
                f"{folder}: the draft vocabulary has neither 'lm_head.weight' nor 'd2t'"
            )
        if not config.token_map:
            config = replace(config, draft_vocab_size=0)  # all of the target's tokens: its lm_head
    config = replace(
        config,
        own_lm_head="lm_head.weight" in own,
        own_embedding="embed_tokens.weight" in own,
    )
    return DrafterCheckpoint(config, tensors)


def drafter_config(values: Mapping[str, Any], origin: str) -> DrafterConfig:
    """Read a drafter's `config.json`; `origin` names the file in errors."""
    _refuse_lookalikes(values, origin)
    if values.get("speculators_model_type") == _SPECULATORS:
        values = _from_speculators(values, origin)
    names = values.get("architectures") or ["(none)"]
    if names[0] != ARCHITECTURE:
        raise InputError(f"{origin}: '{names[0]}' is not a DFlash drafter ({ARCHITECTURE})")
    read = ConfigReader(values, origin)
    own = ConfigReader(read.get("dflash_config", {}), f"{origin}, dflash_config")
    config = DrafterConfig(
        **read.decoder(),
        block=_block(read, own),
        mask_id=own.integer("mask_token_id", minimum=0),
        taps=_taps(own),
        num_target_layers=read.integer("num_target_layers", minimum=0),
        attention_bias=bool(read.get("attention_bias", False)),
        windows=_windows(read, own),
        window_causal=_window_causal(read, own),
        draft_vocab_size=read.integer("draft_vocab_size", 0, minimum=0),
    )
    check_scaling(config.rope, origin)
    if config.mask_id >= config.vocab_size:
        raise InputError(
            f"{origin}: mask_token_id {config.mask_id} is outside the vocabulary of "
            f"{config.vocab_size}"
        )
    return config


# -- pieces of a configuration


def _from_speculators(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The same settings under z-lab's keys."""
    inner = ConfigReader(values.get("transformer_layer_config") or {}, f"{origin}, layers")
    outer = ConfigReader(values, origin)
    ids = outer.get("aux_hidden_state_layer_ids", None)
    if not ids or not all(isinstance(i, int) and i >= 1 for i in ids):
        raise InputError(f"{origin}: 'aux_hidden_state_layer_ids' is missing or no list of layers")
    if outer.get("sample_from_anchor", False) or outer.get("shift_label", False):
        raise InputError(f"{origin}: the anchor's slot predicts too, which DFlash's does not")
    return {
        **inner.values,
        "architectures": [ARCHITECTURE],
        "block_size": outer.integer("block_size", minimum=2),
        "num_target_layers": outer.get("num_target_layers", 0),
        "draft_vocab_size": outer.integer("draft_vocab_size", 0, minimum=0),
        "dflash_config": {
            "target_layer_ids": [i - 1 for i in ids],
            "mask_token_id": outer.integer("mask_token_id", minimum=0),
            "causal": not outer.get("sliding_window_non_causal", False),
        },
    }


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


def _windows(read: ConfigReader, own: ConfigReader) -> tuple[int, ...]:
    """From `layer_types`, or one window for all layers where `dflash_config.use_swa` is set."""
    layers = read.integer("num_hidden_layers")
    windows = read.windows(layers)
    if windows or not own.get("use_swa", False):
        return windows
    return (own.integer("swa_window_size"),) * layers


def _window_causal(read: ConfigReader, own: ConfigReader) -> bool:
    """Whether windowed layers look backwards only; full ones look both ways in every drafter."""
    if read.get("is_causal", False):
        raise InputError(f"{read.origin}: 'is_causal' makes all layers causal: no DFlash drafter")
    return bool(own.get("causal", read.get("is_causal", True)))


# -- what is refused


def _refuse_lookalikes(values: Mapping[str, Any], origin: str) -> None:
    """Drafters of other kinds would load in part and draft badly without a word."""
    own = values.get("dflash_config") or {}
    kinds = [*(values.get("architectures") or []), values.get("speculators_model_type")]
    kinds += [values.get("projector_type"), own.get("projector_type")]
    words = [str(kind) for kind in kinds if kind]
    for name, (marks, keys, _) in _LOOKALIKES.items():
        found = [word for word in words if any(mark in word.lower() for mark in marks)]
        found += [key for key in keys if values.get(key) or own.get(key)]
        if found:
            raise _foreign(origin, name, found[0])


def _refuse_foreign_tensors(tensors: TensorSource) -> None:
    for tensor in sorted(tensors.names()):
        for name, (_, _, marks) in _LOOKALIKES.items():
            if any(mark in tensor.lower() for mark in marks):
                raise _foreign(tensors.origin, name, tensor)


def _foreign(origin: str, name: str, found: str) -> InputError:
    return InputError(f"{origin}: this is a {name} drafter ('{found}'), only DFlash is supported")


def check_pair(target: TargetConfig, drafter: DrafterConfig, origin: str) -> None:
    """Refuse a drafter that was made for another target."""
    pairs = (
        ("num_target_layers", drafter.num_target_layers, target.num_layers),
        ("hidden_size", drafter.hidden_size, target.hidden_size),
        ("vocab_size", drafter.vocab_size, target.vocab_size),
    )
    for key, mine, theirs in pairs:
        if mine not in (theirs, 0):
            raise InputError(
                f"{origin}: the drafter is for another target, its {key} is {mine} and the "
                f"target's {theirs}"
            )
    outside = [tap for tap in drafter.taps if not 0 <= tap < target.num_layers]
    if outside:
        raise InputError(
            f"{origin}: target_layer_ids {outside} lie outside the target's "
            f"{target.num_layers} layers"
        )
