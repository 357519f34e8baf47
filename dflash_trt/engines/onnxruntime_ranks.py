"""The CPU engine of one rank, where a mesh of processes shares the target.

Every rank has its segments of the target (`lowering.segments`), its heads' caches and its part of the
vocabulary. Rank 0 is the pair that the runtime drives: it drafts alone, and in front of each target
call it says to the others what they must run. They follow.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np
import onnxruntime as ort

from dflash_trt.engines.directory import Manifest, read_manifest
from dflash_trt.engines.mesh import Mesh, Step, decode, encode, message_size
from dflash_trt.engines.onnxruntime import (
    Arrays,
    Buffers,
    Call,
    Lanes,
    OnnxRuntimePair,
    Runs,
    open_session,
    value_over,
)
from dflash_trt.engines.onnxruntime_build import SEGMENTS_FILE, model_name, segment_name
from dflash_trt.lowering.collective import Collective
from dflash_trt.models.shard import Shard

Values = Mapping[str, ort.OrtValue]


class SegmentedCall:
    """All segments of a target call with everything bound, and the collectives between them.

    States that cross from one segment to another lie in buffers that are used again as soon as
    nothing needs them. A sum over the ranks replaces a rank's own part of it.
    """

    def __init__(
        self,
        sessions: Sequence[ort.InferenceSession],
        collectives: Sequence[Collective],
        inputs: Values,
        outputs: Values,
        letters: Mapping[str, int],
        mesh: Mesh,
    ) -> None:
        self._mesh, self._letters = mesh, letters
        self._states: dict[str, np.ndarray] = {}
        self._free: list[np.ndarray] = []
        self._parts: list[Callable[[], None]] = []
        needed = _last_use(sessions)
        parts = {what.part for what in collectives}
        for index, session in enumerate(sessions):
            self._parts.append(self._segment(session, inputs, outputs, needed.keys() | parts).run)
            if index < len(collectives):
                self._parts.append(self._meeting(collectives[index], sessions[index + 1]))
            self._forget(needed, index)

    def run(self) -> None:
        for part in self._parts:
            part()

    def _segment(
        self,
        session: ort.InferenceSession,
        inputs: Values,
        outputs: Values,
        kept: Set[str],
    ) -> Call:
        own = {i.name: inputs.get(i.name) or self._value(i.name) for i in session.get_inputs()}
        made = {}
        for output in session.get_outputs():
            if output.name in outputs:
                made[output.name] = outputs[output.name]
            elif output.name in kept:
                self._states[output.name] = self._buffer(output.shape)
                made[output.name] = self._value(output.name)
        return Call(session, own, made)

    def _value(self, name: str) -> ort.OrtValue:
        return value_over(self._states[name])

    def _buffer(self, shape: Sequence[int | str]) -> np.ndarray:
        sizes = [self._letters[d] if isinstance(d, str) else d for d in shape]
        fitting = [i for i, array in enumerate(self._free) if list(array.shape) == sizes]
        return self._free.pop(fitting[0]) if fitting else np.zeros(sizes, np.float32)

    def _meeting(self, what: Collective, behind: ort.InferenceSession) -> Callable[[], None]:
        part = self._states.pop(what.part)
        if what.kind == "AllReduce":
            self._states[what.result] = part
            return lambda: self._mesh.all_reduce(part)
        shapes = {i.name: i.shape for i in behind.get_inputs()}
        whole = self._states[what.result] = self._buffer(shapes[what.result])
        return lambda: self._mesh.all_gather(part, whole)

    def _forget(self, needed: Mapping[str, int], index: int) -> None:
        for name in [n for n in self._states if needed.get(n, 0) <= index]:
            self._free.append(self._states.pop(name))


def _last_use(sessions: Sequence[ort.InferenceSession]) -> dict[str, int]:
    return {i.name: index for index, s in enumerate(sessions) for i in s.get_inputs()}


class WithLogits:
    """A target call, and behind it all shards of the logits put together into `logits` [B, W, V]."""

    def __init__(self, call: Runs, mesh: Mesh, part: np.ndarray, logits: np.ndarray) -> None:
        self._call, self._mesh = call, mesh
        self._part, self._logits = part, logits
        self._whole = np.zeros((mesh.size, *part.shape), np.float32)
        sizes = (logits.shape[-1],), (part.shape[-1],)
        self._shard = Shard(mesh.size, 2, *sizes, overlap=True)

    def run(self) -> None:
        self._call.run()
        self._mesh.all_gather(self._part, self._whole)
        for rank, part in enumerate(self._whole):
            begin, end = self._shard.span(0, rank)
            self._logits[..., begin:end] = part


@dataclass(frozen=True)
class Announced:
    """A call of rank 0, made known to the others before it runs."""

    pair: RankPair
    step: Step
    call: Runs

    def run(self) -> None:
        with self.pair.running:
            try:
                before = self.pair.met()
                self.pair.announce(self.step)
                self.call.run()
            except Exception as error:
                self.pair.mesh.fail(error)
            if not self.step.prefill:
                self.pair.traffic += Counter(cycles=1) + self.pair.met() - before


class RankPair(OnnxRuntimePair):
    """One rank's part of a pair. Rank 0's is driven as every pair is; the others `follow` it.

    `traffic` counts cycles, and what this rank has brought to the others in them: meetings by their
    kind, and bytes.
    """

    def __init__(self, path: Path, mesh: Mesh, threads: int | None, verify: bool = True) -> None:
        """`threads`: None for those of the process (see `onnxruntime_build.session_options`)."""
        self.mesh = mesh
        self._models = ("target", "drafter") if mesh.rank == 0 else ("target",)
        self.running = Lock()
        self.traffic: Counter[str] = Counter()
        self._threads = threads
        super().__init__(path, verify=verify)
        widest = max(self._batch.tokens.size, self._chunk.tokens.size)
        self._message = np.zeros(message_size(self.manifest.max_batch, widest), np.int32)

    def _read(self, path: Path, verify: bool) -> Manifest:
        return read_manifest(path, verify, self.mesh.rank)

    def _open(self, path: Path, _threads: int) -> None:
        threads = self._threads
        steps = json.loads((path / SEGMENTS_FILE).read_text())
        self._collectives = [Collective(**step) for step in steps]
        names = [segment_name(self.mesh.rank, index) for index in range(len(steps) + 1)]
        # Segments run one after the other: what one keeps for its states the next cannot use.
        self._segments = {
            size: [
                open_session(path / f"{model_name(n, size)}.onnx", threads, False) for n in names
            ]
            for size in self._sizes
        }
        if "drafter" in self._models:
            self._open_model(path, "drafter", threads)

    def _model_inputs(self, model: str) -> list[ort.NodeArg]:
        if model == "drafter":
            return super()._model_inputs(model)
        return [i for session in self._segments[1] for i in session.get_inputs()]

    def _call(self, model: str, lanes: Lanes, inputs: Arrays, outputs: Arrays) -> Runs:
        if model == "drafter":
            return super()._call(model, lanes, inputs, outputs)
        letters = {"B": len(lanes), "S": inputs["tokens"].shape[1], "W": inputs["rows"].shape[1]}
        logits = outputs.get("logits")
        if logits is not None:
            part = np.zeros((*logits.shape[:2], self._shard_size), np.float32)
            outputs = {**outputs, "logits": part}
        values = self._values(model, lanes, inputs, outputs)
        sessions = self._segments[len(lanes)]
        call = SegmentedCall(sessions, self._collectives, *values, letters, self.mesh)
        return call if logits is None else WithLogits(call, self.mesh, part, logits)

    @property
    def _shard_size(self) -> int:
        """Tokens whose logits a rank computes."""
        outputs = (o for session in self._segments[1] for o in session.get_outputs())
        return next(int(o.shape[2]) for o in outputs if o.name == "logits")

    # Rank 0

    def _target_call(
        self, b: Buffers, lanes: Lanes, width: int, rows: np.ndarray, logits: bool
    ) -> Runs:
        call = super()._target_call(b, lanes, width, rows, logits)
        if self.mesh.rank:
            return call
        size = len(lanes)
        tokens, prefill = b.view("tokens", size, width), b is self._chunk
        return Announced(self, Step(lanes, b.lengths[:size], tokens, prefill, logits), call)

    def met(self) -> Counter[str]:
        """All meetings so far, as in `traffic`."""
        return self.mesh.calls + Counter(bytes=self.mesh.bytes.total())

    def announce(self, step: Step | None) -> None:
        """Tell the others what comes next: none is the end."""
        encode(step, self._message)
        self.mesh.broadcast(self._message)

    def stop(self) -> None:
        """Let the others go, once what runs has ended; nothing can be run after that."""
        self.running.acquire()
        self.announce(None)

    # The others

    def follow(self) -> None:
        """Make the target calls that rank 0 makes, until it says that there are no more."""
        while True:
            self.mesh.broadcast(self._message)
            step = decode(self._message)
            if step is None:
                return
            try:
                self._follow(step)
            except Exception as error:
                self.mesh.fail(error)

    def _follow(self, step: Step) -> None:
        b = self._chunk if step.prefill else self._batch
        size, width = step.tokens.shape
        b.view("tokens", size, width)[:], b.lengths[:size] = step.tokens, step.lengths
        first = width - 1 if step.prefill else 0
        rows = np.tile(np.arange(first, width), (size, 1))

        def make() -> Runs:
            return self._target_call(b, step.lanes, width, rows, step.logits)

        key = (step.lanes, width, step.logits)
        (make() if step.prefill else self._bound(key, make)).run()
