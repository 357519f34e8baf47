"""What can be read about the kernels without a GPU: `python -m dflash_plugins.table`.

Registers, spills and shared memory as the assembler reports them, and the widest loads and stores in
the assembly, for kernels with the sizes of a served model.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_plugins.aot import KernelBuild, compile_assembly
from dflash_plugins.registry import KINDS

# gpt-oss-120b with a drafter of eight layers, block 16.
_CACHE = {"dtype": "BF16", "kv_heads": 8, "head_dim": 64, "capacity": 8192, "cache_dim": 64}
_VOCABULARY = {"dtype": "BF16", "vocabulary": 201088}
SETTINGS: dict[str, dict[str, Any]] = {
    "KVInjection": {**_CACHE, "layers": 8, "epsilon": 1e-5},
    "BlockWrite": _CACHE,
    "ConfidenceCommit": {**_VOCABULARY, "slots": 15, "final": 0},
    "SpeculativeVerify": {**_VOCABULARY, "width": 16},
    "MixtureOfExperts": {
        "dtype": "BF16",
        "hidden": 2880,
        "inner": 2880,
        "experts": 128,
        "top_k": 4,
        "alpha": 1.702,
        "limit": 7.0,
        "rows": 16,
    },
}


@dataclass(frozen=True)
class Row:
    """One kernel for one capability. Loads and stores in bytes per thread, shared memory in bytes."""

    plugin: str
    kernel: str
    capability: int
    registers: int
    spills: int
    shared: int
    widest_load: int
    widest_store: int


def rows(capabilities: Sequence[int]) -> list[Row]:
    return [
        _row(plugin, kernel, capability)
        for plugin, settings in SETTINGS.items()
        for kernel in KINDS[plugin](settings).kernels()
        for capability in capabilities
    ]


def _row(plugin: str, kernel: KernelBuild, capability: int) -> Row:
    compiled = compile_assembly(kernel, capability)
    text = compiled.asm["ptx"]
    report = _assemble(text)
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", report)]
    registers = re.search(r"Used (\d+) registers", report)
    return Row(
        plugin, kernel.name, capability, int(registers.group(1)) if registers else -1,
        sum(spills), compiled.metadata.shared, _widest(text, "ld"), _widest(text, "st"),
    )  # fmt: skip


def _assemble(text: str) -> str:
    """What the assembler that comes with Triton says about a PTX text."""
    import triton.backends.nvidia as nvidia

    folder = Path(nvidia.__path__[0]) / "bin"
    target = re.search(r"\.target (sm_\w+)", text)
    assert target, "the assembly names no target"
    program = next(p for p in (folder / "ptxas-blackwell", folder / "ptxas") if p.exists())
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "kernel.ptx"
        source.write_text(text)
        done = subprocess.run(
            [program, "-v", f"--gpu-name={target.group(1)}", "-o", Path(scratch) / "out", source],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    return done.stdout + done.stderr


def _widest(text: str, kind: str) -> int:
    """Bytes of the widest global load (`ld`) or store (`st`) of one thread. A copy from global to
    shared memory is a load."""
    found = re.findall(rf"\b{kind}\.global(?:\.\w+)*?(?:\.v(\d))?\.[bus](\d+)\b", text)
    sizes = [int(vector or 1) * int(bits) // 8 for vector, bits in found]
    if kind == "ld":
        copies = re.findall(r"\bcp\.async\.\w+\.shared\.global [^,]+, [^,]+, (\w+)", text)
        sizes += [int(size, 0) for size in copies]
    return max(sizes, default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, nargs="*", default=[90, 100, 103, 120, 121])
    print("| plugin | kernel | capability | registers | spilled bytes | shared bytes |", end="")
    print(" widest load | widest store |\n|---|---|---|---|---|---|---|---|")
    for r in rows(parser.parse_args().capability):
        print(
            f"| {r.plugin} | {r.kernel} | {r.capability / 10:.1f} | {r.registers} | {r.spills} | "
            f"{r.shared} | {r.widest_load} | {r.widest_store} |"
        )


if __name__ == "__main__":
    main()
