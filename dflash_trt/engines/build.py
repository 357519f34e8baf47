"""One build: checkpoints -> source graphs -> engine directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from dflash_trt.checkpoints import DrafterCheckpoint, TargetCheckpoint, check_pair
from dflash_trt.checkpoints.weights import WeightLoader
from dflash_trt.engines import onnxruntime as cpu
from dflash_trt.engines.directory import (
    Identity,
    Manifest,
    build_versions,
    new_directory,
    write_manifest,
)
from dflash_trt.engines.onnxruntime_build import compile_models
from dflash_trt.errors import InputError
from dflash_trt.lowering.cpu import lower
from dflash_trt.models.dflash import drafter_graph
from dflash_trt.models.graph import SourceGraph, Weight
from dflash_trt.models.llama import target_graph
from dflash_trt.quantization.integer_blocks import quantize

# Bits of each kind of weight on the CPU; what is not named stays fp32. lm_head is over a fifth of
# the bytes of a small model, so it takes part.
CPU_PRECISIONS: Mapping[str, Mapping[str, int]] = {
    "fp32": {},
    "int8": {"projection": 8, "lm_head": 8},
    "int4": {"projection": 4, "lm_head": 4},
}


@dataclass(frozen=True)
class BuildOptions:
    """What a build is asked for. block: verify width; passes: refinement passes of the drafter."""

    name: str
    block: int
    precision: str = "fp32"
    passes: int = 1
    max_seq_len: int = 2048
    chat_arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.block < 2:
            raise InputError(
                f"block {self.block}: a block has at least 2 tokens, anchor and one draft"
            )
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
    target: TargetCheckpoint, drafter: DrafterCheckpoint, options: BuildOptions
) -> Sources:
    """Write both graphs and check every weight's presence and shape before anything is read."""
    check_pair(target.config, drafter.config, drafter.tensors.origin)
    if options.block > drafter.config.block:
        raise InputError(
            f"block {options.block}: the drafter was trained with blocks of {drafter.config.block}"
        )
    positions = options.max_seq_len + options.block
    if positions > target.config.max_positions:
        raise InputError(
            f"max-seq-len {options.max_seq_len}: the target ends at {target.config.max_positions} positions"
        )
    sources = Sources(
        target_graph(target.config, drafter.config.taps, positions),
        drafter_graph(drafter.config, target.config, positions, options.passes),
        WeightLoader(
            {"target": target.tensors, "drafter": drafter.tensors},
            {"target": target.config, "drafter": drafter.config},
        ),
    )
    sources.loader.check(tuple(sources.weights.values()))
    return sources


def build_cpu(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    options: BuildOptions,
    out: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Build an engine directory for ONNX Runtime on this machine's CPU."""
    if options.precision not in CPU_PRECISIONS:
        known = ", ".join(CPU_PRECISIONS)
        raise InputError(f"precision '{options.precision}': the CPU engine offers {known}")
    sources = source_graphs(target, drafter, options)
    bits = CPU_PRECISIONS[options.precision]
    manifest = describe(
        target, drafter, options, sources,
        backend="cpu", requirements=cpu.requirements(),
        versions=build_versions("onnx", "onnxruntime"),
    )  # fmt: skip
    with new_directory(out) as folder:
        write_sources(folder, target, sources)
        models = {
            "target": _lowered(sources.target, bits),
            "drafter": _lowered(sources.drafter, bits),
        }
        arrays = _integer_weights(sources, bits)
        compile_models(models, {name: arrays for name in sources.weights}, folder, progress)
        progress("hash files")
        write_manifest(folder, manifest)
    return manifest


def _lowered(source: SourceGraph, bits: Mapping[str, int]) -> onnx.ModelProto:
    model, _ = lower(source, bits)
    return model


def _integer_weights(
    sources: Sources, bits: Mapping[str, int]
) -> Callable[[str], dict[str, np.ndarray]]:
    def arrays(name: str) -> dict[str, np.ndarray]:
        weight = sources.weights[name]
        array = sources.loader.load(weight)
        if weight.kind not in bits:
            return {name: array}
        parts = quantize(array, bits[weight.kind])
        return dict(zip((f"{name}.q", f"{name}.scale", f"{name}.zero"), parts, strict=True))

    return arrays


def write_sources(folder: Path, target: TargetCheckpoint, sources: Sources) -> None:
    """Keep the source graphs, the tokenizer and the chat template."""
    (folder / "source").mkdir()
    for name, graph in (("target", sources.target), ("drafter", sources.drafter)):
        (folder / "source" / f"{name}.onnx").write_bytes(graph.model.SerializeToString())
    text = target.text_format()
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
        drafted=options.block - 1,
        trained_block=drafter.config.block,
        passes=options.passes,
        taps=drafter.config.taps,
        mask_id=drafter.config.mask_id,
        stop_ids=target.config.stop_ids,
        vocab_size=target.config.vocab_size,
        max_batch=1,
        max_seq_len=options.max_seq_len,
        tensor_parallel=1,
        versions=versions,
        target_requirements=requirements,
        chat_arguments={
            "bos_token": text.bos_token,
            "eos_token": text.eos_token,
            **options.chat_arguments,
        },
        weights=tuple(asdict(w) for w in sources.weights.values()),
    )


def _identity(tensors: Any, config: Mapping[str, Any]) -> Identity:
    return Identity(Path(tensors.origin).name, tensors.digest(), config)
