"""Sharded or single safetensors files of one folder, read lazily.

Tensors are read through the file, not mapped: pages of a mapped checkpoint would count as memory of
the process for as long as it is open.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from dflash_trt.errors import InputError

_PIECE_BYTES = 16_000_000  # of a tensor, as stored, in memory at once
_DTYPES: Mapping[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8,
    "U16": np.uint16, "I16": np.int16, "U32": np.uint32, "I32": np.int32, "I64": np.int64,
}  # fmt: skip


def file_digest(paths: Iterable[Path]) -> str:
    """SHA-256 over the content of `paths`, in the order given."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return f"sha256:{total.hexdigest()}"


@dataclass(frozen=True)
class _Entry:
    """A tensor of a file: its name and type there, and where its data begins."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The entries of a file and where its data begins. The library checks all of it first, such as
    that the data is as long as the header says; it does not tell where a tensor lies.

    Format: eight bytes of header length, the header in JSON, then the data.
    """
    try:
        with safe_open(path, framework="numpy"), path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            return json.loads(file.read(size)), 8 + size
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: cannot be read as safetensors ({error})") from error


class SafetensorsFolder:
    """All tensors of the `*.safetensors` files in a folder, under one name space."""

    def __init__(self, folder: Path, strip: str = "") -> None:
        """`strip` is a prefix that names may carry and that is left away, such as `model.`."""
        self.origin = str(folder)
        self._files = sorted(folder.glob("*.safetensors"))
        if not self._files:
            raise InputError(f"{folder}: there is no *.safetensors file in this folder")
        self._entries: dict[str, _Entry] = {}
        for path in self._files:
            self._index(path, strip)
        self._check_against_index(folder)

    def _index(self, path: Path, strip: str) -> None:
        header, begin = _header(path)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            short = name.removeprefix(strip)
            if short in self._entries:
                raise InputError(f"{path}: the tensor '{short}' stands in two files")
            shape, offset = tuple(entry["shape"]), begin + entry["data_offsets"][0]
            self._entries[short] = _Entry(path, name, entry["dtype"], shape, offset)

    def _check_against_index(self, folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        if not path.exists():
            return
        listed = set(json.loads(path.read_text())["weight_map"])
        missing = listed - {entry.name for entry in self._entries.values()}
        if missing:
            raise InputError(f"{folder}: a shard is missing, it should hold '{min(missing)}'")

    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> np.dtype:
        """The type that `read` gives, from the header: fp32 for every floating type."""
        kept = self._stored_type(name)
        return kept if kept.kind in "iub" else np.dtype(np.float32)

    def _stored_type(self, name: str) -> np.dtype:
        kind = self._entries[name].dtype
        if kind not in _DTYPES:
            raise InputError(f"{self.origin}: '{name}' holds {kind}, which is not read")
        return np.dtype(_DTYPES[kind])

    def read(self, name: str) -> np.ndarray:
        """The tensor, floating types as fp32."""
        shape = self.shape(name)
        return self.read_part(name, 0, 0, shape[0]) if shape else next(self.rows(name)).reshape(())

    def read_part(self, name: str, axis: int, begin: int, end: int) -> np.ndarray:
        """Along the first axis nothing else is read; along another one all rows are, and are cut
        piece by piece."""
        shape = list(self.shape(name))
        rows = (begin, end) if axis == 0 else (0, shape[0])
        shape[axis] = end - begin
        made, at = np.empty(shape, self.dtype(name)), 0
        columns = (slice(None),) * axis + (slice(begin, end),) if axis else ()
        for piece in self._pieces(name, *rows):
            made[at : at + len(piece)] = piece[columns]
            at += len(piece)
        return made

    def rows(self, name: str) -> Iterator[np.ndarray]:
        shape = self.shape(name) or (1,)
        for piece in self._pieces(name, 0, shape[0]):
            yield piece.astype(self.dtype(name), copy=False)

    def _pieces(self, name: str, begin: int, end: int) -> Iterator[np.ndarray]:
        """Rows `begin` to `end` as they are stored."""
        entry, dtype = self._entries[name], self._stored_type(name)
        inner = entry.shape[1:]
        width = prod(inner) * dtype.itemsize
        step = max(1, _PIECE_BYTES // max(width, 1))
        with entry.path.open("rb", buffering=0) as file:
            file.seek(entry.offset + begin * width)
            for first in range(begin, end, step):
                count = min(step, end - first)
                data = np.fromfile(file, np.uint8, count * width)
                yield data.view(dtype).reshape(count, *inner)

    def digest(self) -> str:
        return file_digest(self._files)
