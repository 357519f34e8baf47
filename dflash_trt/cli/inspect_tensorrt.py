"""The part of `dflash-trt inspect` that belongs to TensorRT plans."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from dflash_trt.engines.plan import Plan
from dflash_trt.engines.tensorrt_build import PlanReport
from dflash_trt.engines.tensorrt_directory import PLANS_FILE, read_plans


def print_plans(console: Console, folder: Path) -> None:
    """Inputs, outputs, kernels, sizes and capabilities of every plan, read from the plans."""
    if not (folder / PLANS_FILE).is_file():
        return
    for report in read_plans(folder)["plans"].values():
        for line in describe(report, Plan.read(folder / report.file)):
            console.print(line, highlight=False, soft_wrap=True)


def describe(report: PlanReport, plan: Plan) -> list[str]:
    """Lines about one plan."""
    capabilities = ", ".join(f"{c / 10:.1f}" for c in plan.capabilities)
    kernels = ", ".join(f"{count} {kind}" for kind, count in sorted(plan.kernels.items()))
    layers = ", ".join(f"{count} {kind.lower()}" for kind, count in sorted(report.layers.items()))
    lines = [
        f"{report.file}: compute capability {capabilities}, {report.plan_bytes / 1e6:.1f} MB, "
        f"scratch {plan.scratch_bytes / 1e6:.1f} MB, compiler {report.compiler}",
        f"  runs {kernels}",
        f"  made of {layers}",
    ]
    for direction in ("input", "output"):
        own = [b for b in report.bindings if (b.direction, b.role) == (direction, "state")]
        shapes = ", ".join(f"{b.name} {_shape(b.shape)} {b.dtype}" for b in own)
        others = {
            role: sum((b.direction, b.role) == (direction, role) for b in report.bindings)
            for role in ("cache", "weight", "scratch")
        }
        rest = "".join(f", {count} {role}" for role, count in others.items() if count)
        lines.append(f"  {direction}s: {shapes}{rest}")
    return lines


def _shape(shape: tuple[int, ...]) -> str:
    """`[B, 8]`: the first size that varies is the batch, another is a number of rows."""
    names = ["B", *("R" for _ in shape[1:])]
    sizes = (name if d < 0 else str(d) for name, d in zip(names, shape, strict=True))
    return f"[{', '.join(sizes)}]"
