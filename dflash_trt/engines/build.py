"""One build: checkpoints -> source graphs -> engine directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from dflash_trt.checkpoints import DrafterCheckpoint, TargetCheckpoint, check_pair
from dflash_trt.checkpoints.described import AbsentTensors
from dflash_trt.checkpoints.draft_head import draft_head
from dflash_trt.checkpoints.weights import WeightLoader
from dflash_trt.config import DrafterConfig
from dflash_trt.engines import onnxruntime as cpu
from dflash_trt.engines.directory import (
    Identity,
    Manifest,
    build_versions,
    multiplies_bytes,
    new_directory,
    write_manifest,
)
from dflash_trt.engines.onnxruntime_build import (
    RANK_WEIGHTS_FILE,
    SEGMENTS_FILE,
    WEIGHTS_FILE,
    WeightsFile,
    batch_sizes,
    compile_models,
    model_name,
    segment_name,
)
from dflash_trt.errors import InputError
from dflash_trt.lowering.cpu import lower
from dflash_trt.lowering.lanes import unroll_lanes
from dflash_trt.lowering.segments import segments
from dflash_trt.models.dflash import drafter_graph
from dflash_trt.models.graph import SourceGraph, Weight
from dflash_trt.models.registry import target_graph
from dflash_trt.quantization.integers import BLOCKS4, BLOCKS8, COLUMNS8, IntegerForm


@dataclass(frozen=True)
class CpuPrecision:
    """Integer forms by kind of weight, for target and drafter; kinds that are not named stay
    fp32."""

    target: Mapping[str, IntegerForm]
    drafter: Mapping[str, IntegerForm]


# The target's precision decides the output, the drafter's only how often it is right: even the fp32
# engine drafts in int8, and in the faster of two forms where this CPU can. lm_head is over a fifth of
# the bytes of a small model: a drafter of all tokens shares the int8 engine's.
_BYTES = {"projection": BLOCKS8, "lm_head": BLOCKS8}
_NIBBLES = {"projection": BLOCKS4, "lm_head": BLOCKS4}
_DRAFT = COLUMNS8 if multiplies_bytes() else BLOCKS8
_DRAFTS = {"projection": _DRAFT, "draft_head": _DRAFT}
CPU_PRECISIONS: Mapping[str, CpuPrecision] = {
    "fp32": CpuPrecision({}, {**_DRAFTS, "lm_head": _DRAFT}),
    "int8": CpuPrecision(_BYTES, {**_DRAFTS, "lm_head": BLOCKS8}),
    "int4": CpuPrecision(_NIBBLES, {**_DRAFTS, "lm_head": _DRAFT}),
}


@dataclass(frozen=True)
class BuildOptions:
    """What a build is asked for. block: verify width; passes: refinement passes of the drafter;
    max_batch: sequences at once; ranks: processes that share the target (tensor parallel)."""

    name: str
    block: int
    precision: str = "fp32"
    passes: int = 1
    max_seq_len: int = 2048
    max_batch: int = 1
    ranks: int = 1
    chat_arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.block < 2:
            raise InputError(
                f"block {self.block}: a block has at least 2 tokens, anchor and one draft"
            )
        if self.max_batch < 1:
            raise InputError(f"max-batch {self.max_batch}: an engine has at least one slot")
        if self.ranks < 1:
            raise InputError(f"tp {self.ranks}: a target has at least one rank")
        if self.passes not in (1, 2):
            raise InputError(f"passes {self.passes}: 1 or 2 refinement passes are supported")
        if self.max_seq_len < 2 * self.block:
            raise InputError(
                f"max-seq-len {self.max_seq_len}: too short for blocks of {self.block}"
            )


@dataclass(frozen=True)
class Sources:
    """The two source graphs of a build and where their weights come from."""

    target: SourceGraph
    drafter: SourceGraph
    loader: WeightLoader

    @property
    def weights(self) -> dict[str, Weight]:
        """All weights of both graphs by name; shared ones once."""
        return {w.name: w for w in (*self.target.weights, *self.drafter.weights)}


def source_graphs(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    options: BuildOptions,
    rank: int | None = None,
) -> Sources:
    """Write both graphs and check every weight's presence and shape before anything is read. Of
    several ranks, the target's is that of `rank`; None: one for all."""
    check_pair(target.config, drafter.config, drafter.tensors.origin)
    positions = options.max_seq_len + options.block
    if positions > target.config.max_positions:
        raise InputError(
            f"max-seq-len {options.max_seq_len}: the target ends at {target.config.max_positions} positions"
        )
    sources = Sources(
        target_graph(target.config, drafter.config.taps, positions, options.ranks, rank),
        drafter_graph(drafter.config, target.config, positions, options.passes),
        WeightLoader(
            {
                "target": target.tensors,
                "drafter": drafter.tensors,
                "draft_head": draft_head(target, drafter),
            },
            {"target": target.config, "drafter": drafter.config},
        ),
    )
    sources.loader.check(tuple(sources.weights.values()))
    return sources


def drafted_slots(options: BuildOptions, drafter: DrafterConfig) -> int:
    """Slots to draft per cycle, the anchor not counted: a drafter is never asked for a longer block
    than it was trained with, however wide the verify call is."""
    return min(options.block, drafter.block) - 1


def wide_verify_note(options: BuildOptions, drafter: DrafterConfig) -> str:
    """What a build says where it verifies more than it drafts; empty where it does not."""
    if options.block <= drafter.block:
        return ""
    return (
        f"verifies {options.block} tokens, drafts {drafter.block} (anchor included): the drafter "
        f"was trained with blocks of {drafter.block}"
    )


def build_cpu(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    options: BuildOptions,
    out: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Build an engine directory for ONNX Runtime on this machine's CPU."""
    check_cpu_precision(options)
    sources = source_graphs(target, drafter, options)
    _check_cpu(target, drafter, options)
    precision = CPU_PRECISIONS[options.precision]
    manifest = describe(
        target, drafter, options, sources,
        backend="cpu", requirements=cpu.requirements(),
        versions=build_versions("onnx", "onnxruntime"),
    )  # fmt: skip
    with new_directory(out) as folder:
        write_sources(folder, target, sources)
        with WeightsFile(folder / WEIGHTS_FILE) as common:
            if options.ranks == 1:
                models = _lowered(sources, precision, options.max_batch, "target", "drafter")
                forms = _stored_forms(sources, precision, "target", "drafter")
                compile_models(models, forms, folder, lambda _: common, progress)
            else:
                ranks = [source_graphs(target, drafter, options, r) for r in range(options.ranks)]
                _compile_ranks(ranks, precision, options, folder, common, progress)
        progress("hash files")
        write_manifest(folder, manifest)
    return manifest


def check_cpu_precision(options: BuildOptions) -> None:
    """Refuse a precision that the cpu backend does not offer."""
    if options.precision not in CPU_PRECISIONS:
        known = ", ".join(CPU_PRECISIONS)
        raise InputError(f"precision '{options.precision}': the CPU engine offers {known}")


def _check_cpu(target: TargetCheckpoint, drafter: DrafterCheckpoint, options: BuildOptions) -> None:
    """This backend stores the weights with the models, and has no use for a wider verify call:
    sizes are free in every call, so room to spare is no other engine."""
    for tensors in (target.tensors, drafter.tensors):
        if isinstance(tensors, AbsentTensors):
            raise InputError(
                f"{tensors.origin}: the checkpoint is not here, and the cpu backend needs its "
                f"weights; give its folder as a path, or --download"
            )
    if options.block > drafter.config.block:
        raise InputError(
            f"block {options.block}: the drafter was trained with blocks of "
            f"{drafter.config.block}, and the cpu backend verifies no more than is drafted"
        )


def _compile_ranks(
    ranks: Sequence[Sources],
    precision: CpuPrecision,
    options: BuildOptions,
    folder: Path,
    common: WeightsFile,
    progress: Callable[[str], None],
) -> None:
    """The drafter, which rank 0 alone runs, and every rank's segments of the target; `common` takes
    the weights that are not cut."""
    models = _lowered(ranks[0], precision, options.max_batch, "drafter")
    compile_models(
        models, _stored_forms(ranks[0], precision, "drafter"), folder, lambda _: common, progress
    )
    whole = {name for name, weight in ranks[0].weights.items() if not weight.shard}
    cuts = [segments(sources.target) for sources in ranks]
    met, *others = [[asdict(s.then) for s in cut if s.then] for cut in cuts]
    assert all(other == met for other in others), "the ranks do not meet at the same places"
    (folder / SEGMENTS_FILE).write_text(json.dumps(met, indent=1) + "\n")
    for rank, (sources, cut) in enumerate(zip(ranks, cuts, strict=True)):
        models = {
            model_name(segment_name(rank, index), size): model
            for size in batch_sizes(options.max_batch)
            for index, segment in enumerate(cut)
            for model in [lower(unroll_lanes(segment.graph, size)[0], precision.target)[0]]
        }
        forms = _stored_forms(sources, precision, "target", rank=rank)
        with WeightsFile(folder / RANK_WEIGHTS_FILE.format(rank=rank)) as own:

            def file_of(name: str, own: WeightsFile = own) -> WeightsFile:
                return common if name in whole else own

            compile_models(models, forms, folder, file_of, progress)


def _lowered(
    sources: Sources, precision: CpuPrecision, max_batch: int, *wanted: str
) -> dict[str, onnx.ModelProto]:
    """The wanted models for every batch size, by the names of their files."""
    return {
        model_name(name, size): lower(unroll_lanes(graph, size)[0], forms)[0]
        for size in batch_sizes(max_batch)
        for name, graph, forms in _graphs(sources, precision)
        if name in wanted
    }


def _graphs(
    sources: Sources, precision: CpuPrecision
) -> tuple[tuple[str, SourceGraph, Mapping[str, IntegerForm]], ...]:
    return (
        ("target", sources.target, precision.target),
        ("drafter", sources.drafter, precision.drafter),
    )


def _stored_forms(
    sources: Sources,
    precision: CpuPrecision,
    *wanted: str,
    rank: int = 0,
) -> dict[str, Callable[[], dict[str, np.ndarray]]]:
    """For each weight of the wanted models what makes the arrays that they read, in every
    form needed; of what is cut, a rank's part."""
    forms: dict[str, set[IntegerForm | None]] = {}
    for name, graph, by_kind in _graphs(sources, precision):
        for weight in graph.weights if name in wanted else ():
            forms.setdefault(weight.name, set()).add(by_kind.get(weight.kind))

    def arrays(weight: Weight) -> dict[str, np.ndarray]:
        array = sources.loader.load(weight, rank)
        made: dict[str, np.ndarray] = {}
        for form in forms[weight.name]:
            made |= form.arrays(weight.name, array) if form else {weight.name: array}
        return made

    return {name: partial(arrays, sources.weights[name]) for name in forms}


def write_sources(folder: Path, target: TargetCheckpoint, sources: Sources) -> None:
    """Keep the source graphs, the tokenizer and the chat template."""
    (folder / "source").mkdir()
    for name, graph in (("target", sources.target), ("drafter", sources.drafter)):
        (folder / "source" / f"{name}.onnx").write_bytes(graph.model.SerializeToString())
    write_text_format(folder, target)


def write_text_format(folder: Path, target: TargetCheckpoint) -> None:
    """Tokenizer and chat template, where the checkpoint is here."""
    text = target.text_format()
    if text.tokenizer_json:
        (folder / "tokenizer.json").write_text(text.tokenizer_json)
        (folder / "chat_template.jinja").write_text(text.chat_template)


def describe(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    options: BuildOptions,
    sources: Sources,
    backend: str,
    requirements: Mapping[str, str],
    versions: Mapping[str, str],
) -> Manifest:
    """The manifest of a build, without its files."""
    text = target.text_format()
    return Manifest(
        name=options.name,
        backend=backend,
        precision=options.precision,
        target=_identity(target.tensors, target.config.to_json()),
        drafter=_identity(drafter.tensors, drafter.config.to_json()),
        block=options.block,
        drafted=drafted_slots(options, drafter.config),
        trained_block=drafter.config.block,
        passes=options.passes,
        taps=drafter.config.taps,
        mask_id=drafter.config.mask_id,
        stop_ids=target.config.stop_ids,
        vocab_size=target.config.token_count,
        max_batch=options.max_batch,
        max_seq_len=options.max_seq_len,
        tensor_parallel=options.ranks,
        versions=versions,
        target_requirements=requirements,
        chat_arguments={
            "bos_token": text.bos_token,
            "eos_token": text.eos_token,
            **options.chat_arguments,
        },
        chat_format=text.chat_format,
        weights=tuple(asdict(w) for w in sources.weights.values()),
    )


def _identity(tensors: Any, config: Mapping[str, Any]) -> Identity:
    return Identity(Path(tensors.origin).name, tensors.digest(), config)
