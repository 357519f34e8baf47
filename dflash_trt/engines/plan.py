"""Reads what a TensorRT plan says about itself in plain text: no GPU and no TensorRT needed.

A plan holds the text of the compiled program: its regions of memory, its operations with the types
and sizes of their operands, the capabilities it was compiled for, and the fields of its plugins.
This reader looks for a few things in it. It is no decoder of the format: where a text is not found
it says so instead of passing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dflash_trt.errors import InputError

_SKIPPED = frozenset({"tensor", "sub_tensor", "region", "shape_call", "signal", "wait", "buffer"})
_TENSOR = re.compile(r'\n  (?:sub_)?tensor=\{[^\n]*?name="([^"]*)"([^\n]*)')
_OPERATION = re.compile(r'\n  (\w+)=\{ ?name=("[^"]*"|[^ ]+)([^\n]*)')
_REGION = re.compile(
    r"region = \{ name=(\S+) size=(\d+) alignment=\d+ instance=\d+ type=\w+ place=(\w+)"
)
# Types with fewer bits than an activation: what a quantised weight is stored in.
_NARROW = ("fp8_e4m3", "fp4_e2m1", "int8", "int4")


@dataclass(frozen=True)
class Operand:
    """A tensor of the compiled program; sizes that vary are -1."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Operation:
    kind: str
    name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]


@dataclass(frozen=True)
class Plan:
    """The text of one plan, taken apart when asked for."""

    data: bytes

    @classmethod
    def read(cls, path: Path) -> Plan:
        return cls(path.read_bytes())

    @cached_property
    def segments(self) -> list[str]:
        """The device programs, one for each compiled graph and capability."""
        starts = [m.start() for m in re.finditer(rb"n_accelerators", self.data)]
        ends = [*starts[1:], len(self.data)]
        return [self._segment(start, end) for start, end in zip(starts, ends, strict=False)]

    def _segment(self, start: int, end: int) -> str:
        host = self.data.find(b"\nshape_main {", start, end)
        return self.data[start : host if host > 0 else end].decode("latin1")

    @cached_property
    def capabilities(self) -> tuple[int, ...]:
        """Compute capabilities, such as 120, that the plan holds programs for."""
        found = re.findall(rb"accelerators=\{([^}]*)\}", self.data)
        return tuple(sorted({int(n) for text in found for n in re.findall(rb"sm(\d+)", text)}))

    @cached_property
    def ranks(self) -> int:
        """How many ranks the plan's collectives are over."""
        found = [int(n) for s in self.segments for n in re.findall(r"world_size = (\d+)", s)]
        return max(found, default=1)

    @cached_property
    def reductions(self) -> set[str]:
        """How all-reduces put together what the ranks bring, such as `sum`."""
        pattern = r"\n  comm_allreduce=\{[^\n]* reduction_op=(\w+)"
        return {how for segment in self.segments for how in re.findall(pattern, segment)}

    @cached_property
    def operations(self) -> list[Operation]:
        return [operation for segment in self.segments for operation in _operations(segment)]

    @cached_property
    def scratch_bytes(self) -> int:
        """Scratch memory on the device, of the largest program."""
        return max((_scratch(segment) for segment in self.segments), default=0)

    @cached_property
    def kernels(self) -> dict[str, int]:
        """How many operations of each kind of kernel one run of a program launches."""
        if not self.segments:
            return {}
        main = max((_operations(segment) for segment in self.segments), key=len)
        return dict(Counter(_kernel_kind(operation) for operation in main))

    @cached_property
    def embedded(self) -> set[tuple[str, int]]:
        """Kernels of plugins that the plan carries: their names and compute capabilities."""
        pattern = rb'\{"name": "(\w+)", "symbol": "[^"]*", "capability": (\d+)'
        return {(name.decode(), int(number)) for name, number in re.findall(pattern, self.data)}

    def holds(self, name: str) -> bool:
        return name.encode() in self.data


def _operations(segment: str) -> list[Operation]:
    tensors = _tensors(segment)
    found = []
    for kind, name, rest in _OPERATION.findall(segment):
        if kind not in _SKIPPED:
            inputs, outputs = (_operands(rest, key, tensors) for key in ("input", "output"))
            found.append(Operation(kind, name.strip('"'), inputs, outputs))
    return found


def _tensors(segment: str) -> dict[str, Operand]:
    found = {}
    for name, rest in _TENSOR.findall(segment):
        sizes = re.search(r"dims=\{([^}]*)\}", rest)
        dtype = re.search(r" type=(\w+)", rest)
        if sizes and dtype:
            shape = tuple(int(d) if d.isdigit() else -1 for d in sizes.group(1).split())
            found[name] = Operand(name, dtype.group(1), shape)
    return found


def _operands(rest: str, key: str, tensors: Mapping[str, Operand]) -> tuple[Operand, ...]:
    match = re.search(rf'(?:^| ){key}(?:_args)?=\{{((?: ?"[^"]*")*) ?\}}', rest)
    names = re.findall(r'"([^"]*)"', match.group(1)) if match else []
    return tuple(tensors[name] for name in names if name in tensors)


def _scratch(segment: str) -> int:
    return sum(
        int(size)
        for name, size, place in _REGION.findall(segment)
        if place == "accelerator" and "const" not in name
    )


def _kernel_kind(operation: Operation) -> str:
    if operation.kind == "custom_layer":
        return "plugin"
    if operation.kind == "function" and "mha" in operation.name:
        return "attention"
    return {"fully_connected": "gemm", "runtime_fusion": "fused gemm"}.get(
        operation.kind, operation.kind
    )


@dataclass(frozen=True)
class Expectations:
    """What a plan must keep to. Shapes are of weights as they are stored; `collectives`: the nodes at
    which ranks meet, in order."""

    capabilities: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    plugins: tuple[str, ...]
    capacity: int
    kv_heads: int
    quantised: tuple[tuple[int, int], ...] = ()
    scratch_limit: int = 0
    collectives: tuple[str, ...] = ()


def check_plan(plan: Plan, wanted: Expectations, name: str) -> None:
    """Refuse a plan that is not what was asked for, with a sentence that says in what."""
    if not plan.segments:
        raise InputError(f"plan '{name}': no program text was found in it, it cannot be checked")
    if plan.capabilities != tuple(sorted(wanted.capabilities)):
        raise InputError(
            f"plan '{name}': was compiled for {list(plan.capabilities)}, not for "
            f"{sorted(wanted.capabilities)}"
        )
    for what in (*wanted.inputs, *wanted.outputs):
        if not plan.holds(what):
            raise InputError(f"plan '{name}': the tensor '{what}' is not in it")
    for plugin in wanted.plugins:
        if not any(o.kind == "custom_layer" and o.name == plugin for o in plan.operations):
            raise InputError(f"plan '{name}': the plugin of node '{plugin}' is not in it")
    if wanted.plugins:
        _check_kernels(plan, wanted, name)
    _check_collectives(plan, wanted, name)
    _check_memory(plan, wanted, name)


def _check_kernels(plan: Plan, wanted: Expectations, name: str) -> None:
    """Plugins carry each of their kernels for each capability."""
    if not plan.embedded:
        raise InputError(f"plan '{name}': no kernel of its plugins is in it")
    for kernel in sorted({kernel for kernel, _ in plan.embedded}):
        for capability in wanted.capabilities:
            if (kernel, capability) not in plan.embedded:
                raise InputError(
                    f"plan '{name}': the kernel '{kernel}' is not in it for {capability}"
                )


def _check_collectives(plan: Plan, wanted: Expectations, name: str) -> None:
    """Every program has each once, in the order of the graph: ranks wait for each other in it."""
    programs = [
        [o.name.partition("/")[0] for o in _operations(text) if o.kind.startswith("comm_")]
        for text in plan.segments
    ]
    for found in filter(None, programs):
        if tuple(found) != wanted.collectives:
            raise InputError(
                f"plan '{name}': the ranks meet {len(found)} times in it, {len(wanted.collectives)} "
                "were asked for, or in another order"
            )
    if wanted.collectives and not any(programs):
        raise InputError(f"plan '{name}': no collective is in it, the ranks would not meet")
    if any(o.kind == "comm_allreduce" for o in plan.operations) and plan.reductions != {"sum"}:
        raise InputError(f"plan '{name}': its all-reduces are {sorted(plan.reductions)}, not sums")


def _check_memory(plan: Plan, wanted: Expectations, name: str) -> None:
    expanded = expanded_caches(plan, wanted.capacity, wanted.kv_heads)
    if expanded:
        raise InputError(
            f"plan '{name}': {expanded[0]} copies a cache, expanded over the query heads"
        )
    widened = widened_weights(plan, wanted.quantised)
    if widened:
        raise InputError(f"plan '{name}': {widened[0]} unpacks a whole weight to a wider type")
    if wanted.scratch_limit and plan.scratch_bytes > wanted.scratch_limit:
        raise InputError(
            f"plan '{name}': wants {plan.scratch_bytes / 1e6:.0f} MB of scratch memory, "
            f"{wanted.scratch_limit / 1e6:.0f} MB were expected at most"
        )


def expanded_caches(plan: Plan, capacity: int, kv_heads: int) -> list[str]:
    """Operations that write a whole cache for more heads than it has."""
    return [
        operation.name
        for operation in plan.operations
        for output in operation.outputs
        if capacity in output.shape and _elements_per_row(output.shape, capacity) > kv_heads
        and len(output.shape) >= 4
        and output.dtype in ("bf16", "half", "float")
    ]  # fmt: skip


def _elements_per_row(shape: Sequence[int], capacity: int) -> int:
    """Heads of a cache-like tensor: the product of known sizes in front of the capacity."""
    product = 1
    for size in shape[: list(shape).index(capacity)]:
        product *= max(size, 1)
    return product


def widened_weights(plan: Plan, shapes: Sequence[tuple[int, int]]) -> list[str]:
    """Operations whose result is a whole quantised weight in a type wider than it is stored in."""
    known = {frozenset(shape) for shape in shapes}
    return [
        operation.name
        for operation in plan.operations
        for output in operation.outputs
        if output.dtype not in _NARROW
        and len(output.shape) >= 2
        and frozenset(output.shape[-2:]) in known
        and all(size > 0 for size in output.shape)
        and operation.kind != "fully_connected"
    ]
