"""Checkpoints by their name on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from dflash_trt.errors import InputError

# What a target or drafter is read from; other formats of the same weights stay where they are.
_WANTED = ["*.json", "*.jinja", "*.safetensors"]
_UNWANTED = ["original/*", "metal/*", "onnx/*"]


def is_hub_id(text: str) -> bool:
    """`owner/name`, which is no path on this machine."""
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", text)) and not Path(text).exists()


def cached_folder(repo: str) -> Path | None:
    """The folder of `repo` if it was downloaded before; asks nobody."""
    try:
        return _snapshot(repo, local_only=True)
    except ImportError:
        return None
    except Exception:  # the hub's library has an exception for every way of not being there
        return None


def download(repo: str) -> Path:
    """The folder of `repo`, downloaded where it is not here yet; what was begun is resumed."""
    try:
        return _snapshot(repo, local_only=False)
    except ImportError:
        raise InputError(
            f"{repo}: downloading needs the package huggingface_hub, or give a folder"
        ) from None
    except Exception as error:  # as above: offline, gated, no such name, disk full ..
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(
            f"{repo}: cannot be downloaded from the Hugging Face hub ({reason[0]}); fetch it "
            f"elsewhere and give the folder as a path"
        ) from error


def _snapshot(repo: str, local_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        repo,
        local_files_only=local_only,
        allow_patterns=_WANTED,
        ignore_patterns=_UNWANTED,
    )
    path = Path(folder)
    if local_only and not any(path.glob("*.safetensors")):
        raise FileNotFoundError(f"{repo} was begun, but no weights are here")
    return path
