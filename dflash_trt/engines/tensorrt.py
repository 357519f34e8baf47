"""The GPU engine: TensorRT plans over shared device buffers, chained on one stream.

Weights are bound once to all plans. What one plan writes the next one reads on the device: features
from verify to draft, tokens and lengths from draft to verify. The host sends three integers per slot
before a cycle and reads back accepted counts, anchors and the block's tokens behind it. Logits stay on
the device, but for the rows that a sampled request reads. After their first run, draft and verify of a
batch size are played as CUDA graphs.

A call runs the slots 0 .. n-1 that cover the ones asked for. What an idle slot computes is written
behind its context, where its next call overwrites it, and its results are not read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dflash_trt.engines.cuda import Memory, Stream, capability
from dflash_trt.engines.directory import Manifest, check_requirements, read_manifest
from dflash_trt.engines.tensorrt_build import PlanReport
from dflash_trt.engines.tensorrt_directory import read_plans
from dflash_trt.engines.tensorrt_weights import FILE
from dflash_trt.errors import InputError
from dflash_trt.lowering.tensorrt import api
from dflash_trt.lowering.tensorrt.plan import Binding

BYTES = {"FLOAT": 4, "HALF": 2, "BF16": 2, "FP8": 1, "E8M0": 1, "INT32": 4, "INT64": 8, "BOOL": 1}
SCRATCH = "scratch"
FLOATS = {"FLOAT": np.float32, "HALF": np.float16, "BF16": ml_dtypes.bfloat16}


class DeviceLogits:
    """Logits of the last call, [B, W, V] on the device. A row is copied to the host when it is read:
    a sampled request reads as many as it commits tokens, a greedy one reads none."""

    def __init__(
        self, stream: Stream, address: int, binding: Binding, slots: Sequence[int]
    ) -> None:
        """`slots`: where the sequence of each lane lies in the batch that was run."""
        self._stream, self._address, self._slots = stream, address, list(slots)
        self._rows, self._vocab = binding.shape[1:]
        self._dtype = np.dtype(FLOATS[binding.dtype])

    def __getitem__(self, at: tuple[int, int]) -> np.ndarray:
        """The row [V] fp32 of a lane."""
        lane, row = at
        found = np.empty(self._vocab, self._dtype)
        offset = (self._slots[lane] * self._rows + row) * found.nbytes
        self._stream.download(found, self._address + offset)
        self._stream.wait()
        return found.astype(np.float32)


class TensorRTPair:
    """Target and drafter of one engine directory, with `manifest.max_batch` slots (see
    `runtime.cycle.EnginePair`). It decides greedily on the device, and hands out logits."""

    def __init__(self, path: Path, verify: bool = True, graphs: bool = True) -> None:
        """`graphs`: play draft and verify as CUDA graphs."""
        self.manifest: Manifest = read_manifest(path, verify)
        if self.manifest.tensor_parallel > 1:
            raise InputError(
                f"{path}: is for {self.manifest.tensor_parallel} GPUs; its plans are compiled, but "
                "running them on several GPUs is not supported yet"
            )
        if FILE not in self.manifest.files:
            raise InputError(
                f"{path}: holds plans without weights; write them with: dflash-trt weights {path} "
                f"--target PATH --drafter PATH"
            )
        content = read_plans(path)
        check_capability(path, content["capabilities"], capability())
        loaded = api.load(self.manifest.backend)
        check_requirements(path, self.manifest, {loaded.backend: loaded.version})
        self.prefill_chunk: int = content["chunk"]
        self._reports: dict[str, PlanReport] = content["plans"]
        step = (1,) if "target.step" in self._reports else ()
        self.widths: Sequence[int] = (*step, self.manifest.drafted + 1)
        self._graphs, self._played = graphs, {}  # type: ignore[var-annotated]
        self.stream, self.memory = Stream(), Memory()
        self._load(loaded.module, path)
        slots = self.manifest.max_batch
        self.context, self._pending = (np.zeros(slots, np.int32) for _ in range(2))
        self.anchor = np.zeros(slots, np.int64)
        self.tokens, self.accepted = np.zeros((1, 1), np.int64), np.zeros(1, np.int32)
        self._leave_logits("target.prefill", [0])

    # -- loading

    def _load(self, trt: Any, path: Path) -> None:
        from dflash_plugins.base import register
        from dflash_plugins.registry import KINDS

        self._logger = trt.Logger(trt.Logger.WARNING)
        self._creators = register(trt, list(KINDS.values()), ())
        runtime = trt.Runtime(self._logger)
        self._engines, self._contexts = {}, {}
        for name, report in self._reports.items():
            engine = runtime.deserialize_cuda_engine((path / report.file).read_bytes())
            if engine is None:
                raise InputError(
                    f"{path / report.file}: TensorRT could not load it; build it again"
                )
            self._engines[name], self._contexts[name] = engine, engine.create_execution_context()
        self._allocate()
        self._bind_weights(path / FILE)
        self.stream.wait()

    def _allocate(self) -> None:
        """Every buffer once, as large as the plan that wants most of it."""
        sizes: dict[str, int] = {}
        for report in self._reports.values():
            for binding in report.bindings:
                if binding.role != "weight":
                    name = self._buffer(report.name, binding)
                    size = _bytes(binding, self.manifest.max_batch)
                    sizes[name] = max(sizes.get(name, 0), size)
        for name, size in sizes.items():
            self.stream.zero(self.memory.allocate(name, size), size)

    def _buffer(self, plan: str, binding: Binding) -> str:
        """The buffer of a binding. Caches belong to a model, inputs and outputs share memory; what
        both engines know (features, tokens, accepted, context, anchor, lengths) is one buffer."""
        if binding.role == "scratch":
            return SCRATCH
        name = binding.alias or binding.name
        if binding.role == "cache":
            return f"{plan.partition('.')[0]}.{name}"
        if plan.startswith("drafter") and binding.direction == "output" and name == "tokens":
            return "drafted"
        own = name == "rows" or (name == "features" and plan == "target.step")
        if name == "features" and plan in ("target.prefill", "drafter.inject"):
            return "chunk.features"  # the slots' features may still be waiting for their draft
        return f"{plan}.{name}" if own else name

    def _bind_weights(self, path: Path) -> None:
        """Copy the mapped file to the device tensor by tensor; sinks go into the key caches."""
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        data = np.memmap(path, np.uint8, "r", offset=8 + size)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            array = np.ascontiguousarray(data[begin:end])
            self.stream.upload(self.memory.allocate(name, end - begin), array)
            self.stream.wait()
        self._write_sinks(header, data)

    def _write_sinks(self, header: dict[str, Any], data: np.ndarray) -> None:
        for binding in self._reports["target.verify"].bindings:
            if binding.made_of[1] != "sinks" or not binding.name.startswith("k_cache"):
                continue
            begin, end = header[binding.made_of[0]]["data_offsets"]
            _, heads, rows, dim = binding.shape
            groups = np.frombuffer(data[begin:end].tobytes(), ml_dtypes.bfloat16)
            row = np.zeros((heads, dim), ml_dtypes.bfloat16)
            row[:, dim - 16 : dim - 16 + len(groups) // heads] = groups.reshape(heads, -1)
            base = self.memory[f"target.{binding.name}"]
            for slot in range(self.manifest.max_batch):
                for head in range(heads):
                    offset = 2 * ((slot * heads + head) * rows * dim)
                    self.stream.upload(base + offset, row[head])
            self.stream.wait()

    @property
    def cache_bytes(self) -> int:
        """Bytes of all caches of all slots."""
        return sum(size for name, size in self.memory.sizes.items() if "_cache." in name)

    # -- slots

    def release(self, slot: int) -> None:
        """Forget a slot's sequence; what its caches hold is overwritten, never read."""
        self.context[slot] = self._pending[slot] = 0

    def commit(self, slot: int, accepted: int, anchor: int) -> None:
        """Take only `accepted` rows of the last verify, and `anchor` behind them."""
        self.context[slot] += accepted - self._pending[slot]
        self._pending[slot], self.anchor[slot] = accepted, anchor

    # -- calls

    def prefill(self, slot: int, chunk: np.ndarray, inject: bool, logits: bool = False) -> None:
        """Run `chunk` [S] int64 behind the slot's context, S <= prefill_chunk; all of it counts."""
        size = len(chunk)
        padded = np.full(self.prefill_chunk, self.manifest.mask_id, np.int64)
        padded[:size] = chunk
        self._send("tokens", padded)
        self._send("target.prefill.rows", np.array([size - 1], np.int64))
        self._send("lengths", self.context[slot : slot + 1])
        self._execute("target.prefill", 1, slot, self.prefill_chunk)
        if inject:
            self._execute("drafter.inject", 1, slot, self.prefill_chunk)
        self._receive(1)
        self.context[slot] += size
        self.anchor[slot], self._pending[slot] = self._anchors[0], 0
        self.tokens, self.accepted = chunk[None], np.array([size], np.int32)
        self._leave_logits("target.prefill", [0])

    def draft(self, slots: Sequence[int], count: int) -> None:
        """Inject what the last verify left of each slot and draft `count` tokens (0: inject; the
        plan drafts all the same, and no one reads it)."""
        if count not in (0, self.manifest.drafted):
            raise InputError(f"this engine drafts {self.manifest.drafted} tokens, not {count}")
        count = self.manifest.drafted
        batch = max(slots) + 1
        self._send("context", self.context[:batch])
        self._send("accepted", self._pending[:batch])
        self._pending[:batch] = 0  # injected by this call, idle slots' as well
        self._send("anchor", self.anchor[:batch])
        mask = np.full((batch, self.manifest.block), self.manifest.mask_id, np.int64)
        self._send("masks", np.ascontiguousarray(mask[:, :count]))
        self._send("tokens", mask)
        self._play(("draft", batch), lambda: self._draft(batch, count + 1))

    def _draft(self, batch: int, width: int) -> None:
        self._execute("drafter.draft", batch)
        self.stream.copy_rows(
            self.memory["tokens"], 8 * self.manifest.block, self.memory["drafted"], 8 * width, batch
        )

    def verify(self, slots: Sequence[int], width: int, logits: bool = False) -> None:
        """Run the drafted block of each slot; width 1 runs the anchors alone."""
        batch, block = max(slots) + 1, self.manifest.block
        if width not in (1, self.manifest.drafted + 1, block):
            raise InputError(f"this engine verifies blocks of {block} tokens, not of {width}")
        plan = "target.step" if width == 1 else "target.verify"
        run = 1 if width == 1 else block
        if plan not in self._reports:
            raise InputError("this engine has no plan for single tokens; build it with --step")
        self._send(f"{plan}.rows", np.tile(np.arange(run), (batch, 1)))
        if width == 1:
            self._send("tokens", self.anchor[:batch])
            self._send("lengths", self.context[:batch])
        self._play((plan, batch), lambda: self._execute(plan, batch))
        tokens = np.zeros((batch, run), np.int64)
        self.stream.download(tokens, self.memory["tokens"])
        self._receive(batch)
        chosen = list(slots)
        if width == 1:
            self._keep_step_features(chosen)
        self.tokens, self.accepted = tokens[chosen, :width], self._counts[chosen]
        self._pending[chosen], self.anchor[chosen] = self._counts[chosen], self._anchors[chosen]
        self.context[chosen] += self._counts[chosen]
        self._leave_logits(plan, chosen)

    def _leave_logits(self, plan: str, slots: Sequence[int]) -> None:
        """Whether they were asked for or not: they are copied row by row, when they are read."""
        (binding,) = (b for b in self._reports[plan].bindings if b.name == "logits")
        self.logits = DeviceLogits(self.stream, self.memory["logits"], binding, slots)

    def _keep_step_features(self, slots: Sequence[int]) -> None:
        """A step leaves one row of features per slot; the draft call wants them a block apart."""
        source, to = self.memory["target.step.features"], self.memory["features"]
        bindings = {b.name: b for b in self._reports["target.step"].bindings}
        size = _bytes(bindings["features"], 1)
        for slot in slots:
            target = to + slot * size * self.manifest.block
            self.stream.copy_rows(target, size, source + slot * size, size, 1)

    # -- the device

    def _play(self, key: tuple[str, int], work: Callable[[], None]) -> None:
        """The first run is plain (TensorRT compiles and allocates in it), later ones are graphs."""
        if not self._graphs or key not in self._played:
            work()
            self._played[key] = None
            return
        if self._played[key] is None:
            self._played[key] = self.stream.capture(work)
        self._played[key]()

    def _send(self, name: str, array: np.ndarray) -> None:
        self.stream.upload(self.memory[name], np.ascontiguousarray(array))

    def _receive(self, batch: int) -> None:
        self._counts, self._anchors = np.zeros(batch, np.int32), np.zeros(batch, np.int64)
        self.stream.download(self._counts, self.memory["accepted"])
        self.stream.download(self._anchors, self.memory["anchor"])
        self.stream.wait()

    def _execute(self, plan: str, batch: int, slot: int = 0, rows: int = 0) -> None:
        """Bind and run. `slot` is where the caches of the first sequence begin."""
        context = self._contexts[plan]
        for binding in self._reports[plan].bindings:
            address = self._address(plan, binding, slot)
            context.set_tensor_address(binding.name, address)
            if binding.direction == "input" and -1 in binding.shape:
                first, *rest = binding.shape
                shape = (batch if first < 0 else first, *(rows if d < 0 else d for d in rest))
                context.set_input_shape(binding.name, shape)
        if not context.execute_async_v3(self.stream.handle):
            raise RuntimeError(f"TensorRT could not run the plan '{plan}'")

    def _address(self, plan: str, binding: Binding, slot: int) -> int:
        if binding.role == "weight":
            return self.memory[binding.name]
        address = self.memory[self._buffer(plan, binding)]
        return address + slot * _bytes(binding, 1) if binding.role == "cache" else address


def _bytes(binding: Binding, batch: int) -> int:
    """Size for `batch` sequences; another size that varies counts as one chunk at most."""
    first, *rest = binding.shape
    count = int(np.prod([batch, *(1024 if size < 0 else size for size in rest)]))
    if first > 0 and binding.role == "state" and len(binding.shape) == 1:
        count = first
    return count * BYTES[binding.dtype]


def check_capability(path: Path, built: Sequence[int], here: int) -> None:
    """Refuse, before anything is deserialised, plans that hold no code for this GPU."""
    if here not in built:
        names = ", ".join(f"{c / 10:.1f}" for c in built)
        raise InputError(
            f"{path}: was built for compute capability {names}, this GPU has {here / 10:.1f}; "
            f"build it with --compute-capability {here / 10:.1f}"
        )
