"""`dflash-trt build --dry-run`: what the build would come to, from configurations alone."""

from __future__ import annotations

import argparse
from dataclasses import replace

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from dflash_trt.checkpoints import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.cli import build_tensorrt
from dflash_trt.engines.build import BuildOptions, check_cpu_precision, source_graphs
from dflash_trt.engines.tensorrt_directory import check_precision
from dflash_trt.lowering.tensorrt.api import CAPABILITIES, check_capabilities
from dflash_trt.planner.build_size import BuildSize, build_size, rank_of
from dflash_trt.planner.fit import fits, ranks_that_fit, verdict
from dflash_trt.planner.hardware import GPUS, Gpu, find_gpu


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("dry run")
    group.add_argument(
        "--dry-run", action="store_true", help="print sizes, memory and files; build nothing"
    )
    group.add_argument("--gpu", help=f"with --dry-run, whether it fits: {', '.join(GPUS)}")


def run(
    args: argparse.Namespace,
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    options: BuildOptions,
) -> int:
    """Print the size of the build that `options` describe."""
    gpu = find_gpu(args.gpu) if args.gpu else None

    def size_of(options: BuildOptions) -> BuildSize:
        _check(args, options, gpu)
        sources = source_graphs(target, drafter, options, rank_of(args.backend))
        return build_size(target.config, drafter.config, options, sources, args.backend)

    size = size_of(options)
    console = Console()
    count = "1 sequence" if options.max_batch == 1 else f"{options.max_batch} sequences"
    console.print(
        f"{options.name}, {args.backend}, {count} of {options.max_seq_len} tokens",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    console.print(_table(size))
    console.print(f"peak memory where it runs: {_gb(size.device)}", highlight=False)
    console.print(f"peak host memory for weights: {_gb(size.host)}", highlight=False)
    if options.ranks > 1:
        sums, whose = 2 * target.config.num_layers, "rank 0" if args.backend == "cpu" else "each"
        console.print(
            f"all of it on {whose} of {options.ranks} ranks, which meet {sums + 1} times in a cycle: "
            f"{sums} sums of {size.summed / 1e3:.1f} kB, a gathering of {size.gathered:.0f} bytes",
            highlight=False,
            soft_wrap=True,
        )
    if gpu:
        console.print(verdict(size.device, gpu), highlight=False, soft_wrap=True)
        told = ranks_that_fit(lambda ranks: size_of(replace(options, ranks=ranks)).device, gpu)
        console.print(told, highlight=False, soft_wrap=True)
        console.print(_way_to(gpu, args), end="", highlight=False, soft_wrap=True)
    elif args.backend != "cpu":
        console.print(_where(size), highlight=False, soft_wrap=True)
    console.print(f"files: {', '.join(size.files)}", highlight=False, soft_wrap=True)
    return 0


def _check(args: argparse.Namespace, options: BuildOptions, gpu: Gpu | None) -> None:
    """Refuse what the build would refuse, and what `gpu` has no products in. Without a compute
    capability, which the build wants to know, there are sizes all the same."""
    if args.backend == "cpu":
        check_cpu_precision(options)
        return
    asked = build_tensorrt.asked_capabilities(args)
    if asked:
        check_capabilities(args.backend, asked)
    check_precision(options, args.backend, (*asked, gpu.capability) if gpu else asked)


def _table(size: BuildSize) -> Table:
    table = Table(box=SIMPLE)
    table.add_column("component")
    table.add_column("size", justify="right")
    for name, count in size.weights.items():
        table.add_row(f"weights: {name}", _gb(count))
    table.add_row("weights together", _gb(size.stored))
    for name, count in size.caches.items():
        table.add_row(f"keys and values: {name}", _gb(count))
    table.add_row("logits and features", _gb(size.work))
    return table


def _way_to(gpu: Gpu, args: argparse.Namespace) -> str:
    """What to build for `gpu`, where the plans described would not run on it."""
    asked = build_tensorrt.asked_capabilities(args)
    if args.backend != "cpu" and gpu.capability in asked:
        return ""
    backend = "tensorrt-rtx" if gpu.capability in CAPABILITIES["tensorrt-rtx"] else "tensorrt"
    return (
        f"{gpu.name} has compute capability {gpu.capability / 10:.1f}: plans for it come with "
        f"--backend {backend} --compute-capability {gpu.capability / 10:.1f}\n"
    )


def _where(size: BuildSize) -> str:
    """The GPUs on one of which it fits."""
    names = [name for name, gpu in GPUS.items() if fits(size.device, gpu)]
    return f"fits on one of: {', '.join(names)}" if names else "fits on no single GPU that is known"


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
