"""Sizes that the launches of MixtureOfExperts agree on: tiles, grids and the plugin's workspace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Rows of a matrix to a program of the products, and how many of its columns at a time.
COLUMNS, STEP = 64, 128
SUM_COLUMNS = 1024
PAIR_STEP = 32
# Rows of a tile: what one matrix instruction takes at least, and what registers hold at most.
FEWEST_ROWS, MOST_ROWS = 16, 32
TILES = ("tile_expert", "tile_first", "tile_rows")
ELEMENT_BYTES = {"BF16": 2, "HALF": 2}
ALIGNMENT = 256


def tile_rows(tokens: int, top_k: int, experts: int) -> int:
    """Tokens of an expert that one program takes: about as many as an expert gets of `tokens`."""
    return FEWEST_ROWS if tokens * top_k <= FEWEST_ROWS * experts else MOST_ROWS


def most_tiles(pairs: int, experts: int, rows: int) -> int:
    """Tiles of `pairs` at most: the last one of each expert may hold a single pair."""
    return min(pairs, pairs // rows + experts)


def fields(settings: Mapping[str, Any], tokens: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of everything in the workspace for so many tokens."""
    pairs = tokens * settings["top_k"]
    tiles = most_tiles(pairs, settings["experts"], settings["rows"])
    return {
        "chosen": ("INT32", (pairs,)),
        "shares": ("FLOAT", (pairs,)),
        "order": ("INT32", (pairs,)),
        **dict.fromkeys(TILES, ("INT32", (tiles,))),
        "tile_count": ("INT32", (1,)),
        "inner": (settings["dtype"], (pairs, settings["inner"])),
        "parts": ("FLOAT", (pairs, settings["hidden"])),
    }


def offsets(settings: Mapping[str, Any], tokens: int) -> tuple[dict[str, int], int]:
    """Where each field begins in the workspace, and the size of it all in bytes."""
    found, end = {}, 0
    for name, (dtype, shape) in fields(settings, tokens).items():
        found[name] = end
        size = ELEMENT_BYTES.get(dtype, 4)
        for extent in shape:
            size *= extent
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return found, end


def grids(settings: Mapping[str, Any], tokens: int) -> dict[str, tuple[int, int, int]]:
    """Programs of each launch. Tiles come first, so that those of an expert run together."""
    tiles = most_tiles(tokens * settings["top_k"], settings["experts"], settings["rows"])
    return {
        "route": (tokens, 1, 1),
        "group": (1, 1, 1),
        "gate_up": (tiles, -(-2 * settings["inner"] // COLUMNS), 1),
        "down": (tiles, -(-settings["hidden"] // COLUMNS), 1),
        "combine": (tokens, -(-settings["hidden"] // SUM_COLUMNS), 1),
    }


def arguments(
    given: Mapping[str, Any], field: Mapping[str, Any], pairs: int
) -> dict[str, tuple[Any, ...]]:
    """What each launch takes, in the order of its kernel. `given` holds the op's inputs and `y`."""
    tiles = (field["order"], *(field[name] for name in TILES), field["tile_count"])
    first, second = (
        tuple(given[f"{name}_{part}"] for part in ("blocks", "scales", "bias"))
        for name in ("gate_up", "down")
    )
    return {
        "route": (given["router_logits"], field["chosen"], field["shares"]),
        "group": (field["chosen"], *tiles, pairs),
        "gate_up": (given["x"], *first, *tiles, field["inner"]),
        "down": (field["inner"], *second, field["shares"], *tiles, field["parts"]),
        "combine": (field["parts"], given["y"]),
    }
