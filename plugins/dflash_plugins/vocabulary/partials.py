"""Layout of the tile results in a plugin's workspace, and the first of its two launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_plugins.aot import KernelBuild
from dflash_plugins.launch import Launch

TILE = 4096
FIELD_BYTES = 4
POINTERS = {"BF16": "*bf16", "HALF": "*fp16", "FLOAT": "*fp32"}
NAME = "best_of_tile"


def tiles(vocabulary: int) -> int:
    return -(-vocabulary // TILE)


def field_bytes(rows: int, vocabulary: int) -> int:
    """Bytes of one of the three fields, kept aligned to 256."""
    return -(-rows * tiles(vocabulary) * FIELD_BYTES // 256) * 256


def workspace_bytes(rows: int, vocabulary: int) -> int:
    return 3 * field_bytes(rows, vocabulary)


def fields(workspace: int, rows: int, vocabulary: int) -> tuple[int, int, int]:
    """Addresses of best, index and total."""
    size = field_bytes(rows, vocabulary)
    return workspace, workspace + size, workspace + 2 * size


def kernel(settings: dict[str, Any]) -> KernelBuild:
    from dflash_plugins.vocabulary.kernel import best_of_tile

    signature = {
        "logits": POINTERS[settings["dtype"]],
        "best": "*fp32",
        "index": "*i32",
        "total": "*fp32",
    }
    constants = {"V": settings["vocabulary"], "TILE": TILE}
    return KernelBuild(NAME, best_of_tile, signature, constants, num_warps=4)


def launch(logits: int, rows: int, vocabulary: int, parts: Sequence[int]) -> Launch:
    return Launch(NAME, (rows, tiles(vocabulary), 1), (logits, *parts))
