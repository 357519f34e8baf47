"""Ahead-of-time compilation of Triton kernels, and the form in which a plan carries them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

ALIGNED = [["tt.divisibility", 16]]

Signature = Mapping[str, str | tuple[str, ...]]


@dataclass(frozen=True)
class KernelBuild:
    """What to compile: a `triton.jit` function, the types of its arguments, its constants.

    `signature` holds run-time arguments in order, such as `*bf16` or `i32`; a tuple stands for a
    tuple of pointers. All pointers are taken to be aligned to 16 bytes.
    """

    name: str
    function: Any
    signature: Signature
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel: machine code for one capability and what a launch needs to know."""

    name: str
    symbol: str
    capability: int
    num_warps: int
    shared: int
    arguments: tuple[str, ...]
    code: bytes = field(repr=False)


def flat_arguments(signature: Signature) -> tuple[str, ...]:
    """Types of the run-time arguments, tuples spread out."""
    flat: list[str] = []
    for kind in signature.values():
        flat.extend(kind if isinstance(kind, tuple) else (kind,))
    return tuple(flat)


def compile_kernel(build: KernelBuild, capability: int) -> Cubin:
    """Compile for one capability, such as 120 for SM120. Needs no GPU."""
    compiled = compile_assembly(build, capability)
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise RuntimeError(f"kernel {build.name} asks for scratch memory of its own")
    return Cubin(
        name=build.name,
        symbol=metadata.name,
        capability=capability,
        num_warps=metadata.num_warps,
        shared=metadata.shared,
        arguments=flat_arguments(build.signature),
        code=bytes(compiled.asm["cubin"]),
    )


def compile_assembly(build: KernelBuild, capability: int) -> Any:
    """The compiler's result with all stages (`.asm["ptx"]`, `.asm["cubin"]`, `.metadata`)."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = dict(build.constants)
    source = ASTSource(
        fn=build.function,
        signature={**build.signature, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        attrs=_alignment(build.signature),
    )
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages}
    with triton.knobs.compilation.scope():
        # Line numbers are two thirds of a kernel, and a plan holds the kernels of each layer.
        triton.knobs.compilation.disable_line_info = True
        return triton.compile(source, target=target, options=options)


def _alignment(signature: Signature) -> dict[tuple[int, ...], list[list[Any]]]:
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, kind in enumerate(signature.values()):
        if isinstance(kind, tuple):
            attributes.update({(index, part): ALIGNED for part in range(len(kind))})
        elif kind.startswith("*"):
            attributes[(index,)] = ALIGNED
    return attributes


def pack(cubins: Sequence[Cubin]) -> tuple[bytes, bytes]:
    """(description as JSON, all machine code in one piece)."""
    entries, code = [], b""
    for cubin in cubins:
        entry = {key: value for key, value in asdict(cubin).items() if key != "code"}
        entries.append({**entry, "offset": len(code), "size": len(cubin.code)})
        code += cubin.code
    return json.dumps(entries).encode(), code


def unpack(description: bytes, code: bytes) -> list[Cubin]:
    """The inverse of `pack`."""
    cubins = []
    for entry in json.loads(description):
        offset, size = entry.pop("offset"), entry.pop("size")
        entry["arguments"] = tuple(entry["arguments"])
        cubins.append(Cubin(**entry, code=code[offset : offset + size]))
    return cubins
