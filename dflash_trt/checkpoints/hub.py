"""Checkpoints by their name on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from dflash_trt.checkpoints.hub_weights import fetch_weights
from dflash_trt.errors import InputError

# What a target or drafter is read from; other formats of the same weights stay where they are.
_TEXTS, _WEIGHTS = ["*.json", "*.jinja"], "*.safetensors"
_UNWANTED = ["original/*", "metal/*", "onnx/*"]


def is_hub_id(text: str) -> bool:
    """`owner/name`, which is no path on this machine."""
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", text)) and not Path(text).exists()


def cached_folder(repo: str) -> Path | None:
    """The folder of `repo` if it was downloaded before; asks nobody."""
    try:
        folder = _snapshot(repo, [*_TEXTS, _WEIGHTS], local_only=True)
    except Exception:  # the hub's library has an exception for every way of not being there
        return None
    return folder if any(folder.glob(_WEIGHTS)) else None  # else it was begun only


def download(repo: str) -> Path:
    """The folder of `repo`, downloaded where it is not here yet; what was begun is gone on with."""
    again = ""
    try:
        texts = _snapshot(repo, _TEXTS)
        again = "the same command goes on from what is here, or "
        fetch_weights(repo, texts, _WEIGHTS, _UNWANTED)
        return _snapshot(repo, [*_TEXTS, _WEIGHTS])
    except InputError:
        raise
    except ImportError:
        raise InputError(
            f"{repo}: downloading needs the package huggingface_hub, or give a folder"
        ) from None
    except Exception as error:  # as above: offline, gated, no such name, disk full ..
        raise InputError(
            f"{repo}: cannot be downloaded from the Hugging Face hub ({_reason(error)}); {again}fetch "
            f"it elsewhere and give the folder as a path"
        ) from error


def _reason(error: Exception) -> str:
    """The first line that is more than a status (`404 Client Error. (Request ID: ..)`)."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not re.match(r"\d{3} \w+ Error\b", line)]
    return said[0].rstrip(".") if said else type(error).__name__


def _snapshot(repo: str, wanted: list[str], local_only: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        repo, local_files_only=local_only, allow_patterns=wanted, ignore_patterns=_UNWANTED
    )
    return Path(folder)
