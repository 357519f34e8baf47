"""Write and read a drafter in the published (z-lab) layout: config.json + model.safetensors, and
d2t.safetensors where it drafts a part of the vocabulary (see `checkpoints.drafter`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_trt.training.drafter import Drafter, DrafterShape

MAP_FILE = "d2t.safetensors"


def config_json(shape: DrafterShape) -> dict[str, Any]:
    """The keys that loaders of the published drafters read."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": shape.max_positions,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["full_attention"] * shape.layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "block_size": shape.block,
        "num_target_layers": shape.target_layers,
        "dflash_config": {
            "target_layer_ids": list(shape.taps),
            "mask_token_id": shape.mask_token,
        },
    }


def shape_from(config: dict[str, Any]) -> DrafterShape:
    """The shape that :func:`config_json` wrote."""
    inner = config["dflash_config"]
    return DrafterShape(
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        ffn=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        block=config["block_size"],
        taps=tuple(inner["target_layer_ids"]),
        mask_token=inner["mask_token_id"],
        vocab=config["vocab_size"],
        target_layers=config["num_target_layers"],
        rope_theta=config["rope_theta"],
        eps=config["rms_norm_eps"],
        max_positions=config["max_position_embeddings"],
    )


def export(
    drafter: Drafter,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    drafted: NDArray[np.int64] | None = None,
) -> None:
    """Write ``folder``; each file is written beside its place and renamed. ``drafted``: the token
    ids it drafts, rising; by default all."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.detach().to("cpu", dtype).contiguous() for k, v in drafter.state_dict().items()}
    _save(tensors, folder / "model.safetensors")
    config, values = folder / "config.json", config_json(drafter.shape)
    if drafted is not None and len(drafted) < drafter.shape.vocab:
        values["draft_vocab_size"] = len(drafted)
        offsets = torch.from_numpy(drafted - np.arange(len(drafted)))
        _save({"d2t": offsets}, folder / MAP_FILE)
    else:
        (folder / MAP_FILE).unlink(missing_ok=True)
    config.with_suffix(".tmp").write_text(json.dumps(values, indent=2) + "\n")
    config.with_suffix(".tmp").replace(config)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path.with_suffix(".tmp"), metadata={"format": "pt"})
    path.with_suffix(".tmp").replace(path)


def load(folder: Path) -> Drafter:
    """An exported drafter in fp32, ready to train on."""
    drafter = Drafter(shape_from(json.loads((folder / "config.json").read_text())))
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    drafter.load_state_dict({k: v.float() for k, v in tensors.items()})
    return drafter
