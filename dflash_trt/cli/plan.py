"""dflash-trt plan: what to expect of a target and its drafter on a GPU, before buying the hour."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from dflash_trt.errors import InputError
from dflash_trt.planner.acceptance import acceptance_length, from_length
from dflash_trt.planner.calibration import SOFTWARE
from dflash_trt.planner.fit import ranks_that_fit, verdict
from dflash_trt.planner.hardware import GPUS, find_gpu
from dflash_trt.planner.interactivity import Curves, curves
from dflash_trt.planner.roofline import Cycle, Pass, Setting, best, communication, memory_needed
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
    acceptance = parser.add_mutually_exclusive_group(required=True)
    acceptance.add_argument("--tau", type=float, help="acceptance length at this block")
    acceptance.add_argument(
        "--acceptance", type=Path, metavar="FILE.json",
        help="acceptance per slot, as `bench --json` writes it",
    )  # fmt: skip
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
    shares = _shares(args.acceptance) if args.acceptance else from_length(args.tau, setting.block)
    tau = acceptance_length(shares, setting.block)
    both = curves(setting, tau, BATCHES)
    console = Console(highlight=False)
    console.print(_table(setting, both, tau))
    console.print(_passes("verify", [(c.batch, c.verify) for c in both.cycles]))
    console.print(_passes("draft", [(c.batch, c.draft) for c in both.cycles]))
    console.print(_best(setting, shares))
    for line in (_floor(both.cycles[0]), *_per_gpu(setting), _sources(setting)):
        console.print(line, soft_wrap=True)
    return 0


def _shares(path: Path) -> list[float]:
    try:
        shares = json.loads(path.read_text(encoding="utf-8"))["acceptance_per_slot"]
        found = [float(share) for share in shares]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"{path}: holds no acceptance_per_slot, as bench --json writes it"
        ) from None
    if not all(0 <= share <= 1 for share in found):
        raise InputError(f"{path}: acceptance_per_slot holds a share outside 0 to 1")
    return found


def _empty(title: str, columns: Sequence[str], caption: str | None = None) -> Table:
    table = Table(title=title, caption=caption, box=SIMPLE, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _table(setting: Setting, both: Curves, tau: float) -> Table:
    title = (
        f"MODELLED: {setting.plan.name}, {setting.precision}, {setting.ranks} x {setting.gpu.name}, "
        f"block {setting.block}, acceptance length {tau:g}"
    )
    columns = (
        "batch", "step\nms", "cycle\nms", "c", "speed-\nup", "plain\n/user", "DFlash\n/user",
        "plain\n/GPU", "DFlash\n/GPU", "verify\nbound by",
    )  # fmt: skip
    table = _empty(title, columns, caption="/user and /GPU: tokens per second")
    for cycle, plain, dflash in zip(both.cycles, both.plain, both.dflash, strict=True):
        table.add_row(
            str(cycle.batch), f"{cycle.step.seconds * 1e3:.2f}", f"{cycle.seconds * 1e3:.2f}",
            f"{cycle.cost:.2f}", f"{cycle.speedup:.2f}", f"{plain.interactivity:.0f}",
            f"{dflash.interactivity:.0f}", f"{plain.throughput:.0f}", f"{dflash.throughput:.0f}",
            cycle.verify.bound,
        )  # fmt: skip
    return table


def _passes(name: str, passes: Sequence[tuple[int, Pass]]) -> Table:
    """Bytes and operations are those of all GPUs, times of one."""
    columns = (
        "batch", "weights\nGB", "KV\nGB", "experts\nread", "TFLOP", "memory\nms", "comp.\nms",
        "launch\nms", "reduce\nms", "pass\nms",
    )  # fmt: skip
    table = _empty(f"MODELLED: the {name} pass", columns)
    for batch, p in passes:
        times = (p.memory, p.compute, p.launches, p.collectives, p.seconds)
        table.add_row(
            str(batch), f"{p.weight_bytes / 1e9:.2f}", f"{p.cache_bytes / 1e9:.2f}",
            f"{p.experts:.1f}" if p.experts else "-", f"{p.operations / 1e12:.2f}",
            *(f"{1e3 * seconds:.2f}" for seconds in times),
        )  # fmt: skip
    return table


def _best(setting: Setting, shares: Sequence[float]) -> Table:
    columns = ("batch", "block", "acceptance", "precision", "tokens/s\n/GPU")
    table = _empty("MODELLED: fastest block and precision", columns)
    for batch in BATCHES:
        b = best(replace(setting, batch=batch), shares)
        if b is None:
            table.add_row(str(batch), "does not fit", "-", "-", "-")
            continue
        block = "plain" if b.block == 1 else str(b.block)
        rate = f"{b.rate / setting.ranks:.0f}"
        table.add_row(str(batch), block, f"{b.tau:.2f}", b.precision, rate)
    return table


def _floor(cycle: Cycle) -> str:
    parts = {
        "launches of the draft": cycle.draft.launches,
        "launches of the verify": cycle.verify.launches,
        "all-reduces": cycle.verify.collectives,
        "host": cycle.host,
    }
    shown = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in parts.items())
    return f"of a cycle at batch 1, {1e3 * sum(parts.values()):.2f} ms are floor: {shown}"


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


def _sources(setting: Setting) -> str:
    software, gpu = setting.software, setting.gpu
    return f"constants of the software: {software.source}; GPU: {gpu.source}"
