"""The cycle: one draft call, one verify call, and what was committed by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dflash_trt.engines.directory import Manifest


class EnginePair(Protocol):
    """What the runtime knows of a pair of engines; see `engines.onnxruntime.OnnxRuntimePair`."""

    manifest: Manifest

    @property
    def accepted(self) -> int: ...
    @property
    def anchor(self) -> int: ...
    @property
    def context(self) -> int: ...
    def tokens(self, count: int) -> list[int]: ...
    def reset(self) -> None: ...
    def prefill(self, chunk: np.ndarray) -> None: ...
    def decode(self) -> None: ...
    def draft(self, rows: int, slots: int) -> None: ...
    def verify(self, width: int) -> None: ...


@dataclass(frozen=True)
class StepResult:
    """What one cycle committed, in order; the last token is the target's own (the next anchor)."""

    committed: tuple[int, ...]
    drafted: int

    @property
    def accepted(self) -> int:
        """Drafts that were accepted."""
        return len(self.committed) - 1


class Cycle:
    """One sequence on a pair of engines.

    Between calls the engines hold `context` cached tokens and `anchor`, the token behind them, which
    the target has chosen and not yet seen. `_rows` counts the feature rows that the last target call
    left and that the drafter has not been given yet.
    """

    def __init__(self, engines: EnginePair, chunk: int, width: int | None = None) -> None:
        """`width`: tokens per verify, 2 to the engine's block; None takes the block, 1 drafts not."""
        self._engines = engines
        self._chunk = chunk
        self._width = width or engines.manifest.block
        self._rows = 0

    @property
    def context(self) -> int:
        return self._engines.context

    def start(self, prompt: Sequence[int]) -> int:
        """Prefill `prompt` chunk by chunk, injecting each; returns the first token behind it."""
        self._engines.reset()
        self._rows = 0
        ids = np.asarray(prompt, np.int64)
        for begin in range(0, len(ids), self._chunk):
            if self._rows and self._width > 1:
                self._engines.draft(self._rows, slots=0)
            chunk = ids[begin : begin + self._chunk]
            self._engines.prefill(chunk)
            self._rows = len(chunk)
        return self._engines.anchor

    def step(self) -> StepResult:
        """Draft, verify, commit."""
        if self._width == 1:
            return self._plain_step()
        before = self._engines.context
        self._engines.draft(self._rows, slots=self._width - 1)
        self._engines.verify(self._width)
        self._rows = self._width
        accepted = self._engines.accepted
        assert self._engines.context == before + accepted, (
            "context rows and committed tokens differ"
        )
        drafts = self._engines.tokens(accepted)[1:]
        return StepResult((*drafts, self._engines.anchor), self._width - 1)

    def _plain_step(self) -> StepResult:
        self._engines.decode()
        return StepResult((self._engines.anchor,), 0)
