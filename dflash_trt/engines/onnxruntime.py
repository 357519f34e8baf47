"""The CPU engine: two ONNX Runtime sessions over shared buffers, one sequence at a time.

A `Call` is a session with everything bound; running it moves nothing. What one engine writes the
other reads: features, accepted, context and anchor go from verify to draft, tokens and lengths from
draft to verify. Caches are bound as input and output at once and are written in place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort

from dflash_trt.engines.directory import Manifest, check_requirements, cpu_kind, read_manifest
from dflash_trt.engines.onnxruntime_build import session_options

PREFILL_CHUNK = 128  # tokens; larger chunks are no faster on a CPU and let others wait longer


def requirements() -> dict[str, str]:
    """What an engine directory for this backend depends on."""
    return {"onnxruntime": ort.__version__, "cpu": cpu_kind()}


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


class OnnxRuntimePair:
    """Target and drafter of one engine directory.

    Buffers, shared by both engines (S: tokens of a call, up to the prefill chunk):
    tokens [1, S] int64; features [1, S, taps*H] fp32; accepted, context, lengths [1] int32;
    anchor [1] int64.
    """

    def __init__(self, path: Path, threads: int = 0, verify: bool = True) -> None:
        """`threads` 0: one per core of this process. `verify`: compare every file with its hash."""
        self.manifest = read_manifest(path, verify)
        check_requirements(path, self.manifest, requirements())
        threads = threads or len(os.sched_getaffinity(0))
        self._target = self._session(path / "target.onnx", threads)
        self._drafter = self._session(path / "drafter.onnx", threads)
        self._target_caches = self._caches(self._target)
        self._drafter_caches = self._caches(self._drafter)
        width = max(PREFILL_CHUNK, self.manifest.block)
        shapes = {i.name: i.shape for i in self._drafter.get_inputs()}
        self._feature_size = int(shapes["features"][2])
        self._tokens = np.zeros(width, np.int64)
        self._features = np.zeros(width * self._feature_size, np.float32)
        self._lengths, self._context, self._accepted = (np.zeros(1, np.int32) for _ in range(3))
        self._anchor = np.zeros(1, np.int64)
        self._calls: dict[tuple[str, int, int], Call] = {}

    @staticmethod
    def _session(path: Path, threads: int) -> ort.InferenceSession:
        return ort.InferenceSession(
            path, session_options(threads), providers=["CPUExecutionProvider"]
        )

    def _caches(self, session: ort.InferenceSession) -> dict[str, ort.OrtValue]:
        shapes = {i.name: i.shape for i in session.get_inputs() if "_cache." in i.name}
        size = self.manifest.capacity
        return {
            name: ort.OrtValue.ortvalue_from_numpy(np.zeros((1, heads, size, dim), np.float32))
            for name, (_, heads, _, dim) in shapes.items()
        }

    # What the host reads and writes: a few integers per cycle.

    @property
    def accepted(self) -> int:
        """Rows of the last target call that are committed."""
        return int(self._accepted[0])

    @property
    def anchor(self) -> int:
        """The target's own token behind them."""
        return int(self._anchor[0])

    @property
    def context(self) -> int:
        """Cached tokens after the last target call."""
        return int(self._context[0])

    def tokens(self, count: int) -> list[int]:
        """The first `count` tokens of the block that was verified last."""
        return self._tokens[:count].tolist()

    def reset(self) -> None:
        """Forget the sequence; what the caches hold is overwritten, never read."""
        self._context[0] = 0

    def prefill(self, chunk: np.ndarray) -> None:
        """Run `chunk` [S] int64 behind the context, S <= PREFILL_CHUNK; all of it is committed."""
        size = len(chunk)
        self._tokens[:size] = chunk
        self._lengths[0] = self._context[0]
        self._target_call(size, rows=np.array([[size - 1]])).run()

    def decode(self) -> None:
        """Run the anchor alone: one autoregressive step."""
        self._tokens[0] = self._anchor[0]
        self._lengths[0] = self._context[0]
        self._cached_target_call(1).run()

    def draft(self, rows: int, slots: int) -> None:
        """Inject `rows` feature rows, of which `accepted` count; draft `slots` tokens (0: only inject)."""
        key = ("draft", rows, slots)
        call = self._calls.get(key) or self._draft_call(rows, slots)
        if rows <= self.manifest.block:
            self._calls[key] = call
        call.run()

    def verify(self, width: int) -> None:
        """Run the drafted block, `width` tokens with the anchor."""
        self._cached_target_call(width).run()

    # Calls

    def _cached_target_call(self, width: int) -> Call:
        key = ("verify", width, width)
        if key not in self._calls:
            self._calls[key] = self._target_call(width, rows=np.arange(width)[None])
        return self._calls[key]

    def _view(self, buffer: np.ndarray, *shape: int) -> ort.OrtValue:
        """The start of a buffer as an OrtValue of `shape`, sharing its memory."""
        return ort.OrtValue.ortvalue_from_numpy(buffer[: int(np.prod(shape))].reshape(shape))

    def _target_call(self, size: int, rows: np.ndarray) -> Call:
        inputs = {
            "tokens": self._view(self._tokens, 1, size),
            "lengths": self._view(self._lengths, 1),
            "rows": ort.OrtValue.ortvalue_from_numpy(rows.astype(np.int64)),
            **self._target_caches,
        }
        outputs = {
            "features": self._view(self._features, 1, size, self._feature_size),
            "accepted": self._view(self._accepted, 1),
            "anchor": self._view(self._anchor, 1),
            "context": self._view(self._context, 1),
            **{f"{name}.out": cache for name, cache in self._target_caches.items()},
        }
        return Call(self._target, inputs, outputs)

    def _draft_call(self, rows: int, slots: int) -> Call:
        masks = np.full((1, slots), self.manifest.mask_id, np.int64)
        inputs = {
            "features": self._view(self._features, 1, rows, self._feature_size),
            "accepted": self._view(self._accepted, 1),
            "context": self._view(self._context, 1),
            "anchor": self._view(self._anchor, 1),
            "masks": ort.OrtValue.ortvalue_from_numpy(masks),
            **self._drafter_caches,
        }
        outputs = {
            "tokens": self._view(self._tokens, 1, 1 + slots),
            "lengths": self._view(self._lengths, 1),
            **{f"{name}.out": cache for name, cache in self._drafter_caches.items()},
        }
        return Call(self._drafter, inputs, outputs)
