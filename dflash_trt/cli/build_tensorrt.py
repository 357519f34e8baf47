"""The part of `dflash-trt build` that belongs to the TensorRT backends."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from dflash_trt.checkpoints import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.engines.build import BuildOptions
from dflash_trt.engines.tensorrt_build import PlanReport, estimate_peak_bytes
from dflash_trt.engines.tensorrt_directory import TensorRTOptions, build_tensorrt, read_plans
from dflash_trt.errors import InputError
from dflash_trt.lowering.tensorrt.api import MODULES
from dflash_trt.lowering.tensorrt.plan import EXPERTS

BACKENDS = tuple(MODULES)
DEFAULT_CAPABILITIES = {"tensorrt-rtx": "12.0,12.1", "tensorrt": ""}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("TensorRT backends")
    group.add_argument(
        "--compute-capability",
        metavar="X.Y,..",
        help="GPUs to compile for (tensorrt-rtx: 12.0,12.1 unless given; no GPU is needed)",
    )
    group.add_argument(
        "--step", action="store_true", help="also compile single-token steps, to compare with"
    )
    group.add_argument(
        "--no-weights", action="store_true", help="compile the plans only, without weights file"
    )
    group.add_argument(
        "--experts",
        choices=EXPERTS,
        default=EXPERTS[0],
        help="mixtures of experts as our plugin (default) or of TensorRT's own layers",
    )


def capabilities(text: str) -> tuple[int, ...]:
    """`12.0,12.1` -> (120, 121)."""
    found = []
    for part in filter(None, text.split(",")):
        major, dot, minor = part.strip().partition(".")
        if not (major.isdigit() and dot and minor.isdigit() and len(minor) == 1):
            raise InputError(f"--compute-capability '{part}' is not of the form 12.0")
        found.append(10 * int(major) + int(minor))
    return tuple(dict.fromkeys(found))


def asked_capabilities(args: argparse.Namespace) -> tuple[int, ...]:
    """Those that `args` name, or the backend's usual ones."""
    return capabilities(args.compute_capability or DEFAULT_CAPABILITIES.get(args.backend, ""))


def build(
    args: argparse.Namespace,
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    options: BuildOptions,
    out: Path,
    progress: Callable[[str], None],
) -> list[PlanReport]:
    """Build for the backend that `args` name."""
    own = TensorRTOptions(
        args.backend, asked_capabilities(args), step=args.step, weights=not args.no_weights,
        experts=args.experts,
    )  # fmt: skip
    _, reports = build_tensorrt(target, drafter, options, own, out, progress)
    return reports


def print_reports(console: Console, reports: Sequence[PlanReport], out: Path) -> None:
    """For each plan its time, memory, size, layers and kernels; of the build its memory."""
    for r in reports:
        layers = sum(r.layers.values())
        kernels = ", ".join(f"{count} {kind}" for kind, count in sorted(r.kernels.items()))
        meet = f"; ranks meet {len(r.collectives)} times" if r.collectives else ""
        console.print(
            f"{r.name}: {r.seconds:.1f} s, peak memory {r.peak_bytes / 1e6:.0f} MB "
            f"({estimate_peak_bytes(layers) / 1e6:.0f} MB expected), plan "
            f"{r.plan_bytes / 1e6:.1f} MB, scratch {r.scratch_bytes / 1e6:.1f} MB, {layers} layers; "
            f"runs {kernels}; plugins {', '.join(sorted(set(r.plugins.values()))) or 'none'}{meet}",
            highlight=False,
        )
    peak = read_plans(out)["peak_bytes"]
    console.print(
        f"peak memory of the build, compiler and quantisation together: {peak / 1e6:.0f} MB",
        highlight=False,
    )
    carried = ", ".join(f"{c / 10:.1f}" for c in reports[0].capabilities)
    console.print(
        f"compiler {reports[0].compiler}, compute capabilities {carried}", highlight=False
    )
