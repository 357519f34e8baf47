"""Reading weights and metadata: Hugging Face folders, GGUF files, drafters in the z-lab layout."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.checkpoints.base import TargetCheckpoint, TensorSource, TextFormat
from dflash_trt.checkpoints.drafter import DrafterCheckpoint, check_pair, read_drafter
from dflash_trt.checkpoints.gguf import GgufTarget
from dflash_trt.checkpoints.huggingface import HuggingFaceTarget
from dflash_trt.errors import InputError

__all__ = [
    "DrafterCheckpoint",
    "TargetCheckpoint",
    "TensorSource",
    "TextFormat",
    "check_pair",
    "open_drafter",
    "open_target",
]


def open_target(path: Path) -> TargetCheckpoint:
    """A target from a Hugging Face folder or a GGUF file."""
    if path.is_dir():
        return HuggingFaceTarget(path)
    if not path.exists():
        raise InputError(f"{path}: there is no such file or folder")
    if path.suffix == ".gguf":
        return GgufTarget(path)
    raise InputError(f"{path}: is neither a Hugging Face folder nor a GGUF file")


def open_drafter(path: Path) -> DrafterCheckpoint:
    """A drafter from a folder in the z-lab or the speculators layout."""
    if not path.is_dir():
        raise InputError(f"{path}: there is no such drafter folder")
    return read_drafter(path)
