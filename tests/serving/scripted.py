"""Engines that say what a test wants, several tokens a cycle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_trt.engines.directory import Manifest


class ScriptedPair:
    """Fulfils `EnginePair`: behind any prompt the tokens of `script`, `run` of them accepted a cycle,
    and zeros behind its end. `prompts` are those that were run."""

    prefill_chunk = 1 << 16
    cache_bytes = 0

    def __init__(self, manifest: Manifest, script: Sequence[int], run: int) -> None:
        self.manifest, self.run = manifest, run
        self.widths = range(1, manifest.block + 1)
        self.script = np.array([*script, *[0] * 4096], np.int64)
        slots = manifest.max_batch
        self.context, self.anchor = np.zeros(slots, np.int32), np.zeros(slots, np.int64)
        self.place = np.zeros(slots, np.int64)
        self.prompts: list[list[int]] = []

    def release(self, slot: int) -> None:
        self.context[slot] = 0

    def prefill(self, slot: int, chunk: np.ndarray, inject: bool, logits: bool = False) -> None:
        self.prompts.append(chunk.tolist())
        self.context[slot] += len(chunk)
        self.place[slot], self.anchor[slot] = 0, self.script[0]

    def draft(self, slots: Sequence[int], count: int) -> None:
        pass

    def verify(self, slots: Sequence[int], width: int, logits: bool = False) -> None:
        places = self.place[list(slots)]
        self.tokens = np.stack([self.script[p : p + width] for p in places])
        self.accepted = np.full(len(slots), min(self.run, width), np.int32)
        self.context[list(slots)] += self.accepted
        self.place[list(slots)] += self.accepted
        self.anchor[list(slots)] = self.script[self.place[list(slots)]]

    def commit(self, slot: int, accepted: int, anchor: int) -> None:
        raise AssertionError("greedy answers are the engines' own")
