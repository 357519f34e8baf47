"""What a checkpoint offers, whatever file format it comes in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dflash_trt.config import TargetConfig


@dataclass(frozen=True)
class TextFormat:
    """Tokenizer (the `tokenizers` JSON) and chat template (Jinja source) of a target."""

    tokenizer_json: str
    chat_template: str
    bos_token: str
    eos_token: str

    @property
    def chat_format(self) -> str:
        """`harmony` where the template writes messages in channels, as gpt-oss's does."""
        marks = ("<|start|>", "<|channel|>", "<|message|>")
        return "harmony" if all(mark in self.chat_template for mark in marks) else "template"


class TensorSource(Protocol):
    """Named tensors in the Hugging Face naming and layout, read one at a time."""

    @property
    def origin(self) -> str: ...

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> np.dtype:
        """The type that `read` gives; nothing of the tensor is read for it."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor as fp32, or in its stored integer type."""
        ...

    def read_part(self, name: str, axis: int, begin: int, end: int) -> np.ndarray:
        """Entries `begin` to `end` of the tensor along `axis`; the rest is not read where the format
        allows that."""
        ...

    def rows(self, name: str) -> Iterator[np.ndarray]:
        """The tensor in pieces along its first axis, so that a large one is never in memory twice."""
        ...

    def digest(self) -> str:
        """SHA-256 over the content of the files, as `sha256:<hex>`."""
        ...


class TargetCheckpoint(Protocol):
    """A target: its configuration, its tensors and how its text is made."""

    @property
    def config(self) -> TargetConfig: ...

    @property
    def tensors(self) -> TensorSource: ...

    def text_format(self) -> TextFormat: ...
