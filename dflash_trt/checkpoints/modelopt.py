"""Checkpoints exported by NVIDIA ModelOpt in FP8 or NVFP4 (`hf_quant_config.json`).

They are read as fp32, or as they are stored where an engine takes them so.

Format: the unified Hugging Face export of `nvidia-modelopt`. FP8: `weight` in E4M3 and one fp32
`weight_scale`, for the tensor or for each row. NVFP4: `weight` uint8 [N, K/2], two E2M1 codes to a
byte with the first in the low half, `weight_scale` E4M3 [N, K/16] and one fp32 `weight_scale_2`.
`input_scale`, one fp32, is what activations are divided by before they are rounded.
Modules that were left out of the quantisation are stored as they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dflash_trt.checkpoints.base import TensorSource
from dflash_trt.checkpoints.json_file import read_json
from dflash_trt.errors import InputError
from dflash_trt.ops.mixture_of_experts import FP4_VALUES

ALGORITHMS = ("FP8", "NVFP4")
_SCALES = (".weight_scale", ".weight_scale_2", ".input_scale", ".k_scale", ".v_scale")
_BLOCK = 16


@dataclass(frozen=True)
class StoredMatrix:
    """A quantised matrix [N, K] as an export holds it.

    codes: E4M3 [N, K], or two E2M1 to a byte, uint8 [N, K/2]; block_scales: E4M3 [N, K/16] beside
    the latter; scale: fp32 [N]; input_scale: of the activations that it is multiplied with.
    """

    codes: np.ndarray
    block_scales: np.ndarray | None
    scale: np.ndarray
    input_scale: float


def algorithm(settings: Mapping[str, Any], origin: str) -> str:
    """What `hf_quant_config.json`, or `quantization_config` of config.json, says was used."""
    inner = settings.get("quantization", settings)
    name = str(inner.get("quant_algo"))
    if name not in ALGORITHMS:
        raise InputError(
            f"{origin}: 'quant_algo' is '{name}', only {', '.join(ALGORITHMS)} is read"
        )
    return name


class ModelOptTensors:
    """The tensors of an export under the names of the model, scales applied and left away."""

    def __init__(self, stored: TensorSource, algo: str) -> None:
        self._stored = stored
        self._algo = algo
        self._names = frozenset(n for n in stored.names() if not n.endswith(_SCALES))
        quantised = [n for n in self._names if self._scale_of(n) in stored.names()]
        self._quantised = frozenset(quantised)
        if not quantised:
            raise InputError(f"{stored.origin}: {algo} was announced, but no tensor has a scale")
        if algo == "NVFP4":
            self._check_blocks()
        for name in sorted(self._names - self._quantised):
            if stored.dtype(name) == np.uint8:
                raise InputError(f"{stored.origin}: '{name}' is packed and has no scale")

    @property
    def origin(self) -> str:
        return self._stored.origin

    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._stored.shape(name)
        packed = self._algo == "NVFP4" and name in self._quantised
        return (*shape[:-1], 2 * shape[-1]) if packed else shape

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(np.float32) if name in self._quantised else self._stored.dtype(name)

    def read(self, name: str) -> np.ndarray:
        array = self._stored.read(name)
        if name not in self._quantised:
            return array
        scale = self._stored.read(self._scale_of(name))
        if self._algo == "NVFP4":
            return _unpacked(array) * self._block_factors(name, scale)
        return array * (scale.reshape(-1, 1) if scale.size > 1 else scale.reshape(()))

    @property
    def precision(self) -> str:
        """`fp8` or `nvfp4`."""
        return self._algo.lower()

    def is_quantised(self, name: str) -> bool:
        return name in self._quantised

    def stored(self, name: str) -> StoredMatrix:
        """A quantised tensor as it is stored. (E4M3 is read as fp32; back it is the same bits.)"""
        array, scale = self._stored.read(name), self._stored.read(self._scale_of(name))
        input_scale = self.input_scale(name)
        if self._algo == "FP8":
            columns = np.broadcast_to(scale.reshape(-1), array.shape[:1])
            return StoredMatrix(array.astype(ml_dtypes.float8_e4m3fn), None, columns, input_scale)
        whole = self._stored.read(f"{self._scale_of(name)}_2").reshape(-1)
        blocks = scale.astype(ml_dtypes.float8_e4m3fn)
        return StoredMatrix(array, blocks, np.broadcast_to(whole, array.shape[:1]), input_scale)

    def read_part(self, name: str, axis: int, begin: int, end: int) -> np.ndarray:
        """Cut from the whole tensor: scales are applied to it first."""
        return self.read(name).take(range(begin, end), axis)

    def rows(self, name: str) -> Iterator[np.ndarray]:
        return iter([self.read(name)]) if name in self._quantised else self._stored.rows(name)

    def digest(self) -> str:
        return self._stored.digest()

    def input_scale(self, name: str) -> float:
        """What the activations that meet a quantised tensor are divided by."""
        name = f"{name.removesuffix('.weight')}.input_scale"
        if name not in self._stored.names():
            raise InputError(f"{self.origin}: the tensor '{name}' is missing")
        scale = float(self._stored.read(name).reshape(()))
        if not 0 < scale < math.inf:
            raise InputError(f"{self.origin}: '{name}' is {scale}, not a scale")
        return scale

    @staticmethod
    def _scale_of(name: str) -> str:
        return f"{name.removesuffix('.weight')}.weight_scale"

    def _block_factors(self, name: str, scale: np.ndarray) -> np.ndarray:
        whole = self._stored.read(f"{self._scale_of(name)}_2").reshape(())
        return np.repeat(scale * whole, _BLOCK, axis=-1)

    def _check_blocks(self) -> None:
        for name in sorted(self._quantised):
            wanted = (*self.shape(name)[:-1], self.shape(name)[-1] // _BLOCK)
            scale = self._scale_of(name)
            if f"{scale}_2" not in self._stored.names():
                raise InputError(f"{self.origin}: the tensor '{scale}_2' is missing")
            if self._stored.shape(scale) != wanted:
                raise InputError(
                    f"{self.origin}: '{scale}' has the shape {list(self._stored.shape(scale))} "
                    f"instead of {list(wanted)}"
                )


def _unpacked(packed: np.ndarray) -> np.ndarray:
    """Bytes [.., K/2] -> values [.., K]."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1)
    return FP4_VALUES[codes].reshape(*packed.shape[:-1], -1)


def quantised_tensors(
    folder: Path, config: Mapping[str, Any], stored: TensorSource
) -> TensorSource:
    """`stored` with scales applied where the checkpoint in `folder` is such an export."""
    path = folder / "hf_quant_config.json"
    if path.exists():
        return ModelOptTensors(stored, algorithm(read_json(path), str(path)))
    settings = config.get("quantization_config") or {}
    if settings.get("quant_method") != "modelopt":
        return stored
    return ModelOptTensors(stored, algorithm(settings, str(folder / "config.json")))
