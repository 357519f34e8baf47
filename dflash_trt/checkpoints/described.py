"""Models known by their configuration alone: graphs and plans can be made, weights cannot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from dflash_trt.checkpoints.base import TextFormat
from dflash_trt.config import TargetConfig
from dflash_trt.errors import InputError


@dataclass(frozen=True)
class AbsentTensors:
    """Stands for a checkpoint that is not here; reading from it is an error that says so."""

    origin: str

    def names(self) -> frozenset[str]:
        return frozenset()

    def shape(self, name: str) -> tuple[int, ...]:
        self._refuse()

    def dtype(self, name: str) -> np.dtype:
        self._refuse()

    def read(self, name: str) -> np.ndarray:
        self._refuse()

    def read_part(self, name: str, axis: int, begin: int, end: int) -> np.ndarray:
        self._refuse()

    def rows(self, name: str) -> Iterator[np.ndarray]:
        self._refuse()

    def digest(self) -> str:
        return "absent"

    def _refuse(self) -> NoReturn:
        raise InputError(
            f"{self.origin}: the checkpoint is not here, only its configuration is known; give its "
            f"folder as a path"
        )


@dataclass(frozen=True)
class DescribedTarget:
    """A target without weights and tokenizer."""

    config: TargetConfig
    tensors: AbsentTensors

    def text_format(self) -> TextFormat:
        return TextFormat("", "", "", "")
