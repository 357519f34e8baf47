"""The CPU engine: ONNX Runtime sessions of target and drafter over shared buffers.

A slot is one sequence: its caches and three integers (context, accepted, anchor). A call runs a
batch of slots, one lane each; there is a pair of sessions for every batch size of `batch_sizes`, all
over the same mapped weights, and a batch in between is filled up with idle slots. What lanes write
behind their slot's context is unspecified anyway, so idle ones do no harm.

A `Call` is a session with everything bound; running it moves nothing. What one engine writes the
other reads: features from verify to draft, tokens and lengths from draft to verify. Caches are bound
as input and output at once and are written in place.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import onnxruntime as ort
import psutil

from dflash_trt.engines.directory import (
    Manifest,
    check_requirements,
    cpu_kind,
    read_manifest,
)
from dflash_trt.engines.onnxruntime_build import batch_sizes, model_name, session_options
from dflash_trt.errors import InputError

PREFILL_CHUNK = 128  # tokens; larger chunks are no faster on a CPU and let others wait longer
_CALLS_KEPT = 64  # bound calls, least recently used out first
Lanes = tuple[int, ...]
Arrays = Mapping[str, np.ndarray]


def requirements() -> dict[str, str]:
    """What an engine directory for this backend depends on."""
    return {"onnxruntime": ort.__version__, "cpu": cpu_kind()}


class Runs(Protocol):
    """Something bound that runs as often as wanted."""

    def run(self) -> None: ...


class Call:
    """One session with all inputs and outputs bound to buffers."""

    def __init__(
        self,
        session: ort.InferenceSession,
        inputs: Mapping[str, ort.OrtValue],
        outputs: Mapping[str, ort.OrtValue],
    ) -> None:
        self._session = session
        self._binding = session.io_binding()
        for name, value in inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            self._binding.bind_ortvalue_output(name, value)

    def run(self) -> None:
        self._session.run_with_iobinding(self._binding)


class Buffers:
    """What a call reads and writes besides caches, for up to `lanes` lanes of `width` tokens.

    tokens [B, S] int64; features [B, S, taps*H] fp32; logits [B, W, V] fp32; accepted, context,
    lengths [B] int32; anchor [B] int64.
    """

    def __init__(self, lanes: int, width: int, feature_size: int, rows: int, vocab: int) -> None:
        self.tokens = np.zeros(lanes * width, np.int64)
        self.features = np.zeros(lanes * width * feature_size, np.float32)
        self.logits = np.zeros(lanes * rows * vocab, np.float32)
        self.lengths, self.context, self.accepted = (np.zeros(lanes, np.int32) for _ in range(3))
        self.anchor = np.zeros(lanes, np.int64)
        self.feature_size, self.vocab = feature_size, vocab

    def view(self, name: str, *shape: int) -> np.ndarray:
        """The start of a buffer in `shape`."""
        buffer: np.ndarray = getattr(self, name)
        return buffer[: int(np.prod(shape))].reshape(shape)


class OnnxRuntimePair:
    """Target and drafter of one engine directory, with `manifest.max_batch` slots.

    `context` [slots] int32 counts the cached tokens of each slot and `anchor` [slots] int64 holds the
    token behind them. `tokens` [B, W], `accepted` [B] and `logits` [B, W, V] belong to the last
    verify (or prefill) and are in the order of its slots; they are overwritten by the next one.
    """

    prefill_chunk = PREFILL_CHUNK
    _models: tuple[str, ...] = ("target", "drafter")

    def __init__(self, path: Path, threads: int = 0, verify: bool = True) -> None:
        """`threads` 0: one per core of this process. `verify`: compare every file with its hash."""
        self.manifest = m = self._read(path, verify)
        check_requirements(path, m, requirements())
        self.widths: Sequence[int] = range(1, m.block + 1)
        self._sizes = batch_sizes(m.max_batch)
        self._sessions: dict[tuple[str, int], ort.InferenceSession] = {}
        self._open(path, threads)
        check_memory(self.cache_bytes, m.max_batch, m.max_seq_len)
        self._caches = {
            model: [self._slot_caches(model) for _ in range(m.max_batch)] for model in self._models
        }
        size = len(m.taps) * int(m.target.config["hidden_size"])
        self._batch = Buffers(m.max_batch, m.block, size, m.block, m.vocab_size)
        self._chunk = Buffers(1, max(PREFILL_CHUNK, m.block), size, 1, m.vocab_size)
        self.context, self._accepted = (np.zeros(m.max_batch, np.int32) for _ in range(2))
        self.anchor = np.zeros(m.max_batch, np.int64)
        self.tokens, self.accepted = self._batch.view("tokens", 1, 1), self._batch.accepted[:1]
        self.logits = self._batch.view("logits", 1, 1, m.vocab_size)
        self._calls: OrderedDict[Hashable, Runs] = OrderedDict()
        self._arranged: tuple[Lanes, int] = ((), 0)  # lanes and rows that `features` holds

    def _read(self, path: Path, verify: bool) -> Manifest:
        return read_manifest(path, verify)

    def _open(self, path: Path, threads: int) -> None:
        for model in self._models:
            self._open_model(path, model, threads or len(os.sched_getaffinity(0)))

    def _open_model(self, path: Path, model: str, threads: int | None) -> None:
        for size in self._sizes:
            file = path / f"{model_name(model, size)}.onnx"
            self._sessions[model, size] = open_session(file, threads)

    def _model_inputs(self, model: str) -> list[ort.NodeArg]:
        return list(self._sessions[model, 1].get_inputs())

    @property
    def cache_bytes(self) -> int:
        """Bytes of all caches of all slots."""
        shapes = [s for model in self._models for s in self._cache_shapes(model).values()]
        return 4 * self.manifest.max_batch * sum(int(np.prod(shape)) for shape in shapes)

    def _cache_shapes(self, model: str) -> dict[str, tuple[int, int, int, int]]:
        shapes = {i.name: i.shape for i in self._model_inputs(model) if "_cache." in i.name}
        size = self.manifest.capacity
        return {name: (1, heads, size, dim) for name, (_, heads, _, dim) in shapes.items()}

    def _slot_caches(self, model: str) -> dict[str, ort.OrtValue]:
        return {
            name: ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32))
            for name, shape in self._cache_shapes(model).items()
        }

    # Slots

    def release(self, slot: int) -> None:
        """Forget a slot's sequence; what its caches hold is overwritten, never read."""
        self.context[slot] = self._accepted[slot] = 0

    def commit(self, slot: int, accepted: int, anchor: int) -> None:
        """Overrule the last verify: `accepted` rows of the slot's block count, `anchor` follows."""
        self.context[slot] += accepted - self._accepted[slot]
        self._accepted[slot], self.anchor[slot] = accepted, anchor

    # Calls of a cycle

    def prefill(self, slot: int, chunk: np.ndarray, inject: bool, logits: bool = False) -> None:
        """Run `chunk` [S] int64, S <= prefill_chunk, behind the slot's context; all is committed.

        inject: give the drafter its features; logits: leave those [1, 1, V] behind the last token.
        """
        b, size = self._chunk, len(chunk)
        b.tokens[:size] = chunk
        b.lengths[0] = self.context[slot]
        self._target_call(b, (slot,), size, np.array([[size - 1]]), logits).run()
        if inject:
            self._draft_call(b, (slot,), size, 0).run()
        self.context[slot], self.anchor[slot], self._accepted[slot] = b.context[0], b.anchor[0], 0
        self.logits = b.view("logits", 1, 1, b.vocab)

    def draft(self, slots: Sequence[int], count: int) -> None:
        """Inject the rows that the last verify committed; draft `count` tokens behind each anchor."""
        lanes = self._lanes(slots)
        rows = self._arrange(lanes)
        b, index = self._batch, list(lanes)
        size = len(lanes)
        b.context[:size], b.anchor[:size] = self.context[index], self.anchor[index]
        b.accepted[:size] = self._accepted[index]
        key = ("draft", lanes, rows, count)
        self._bound(key, lambda: self._draft_call(b, lanes, rows, count)).run()

    def verify(self, slots: Sequence[int], width: int, logits: bool = False) -> None:
        """Run the blocks of `width` tokens that `draft` left for these slots (1: the anchors)."""
        lanes = self._lanes(slots)
        b, index, size = self._batch, list(lanes), len(lanes)
        if width == 1:
            b.tokens[:size], b.lengths[:size] = self.anchor[index], self.context[index]
        rows = np.tile(np.arange(width), (size, 1))
        key = ("verify", lanes, width, logits)
        self._bound(key, lambda: self._target_call(b, lanes, width, rows, logits)).run()
        self._arranged = lanes, width
        self._leave_results(list(slots), size, width)

    def _leave_results(self, slots: list[int], lanes: int, width: int) -> None:
        b, used = self._batch, len(slots)
        self.context[slots], self.anchor[slots] = b.context[:used], b.anchor[:used]
        self._accepted[slots] = b.accepted[:used]
        self.accepted = b.accepted[:used]
        self.tokens = b.view("tokens", lanes, width)[:used]
        self.logits = b.view("logits", lanes, width, b.vocab)[:used]

    # Lanes

    def _lanes(self, slots: Sequence[int]) -> Lanes:
        """The slots, and idle ones behind them up to the next batch size."""
        size = next(size for size in self._sizes if size >= len(slots))
        idle = (s for s in range(self.manifest.max_batch) if s not in slots)
        return (*slots, *(next(idle) for _ in range(size - len(slots))))

    def _arrange(self, lanes: Lanes) -> int:
        """Bring the features of the last verify into the order of `lanes`; how many rows each has.

        A slot that was not part of it has no row to inject: what lies in its lane does not count.
        """
        before, rows = self._arranged
        rows = rows or 1
        if before and before != lanes:
            b = self._batch
            old = b.view("features", len(before), rows, b.feature_size).copy()
            new = b.view("features", len(lanes), rows, b.feature_size)
            for lane, slot in enumerate(lanes):
                if slot in before:
                    new[lane] = old[before.index(slot)]
                else:
                    assert self._accepted[slot] == 0, "features of a slot were lost"
        self._arranged = lanes, rows
        return rows

    # Binding

    def _bound(self, key: Hashable, make: Callable[[], Runs]) -> Runs:
        """The call of `key`, bound once and kept for a while."""
        call = self._calls.pop(key, None) or make()
        self._calls[key] = call
        if len(self._calls) > _CALLS_KEPT:
            self._calls.popitem(last=False)
        return call

    def _bind_caches(self, model: str, lanes: Lanes) -> dict[str, ort.OrtValue]:
        if len(lanes) == 1:
            return self._caches[model][lanes[0]]
        return {
            f"{name}.lane{lane}": cache
            for lane, slot in enumerate(lanes)
            for name, cache in self._caches[model][slot].items()
        }

    def _target_call(
        self, b: Buffers, lanes: Lanes, width: int, rows: np.ndarray, logits: bool
    ) -> Runs:
        size = len(lanes)
        inputs = {
            "tokens": b.view("tokens", size, width),
            "lengths": b.lengths[:size],
            "rows": rows.astype(np.int64),
        }
        outputs = {
            "features": b.view("features", size, width, b.feature_size),
            **{name: b.view(name, size) for name in ("accepted", "anchor", "context")},
        }
        if logits:
            outputs["logits"] = b.view("logits", *rows.shape, b.vocab)
        return self._call("target", lanes, inputs, outputs)

    def _draft_call(self, b: Buffers, lanes: Lanes, rows: int, count: int) -> Runs:
        size = len(lanes)
        inputs = {
            "features": b.view("features", size, rows, b.feature_size),
            **{name: b.view(name, size) for name in ("accepted", "anchor", "context")},
            "masks": np.full((size, count), self.manifest.mask_id, np.int64),
        }
        outputs = {"tokens": b.view("tokens", size, 1 + count), "lengths": b.lengths[:size]}
        return self._call("drafter", lanes, inputs, outputs)

    def _call(self, model: str, lanes: Lanes, inputs: Arrays, outputs: Arrays) -> Runs:
        """A model over buffers and over the caches of `lanes`, which are written in place."""
        values = self._values(model, lanes, inputs, outputs)
        return Call(self._sessions[model, len(lanes)], *values)

    def _values(
        self, model: str, lanes: Lanes, inputs: Arrays, outputs: Arrays
    ) -> tuple[dict[str, ort.OrtValue], dict[str, ort.OrtValue]]:
        caches = self._bind_caches(model, lanes)
        given = {name: value_over(array) for name, array in inputs.items()}
        taken = {name: value_over(array) for name, array in outputs.items()}
        updated = {f"{name}.out": cache for name, cache in caches.items()}
        return given | caches, taken | updated


def open_session(path: Path, threads: int | None, arena: bool = True) -> ort.InferenceSession:
    """A compiled model; threads and arena as in `session_options`."""
    options = session_options(threads, arena)
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def value_over(array: np.ndarray) -> ort.OrtValue:
    """An OrtValue over the array's own memory."""
    return ort.OrtValue.ortvalue_from_numpy(array)


def check_memory(needed: int, slots: int, tokens: int) -> None:
    """Refuse caches of `needed` bytes, before any is made, where the machine has not so much left."""
    free = psutil.virtual_memory().available
    if needed > free:
        raise InputError(
            f"KV cache: {slots} slots x {tokens} tokens = {needed / 1e9:.2f} GB, "
            f"and {free / 1e9:.2f} GB are free; "
            "build with a smaller --max-batch or --max-seq-len"
        )
