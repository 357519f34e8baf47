"""The weights file of a TensorRT engine: every weight in the layout and precision of the plans.

Tensors are made and written one weight of the source graph at a time. FP4 is stored as bytes of two
codes each. The file is safetensors, so that it can be mapped and copied to the device piece by piece.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from dflash_trt.errors import InputError
from dflash_trt.lowering.tensorrt.plan import Binding
from dflash_trt.quantization import fp8, nvfp4

FILE = "weights.safetensors"
_HEADER_ALIGNMENT = 256
_STORED = {
    "BF16": ("BF16", 2),
    "HALF": ("F16", 2),
    "FLOAT": ("F32", 4),
    "FP8": ("F8_E4M3", 1),
    "E8M0": ("U8", 1),
}
_NUMPY = {"BF16": ml_dtypes.bfloat16, "HALF": np.float16, "FLOAT": np.float32}
_RECIPES = {"fp8": fp8, "nvfp4": nvfp4}


@dataclass(frozen=True)
class Stored:
    """A tensor of the file: its type there and its shape there (FP4: bytes of two codes)."""

    binding: Binding
    dtype: str
    shape: tuple[int, ...]
    size: int


def stored(binding: Binding) -> Stored:
    if binding.dtype == "FP4":
        shape = (*binding.shape[:-1], binding.shape[-1] // 2)
        return Stored(binding, "U8", shape, int(np.prod(shape)))
    dtype, width = _STORED[binding.dtype]
    return Stored(binding, dtype, binding.shape, width * int(np.prod(binding.shape)))


def weight_table(plans: Sequence[Sequence[Binding]]) -> dict[str, Binding]:
    """All weight bindings of several plans by name; a name must mean the same everywhere."""
    table: dict[str, Binding] = {}
    for binding in (b for plan in plans for b in plan if b.role == "weight"):
        known = table.setdefault(binding.name, binding)
        if known != binding:
            raise InputError(f"the plans disagree about the weight '{binding.name}'")
    return table


def sinks_table(
    plans: Sequence[Sequence[Binding]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Binding]:
    """Attention sinks are no inputs: the runtime writes them into the first row of the caches."""
    names = {b.made_of[0] for plan in plans for b in plan if b.made_of[1] == "sinks"}
    return {
        name: Binding(name, "", "BF16", shapes[name], "sinks", made_of=(name, ""))
        for name in sorted(names)
    }


def make_parts(
    weight: np.ndarray, bindings: Sequence[Binding], peak: float
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors made of one source weight fp32 [K, N]; `peak` is that of its activations."""
    parts = {binding.made_of[1]: binding for binding in bindings}
    if "bytes" in parts:
        yield parts["bytes"].name, weight.view(np.uint8)
        return
    recipe = next((name for name in _RECIPES if name in parts), None)
    if recipe is None:
        for binding in bindings:
            yield binding.name, weight.astype(_NUMPY[binding.dtype])
        return
    scale = np.float32(_RECIPES[recipe].input_scale(peak))
    inverse = parts["inverse_input_scale"]
    yield inverse.name, np.full((1, 1), 1 / scale, _NUMPY[inverse.dtype])
    if recipe == "fp8":
        codes, columns = fp8.encode(weight)
        yield parts["fp8"].name, codes
        yield parts["scale"].name, columns * scale
        return
    packed, blocks, whole = nvfp4.encode(weight)
    yield parts["nvfp4"].name, packed
    yield parts["block_scale"].name, blocks
    yield parts["scale"].name, whole * scale


def write_weights(
    path: Path,
    table: Mapping[str, Binding],
    load: Callable[[str], np.ndarray],
    peaks: Mapping[str, float],
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Write the file at `path`. `load` gives a source weight by name, `peaks` the largest
    magnitude of the activations that a quantised weight is multiplied with."""
    layout = [stored(binding) for binding in table.values()]
    header, offsets = _header(layout)
    by_source: dict[str, list[Binding]] = {}
    for binding in table.values():
        by_source.setdefault(binding.made_of[0], []).append(binding)
    missing = [b.made_of[0] for b in table.values() if b.made_of[1] and b.made_of[0] not in peaks]
    if missing:
        raise InputError(f"weight '{missing[0]}': its activations were not calibrated")
    sizes = {item.binding.name: item for item in layout}
    with path.open("wb") as file:
        file.write(header)
        for source, bindings in by_source.items():
            progress(f"weights {source}")
            for name, array in make_parts(load(source), bindings, peaks.get(source, 0.0)):
                _check(sizes[name], array)
                file.seek(len(header) + offsets[name])
                file.write(np.ascontiguousarray(array).view(np.uint8).data)


def _check(item: Stored, array: np.ndarray) -> None:
    if tuple(array.shape) != item.shape or array.nbytes != item.size:
        raise InputError(
            f"weight '{item.binding.name}': {list(array.shape)} was made, "
            f"the plan wants {list(item.shape)}"
        )


def _header(layout: Sequence[Stored]) -> tuple[bytes, dict[str, int]]:
    """safetensors header, and where each tensor begins behind it. The largest types come first, so
    that all tensors are aligned to their type."""
    entries, offsets, end = {}, {}, 0
    for item in sorted(layout, key=lambda s: -_element_bytes(s)):
        name = item.binding.name
        offsets[name] = end
        span = [end, end + item.size]
        entries[name] = {"dtype": item.dtype, "shape": list(item.shape), "data_offsets": span}
        end += item.size
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, offsets


def _element_bytes(item: Stored) -> int:
    return item.size // max(int(np.prod(item.shape)), 1)
