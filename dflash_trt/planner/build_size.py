"""What a build would come to, from the configurations alone: sizes, memory, files. No weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from dflash_trt.config import DrafterConfig, TargetConfig
from dflash_trt.engines.build import CPU_PRECISIONS, BuildOptions, Sources, drafted_slots
from dflash_trt.engines.onnxruntime_build import (
    RANK_WEIGHTS_FILE,
    SEGMENTS_FILE,
    WEIGHTS_FILE,
    batch_sizes,
    model_name,
    segment_name,
)
from dflash_trt.engines.tensorrt_weights import FILE, RANK_FILE
from dflash_trt.lowering.tensorrt.attention import shape_with_sinks
from dflash_trt.models.graph import Weight
from dflash_trt.models.shards import share_of

PREFILL_CHUNK = 128
# Bytes per element of a weight: what it is stored in, its block scales included.
_TENSORRT = {"bf16": 2.0, "fp8": 1.0, "nvfp4": 4.5 / 8}
_BYTES_KINDS = frozenset({"mxfp4_blocks", "mxfp4_scales"})
_ALWAYS = ("engine.json", "source/target.onnx", "source/drafter.onnx")
_TEXT = ("tokenizer.json", "chat_template.jinja")


@dataclass(frozen=True)
class BuildSize:
    """Sizes in bytes. weights: by component; caches: keys and values of all slots; work: buffers
    between the engines and logits; host: peak of the weights that are held while they are read and
    quantised, the program itself (0.15 GB) not counted. Of several
    ranks it is what one has (on the CPU rank 0, which has the drafter); `summed` and `gathered`:
    what it brings to each sum and gathering of a verify."""

    weights: Mapping[str, float]
    caches: Mapping[str, float]
    work: float
    host: float
    files: tuple[str, ...]
    summed: float
    gathered: float

    @property
    def stored(self) -> float:
        return sum(self.weights.values())

    @property
    def device(self) -> float:
        """Peak where the engines run; scratch memory of the compiled programs is not known yet."""
        return self.stored + sum(self.caches.values()) + self.work


def build_size(
    target: TargetConfig,
    drafter: DrafterConfig,
    options: BuildOptions,
    sources: Sources,
    backend: str,
) -> BuildSize:
    """What `options` would build from these models; `sources` as `rank_of(backend)` has them."""
    element = 4 if backend == "cpu" else 2
    share = share_of(target, options.ranks, rank_of(backend))
    caches = {
        "target": _cache_bytes(target, share.kv_heads, options, backend, target.attention_sinks),
        "drafter": _cache_bytes(drafter, drafter.num_kv_heads, options, backend, False),
    }
    slots = options.block + drafted_slots(options, drafter)
    features = PREFILL_CHUNK * len(drafter.taps) * target.hidden_size
    work = options.max_batch * element * (slots * target.vocab_size + features)
    host = _host_bytes(sources, options.precision, backend)
    weights = _components(sources, options, backend)
    rows = options.max_batch * options.block
    files = _files(backend, options, 2 * target.num_layers + 2)
    sums = element * rows * target.hidden_size
    return BuildSize(weights, caches, work, host, files, sums, 8 * rows)


def rank_of(backend: str) -> int | None:
    """Whose share is sized: on the CPU rank 0's; elsewhere all ranks have the same."""
    return 0 if backend == "cpu" else None


def _cache_bytes(
    c: TargetConfig | DrafterConfig, heads: int, options: BuildOptions, backend: str, sinks: bool
) -> float:
    """Keys and values of all layers and slots; TensorRT keeps attention sinks in wider heads."""
    capacity = options.max_seq_len + max(options.block, PREFILL_CHUNK)
    shape = [options.max_batch, heads, capacity, c.head_dim]
    if sinks and backend != "cpu":
        shape = shape_with_sinks(shape)
    return 2.0 * c.num_layers * prod(shape) * (4 if backend == "cpu" else 2)


def _host_bytes(sources: Sources, precision: str, backend: str) -> float:
    """Weights in memory at a time: on the CPU a model, which ONNX Runtime holds while it optimises
    it; else the largest one. (A piece of calibration with several is smaller than that.)"""
    if backend != "cpu":
        return max(prod(w.shape) * _held_bytes(w, precision) for w in sources.weights.values())
    return max(
        sum(prod(w.shape) * _element_bytes(w, user, precision, backend) for w in graph.weights)
        for user, graph in (("target", sources.target), ("drafter", sources.drafter))
    )


def _held_bytes(weight: Weight, precision: str) -> int:
    """Per element, for TensorRT: as stored in bf16; else in fp32, and of what is quantised three
    copies more on the way."""
    if weight.kind in _BYTES_KINDS:
        return 1
    if precision == "bf16":
        return 2
    return 16 if weight.kind == "projection" else 4


def _components(sources: Sources, options: BuildOptions, backend: str) -> dict[str, float]:
    """Stored bytes by component; a weight that both engines read in one form counts once."""
    total: dict[str, float] = {}
    for weight in sources.weights.values():
        users = [
            name
            for name, graph in (("target", sources.target), ("drafter", sources.drafter))
            if weight.name in graph.weight_names
        ]
        forms = {_element_bytes(weight, user, options.precision, backend) for user in users}
        component = _component(weight)
        total[component] = total.get(component, 0.0) + prod(weight.shape) * sum(forms)
    return total


def _component(weight: Weight) -> str:
    if weight.kind == "draft_head":
        return "drafter lm_head"
    if weight.kind in ("embedding", "lm_head"):
        return f"{weight.kind}" if weight.model == "target" else f"drafter {weight.kind}"
    part = "experts" if weight.kind in _BYTES_KINDS else "layers"
    return f"{weight.model} {part}"


def _element_bytes(weight: Weight, user: str, precision: str, backend: str) -> float:
    if weight.kind in _BYTES_KINDS:
        return 1.0
    if backend == "cpu":
        form = getattr(CPU_PRECISIONS[precision], user).get(weight.kind)
        return form.element_bytes if form else 4.0
    return _TENSORRT[precision] if weight.kind == "projection" else 2.0


def _files(backend: str, options: BuildOptions, segments: int) -> tuple[str, ...]:
    ranks = range(options.ranks) if options.ranks > 1 else ()
    if backend == "cpu":
        sizes = batch_sizes(options.max_batch)
        if ranks:
            parts = [segment_name(r, i) for r in ranks for i in range(segments)]
            models = [f"{model_name(m, n)}.onnx" for n in sizes for m in ("drafter", *parts)]
            own = [RANK_WEIGHTS_FILE.format(rank=r) for r in ranks]
            return (*models, WEIGHTS_FILE, *own, SEGMENTS_FILE, *_ALWAYS, *_TEXT)
        models = [f"{model_name(m, n)}.onnx" for n in sizes for m in ("target", "drafter")]
        return (*models, WEIGHTS_FILE, *_ALWAYS, *_TEXT)
    plans = ("target.verify", "target.prefill", "drafter.draft", "drafter.inject")
    cut = [RANK_FILE.format(rank=r) for r in ranks]
    return (*(f"{plan}.engine" for plan in plans), FILE, *cut, "plans.json", *_ALWAYS, *_TEXT)
