"""JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_trt.errors import InputError


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
