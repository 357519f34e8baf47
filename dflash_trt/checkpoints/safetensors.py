"""Sharded or single safetensors files of one folder, read lazily."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from dflash_trt.errors import InputError


def file_digest(paths: Iterable[Path]) -> str:
    """SHA-256 over the content of `paths`, in the order given."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return f"sha256:{total.hexdigest()}"


def _read_fp8(path: Path, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor in E4M3 as fp32: the one type in use that the library does not give to NumPy.

    Format: eight bytes of header length, the header in JSON, then the data.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(size))[name]["data_offsets"]
        file.seek(8 + size + begin)
        data = np.frombuffer(file.read(end - begin), ml_dtypes.float8_e4m3fn)
    return data.reshape(shape).astype(np.float32)


def _as_fp32(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.kind in "iub" else array.astype(np.float32, copy=False)


class SafetensorsFolder:
    """All tensors of the `*.safetensors` files in a folder, under one name space."""

    def __init__(self, folder: Path, strip: str = "") -> None:
        """`strip` is a prefix that names may carry and that is left away, such as `model.`."""
        self.origin = str(folder)
        self._files = sorted(folder.glob("*.safetensors"))
        if not self._files:
            raise InputError(f"{folder}: there is no *.safetensors file in this folder")
        self._where: dict[str, tuple[Path, str]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in self._files:
            self._index(path, strip)
        self._check_against_index(folder)

    def _index(self, path: Path, strip: str) -> None:
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    short = name.removeprefix(strip)
                    if short in self._where:
                        raise InputError(f"{path}: the tensor '{short}' stands in two files")
                    self._where[short] = (path, name)
                    self._shapes[short] = tuple(file.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: cannot be read as safetensors ({error})") from error

    def _check_against_index(self, folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        if not path.exists():
            return
        listed = set(json.loads(path.read_text())["weight_map"])
        missing = listed - {name for _, name in self._where.values()}
        if missing:
            raise InputError(f"{folder}: a shard is missing, it should hold '{min(missing)}'")

    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> np.ndarray:
        """The tensor, floating types as fp32."""
        path, stored = self._where[name]
        with safe_open(path, framework="numpy") as file:
            if file.get_slice(stored).get_dtype() == "F8_E4M3":
                return _read_fp8(path, stored, self._shapes[name])
            array = file.get_tensor(stored)
        return _as_fp32(array)

    def read_part(self, name: str, axis: int, begin: int, end: int) -> np.ndarray:
        path, stored = self._where[name]
        cut = (*[slice(None)] * axis, slice(begin, end))
        with safe_open(path, framework="numpy") as file:
            part = file.get_slice(stored)
            if part.get_dtype() == "F8_E4M3":
                return self.read(name)[cut]
            return _as_fp32(part[cut])

    def digest(self) -> str:
        return file_digest(self._files)
