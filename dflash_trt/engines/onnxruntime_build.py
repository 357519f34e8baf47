"""Compile lowered graphs for ONNX Runtime on the CPU: optimised model files and their weights files.

ONNX Runtime packs matrices into the layout of its kernels when it loads a model. For what several
models use (the lm_head; every weight where there are models for several batch sizes) the packed form
is stored too: all sessions then map the same pages and it is in memory once. Anything else packed
stays private to its session and is not stored. The packed layout belongs to an ONNX Runtime version
and a kind of CPU; engine.json records both.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

ALIGNMENT = 4096  # a page: what is mapped starts on one
WEIGHTS_FILE = "weights.bin"
SEGMENTS_FILE = "segments.json"  # of a mesh: the collectives between the segments, in order
RANK_WEIGHTS_FILE = "weights.rank{rank}.bin"  # of a mesh: what only this rank has
_INLINE_LIMIT = 1024  # bytes; smaller initializers stay in the model file

Arrays = Callable[[], dict[str, np.ndarray]]


def batch_sizes(max_batch: int) -> tuple[int, ...]:
    """Batches that models are compiled for: powers of two below `max_batch`, and `max_batch`."""
    powers = [2**n for n in range(max_batch.bit_length()) if 2**n < max_batch]
    return (*powers, max_batch)


def model_name(model: str, batch: int) -> str:
    """The name of the file for a batch size, without its suffix."""
    return model if batch == 1 else f"{model}.b{batch}"


def segment_name(rank: int, index: int) -> str:
    """The model of one segment of a rank's share of the target, as `model_name` takes it."""
    return f"target.rank{rank}.{index:03}"


class WeightsFile:
    """Appends aligned blobs to a new file; equal content is stored once."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._file = path.open("wb")
        self._known: dict[bytes, int] = {}

    def __enter__(self) -> WeightsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, blob: memoryview) -> int:
        """Offset of `blob` in the file."""
        digest = hashlib.sha256(blob).digest()
        if digest not in self._known:
            self._file.write(b"\0" * (-self._file.tell() % ALIGNMENT))
            self._known[digest] = self._file.tell()
            self._file.write(blob)
        return self._known[digest]


def compile_models(
    models: Mapping[str, onnx.ModelProto],
    weights: Mapping[str, Arrays],
    folder: Path,
    file_of: Callable[[str], WeightsFile],
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Write `<name>.onnx` for each of `models` into `folder`, and their weights to the files there
    that `file_of` gives for the names of weights.

    `weights` makes for each weight the arrays that the lowered models read, by their names.
    """
    raw = folder / "raw.bin"
    placed = _write_raw(raw, weights, progress)
    shared = _shared_inputs(models.values())
    for name, model in models.items():
        progress(f"compile {name}")
        optimised = _optimise(_with_raw_weights(model, placed), folder, name)
        packed = folder / f"{name}.packed.bin"
        if packed.exists():  # a model may hold nothing large
            _move_blobs(optimised, packed, file_of, shared)
            packed.unlink()
        (folder / f"{name}.onnx").write_bytes(optimised.SerializeToString())
    raw.unlink()


@dataclass(frozen=True)
class _Placed:
    dtype: int
    shape: tuple[int, ...]
    offset: int
    length: int


def _write_raw(
    path: Path, weights: Mapping[str, Arrays], progress: Callable[[str], None]
) -> dict[str, _Placed]:
    """One weight after the other into a raw file; only one is in memory at a time."""
    placed: dict[str, _Placed] = {}
    with path.open("wb") as file:
        for name, arrays in weights.items():
            progress(f"weights {name}")
            for label, array in arrays().items():
                file.write(b"\0" * (-file.tell() % ALIGNMENT))
                dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
                placed[label] = _Placed(dtype, array.shape, file.tell(), array.nbytes)
                file.write(np.ascontiguousarray(array).data)
    return placed


def _with_raw_weights(model: onnx.ModelProto, placed: Mapping[str, _Placed]) -> onnx.ModelProto:
    """The model with an external initializer for every weight name it uses."""
    wired = onnx.ModelProto()
    wired.CopyFrom(model)
    used = {name for node in model.graph.node for name in node.input}
    for name in sorted(used & placed.keys()):
        p = placed[name]
        tensor = onnx.TensorProto(name=name, data_type=p.dtype, dims=p.shape)
        _set_location(tensor, "raw.bin", p.offset, p.length)
        wired.graph.initializer.append(tensor)
    return wired


def _set_location(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    tensor.data_location = onnx.TensorProto.EXTERNAL
    values = {"location": location, "offset": str(offset), "length": str(length)}
    for key, value in values.items():
        tensor.external_data.add(key=key, value=value)


def _optimise(model: onnx.ModelProto, folder: Path, name: str) -> onnx.ModelProto:
    """Let ONNX Runtime optimise the graph and save it with packed weights in a file of its own."""
    source, saved = folder / f"{name}.raw.onnx", folder / f"{name}.opt.onnx"
    source.write_bytes(model.SerializeToString())
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(saved)
    options.log_severity_level = 3
    for key, value in {
        "session.save_external_prepacked_constant_initializers": "1",
        "session.optimized_model_external_initializers_file_name": f"{name}.packed.bin",
        "session.optimized_model_external_initializers_min_size_in_bytes": str(_INLINE_LIMIT),
    }.items():
        options.add_session_config_entry(key, value)
    ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    optimised = onnx.load(saved, load_external_data=False)
    source.unlink()
    saved.unlink()
    return optimised


def _shared_inputs(models: Iterable[onnx.ModelProto]) -> set[str]:
    """Names that nodes of more than one model read."""
    seen = Counter(name for m in models for name in {n for x in m.graph.node for n in x.input})
    return {name for name, count in seen.items() if count > 1}


def _move_blobs(
    model: onnx.ModelProto,
    packed: Path,
    file_of: Callable[[str], WeightsFile],
    shared: set[str],
) -> None:
    """Point every external initializer to its weights file, packed forms only of what is shared.
    One blob is in memory at a time."""
    for tensor in _initializers(model.graph):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        entries = {e.key: e.value for e in tensor.external_data}
        keep = tensor.name in shared
        blobs = {k: v for k, v in entries.items() if keep and k.startswith("prepacked_")}
        offset, length = int(entries["offset"]), int(entries["length"])
        file = file_of(tensor.name)

        def moved(offset: int, length: int, file: WeightsFile = file) -> int:
            return file.append(np.fromfile(packed, np.uint8, length, offset=offset).data)

        del tensor.external_data[:]
        _set_location(tensor, file.name, moved(offset, length), length)
        for key, value in blobs.items():
            tensor.external_data.add(key=key, value=_moved_entry(value, moved))


def _initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Of a graph and of the bodies of its loops."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _initializers(attribute.g)


def _moved_entry(value: str, moved: Callable[[int, int], int]) -> str:
    """`key|offset;length;padded|..` with every offset moved.

    The format is ONNX Runtime's (`PrepackedWeightsForGraph`): a kernel key, then one group of
    offset, length and padding for each packed buffer.
    """
    key, *groups = value.split("|")
    out = []
    for group in groups:
        offset, length, padding = (int(n) for n in group.split(";"))
        out.append(f"{moved(offset, length)};{length};{padding}")
    return "|".join([key, *out])


def session_options(threads: int | None, arena: bool = True) -> Any:
    """Options for a compiled model: nothing is optimised again. threads None: those of the
    process, which all its sessions then share (see `mpi.share_threads`). arena: the session keeps
    the memory that its states take."""
    options = ort.SessionOptions()
    if threads is None:
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = threads
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_cpu_mem_arena = arena
    options.log_severity_level = 3
    # Two sessions take turns, and a server shares its machine: threads that wait must sleep. On an
    # idle machine that is as fast as spinning; beside other work it is several times faster.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options
