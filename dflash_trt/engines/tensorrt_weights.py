"""The weights file of a TensorRT engine: every weight in the layout and precision of the plans.

Tensors are made and written one weight of the source graph at a time. FP4 is stored as bytes of two
codes each. The file is safetensors, so that it can be mapped and copied to the device piece by piece.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dflash_trt.checkpoints.modelopt import StoredMatrix
from dflash_trt.errors import InputError
from dflash_trt.lowering.tensorrt.plan import Binding
from dflash_trt.quantization import fp8, nvfp4

FILE = "weights.safetensors"
RANK_FILE = "weights.rank{rank}.safetensors"  # of a mesh: what only this rank has
_HEADER_ALIGNMENT = 256
_STORED = {
    "BF16": ("BF16", 2),
    "HALF": ("F16", 2),
    "FLOAT": ("F32", 4),
    "FP8": ("F8_E4M3", 1),
    "E8M0": ("U8", 1),
    "INT8": ("U8", 1),
    "INT64": ("I64", 8),
}
_NUMPY = {
    "BF16": ml_dtypes.bfloat16,
    "HALF": np.float16,
    "FLOAT": np.float32,
    "INT64": np.int64,
}
_READ = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "U8": np.uint8,
    "I64": np.int64,
}


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


@dataclass(frozen=True)
class Encoded:
    """A quantised weight: its tensors by their part (see `Binding`), its scale fp32 [1, N] without
    that of its activations, and theirs, a power of two."""

    parts: Mapping[str, np.ndarray]
    scale: np.ndarray
    input_scale: float


def encode(weight: np.ndarray, precision: str, peak: float) -> Encoded:
    """Quantise a weight fp32 [K, N]; `peak` is the largest magnitude of its activations."""
    if precision == "fp8":
        codes, scale = fp8.encode(weight)
        return Encoded({"fp8": codes}, scale, fp8.input_scale(peak))
    packed, blocks, scale = nvfp4.encode(weight)
    parts = {"nvfp4": packed, "block_scale": blocks}
    return Encoded(parts, scale, nvfp4.input_scale(peak))


def from_export(stored: StoredMatrix) -> Encoded:
    """A weight with the codes and scales of its checkpoint. Plans want the scale of activations to
    be a power of two; the next larger one costs headroom at the small end, nothing else."""
    scale, input_scale = stored.scale[None], fp8.power_of_two(stored.input_scale)
    if stored.block_scales is None:
        return Encoded({"fp8": stored.codes.T}, scale, input_scale)
    parts = {"nvfp4": stored.codes, "block_scale": stored.block_scales}
    return Encoded(parts, scale, input_scale)


_Place = tuple[int, np.dtype, tuple[int, ...]]  # offset in the file, type and shape


class Shelf:
    """Quantised weights between their making and their writing: in a file of `folder` that has no
    name, so that they are neither in memory nor left behind. (On NFS it has one until it is closed:
    a block that uses a shelf ends before the files of `folder` are counted.)"""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (see __exit__)
        self._known: dict[str, tuple[dict[str, _Place], np.ndarray, float]] = {}

    def __enter__(self) -> Shelf:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def put(self, name: str, weight: Encoded) -> None:
        places = {part: self._append(array) for part, array in weight.parts.items()}
        self._known[name] = places, weight.scale, weight.input_scale

    def take(self, name: str) -> Encoded:
        places, scale, input_scale = self._known[name]
        return Encoded({part: self._read(*p) for part, p in places.items()}, scale, input_scale)

    def _append(self, array: np.ndarray) -> _Place:
        offset = self._file.seek(0, os.SEEK_END)
        np.ascontiguousarray(array).view(np.uint8).tofile(self._file)
        return offset, array.dtype, array.shape

    def _read(self, offset: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        self._file.seek(offset)
        size = prod(shape) * dtype.itemsize
        return np.fromfile(self._file, np.uint8, size).view(dtype).reshape(shape)


def make_parts(
    weight: np.ndarray | Encoded, bindings: Sequence[Binding]
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors made of one source weight, fp32 [K, N], bytes, or quantised."""
    parts = {binding.made_of[1]: binding for binding in bindings}
    if isinstance(weight, Encoded):
        inverse = parts["inverse_input_scale"]
        yield inverse.name, np.full((1, 1), 1 / weight.input_scale, _NUMPY[inverse.dtype])
        yield parts["scale"].name, weight.scale * np.float32(weight.input_scale)
        yield from ((parts[part].name, array) for part, array in weight.parts.items())
    elif "bytes" in parts:
        yield parts["bytes"].name, weight.view(np.uint8)
    else:
        yield from ((b.name, weight.astype(_NUMPY[b.dtype], copy=False)) for b in bindings)


def _wanted_type(bindings: Sequence[Binding]) -> Any:
    """What all tensors of a source weight are stored in; None where that is not one type."""
    types = {binding.dtype for binding in bindings}
    return _NUMPY.get(types.pop()) if len(types) == 1 else None


Load = Callable[[str, Any], np.ndarray | Encoded]


def write_weights(
    path: Path,
    table: Mapping[str, Binding],
    load: Load,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Write the file at `path`. `load` gives a source weight by name, in the type that is named
    (None: its own), quantised where plans want it so."""
    layout = [stored(binding) for binding in table.values()]
    header, offsets = _header(layout)
    by_source: dict[str, list[Binding]] = {}
    for binding in table.values():
        by_source.setdefault(binding.made_of[0], []).append(binding)
    sizes = {item.binding.name: item for item in layout}
    with path.open("wb") as file:
        file.write(header)
        for source, bindings in by_source.items():
            progress(f"weights {source}")
            for name, array in make_parts(load(source, _wanted_type(bindings)), bindings):
                _check(sizes[name], array)
                file.seek(len(header) + offsets[name])
                file.write(np.ascontiguousarray(array).view(np.uint8).data)


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a weights file by name, mapped: nothing is read before it is used."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, np.uint8, "r", offset=8 + size)
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        found[name] = data[begin:end].view(_READ[entry["dtype"]]).reshape(entry["shape"])
    return found


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
