"""The target's own engine with many slots: answers in batches, taps and choices of whole texts.

Decoding runs all slots in one call, a token each. Prompts and texts go through slot by slot, in
chunks, on a view of the slot's caches (the CPU's attention kernel takes several rows only one
sequence at a time).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from dflash_trt.checkpoints import TargetCheckpoint
from dflash_trt.checkpoints.weights import WeightLoader
from dflash_trt.engines.directory import new_directory
from dflash_trt.engines.onnxruntime import PREFILL_CHUNK, Call
from dflash_trt.engines.onnxruntime_build import (
    WEIGHTS_FILE,
    WeightsFile,
    compile_models,
    session_options,
)
from dflash_trt.errors import InputError
from dflash_trt.lowering.cpu import lower
from dflash_trt.models.graph import Weight
from dflash_trt.models.registry import target_graph

KEY_FILE = "target.json"


@dataclass(frozen=True)
class EngineKey:
    """What an engine on disk was compiled from."""

    digest: str
    taps: tuple[int, ...]
    positions: int
    onnxruntime: str


def prepare_engine(
    folder: Path, target: TargetCheckpoint, taps: Sequence[int], capacity: int
) -> None:
    """Compile the target with these taps into ``folder``, unless it is there already."""
    if capacity > target.config.max_positions:
        raise InputError(
            f"{capacity} positions asked for, the target ends at {target.config.max_positions}"
        )
    key = EngineKey(target.tensors.digest(), tuple(taps), capacity, ort.__version__)
    wanted = json.dumps(key.__dict__)
    if (folder / KEY_FILE).is_file():
        if (folder / KEY_FILE).read_text() == wanted:
            return
        raise InputError(f"{folder}: was made for another target, taps or length; delete it")
    graph = target_graph(target.config, tuple(taps), capacity)
    loader = WeightLoader({"target": target.tensors}, {"target": target.config})
    loader.check(graph.weights)
    arrays = {w.name: partial(_array, loader, w) for w in graph.weights}
    model, _ = lower(graph, {})
    with new_directory(folder) as out:
        with WeightsFile(out / WEIGHTS_FILE) as file:
            compile_models({"target": model}, arrays, out, lambda _: file)
        (out / KEY_FILE).write_text(wanted)


def _array(loader: WeightLoader, weight: Weight) -> dict[str, np.ndarray]:
    return {weight.name: loader.load(weight)}


class SlotEngine:
    """N sequences of up to ``capacity`` tokens on one target.

    ``lengths`` int32 [N] are the cached tokens of each slot; the caches are [N, K, capacity, D].
    """

    def __init__(self, folder: Path, slots: int, capacity: int, threads: int = 0) -> None:
        self.slots, self.capacity = slots, capacity
        options = session_options(threads)
        self._session = ort.InferenceSession(
            folder / "target.onnx", options, providers=["CPUExecutionProvider"]
        )
        self._caches = self._make_caches()
        shapes = {o.name: o.shape for o in self._session.get_outputs()}
        self.width, self.vocab = int(shapes["features"][2]), int(shapes["logits"][2])
        self.lengths = np.zeros(slots, np.int32)
        self._decode: Call | None = None
        self._tokens = np.zeros((slots, 1), np.int64)
        self._logits = np.zeros((slots, 1, self.vocab), np.float32)

    def _make_caches(self) -> dict[str, NDArray[np.float32]]:
        shapes = {i.name: i.shape for i in self._session.get_inputs() if "_cache." in i.name}
        return {
            name: np.zeros((self.slots, heads, self.capacity, dim), np.float32)
            for name, (_, heads, _, dim) in shapes.items()
        }

    def _call(
        self,
        slots: slice,
        tokens: NDArray[np.int64],
        rows: Sequence[int],
        wanted: Mapping[str, NDArray[np.float32]],
    ) -> Call:
        lengths = self.lengths[slots]
        caches = {n: ort.OrtValue.ortvalue_from_numpy(c[slots]) for n, c in self._caches.items()}
        index = np.tile(np.asarray(rows, np.int64), (len(lengths), 1))
        inputs = {
            "tokens": ort.OrtValue.ortvalue_from_numpy(tokens),
            "lengths": ort.OrtValue.ortvalue_from_numpy(lengths),
            "rows": ort.OrtValue.ortvalue_from_numpy(index),
            **caches,
        }
        outputs = {n: ort.OrtValue.ortvalue_from_numpy(a) for n, a in wanted.items()}
        outputs |= {f"{n}.out": c for n, c in caches.items()}
        return Call(self._session, inputs, outputs)

    def prefill(self, slot: int, prompt: Sequence[int]) -> NDArray[np.float32]:
        """Start ``prompt`` in ``slot``; the logits [V] behind its last token."""
        logits = np.zeros((1, 1, self.vocab), np.float32)
        ids = self._checked(prompt)
        self.lengths[slot] = 0
        for begin in range(0, len(ids), PREFILL_CHUNK):
            chunk = ids[None, begin : begin + PREFILL_CHUNK].copy()
            rows = [chunk.shape[1] - 1]
            self._call(slice(slot, slot + 1), chunk, rows, {"logits": logits}).run()
            self.lengths[slot] += chunk.shape[1]
        return logits[0, 0]

    def decode(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """One token [N] behind every slot; logits [N, V], overwritten by the next call."""
        self._tokens[:, 0] = tokens
        if self._decode is None:
            wanted = {"logits": self._logits}
            self._decode = self._call(slice(0, self.slots), self._tokens, [0], wanted)
        self._decode.run()
        self.lengths += 1
        return self._logits[:, 0]

    def read(
        self, text: Sequence[int], first: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Features [T, W] of a whole text, and the target's choice behind each row from ``first``.

        The choices are [T] with -1 before ``first``. Slot 0 is overwritten.
        """
        ids = self._checked(text)
        features = np.zeros((len(ids), self.width), np.float32)
        choices = np.full(len(ids), -1, np.int32)
        self.lengths[0] = 0
        for begin in range(0, len(ids), PREFILL_CHUNK):
            chunk = ids[None, begin : begin + PREFILL_CHUNK].copy()
            size = chunk.shape[1]
            rows = range(max(first - begin, 0), size) or range(size - 1, size)
            logits = np.zeros((1, len(rows), self.vocab), np.float32)
            part = features[None, begin : begin + size]
            self._call(slice(0, 1), chunk, rows, {"logits": logits, "features": part}).run()
            if begin + rows[0] >= first:
                choices[begin + rows[0] : begin + size] = logits[0].argmax(-1)
            self.lengths[0] += size
        return features, choices

    def _checked(self, ids: Sequence[int]) -> NDArray[np.int64]:
        if not 0 < len(ids) <= self.capacity:
            raise InputError(f"a text of {len(ids)} tokens does not fit into {self.capacity}")
        return np.asarray(ids, np.int64)
