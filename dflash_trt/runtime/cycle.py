"""The cycle: one draft call, one verify call, and what was committed by them, for a batch of slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dflash_trt.engines.directory import Manifest
from dflash_trt.runtime.acceptance import clip_block, commit_block
from dflash_trt.runtime.sampling import Chooser


class LogitRows(Protocol):
    """Logits of the last verify: an array [B, W, V], or what fetches a row when it is asked for."""

    def __getitem__(self, at: tuple[int, int], /) -> NDArray[np.float32]: ...


class EnginePair(Protocol):
    """What the runtime knows of a pair of engines; see `engines.onnxruntime.OnnxRuntimePair`.

    widths: how many tokens a block may have in `verify`, ascending; 1 is the anchor alone.
    By slot: context (cached tokens), anchor (the token behind them). Of the last verify, in the
    order of its slots: tokens [B, W], accepted [B], logits[b, w] [V] where they were asked for.
    """

    manifest: Manifest
    prefill_chunk: int
    widths: Sequence[int]
    context: NDArray[np.int32]
    anchor: NDArray[np.int64]
    tokens: NDArray[np.int64]
    accepted: NDArray[np.int32]

    @property
    def logits(self) -> LogitRows: ...
    @property
    def cache_bytes(self) -> int: ...
    def release(self, slot: int) -> None: ...
    def prefill(self, slot: int, chunk: np.ndarray, inject: bool, logits: bool = False) -> None: ...
    def draft(self, slots: Sequence[int], count: int) -> None: ...
    def verify(self, slots: Sequence[int], width: int, logits: bool = False) -> None: ...
    def commit(self, slot: int, accepted: int, anchor: int) -> None: ...


@dataclass(frozen=True)
class StepResult:
    """What one cycle committed, in order; the last token is the target's own (the next anchor).
    draft_seconds: of the cycle's draft call, which all lanes share."""

    committed: tuple[int, ...]
    drafted: int
    draft_seconds: float = 0.0

    @property
    def accepted(self) -> int:
        """Drafts that were accepted."""
        return len(self.committed) - 1


@dataclass(frozen=True)
class Lane:
    """One sequence's part in a cycle. width: tokens of its block, 1 where it is not drafted;
    follow: the drafter is given its tokens all the same, so that drafting may start again."""

    slot: int
    width: int
    chooser: Chooser
    follow: bool = False

    @property
    def injects(self) -> bool:
        return self.width > 1 or self.follow


class Cycle:
    """Drives a pair of engines; `engine_seconds` adds up the time spent in them, `step_seconds` is
    that of the last step.

    Between calls the engines hold, for each slot, `context` cached tokens and `anchor`, the token
    behind them, which was chosen and not yet run through the target.
    """

    def __init__(self, engines: EnginePair) -> None:
        self._engines = engines
        self.engine_seconds = self.step_seconds = 0.0

    def prefill(self, lane: Lane, chunk: NDArray[np.int64], last: bool) -> int | None:
        """Run a piece of a prompt; the first token behind it where the piece is the `last`."""
        e = self._engines
        processed = last and lane.chooser.needs_logits
        self._timed(lambda: e.prefill(lane.slot, chunk, inject=lane.injects, logits=processed))
        if not last:
            return None
        if processed:
            token = lane.chooser.choose(e.logits[0, 0])
            e.commit(lane.slot, 0, token)
        else:
            token = int(e.anchor[lane.slot])
            lane.chooser.push(token)
        return token

    def step(self, lanes: Sequence[Lane]) -> list[StepResult]:
        """Draft, verify, commit."""
        e, slots = self._engines, [lane.slot for lane in lanes]
        width = max(lane.width for lane in lanes)
        before, seconds_before = e.context[slots], self.engine_seconds
        processed = any(lane.chooser.needs_logits for lane in lanes)
        if any(lane.injects for lane in lanes):
            self._timed(lambda: e.draft(slots, width - 1))
        draft_seconds = self.engine_seconds - seconds_before
        self._timed(lambda: e.verify(slots, width, processed))
        self.step_seconds = self.engine_seconds - seconds_before
        results = [self._commit(lane, index, draft_seconds) for index, lane in enumerate(lanes)]
        assert [len(r.committed) for r in results] == (e.context[slots] - before).tolist(), (
            "context rows and committed tokens differ"
        )
        return results

    def _commit(self, lane: Lane, index: int, draft_seconds: float) -> StepResult:
        """The lane's own part of its block; the engines are overruled where they differ."""
        e, chooser = self._engines, lane.chooser
        drafts, accepted = e.tokens[index, 1:].tolist(), int(e.accepted[index])
        anchor = int(e.anchor[lane.slot])
        if chooser.needs_logits:
            committed = commit_block(
                drafts[: lane.width - 1], lambda row: chooser.choose(e.logits[index, row])
            )
        else:
            committed = clip_block(accepted, drafts, anchor, lane.width)
            for token in committed:
                chooser.push(token)
        if (len(committed), committed[-1]) != (accepted, anchor):
            e.commit(lane.slot, len(committed), committed[-1])
        return StepResult(tuple(committed), lane.width - 1, draft_seconds)

    def _timed(self, call: Callable[[], None]) -> None:
        begin = perf_counter()
        call()
        self.engine_seconds += perf_counter() - begin
