"""Time of a decoding step and of a draft-and-verify cycle on a GPU, as a roofline with floors.

One pass over n tokens of b sequences takes

    hypot(bytes / (e_bw * bandwidth), operations / (e_ops * peak)) + layers * f_layer + f_pass

seconds on each of the tensor-parallel ranks, and two all-reduces per layer on top. The root of the
sum of squares is the larger of the two but near their crossing, where neither overlaps fully.
Everything that comes out is a model, never a measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import hypot

from dflash_trt.errors import InputError
from dflash_trt.lowering.tensorrt.api import FIRST
from dflash_trt.models.shards import part_of
from dflash_trt.planner.acceptance import acceptance_length
from dflash_trt.planner.fit import fits
from dflash_trt.planner.hardware import Gpu
from dflash_trt.planner.shapes import BITS, Plan, Shape


@dataclass(frozen=True)
class Software:
    """Constants of a serving program. e_*: reachable share of a peak; the others: seconds.

    e_moe: in grouped products of experts, where a handful of rows fills a part of a tile and weights
    in 4 bits are unpacked on the way; layer: launches of one layer; pass_: of one pass; host: per
    cycle, between the passes (plain decoding hides it behind the next step); reduce: one
    all-reduce's latency. source: where they are from.
    """

    name: str
    source: str
    e_bw: float
    e_ops: float
    e_moe: float
    layer: float
    pass_: float
    host: float
    reduce: float = 8e-6


@dataclass(frozen=True)
class Setting:
    """What is planned: a pair on `ranks` GPUs, `batch` sequences of `context` tokens each."""

    plan: Plan
    gpu: Gpu
    software: Software
    precision: str
    batch: int
    context: int
    block: int
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.precision not in BITS:
            known = ", ".join(BITS)
            raise InputError(f"precision '{self.precision}': the planner knows {known}")
        if min(self.batch, self.context, self.ranks) < 1 or self.block < 2:
            raise InputError("batch, context and ranks are at least 1, a block at least 2")
        if self.ranks > 1 and not self.gpu.link:
            raise InputError(f"{self.gpu.name}: has no link for {self.ranks} ranks")
        part_of(self.ranks, None, self.plan.target.kv_heads, "key/value heads")


@dataclass(frozen=True)
class Pass:
    """One pass: seconds by cause; bytes of weights and caches that all ranks read, operations, and
    experts that are read of each layer."""

    memory: float
    compute: float
    launches: float
    collectives: float
    weight_bytes: float
    cache_bytes: float
    operations: float
    experts: float = 0.0

    @property
    def seconds(self) -> float:
        return hypot(self.memory, self.compute) + self.launches + self.collectives

    @property
    def bound(self) -> str:
        """What it is made of mostly."""
        parts = {
            "memory": self.memory if self.memory >= self.compute else 0.0,
            "compute": self.compute if self.compute > self.memory else 0.0,
            "launches": self.launches,
            "collectives": self.collectives,
        }
        return max(parts, key=lambda key: parts[key])


@dataclass(frozen=True)
class Cycle:
    """Modelled times of one setting; `tau` tokens are committed per sequence and cycle."""

    step: Pass
    draft: Pass
    verify: Pass
    host: float
    tau: float
    batch: int

    @property
    def seconds(self) -> float:
        return self.draft.seconds + self.verify.seconds + self.host

    @property
    def cost(self) -> float:
        """c: a cycle over one autoregressive step."""
        return self.seconds / self.step.seconds

    @property
    def speedup(self) -> float:
        return self.tau / self.cost

    @property
    def plain_rate(self) -> float:
        """Output tokens per second of all sequences, decoding one at a time."""
        return self.batch / self.step.seconds

    @property
    def dflash_rate(self) -> float:
        return self.batch * self.tau / self.seconds


def cycle(setting: Setting, tau: float) -> Cycle:
    """The modelled cycle; `tau` is the acceptance length at this block."""
    s = setting
    drafter_rows = s.batch * s.block
    return Cycle(
        step=_target_pass(s, s.batch),
        draft=_draft_pass(s, drafter_rows),
        verify=_target_pass(s, s.batch * s.block),
        host=s.software.host,
        tau=tau,
        batch=s.batch,
    )


def _target_pass(s: Setting, tokens: int) -> Pass:
    shape = s.plan.target
    wide, narrow = BITS["bf16"] / 8, BITS[s.precision] / 8
    dense = wide if shape.experts else narrow
    experts = shape.touched_experts(tokens)
    expert_bytes = shape.layers * experts * shape.expert_weights * narrow
    weights = shape.dense_weights * dense + expert_bytes + shape.head_weights * wide
    caches = s.batch * shape.kv_bytes(s.context)
    work = _operations(shape, tokens, s) + 2 * tokens * shape.head_weights
    slower = 0.0
    if shape.experts:
        grouped = 2 * tokens * shape.layers * shape.experts.chosen * shape.expert_weights
        slower = grouped * (s.software.e_ops / s.software.e_moe - 1)  # as if at e_ops
    made = _pass(s, weights, caches, work, shape.layers, s.precision, tokens * shape.hidden * 2)
    compute = made.compute * (1 + slower / work)
    return replace(made, compute=compute, experts=experts)


def _operations(shape: Shape, tokens: int, s: Setting) -> float:
    """Multiply-adds of projections and attention, counted twice."""
    projections = 2 * tokens * (shape.active_weights - shape.head_weights)
    attention = 4 * tokens * s.context * shape.heads * shape.head_dim * shape.layers
    return projections + attention


def _draft_pass(s: Setting, rows: int) -> Pass:
    """Injection of a block's worth of features, the block, and the lm_head. Of the lm_head a rank
    reads its part, of the drafter's other weights all; this project cuts neither (docs/planner.md)."""
    shape, taps = s.plan.drafter, s.plan.taps
    fc = taps * s.plan.target.hidden * shape.hidden
    weights = (shape.dense_weights + fc) * 2 + shape.head_weights * 2 / s.ranks
    caches = s.batch * shape.kv_bytes(s.context)
    work = _operations(shape, rows, s) + 2 * rows * (fc + shape.head_weights / s.ranks)
    alone = replace(s, ranks=1)
    return _pass(alone, weights, caches, work, shape.layers, "bf16", 0)


def _pass(
    s: Setting,
    weights: float,
    caches: float,
    work: float,
    layers: int,
    precision: str,
    reduced: float,
) -> Pass:
    software, gpu = s.software, s.gpu
    each = software.reduce + 2 * reduced / gpu.link if s.ranks > 1 else 0.0
    return Pass(
        memory=(weights + caches) / s.ranks / (software.e_bw * gpu.bandwidth),
        compute=work / s.ranks / (software.e_ops * gpu.peak(precision)),
        launches=layers * software.layer + software.pass_,
        collectives=2 * layers * each,
        weight_bytes=weights,
        cache_bytes=caches,
        operations=work,
    )


@dataclass(frozen=True)
class Communication:
    """Where the ranks meet in a cycle, all of it in verify: sums over all ranks, of `summed` bytes
    (bf16) each, and one gathering of `gathered` bytes from each rank."""

    sums: int
    summed: int
    gathered: int


def communication(s: Setting) -> Communication:
    rows = s.batch * s.block
    return Communication(2 * s.plan.target.layers, 2 * rows * s.plan.target.hidden, 8 * rows)


def memory_needed(s: Setting) -> float:
    """Bytes per GPU: weights of both models, caches of all sequences at full context."""
    weights = s.plan.weight_bytes(s.precision, s.ranks)
    heads = -(-s.plan.target.kv_heads // s.ranks)
    per_token = 4 * heads * s.plan.target.head_dim * s.plan.target.layers
    draft = 4 * s.plan.drafter.kv_heads * s.plan.drafter.head_dim * s.plan.drafter.layers
    return weights + s.batch * s.context * (per_token + draft)


@dataclass(frozen=True)
class Best:
    """The fastest way at one batch. block 1: plain decoding."""

    batch: int
    block: int
    precision: str
    tau: float
    rate: float


def best(setting: Setting, shares: Sequence[float]) -> Best | None:
    """Block length and precision with the most output tokens per second at this batch, among blocks
    that acceptance is known for and precisions that can be built and fit the memory; None where
    none does. What a precision does to answers and acceptance is not modelled."""
    found = []
    for precision in _buildable(setting):
        s = replace(setting, precision=precision)
        if not fits(memory_needed(s), s.gpu):
            continue
        for block in range(2, len(shares) + 2):
            tau = acceptance_length(shares, block)
            modelled = cycle(replace(s, block=block), tau)
            found.append(Best(s.batch, block, precision, tau, modelled.dflash_rate))
        found.append(Best(s.batch, 1, precision, 1.0, modelled.plain_rate))
    return max(found, key=lambda b: b.rate, default=None)


def _buildable(s: Setting) -> tuple[str, ...]:
    """Experts stay in the format of the checkpoint; dense targets need units of the GPU."""
    if s.plan.target.experts:
        return (s.plan.precision,)
    return tuple(p for p, first in FIRST.items() if s.gpu.capability >= first)
