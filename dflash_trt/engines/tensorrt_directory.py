"""Builds an engine directory of TensorRT plans: checkpoints -> source graphs -> plans and weights.

Plans of a pair, all of the two source graphs that lie in `source/`:

    target.verify    the hot path: `block` tokens, logits of each (sampled requests read them)
    target.prefill   a chunk of a prompt, logits of one row
    target.step      one token (only where asked for: the autoregressive baseline)
    drafter.draft    injects up to `block` rows and drafts a block
    drafter.inject   injects a chunk of a prompt

They take the same weights, bound once; the ranks of a mesh share the plans. The number of sequences
varies from 1 to `max_batch`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from dflash_trt.checkpoints import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.engines.build import (
    BuildOptions,
    Sources,
    describe,
    drafted_slots,
    source_graphs,
    write_sources,
)
from dflash_trt.engines.directory import (
    Manifest,
    build_versions,
    check_replaceable,
    new_directory,
    write_manifest,
)
from dflash_trt.engines.memory import PeakMemory, return_free_memory
from dflash_trt.engines.tensorrt_build import PlanReport, compile_plans
from dflash_trt.engines.tensorrt_weights import (
    FILE,
    RANK_FILE,
    Encoded,
    Load,
    Shelf,
    encode,
    from_export,
    sinks_table,
    weight_table,
    write_weights,
)
from dflash_trt.errors import InputError
from dflash_trt.lowering.tensorrt import api
from dflash_trt.lowering.tensorrt.linear import QUANTISED_KINDS
from dflash_trt.lowering.tensorrt.plan import PRECISIONS, PlanRequest, Range
from dflash_trt.models.graph import SourceGraph, Weight
from dflash_trt.quantization.calibration import calibrate_pair

PLANS_FILE = "plans.json"
PREFILL_CHUNK = 128
# Texts that activation scales are calibrated on, unless the caller has better ones.
CALIBRATION_TEXTS = (
    "The capital of France is Paris. It lies on the Seine and has about two million inhabitants.",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
    "Question: A train covers 120 km in 1.5 hours. What is its speed? Answer: 120 / 1.5 = 80 km/h.",
    "Dear Sir or Madam, I am writing to ask whether my order of last week has been sent already.",
)


@dataclasses.dataclass(frozen=True)
class TensorRTOptions:
    """What only this backend wants to know. capabilities: such as 120 for compute capability 12.0;
    step: also compile the plan for single tokens; weights: write the weights file; experts: one of
    `lowering.tensorrt.plan.EXPERTS`."""

    backend: str
    capabilities: tuple[int, ...]
    chunk: int = PREFILL_CHUNK
    step: bool = False
    weights: bool = True
    experts: str = "plugin"

    def __post_init__(self) -> None:
        api.check_capabilities(self.backend, self.capabilities)


def build_tensorrt(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    options: BuildOptions,
    own: TensorRTOptions,
    out: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Manifest, list[PlanReport]]:
    """Build an engine directory at `out`; nothing is left behind if it fails."""
    check_precision(options, own.backend, own.capabilities)
    check_replaceable(out)
    sources = source_graphs(target, drafter, with_room(options, own))
    manifest = describe(
        target, drafter, options, sources, backend=own.backend, requirements={},
        versions=build_versions("onnx"),
    )  # fmt: skip
    with new_directory(out) as folder, PeakMemory() as memory:
        write_sources(folder, target, sources)
        graphs, drafted = (sources.target, sources.drafter), drafted_slots(options, drafter.config)
        quantised, kept = quantised_weights(sources, options.precision)
        plans = pair_plans(*graphs, folder / "source", options, own, drafted, kept)
        # The compiler, a process of its own, takes one core.
        with Shelf(folder) as shelf, ThreadPoolExecutor(1) as beside, _set_if_failed() as stop:
            wanted = quantised if own.weights else frozenset()
            encoding = beside.submit(
                _encode, shelf, target, drafter, sources, options, wanted, stop
            )

            def watching(what: str) -> None:
                """Between two stages of the compiler: no plan is of use if the encoding has failed."""
                if encoding.done():
                    encoding.result()
                progress(what)

            reports = compile_plans(plans, folder, own.backend, own.capabilities, watching)
            if own.weights:
                progress("quantise")
                encoding.result()
                _write_weights(folder, sources, options.ranks, reports, shelf, progress)
        _write_plans(folder / PLANS_FILE, reports, own, memory.peak)
        progress("hash files")
        # The version that plans are tied to is the compiler's word: this process does not load it.
        manifest = dataclasses.replace(
            manifest, target_requirements={own.backend: reports[0].compiler}
        )
        write_manifest(folder, manifest)
    return manifest, reports


def check_precision(options: BuildOptions, backend: str, capabilities: Sequence[int]) -> None:
    """Refuse a precision that `backend` does not offer for so many ranks, or that GPUs of one of
    `capabilities` have no products in."""
    if options.precision not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise InputError(f"precision '{options.precision}': {backend} offers {known}")
    api.check_units(options.precision, tuple(capabilities))
    if options.ranks > 1 and options.precision != "bf16":
        raise InputError(
            f"precision '{options.precision}': {backend} cuts a target over ranks in bf16 only "
            "(experts in MXFP4 stay what they are)"
        )


@contextmanager
def _set_if_failed() -> Iterator[Event]:
    """An event for a thread beside the block, which is to stop where the block fails or is ended."""
    stop = Event()
    try:
        yield stop
    except BaseException:
        stop.set()
        raise


def with_room(options: BuildOptions, own: TensorRTOptions) -> BuildOptions:
    """Caches and rotary tables have room for a whole chunk behind the last position."""
    return dataclasses.replace(options, max_seq_len=capacity(options, own) - options.block)


def capacity(options: BuildOptions, own: TensorRTOptions) -> int:
    """Cache rows of a sequence: a prompt's last chunk is padded and may begin at its end."""
    return options.max_seq_len + max(own.chunk, options.block)


def _of_rank(progress: Callable[[str], None], rank: int) -> Callable[[str], None]:
    return lambda what: progress(f"rank {rank}: {what}")


def _loader(sources: Sources, rank: int = 0) -> Load:
    return lambda name, dtype: sources.loader.load(sources.weights[name], rank, dtype)


def write_weights_of(
    folder: Path,
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    sources: Sources,
    options: BuildOptions,
    reports: Sequence[PlanReport],
    progress: Callable[[str], None],
) -> None:
    """Write the weights files of plans that are compiled already into `folder`."""
    quantised, _ = quantised_weights(sources, options.precision)
    planned = {b.made_of[0] for r in reports for b in r.bindings if b.made_of[1] in PRECISIONS}
    if planned != quantised:
        raise InputError(
            f"{target.tensors.origin}: the plans quantise other weights than this export does; "
            f"build the engine again"
        )
    progress("quantise" if quantised else "weights")
    with Shelf(folder) as shelf:
        _encode(shelf, target, drafter, sources, options, quantised, Event())
        _write_weights(folder, sources, options.ranks, reports, shelf, progress)


def _write_weights(
    folder: Path,
    sources: Sources,
    ranks: int,
    reports: Sequence[PlanReport],
    encoded: Shelf,
    progress: Callable[[str], None],
) -> None:
    """One file of what every rank has, and where the target is cut one for each rank's parts."""
    bindings = [report.bindings for report in reports]
    shapes = {name: w.shape for name, w in sources.weights.items()}
    table, load = weight_table(bindings) | sinks_table(bindings, shapes), _loader(sources)
    cut = {name for name, b in table.items() if sources.weights[b.made_of[0] or name].shard}
    whole = {name: b for name, b in table.items() if name not in cut}

    def common(name: str, dtype: Any) -> np.ndarray | Encoded:
        return encoded.take(name) if name in encoded else load(name, dtype)

    write_weights(folder / FILE, whole, common, progress)
    for rank in range(ranks) if cut else ():
        own = {name: table[name] for name in table if name in cut}
        path, say = folder / RANK_FILE.format(rank=rank), _of_rank(progress, rank)
        write_weights(path, own, _loader(sources, rank), say)


def _write_plans(
    path: Path, reports: Sequence[PlanReport], own: TensorRTOptions, peak_bytes: int
) -> None:
    content = {
        "backend": own.backend,
        "capabilities": list(own.capabilities),
        "chunk": own.chunk,
        "peak_bytes": peak_bytes,
        "plans": [report.to_json() for report in reports],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def read_plans(path: Path) -> dict[str, Any]:
    """`plans.json` of an engine directory; `plans` holds the reports by name, `peak_bytes` is the
    memory of the whole build, compiler and quantisation together."""
    content: dict[str, Any] = json.loads((path / PLANS_FILE).read_text())
    reports = [PlanReport.from_json(values) for values in content["plans"]]
    return {**content, "plans": {report.name: report for report in reports}}


# -- which plans


def pair_plans(
    target: SourceGraph,
    drafter: SourceGraph,
    folder: Path,
    options: BuildOptions,
    own: TensorRTOptions,
    drafted: int,
    kept: frozenset[str] = frozenset(),
) -> list[PlanRequest]:
    """The plans of a pair, made of `target.onnx` and `drafter.onnx` in `folder`; `drafted` slots
    are drafted in a cycle, the anchor not counted; `kept` weights are not quantised."""
    block, chunk = options.block, own.chunk
    caches = [o.name for o in target.model.graph.output if o.name.endswith(".out")]
    draft_caches = [o.name for o in drafter.model.graph.output if o.name.endswith(".out")]
    verified = ["accepted", "anchor", "context", "features", "logits", *caches]
    shapes: dict[str, tuple[SourceGraph, list[str], dict[str, int | Range]]] = {
        "target.verify": (target, verified, {"S": block, "W": block}),
        "target.prefill": (target, verified, {"S": chunk, "W": 1}),
        "drafter.draft": (
            drafter,
            ["tokens", "lengths", *draft_caches],
            {"S": drafted + 1, "R": block, "M": drafted},
        ),
        "drafter.inject": (
            drafter,
            draft_caches,
            {"S": drafted + 1, "R": (1, block, max(chunk, block)), "M": drafted},
        ),
    }
    if own.step:
        shapes["target.step"] = (target, verified, {"S": 1, "W": 1})
    shared: dict[str, int | Range] = {
        "B": (1, 1, options.max_batch),
        "L": capacity(options, own),
    }
    return [
        PlanRequest(
            name=name,
            graph=str(folder / f"{name.partition('.')[0]}.onnx"),
            outputs=tuple(outputs),
            letters={k: _range(v) for k, v in {**shared, **letters}.items()},
            weights={w.name: w.kind for w in graph.weights},
            precision=options.precision,
            kept=tuple(sorted(kept & graph.weight_names)),
            experts=own.experts,
        )
        for name, (graph, outputs, letters) in shapes.items()
    ]


def _range(size: int | Range) -> Range:
    return (size, size, size) if isinstance(size, int) else size


# -- quantisation


def quantised_weights(sources: Sources, precision: str) -> tuple[frozenset[str], frozenset[str]]:
    """Names of the weights that are quantised, and of those that could be and are kept in bf16:
    where a checkpoint was exported in this precision, what the export left out."""
    if precision == "bf16":
        return frozenset(), frozenset()
    known = {name: w for name, w in sources.weights.items() if w.kind in QUANTISED_KINDS}
    loader = sources.loader
    exported = {n: w for n, w in known.items() if loader.export_precision(w) == precision}
    kept = frozenset(name for name, w in exported.items() if not loader.is_quantised(w))
    for name in sorted(exported.keys() - kept):
        loader.check_scales(known[name])
    return frozenset(known) - kept, kept


def _encode(
    shelf: Shelf,
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    sources: Sources,
    options: BuildOptions,
    names: frozenset[str],
    stop: Event,
) -> None:
    """Put the quantised weights on `shelf`: those of an export in this precision with its scales,
    the others quantised here, with activation scales from a calibration. Raises `CancelledError`
    in front of the next weight that is read once `stop` is set."""
    loader, precision = sources.loader, options.precision

    def weight_of(name: str) -> Weight:
        if stop.is_set():
            raise CancelledError
        return sources.weights[name]

    own = {n for n in names if loader.export_precision(sources.weights[n]) == precision}
    for name in sorted(own):
        shelf.put(name, from_export(loader.stored(weight_of(name))))

    def done(name: str, weight: np.ndarray, peak: float) -> None:
        shelf.put(name, encode(weight, precision, peak))
        return_free_memory()  # the compiler needs it

    if names - own:
        calibrate_pair(
            sources.target, sources.drafter, names - own,
            lambda name: loader.load(weight_of(name)),
            _calibration_prompts(target, options), options.block, drafter.config.mask_id, done,
        )  # fmt: skip
    return_free_memory()


def _calibration_prompts(target: TargetCheckpoint, options: BuildOptions) -> list[np.ndarray]:
    from tokenizers import Tokenizer

    codec = Tokenizer.from_str(target.text_format().tokenizer_json)
    ids = [codec.encode(text).ids[: options.max_seq_len] for text in CALIBRATION_TEXTS]
    return [np.array(prompt, np.int64) for prompt in ids]
