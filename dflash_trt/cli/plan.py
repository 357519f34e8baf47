"""dflash-trt plan: what to expect of a target and its drafter on a GPU, before buying the hour."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from dflash_trt.planner.calibration import SOFTWARE
from dflash_trt.planner.fit import ranks_that_fit, verdict
from dflash_trt.planner.hardware import GPUS, find_gpu
from dflash_trt.planner.interactivity import Curves, curves
from dflash_trt.planner.roofline import Setting, communication, memory_needed
from dflash_trt.planner.shapes import PLANS, find_plan

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def add_parser(verbs: argparse._SubParsersAction) -> None:
    parser = verbs.add_parser(
        "plan",
        help="model what a target and its drafter would do on a GPU",
        description="Model cycle times and rates on a GPU as a roofline. Nothing is measured.",
    )
    parser.add_argument("--target", required=True, help=", ".join(PLANS))
    parser.add_argument("--gpu", required=True, help=", ".join(GPUS))
    parser.add_argument("--precision", help="bf16, fp8, nvfp4, mxfp4 (default: the target's)")
    parser.add_argument("--tp", type=int, default=1, help="GPUs for one model (default: 1)")
    parser.add_argument("--context", type=int, default=2048, help="tokens cached per sequence")
    parser.add_argument("--block", type=int, help="tokens per verify call (default: trained block)")
    parser.add_argument(
        "--tau", type=float, required=True, help="acceptance length, as measured with `bench`"
    )
    parser.add_argument(
        "--software", default="sglang", choices=sorted(SOFTWARE), help="whose constants (sglang)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    plan = find_plan(args.target)
    setting = Setting(
        plan, find_gpu(args.gpu), SOFTWARE[args.software], args.precision or plan.precision,
        batch=1, context=args.context, block=args.block or plan.block, ranks=args.tp,
    )  # fmt: skip
    console = Console()
    console.print(_table(setting, curves(setting, args.tau, BATCHES), args.tau))
    for line in _per_gpu(setting):
        console.print(line, highlight=False, soft_wrap=True)
    return 0


def _table(setting: Setting, both: Curves, tau: float) -> Table:
    title = (
        f"MODELLED: {setting.plan.name}, {setting.precision}, {setting.ranks} x {setting.gpu.name}, "
        f"block {setting.block}, acceptance length {tau:g}"
    )
    table = Table(
        title=title, caption="/user and /GPU: tokens per second", box=SIMPLE, padding=(0, 1, 0, 0)
    )
    columns = (
        "batch", "step\nms", "cycle\nms", "c", "speed-\nup", "plain\n/user", "DFlash\n/user",
        "plain\n/GPU", "DFlash\n/GPU", "verify\nbound by",
    )  # fmt: skip
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for cycle, plain, dflash in zip(both.cycles, both.plain, both.dflash, strict=True):
        table.add_row(
            str(cycle.batch), f"{cycle.step.seconds * 1e3:.2f}", f"{cycle.seconds * 1e3:.2f}",
            f"{cycle.cost:.2f}", f"{cycle.speedup:.2f}", f"{plain.interactivity:.0f}",
            f"{dflash.interactivity:.0f}", f"{plain.throughput:.0f}", f"{dflash.throughput:.0f}",
            cycle.verify.bound,
        )  # fmt: skip
    return table


def _per_gpu(setting: Setting) -> Iterator[str]:
    """Memory and communication of one sequence, and which numbers of GPUs have the memory."""
    yield f"one sequence, per GPU: {verdict(memory_needed(setting), setting.gpu)}"
    yield ranks_that_fit(lambda n: memory_needed(replace(setting, ranks=n)), setting.gpu)
    if setting.ranks > 1:
        c = communication(setting)
        yield (
            f"ranks meet {c.sums + 1} times in a cycle: {c.sums} sums of {c.summed / 1e3:.1f} kB, "
            f"a gathering of {c.gathered} bytes"
        )
